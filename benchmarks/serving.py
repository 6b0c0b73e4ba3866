"""What HTTP costs: `outrider serve` beside LLM.generate and llama.cpp's server, and the time to its first token.

    python -m benchmarks.serving                 the wide target in bfloat16, and the default pair
    python -m benchmarks.serving --target pair   the default pair alone
    python -m benchmarks.serving --target wide --rounds 3 --tokens 32

16 clients in a process of their own ask at the same time for one greedy text each. LLM.generate, in another process, writes
the same texts as one batch. llama.cpp's server, in one more, has the same weights and clients; it takes part where the
extra `llama-cpp` is installed. All take turns, in every round in the opposite order, and each has the machine to itself. A
figure is the median of rounds; a ratio to LLM.generate is the median of the ratios within rounds. No prompt is reused from
the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tests.server.running import running
from tests.server.wire import Connection
from transformers import AutoTokenizer

from outrider.config import default_model
from outrider.lab.measure.machine import describe
from outrider.lab.peers.base import PeerMode, PeerModels
from outrider.lab.peers.llama_cpp import LlamaCppEngine, LlamaCppPeer
from outrider.widen import cache_folder, wide_target

RESULTS = Path(__file__).parent / "results" / "serving.json"
CLIENTS = 16
OFFLINE, UNSTREAMED, STREAMED = "LLM.generate, a batch", "outrider serve", "outrider serve, streamed"
TEXTS = [f"# file number {number}\nimport os\n\n\ndef read_{number}(path):\n" for number in range(CLIENTS)]


@dataclass(frozen=True)
class Target:
    """What is served.

    Attributes:
        model, draft: Folders; a draft of None stands for plain decoding, and with one the engine chooses.
        dtype: Of the weights.
    """

    model: str
    draft: str | None
    dtype: str

    @property
    def settings(self) -> dict[str, Any]:
        """For LLM."""
        chosen = {"speculation": "none"} if self.draft is None else {"draft_model": self.draft}
        return {"model": self.model, **chosen, "dtype": self.dtype, "kv_cache_tokens": 8192, "prefix_caching": False}

    @property
    def named(self) -> dict[str, str | None]:
        """The names of its folders, without the paths of this machine."""
        draft = None if self.draft is None else Path(self.draft).name
        return {"model": Path(self.model).name, "draft": draft, "dtype": self.dtype}

    @property
    def arguments(self) -> list[str]:
        """The same for `outrider serve`."""
        method = ["--method", "none"] if self.draft is None else ["--draft-model", self.draft]
        return [self.model, *method, "--dtype", self.dtype, "--kv-cache-tokens", "8192", "--no-prefix-caching"]


@dataclass(frozen=True)
class Run:
    """16 texts.

    Attributes:
        seconds: From the first request to the end of the last answer.
        num_tokens: Of all texts.
        client_seconds: Processor time of the clients.
        writer_seconds: Processor time of who wrote.
    """

    seconds: float
    num_tokens: int
    client_seconds: float = 0.0
    writer_seconds: float = 0.0


#: As token ids, since a converted model has no tokenizer.
Prompts = list[list[int]]


@dataclass(frozen=True)
class Contestant:
    """One who takes turns.

    Attributes:
        pid: Of its process.
        write: Has it write all texts.
    """

    pid: int
    write: Callable[[], Run]

    def run(self) -> Run:
        """All texts, with the processor time that they took."""
        before = processor_seconds(self.pid)
        found = self.write()
        return replace(found, writer_seconds=processor_seconds(self.pid) - before)


class Helper:
    """A process that carries out one kind of order.

    Args:
        work: Called there with a pipe; it answers each order that comes through it, and ends where None comes.
        arguments: Further ones of `work`.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def ask(self, order: Any) -> Any:
        """What it answers."""
        self._pipe.send(order)
        return self._pipe.recv()

    def close(self) -> None:
        """End it."""
        with suppress(OSError):  # it has failed, and has said why
            self._pipe.send(None)
        self._process.join(20)
        self._process.kill()


# -- in the processes of helpers ---------------------------------------------------------------------------------------


def write_offline(pipe: Pipe, settings: dict[str, Any], prompts: Prompts, num_tokens: int) -> None:
    """LLM.generate."""
    from outrider import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(**settings) as llm:
        while pipe.recv() is not None:
            start = perf_counter()
            outputs = llm.generate(prompts, params)
            pipe.send(Run(perf_counter() - start, sum(len(output.token_ids) for output in outputs)))


def serve_llama_cpp(pipe: Pipe, models: PeerModels, mode: PeerMode) -> None:
    """llama.cpp's server; it is asked for its address alone."""
    server = LlamaCppEngine(models).server(mode, CLIENTS)
    while pipe.recv() is not None:
        pipe.send(server.listening_address)


def be_clients(pipe: Pipe, prompts: Prompts, num_tokens: int) -> None:
    """16 clients, at an address, whole or streamed."""
    while (order := pipe.recv()) is not None:
        url, streamed = order
        used, start = processor_seconds(), perf_counter()
        found = asyncio.run(_ask_all(url, prompts, num_tokens, streamed=streamed))
        pipe.send(Run(perf_counter() - start, sum(found), processor_seconds() - used))


async def _ask_all(url: str, prompts: Prompts, num_tokens: int, *, streamed: bool) -> list[int]:
    return list(await asyncio.gather(*(_ask(url, prompt, num_tokens, streamed=streamed) for prompt in prompts)))


async def _ask(url: str, prompt: list[int], num_tokens: int, *, streamed: bool) -> int:
    """Have one text written; its tokens, as they are counted in its usage."""
    fields = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": streamed}
    fields |= {"stream_options": {"include_usage": True}} if streamed else {}
    async with Connection(url) as connection:
        answer = await connection.ask("/v1/completions", json.dumps(fields).encode(), content_type="application/json")
        if not streamed or answer.status != 200:
            body = json.loads(await answer.body())
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {body}")
            return int(body["usage"]["completion_tokens"])
        count = 0
        async for event in answer.events():
            chunk = {} if event == b"[DONE]" else json.loads(event)
            count = chunk["usage"]["completion_tokens"] if chunk.get("usage") else count
        return count


def processor_seconds(pid: int | None = None) -> float:
    """What a process has used so far; None for this one. Of others Linux tells whole hundredths of a second."""
    if pid is None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the measurement ---------------------------------------------------------------------------------------------------


@contextmanager
def contestants(target: Target, num_tokens: int, *, llama_cpp: bool) -> Iterator[dict[str, Contestant]]:
    """All who take turns, loaded."""
    with ExitStack() as stack:

        def helper(work: Callable[..., None], *arguments: Any) -> Helper:
            found = Helper(work, *arguments)
            stack.callback(found.close)
            return found

        prompts = [list(tokens) for tokens in AutoTokenizer.from_pretrained(target.model)(TEXTS)["input_ids"]]
        clients = helper(be_clients, prompts, num_tokens)
        offline = helper(write_offline, target.settings, prompts, num_tokens)
        server = stack.enter_context(running(*target.arguments))
        found = {
            OFFLINE: Contestant(offline.pid, partial(offline.ask, "go")),
            UNSTREAMED: Contestant(server.process.pid, partial(clients.ask, (server.url, False))),
            STREAMED: Contestant(server.process.pid, partial(clients.ask, (server.url, True))),
        }
        models = PeerModels(target.model, target.draft, target.dtype, torch.get_num_threads(), cache_folder() / "peers")
        modes = [PeerMode("plain", "plain")] + [PeerMode("draft_model k=3", "draft_model", 3)] * (target.draft is not None)
        for mode in modes if llama_cpp else []:
            peer = helper(serve_llama_cpp, models, mode)
            address = peer.ask("address")
            name = f"llama.cpp's server, {mode.name}"
            found[name] = Contestant(peer.pid, partial(clients.ask, (address, False)))
            found[f"{name}, streamed"] = Contestant(peer.pid, partial(clients.ask, (address, True)))
        yield found


def measure(target: Target, rounds: int, num_tokens: int, *, llama_cpp: bool) -> dict[str, Any]:
    """The figures of one target."""
    runs: dict[str, list[Run]] = {}
    with contestants(target, num_tokens, llama_cpp=llama_cpp) as found:
        for number in range(rounds + 1):
            for name in list(found)[:: 1 if number % 2 else -1]:
                run = found[name].run()
                if run.num_tokens != CLIENTS * num_tokens:
                    raise RuntimeError(f"{name} wrote {run.num_tokens} tokens instead of {CLIENTS * num_tokens}")
                if number:  # the first round warms up
                    runs.setdefault(name, []).append(run)
    figures = {name: _figures(its, runs[OFFLINE]) for name, its in runs.items()}
    return {"target": target.named, "tokens": num_tokens, "rounds": rounds, "contestants": figures}


def _figures(runs: list[Run], offline: list[Run]) -> dict[str, Any]:
    return {
        "tokens_per_second": median(run.num_tokens / run.seconds for run in runs),
        "of_generate": median(other.seconds / run.seconds for run, other in zip(runs, offline, strict=True)),
        "writer_seconds": median(run.writer_seconds for run in runs),
        "client_seconds": median(run.client_seconds for run in runs),
        "seconds": [run.seconds for run in runs],
    }


def first_token(rounds: int) -> dict[str, float]:
    """Seconds from the start of `outrider serve` on the default pair to the first piece of a stream.

    The first start reads files, and is left out.
    """
    found = [_first_token() for _ in range(rounds + 1)][1:]
    return {"median": median(found), "most": max(found)}


def _first_token() -> float:
    async def read(url: str) -> None:
        async with Connection(url) as connection:
            answer = await connection.ask("/v1/completions", b'{"prompt": "Once", "max_tokens": 1, "stream": true}')
            await anext(answer.events())

    start = perf_counter()
    with running() as server:
        asyncio.run(read(server.url))
        return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=["wide", "pair", "none"], help="both unless given; none for the start alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of a text")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    missing = LlamaCppPeer.missing()
    wanted = ["wide", "pair"] if chosen.target is None else [chosen.target]
    results: dict[str, Any] = {"machine": describe(torch.device("cpu")), "llama.cpp": missing or _version()}
    if "wide" in wanted:
        wide = Target(wide_target("bfloat16"), None, "bfloat16")
        results["wide"] = measure(wide, chosen.rounds, chosen.tokens, llama_cpp=missing is None)
    if "pair" in wanted:
        pair = Target(default_model("target"), default_model("draft"), "float32")
        results["pair"] = measure(pair, chosen.rounds, chosen.tokens, llama_cpp=missing is None)
    results["first_token_seconds"] = first_token(chosen.rounds)
    chosen.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    show(results)


def _version() -> str:
    from importlib.metadata import version

    return f"xllamacpp {version('xllamacpp')}"


def show(results: dict[str, Any]) -> None:
    """Print the figures."""
    console = Console()
    for name in ("wide", "pair"):
        if name in results:
            table = Table(
                "", "tokens a second", "of LLM.generate", "its processor time, s", "that of the clients", title=name
            )
            for who, figures in results[name]["contestants"].items():
                cells = f"{figures['tokens_per_second']:.0f}", f"{figures['of_generate']:.2f}"
                table.add_row(who, *cells, f"{figures['writer_seconds']:.2f}", f"{figures['client_seconds']:.3f}")
            console.print(table)
    first = results["first_token_seconds"]
    console.print(f"first token {first['median']:.1f} s after the start, {first['most']:.1f} s at most")


if __name__ == "__main__":
    main()
