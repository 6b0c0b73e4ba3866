"""GGUF files here and in llama.cpp: speeds, the first token, memory and loading, on the same file.

    python -m benchmarks.gguf_files --file q4_k_m --batch 1 --out benchmarks/results/gguf_files.json      about 3 minutes
    python -m benchmarks.gguf_files --file q4_k_m --loading --out benchmarks/results/gguf_files.json      about 1 minute

Each run is one stage, of one file: a number of texts, or the loading. Stages with the same --out are kept in one file. The
file is that of the wide target, as llama.cpp's own quantiser writes it. The draft model's is Q8_0. They have placeholders
as their vocabulary, since llama.cpp has no name for the pre-tokenizer of the embedded pair, and prompts are token ids. Our
plain decoding, our draft model and the engine's choice take turns with llama.cpp's plain decoding, its draft model and its
n-grams. "+a8" means that our rows are rounded to 8 bits, as those of llama.cpp are. llama.cpp runs in a process of its own,
with a server for each of its modes, and everybody loads once in a stage. In a round all write the same prompts, every other
round in the opposite order, and the first round does not count. A speed counts the tokens after the first output. Figures
are medians of rounds with their ranges. Prompts are short, or have 1,500 tokens (--prompts long).

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
from outrider.bench.peers.base import PeerMode, PeerModels, PeerRequest
from outrider.bench.peers.contestant import theirs
from outrider.bench.peers.converted import converted_path, gguf_file
from outrider.bench.peers.llama_cpp import LlamaCppEngine, LlamaCppPeer
from outrider.config import ROUNDED_ROWS
from outrider.embedded import default_model
from outrider.measure.contestants import Contestant, interleave, ours
from outrider.measure.decoding_config import parse_ways, precision
from outrider.measure.figures import Spread
from outrider.measure.load import LoadWatch
from outrider.measure.machine import MemoryWatch, describe
from outrider.measure.run import EncodedTask, Run
from outrider.measure.tasks import built_in
from outrider.measure.texts import encoded_tasks
from outrider.measure.widen import cache_folder, wide_target

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
    models: PeerModels, texts: list[list[EncodedTask]], temperatures: Sequence[float]
) -> Iterator[tuple[float, dict[str, Any]]]:
    """What each contestant reaches with these prompts, temperature by temperature."""
    batch = len(texts[0])
    with ExitStack() as stack:
        llms = {
            rows: stack.enter_context(LLM(models.target, **settings(batch), **precision(f"auto{rows}")))
            for rows in ("", ROUNDED_ROWS)
        }
        peer = stack.enter_context(LlamaCppPeer(models))
        for temperature in temperatures:
            contestants = [theirs(peer, mode, temperature) for mode in (PLAIN, *MODES)]
            for rows, llm in llms.items():
                for way in parse_ways(WAYS, models.draft):
                    one = ours(llm, way, temperature)
                    contestants.append(Contestant(f"{one.name}{rows}", one.write, plain=one.plain and not rows))
            dropouts: dict[str, str] = {}

            def note(who: Contestant, why: Exception, dropouts: dict[str, str] = dropouts) -> None:
                dropouts[who.name] = str(why)

            runs = interleave(texts, contestants, on_dropout=note)
            figures = _figures({name: of[1:] for name, of in runs.items()})
            yield temperature, {"contestants": figures, "dropouts": dropouts}


def _figures(runs: dict[str, list[Run]]) -> dict[str, Any]:
    rates = {name: [run.tokens_per_second or 0.0 for run in of] for name, of in runs.items()}
    found: dict[str, Any] = {}
    for name, of in runs.items():
        passes = [run.tokens_per_pass for run in of if run.tokens_per_pass is not None]
        found[name] = {
            "tokens_per_second": _spread(rates[name]),
            "tokens_per_pass": _spread(passes) if passes else None,
            "first_token_seconds": _spread([max(run.first_token_seconds) for run in of]),
        }
        if BASE in rates:
            found[name]["over_llama_cpp"] = _spread([a / b for a, b in zip(rates[name], rates[BASE], strict=True) if b])
    return found


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


def _spread(values: Sequence[float]) -> dict[str, float]:
    found = Spread.of(values)
    assert found is not None
    return found.model_dump()


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
    machine = describe(torch.device("cpu"))
    held = json.loads(out.read_text("utf-8")) if out.exists() else {}
    if held.get("machine") != machine:
        held = {"machine": machine}
    held.setdefault(kind, {})[stage] = found
    out.write_text(json.dumps(held, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", choices=FILES, default="q4_k_m")
    parser.add_argument("--batch", type=int, default=1, help="texts at a time")
    parser.add_argument("--prompts", choices=("short", "long"), default="short")
    parser.add_argument("--temperature", type=float, action="append", help="0 and 1 unless given; repeated")
    parser.add_argument("--loading", action="store_true", help="measure loading and memory, and nothing else")
    parser.add_argument("--rounds", type=int, default=5, help="that count")
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
    checkpoint, watch = default_model("target") if asked.embedded else wide_target("bfloat16"), LoadWatch()
    models = files(checkpoint, asked.file)
    if asked.loading:
        long = prompts(checkpoint, 1, 0, 1, long=True)[0][0].prompt_ids
        stages = iter([("loading", {"contestants": loading(models, long, asked.rounds)})])
    else:
        texts = prompts(checkpoint, asked.max_tokens, asked.rounds, asked.batch, long=asked.prompts == "long")
        name = f"{asked.prompts}, {asked.batch} texts"
        found = speeds(models, texts, asked.temperature or (0.0, 1.0))
        stages = ((f"{name}, T={temperature:g}", figures) for temperature, figures in found)
    for stage, figures in stages:
        show(f"{asked.file}: {stage}", figures)
        keep(asked.out, asked.file, stage, {**figures, "load": asdict(watch.load())})


if __name__ == "__main__":
    main()
