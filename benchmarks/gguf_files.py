"""GGUF files here and in llama.cpp: speeds, the first token, memory and loading, on the same file.

    python -m benchmarks.gguf_files --file q4_k_m --batch 1 --out benchmarks/results/gguf_files.json      about 3 minutes
    python -m benchmarks.gguf_files --file q4_k_m --loading --out benchmarks/results/gguf_files.json      about 1 minute

Each run is one stage, of one file: a number of texts, or the loading. Stages with the same --out are kept in one file, and
speeds round by round: with --seconds a run ends before its time is up, and the same command goes on with the rounds that
are missing. A stage whose rounds are all there begins anew. The file is that of the wide target, as llama.cpp's own
quantiser writes it. The draft model's is Q8_0. They have placeholders as their vocabulary, since llama.cpp has no name for
the pre-tokenizer of the embedded pair, and prompts are token ids. Our plain decoding, our draft model and the engine's
choice take turns with llama.cpp's plain decoding, its draft model and its n-grams. "+a8" means that our rows are rounded to
8 bits, as those of llama.cpp are. llama.cpp runs in a process of its own, with a server for each of its modes, and
everybody loads once in a stage. In a round all write the same prompts, every other round in the opposite order, and the
first round of a run does not count; its prompts are short. A speed counts the tokens after the first output. Figures are
medians of rounds with their ranges. Prompts are short, or have 1,500 tokens (--prompts long).

Loading is measured in processes of their own, in turns, which have loaded the draft model before, so that no import counts.
llama.cpp loads with mapped files and without. Files lie in the memory of the system. A peak counts the pages in memory,
those of mapped files included, over what the process had before it loaded, until the first token of a prompt of 1,500
tokens. Both sides keep room for keys and values of 4,096 tokens, in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.config import ROUNDED_ROWS, default_model
from outrider.lab.bench.session import theirs
from outrider.lab.measure.decoding_config import parse_ways, precision
from outrider.lab.measure.figures import Spread
from outrider.lab.measure.machine import LoadWatch, MemoryWatch, describe
from outrider.lab.measure.tasks import built_in
from outrider.lab.measure.writing import Contestant, EncodedTask, Run, encoded_tasks, interleave, ours
from outrider.lab.peers.base import PeerMode, PeerModels, PeerRequest, converted_path, gguf_file
from outrider.lab.peers.llama_cpp import LlamaCppEngine, LlamaCppPeer
from outrider.widen import cache_folder, wide_target

FILES = ("q4_0", "q4_k_m", "q6_k", "q8_0")
WORKLOADS = ("code_completion", "json")
WAYS, MODES = ("draft_model:3", "auto"), (PeerMode("draft_model k=3", "draft_model", 3), PeerMode("ngram k=3", "ngram", 3))
PLAIN = PeerMode("plain", "plain")
#: By whose speed others are divided.
BASE = "llama.cpp: plain"
LONG, LENGTH, CONTEXT = 1500, 2048, 4096
#: Who loads, and whether llama.cpp maps the file.
LOADERS = {"ours": None, "llama.cpp, mapped": True, "llama.cpp, read": False}


def written(checkpoint: str, kind: str) -> str:
    """The file of a checkpoint, which is kept from one run to the next."""
    from ik_llama_cpp.quantize import find_quantize_bin

    folder = cache_folder() / "peers"
    path = converted_path(folder, checkpoint, f"{kind}-llama.cpp.gguf")
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        command = [str(find_quantize_bin()), gguf_file(folder, checkpoint, "bfloat16"), str(unfinished), kind.upper()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        unfinished.rename(path)
    return str(path)


def files(checkpoint: str, kind: str) -> PeerModels:
    """The file and that of the draft model."""
    folder = cache_folder() / "peers"
    draft = gguf_file(folder, default_model("draft"), "int8")
    return PeerModels(written(checkpoint, kind), draft, "bfloat16", torch.get_num_threads(), folder)


def prompts(checkpoint: str, max_tokens: int, rounds: int, batch: int, *, long: bool) -> list[list[EncodedTask]]:
    """The prompts of each round: those of both workloads in turn, or others joined to 1,500 tokens."""
    tasks = encoded_tasks(checkpoint, LENGTH, {name: built_in(name) for name in (*WORKLOADS, "summarisation")}, max_tokens)
    found = list(chain.from_iterable(zip(*(tasks[name] for name in WORKLOADS), strict=True)))
    if long:
        parts = [task.prompt_ids for task in tasks["summarisation"]]
        texts = [tuple(islice(chain(*parts[i:], *parts), LONG)) for i in range(len(parts))]
        found = [EncodedTask(f"long {i}", text, max_tokens) for i, text in enumerate(texts)]
    turns = [found[place % len(found)] for place in range((rounds + 1) * batch)]
    return [turns[place : place + batch] for place in range(0, len(turns), batch)]


def settings(batch: int) -> dict[str, Any]:
    """For LLM, at every place."""
    return {
        "speculation": "none",
        "prefix_caching": False,
        "max_num_seqs": batch,
        "max_model_len": LENGTH,
        "kv_cache_tokens": CONTEXT if batch == 1 else LENGTH * batch,
    }


def speeds(
    models: PeerModels, texts: list[list[EncodedTask]], temperature: float, first: int, until: float
) -> Iterator[tuple[dict[str, dict[str, float | None]], dict[str, str]]]:
    """What each contestant reaches in a round, round by round, and why others dropped out.

    Args:
        models: The file and the draft model.
        texts: The prompts of a round that does not count, and of those that do.
        temperature: Of the texts.
        first: The number of the first round that counts.
        until: The time, as `perf_counter` tells it, by which a round has to end if it takes as long as the one before.
    """
    with ExitStack() as stack:
        contestants = _contestants(models, len(texts[0]), temperature, stack)
        dropouts: dict[str, str] = {}

        def note(who: Contestant, why: Exception) -> None:
            dropouts[who.name] = str(why)

        for number, tasks in enumerate(texts, first - 1):
            begun = perf_counter()
            runs = interleave([tasks], contestants[:: 1 if number % 2 else -1], on_dropout=note)
            contestants = [one for one in contestants if one.name in runs]
            if tasks is not texts[0]:
                yield {name: _record(run) for name, (run,) in runs.items()}, dropouts
            took = perf_counter() - begun
            print(f"round {number}: {took:.1f} s", file=sys.stderr, flush=True)
            if perf_counter() + took > until:
                return


def _contestants(models: PeerModels, batch: int, temperature: float, stack: ExitStack) -> list[Contestant]:
    """llama.cpp's modes, and our ways with rows as they are and with rounded ones. None of ours counts as plain: what is
    faster than plain decoding could be would be measured again, and rounded rows are that without any draft."""
    peer = stack.enter_context(LlamaCppPeer(models))
    found = [theirs(peer, mode, temperature) for mode in (PLAIN, *MODES)]
    for rows in ("", ROUNDED_ROWS):
        how = {"activations": "none", **precision(f"auto{rows}")}
        llm = stack.enter_context(LLM(models.target, **settings(batch), **how))
        for way in parse_ways(WAYS, models.draft):
            one = ours(llm, way, temperature)
            found.append(Contestant(f"{one.name}{rows}", one.write))
    return found


def _record(run: Run) -> dict[str, float | None]:
    """The figures of one turn."""
    return {
        "tokens_per_second": run.tokens_per_second,
        "tokens_per_pass": run.tokens_per_pass,
        "first_token_seconds": max(run.first_token_seconds),
    }


def _figures(rounds: Sequence[dict[str, dict[str, float | None]]]) -> dict[str, Any]:
    """Medians and ranges of rounds, for those who took part in all of them."""
    found: dict[str, Any] = {}
    for name in (name for name in rounds[0] if all(name in each for each in rounds)):
        of = [each[name] for each in rounds]
        found[name] = {key: _spread([one[key] for one in of if one[key] is not None]) for key in of[0]}
        pairs = [(each[name]["tokens_per_second"], each.get(BASE, {}).get("tokens_per_second")) for each in rounds]
        found[name]["over_llama_cpp"] = _spread([one / base for one, base in pairs if one and base])
    return found


def measure(asked: argparse.Namespace, checkpoint: str, temperature: float, until: float) -> None:
    """Measure the rounds of a stage that are missing, and show and keep all of them after each one."""
    stage, watch = f"{asked.prompts}, {asked.batch} texts, T={temperature:g}", LoadWatch()
    rounds = held(asked.out, asked.file, stage).get("rounds", [])
    rounds = [] if len(rounds) >= asked.rounds else rounds
    warm = prompts(checkpoint, asked.max_tokens, 0, asked.batch, long=False)
    texts = prompts(checkpoint, asked.max_tokens, asked.rounds, asked.batch, long=asked.prompts == "long")
    missing, figures = texts[1 + len(rounds) :], {}
    for found, dropouts in speeds(files(checkpoint, asked.file), warm + missing, temperature, len(rounds) + 1, until):
        rounds.append(found)
        figures = {"contestants": _figures(rounds), "dropouts": dropouts}
        keep(asked.out, asked.file, stage, {**figures, "load": asdict(watch.load()), "rounds": rounds})
    if figures:
        show(f"{asked.file}: {stage}, {len(rounds)} of {asked.rounds} rounds", figures)


# -- loading, in processes of their own --------------------------------------------------------------------------------


class LoadingEngine(LlamaCppEngine):
    """llama.cpp that is ready without a pass that warms it up, as ours is.

    Args:
        models: What it loads.
        mapped: Whether files are mapped.
    """

    def __init__(self, models: PeerModels, *, mapped: bool) -> None:
        super().__init__(models)
        self._mapped = mapped

    def _params(self, mode: PeerMode) -> Any:
        params, modes = super()._params(mode), self._native.llama_load_mode
        params.load_mode = modes.LLAMA_LOAD_MODE_MMAP if self._mapped else modes.LLAMA_LOAD_MODE_NONE
        params.warmup = False
        return params


def load(who: str, models: PeerModels, prompt: Sequence[int]) -> dict[str, float]:
    """Load a file once, after the small one: the seconds until a request can be taken, and the peak of memory in bytes."""
    _load_once(who, PeerModels(str(models.draft), None, models.dtype, models.num_threads, models.folder), (1, 2))
    before, watch = _resident(), MemoryWatch(torch.device("cpu"))
    seconds = _load_once(who, models, prompt)
    return {"seconds": seconds, "peak": float((watch.peak().resident or 0) - before)}


def _load_once(who: str, models: PeerModels, prompt: Sequence[int]) -> float:
    """Load the target, write a token, and tell how long the loading took."""
    mapped, begun = LOADERS[who], perf_counter()
    if mapped is None:
        with LLM(models.target, **settings(1)) as llm:
            seconds = perf_counter() - begun
            llm.generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=1))
        return seconds
    engine = LoadingEngine(models, mapped=mapped)
    engine.server(PLAIN, 1)
    seconds = perf_counter() - begun
    engine.generate(PeerRequest(PLAIN, (tuple(prompt),), 1, 0.0, None))  # a server that is ended while it starts may hang
    return seconds


def loading(models: PeerModels, prompt: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds and peak memory, by who loads."""
    Path(models.target).read_bytes()  # so that it lies in the memory of the system
    size, told = Path(models.target).stat().st_size, json.dumps({**asdict(models), "folder": str(models.folder)})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
    for turn in range(rounds):
        for who in list(LOADERS)[:: 1 if turn % 2 else -1]:
            command = [sys.executable, "-m", "benchmarks.gguf_files", "--load", who, told, json.dumps(list(prompt))]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
            found[who].append(json.loads(done.stdout.splitlines()[-1]))
    return {
        who: {
            "seconds": _spread([each["seconds"] for each in of]),
            "peak_over_file": _spread([each["peak"] / size for each in of]),
        }
        for who, of in found.items()
    }


def _resident() -> int:
    """Bytes of this process that lie in memory."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


# -- figures -----------------------------------------------------------------------------------------------------------


def _spread(values: Sequence[Any]) -> dict[str, float] | None:
    found = Spread.of(values)
    return None if found is None else found.model_dump()


def show(title: str, found: dict[str, Any]) -> None:
    """Print the figures of a stage."""
    rows = found["contestants"]
    names = sorted({name for own in rows.values() for name in own})
    table = Table("", *(name.replace("_", " ") for name in names), title=f"{title}, medians with ranges")
    for who, own in rows.items():
        table.add_row(who, *(_text(own.get(name)) for name in names))
    console = Console(width=150)
    console.print(table)
    for who, why in found.get("dropouts", {}).items():
        console.print(f"{who} dropped out: {why}")


def _text(spread: dict[str, float] | None) -> str:
    """A median with its range."""
    return "" if spread is None else "{median:.3g} ({low:.3g} to {high:.3g})".format(**spread)


def keep(out: Path | None, kind: str, stage: str, found: dict[str, Any]) -> None:
    """Put a stage beside those that were measured before on the same machine."""
    if out is None:
        return
    there = _stages(out)
    there.setdefault(kind, {})[stage] = found
    out.write_text(json.dumps(there, indent=1) + "\n", "utf-8")


def held(out: Path | None, kind: str, stage: str) -> dict[str, Any]:
    """A stage that was measured before on the same machine; nothing where there is none."""
    found: dict[str, Any] = {} if out is None else _stages(out).get(kind, {}).get(stage, {})
    return found


def _stages(out: Path) -> dict[str, Any]:
    """What a file holds of this machine."""
    machine = describe(torch.device("cpu"))
    there: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {}
    return there if there.get("machine") == machine else {"machine": machine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", choices=FILES, default="q4_k_m")
    parser.add_argument("--batch", type=int, default=1, help="texts at a time")
    parser.add_argument("--prompts", choices=("short", "long"), default="short")
    parser.add_argument("--temperature", type=float, action="append", help="0 and 1 unless given; repeated")
    parser.add_argument("--loading", action="store_true", help="measure loading and memory, and nothing else")
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end before: begin no later round")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a text")
    parser.add_argument("--embedded", action="store_true", help="the embedded target, to try a stage out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.load is not None:  # a process of `loading`
        who, told, prompt = asked.load
        models = PeerModels(**{**json.loads(told), "folder": Path(json.loads(told)["folder"])})
        print("\n" + json.dumps(load(who, models, json.loads(prompt))), flush=True)
        return
    until = perf_counter() + asked.seconds
    checkpoint = default_model("target") if asked.embedded else wide_target("bfloat16")
    if not asked.loading:
        for temperature in asked.temperature or (0.0, 1.0):
            measure(asked, checkpoint, temperature, until)
        return
    watch, long = LoadWatch(), prompts(checkpoint, 1, 0, 1, long=True)[0][0].prompt_ids
    found = {"contestants": loading(files(checkpoint, asked.file), long, asked.rounds)}
    show(f"{asked.file}: loading", found)
    keep(asked.out, asked.file, "loading", {**found, "load": asdict(watch.load())})


if __name__ == "__main__":
    main()
