"""A coding agent's session through the Messages API: `outrider serve` with drafts and without, beside llama.cpp's server.

    python -m benchmarks.agent_session MODEL                                    12 turns, three rounds
    python -m benchmarks.agent_session model.gguf --turns 3 --rounds 1 --method auto --method none
    python -m benchmarks.agent_session model.gguf --url other=http://127.0.0.1:8080

In the session two files of this repository are read, changed by a call that repeats most of the file, tested and changed
again. It is recorded: a turn asks with what the session holds before it, whatever the server wrote, so that all servers
read the same prompts. Calls are required by name; the texts are greedy. Servers take turns, in every round in the opposite
order, and each has the machine to itself. Every round begins with a line of its own, so that no cache knows its prompts
from before. llama.cpp's server takes part where the model is a GGUF file and the extra `llama-cpp` is installed.

`prediction` as a method is `auto`, and requests for a changed file give the file as their prediction.
"""

from __future__ import annotations

import argparse
import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.server.running import running

from benchmarks.serving import Helper
from outrider.lab.measure.machine import describe
from outrider.lab.peers.llama_cpp import LlamaCppPeer

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "agent_session.json"
CONTEXT = 16384
#: A file, and what is renamed in it: first one name, and the other one when a test has failed.
EDITS = (
    ("src/outrider/server/tool_values.py", ("resolved", "followed_reference"), ("plain_text", "unquoted_text")),
    ("src/outrider/server/wire.py", ("encoded", "as_bytes"), ("failure", "failure_event")),
)


# --- The session.


def _tool(name: str, description: str, *fields: str) -> dict[str, Any]:
    properties = {each: {"type": "string"} for each in fields}
    schema = {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}
    return {"name": name, "description": description, "input_schema": schema}


TOOLS = [
    _tool("read_file", "Reads a file of the repository.", "path"),
    _tool("write_file", "Writes a file of the repository. The content is the whole new text of it.", "path", "content"),
    _tool("run_tests", "Runs the tests of a file.", "path"),
]


@dataclass(frozen=True)
class Turn:
    """Says what is asked in a turn of the session."""

    messages: list[dict[str, Any]]  # the conversation before it
    tool: str | None  # the tool whose call is required; None for a text
    predicted: str | None = None  # what the file held before a change


class _Recording:
    """The conversation as it grows."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.turns: list[Turn] = []

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def call(self, name: str, result: str, then: str, predicted: str | None = None, **arguments: str) -> None:
        """A turn in which the model calls a tool; with its result it is told what comes then."""
        self.turns.append(Turn(list(self.messages), name, predicted))
        place = f"toolu_{len(self.turns)}"
        called = {"type": "tool_use", "id": place, "name": name, "input": arguments}
        told = [{"type": "tool_result", "tool_use_id": place, "content": result}, {"type": "text", "text": then}]
        self.messages += [{"role": "assistant", "content": [called]}, {"role": "user", "content": told}]

    def say(self, text: str) -> None:
        """A turn in which it says something."""
        self.turns.append(Turn(list(self.messages), None))
        self.messages.append({"role": "assistant", "content": text})


@cache
def session() -> tuple[Turn, ...]:
    """All turns."""
    record = _Recording()
    for path, first, second in EDITS:
        source = (ROOT / path).read_text("utf-8")
        assert all(old in source for old, _ in (first, second)), f"{path} is not what it was"
        once = source.replace(*first)
        task = f"In {path}, rename `{first[0]}` to `{first[1]}`. Read the file, write it whole, and run its tests."
        record.user(task)
        change = "Write the whole file again, every line of it, with `{}` in place of `{}` and nothing else changed."
        record.call("read_file", source, change.format(*reversed(first)), path=path)
        record.call("write_file", f"{len(once)} characters written", "Run the tests.", source, path=path, content=once)
        failed = f"1 failed, 11 passed: there is no `{second[1]}` in {path}"
        record.call("run_tests", failed, change.format(*reversed(second)), path=path)
        twice = once.replace(*second)
        record.call("write_file", f"{len(twice)} characters written", "Run the tests.", once, path=path, content=twice)
        record.call("run_tests", "12 passed", "Say what you have done.", path=path)
        record.say(f"`{first[0]}` and `{second[0]}` have their new names in {path}, and all tests pass.")
    return tuple(record.turns)


# --- A server plays the session.


@dataclass(frozen=True)
class Answer:
    """Holds what a turn brought."""

    first_seconds: float  # until the first piece of it
    seconds: float
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    text: str


@dataclass(frozen=True)
class Contestant:
    """One who takes turns."""

    url: str
    model: str
    predicts: bool = False

    def play(self, name: str, number: int, num_turns: int, max_tokens: int) -> list[Answer]:
        """The first turns of the session, in a round of this number. A bar of this name shows how far it is."""
        rules = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
        system = f"Session {number}. You change this repository with the tools that you have.\n\n{rules}"
        fields = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True, "tools": TOOLS}
        return [self._ask({**fields, "system": system}, turn) for turn in track(session()[:num_turns], name)]

    def _ask(self, fields: dict[str, Any], turn: Turn) -> Answer:
        choice = {"type": "auto"} if turn.tool is None else {"type": "tool", "name": turn.tool}  # so the tools stay
        body = {**fields, "messages": turn.messages, "tool_choice": choice}
        if self.predicts and turn.predicted is not None:
            body["prediction"] = {"type": "content", "content": json.dumps(turn.predicted)[1:-1]}
        begun, first, text = perf_counter(), 0.0, ""
        usage: dict[str, int] = {}
        for event in _events(self.url, body):
            usage |= event.get("message", {}).get("usage") or event.get("usage") or {}
            delta = event.get("delta", {}) if event["type"] == "content_block_delta" else {}
            text += delta.get("text", "") + delta.get("partial_json", "")
            first = first or (perf_counter() - begun if event["type"].startswith("content_block") else 0.0)
        cached = usage.get("cache_read_input_tokens", 0)
        total = perf_counter() - begun
        return Answer(first or total, total, usage["output_tokens"], usage["input_tokens"] + cached, cached, text)


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an answer as they come."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    try:
        headers = {"content-type": "application/json", "x-api-key": "any", "anthropic-version": "2023-06-01"}
        connection.request("POST", "/v1/messages", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{url} answers {answer.status}: {answer.read(500).decode('utf-8', 'replace')}")
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if event["type"] == "error":
                    raise RuntimeError(f"{url} answers {event}")
                yield event
    finally:
        connection.close()


def serve_llama_cpp(pipe: Pipe, model: str, num_threads: int) -> None:
    """llama.cpp's server; it is asked for its address alone."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = model, {"llama.cpp"}
    params.n_ctx, params.n_parallel, params.port, params.use_jinja = CONTEXT, 1, 0, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    params.verbosity, params.fit_params = 0, False
    server = xllamacpp.Server(params)
    while pipe.recv() is not None:
        pipe.send(server.listening_address)


@contextmanager
def contestants(
    model: str, methods: list[str], options: list[str], others: dict[str, str]
) -> Iterator[dict[str, Contestant]]:
    """All who take turns, loaded."""
    with ExitStack() as stack:
        found: dict[str, Contestant] = {}
        for method in methods:
            own = ["--method", "auto" if method == "prediction" else method, "--served-model-name", "served"]
            room = ["--kv-cache-tokens", str(CONTEXT), "--max-num-seqs", "1"]
            url = stack.enter_context(running(model, *own, *room, *options)).url
            found[f"outrider, {method}"] = Contestant(url, "served", predicts=method == "prediction")
        if model.endswith(".gguf") and LlamaCppPeer.missing() is None:
            helper = Helper(serve_llama_cpp, model, torch.get_num_threads())
            stack.callback(helper.close)
            found["llama.cpp's server"] = Contestant(helper.ask("address"), "llama.cpp")
        for name, url in others.items():
            found[name] = Contestant(url, "served")
        yield found


# --- The figures.


def measure(found: dict[str, Contestant], rounds: int, num_turns: int, max_tokens: int) -> dict[str, Any]:
    """Plays the session with all of them."""
    runs: dict[str, list[list[Answer]]] = {name: [] for name in found}
    for number in range(rounds):
        for name in list(found)[:: 1 if number % 2 else -1]:
            runs[name].append(found[name].play(name, number, num_turns, max_tokens))
            print(f"round {number + 1}, {name}: {sum(each.seconds for each in runs[name][-1]):.0f} s", flush=True)
    plain = runs.get("outrider, none")
    return {name: _figures(its, plain) for name, its in runs.items()}


def _figures(runs: list[list[Answer]], plain: list[list[Answer]] | None) -> dict[str, Any]:
    """Of one server; ratios are medians of those within rounds."""
    answers = [answer for run in runs for answer in run]
    rates = [sum(each.num_tokens for each in run) / sum(each.seconds for each in run) for run in runs]
    writing = [
        sum(each.num_tokens for each in run) / sum(each.seconds - each.first_seconds for each in run) for run in runs
    ]
    found: dict[str, Any] = {
        "tokens_per_second": median(rates),
        "tokens_per_second_behind_the_first": median(writing),
        "first_seconds_median": median(each.first_seconds for each in answers),
        "first_seconds_most": max(each.first_seconds for each in answers),
        "cached_share": sum(each.num_cached_tokens for each in answers) / sum(each.num_prompt_tokens for each in answers),
    }
    if plain is not None:
        own = [sum(each.num_tokens for each in run) / sum(each.seconds for each in run) for run in plain]
        pairs = [
            (one.text, other.text)
            for run, its in zip(runs, plain, strict=True)
            for one, other in zip(run, its, strict=True)
        ]
        found["of_plain"] = median(rate / each for rate, each in zip(rates, own, strict=True))
        found["texts_like_plain"] = sum(one == other for one, other in pairs) / len(pairs)
    return {**found, "turns": [[asdict(each) for each in run] for run in runs]}


def show(results: dict[str, Any]) -> None:
    """Print the figures."""
    columns = ("", "tokens a second", "behind the first", "of plain", "first token, s", "the longest", "of prompts cached")
    table = Table(*columns, title=results["model"])
    for name, told in results["servers"].items():
        speeds = f"{told['tokens_per_second']:.1f}", f"{told['tokens_per_second_behind_the_first']:.1f}"
        ratio = f"{told['of_plain']:.2f}" if "of_plain" in told else ""
        waits = f"{told['first_seconds_median']:.1f}", f"{told['first_seconds_most']:.1f}"
        table.add_row(name, *speeds, ratio, *waits, f"{told['cached_share']:.0%}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a GGUF file whose chat template knows tools")
    parser.add_argument("--method", action="append", help="of outrider serve; auto and none unless given; may be repeated")
    parser.add_argument("--url", action="append", default=[], help="NAME=URL of another server; may be repeated")
    parser.add_argument("--serve", default="", help="further options of outrider serve, in one text")
    parser.add_argument("--turns", type=int, default=len(session()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1500, help="most of a turn")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    others = dict(each.split("=", 1) for each in chosen.url)
    with contestants(chosen.model, chosen.method or ["auto", "none"], chosen.serve.split(), others) as found:
        figures = measure(found, chosen.rounds, chosen.turns, chosen.tokens)
    about = {"model": Path(chosen.model).name, "rounds": chosen.rounds, "turns": chosen.turns, "tokens": chosen.tokens}
    results = {"machine": describe(torch.device("cpu")), **about, "options": chosen.serve, "servers": figures}
    chosen.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    show(results)


if __name__ == "__main__":
    main()
