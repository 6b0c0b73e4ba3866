"""Lookup proposers on replayed copy-heavy text: code that is given back with small edits.

    python -m benchmarks.copy_heavy             some minutes; writes benchmarks/results/copy_heavy.{md,json}
    python -m benchmarks.copy_heavy --quick     two texts, writes nothing

*Replay*: the text to be written is recorded, and a logits processor makes each of its tokens the target's choice. The
target computes everything it would compute otherwise; only what it says is decided beforehand, so that the embedded model,
which cannot edit, stands for one that can. Texts are functions of the standard library, and the edit renames a parameter.
Every way to draft writes a text before the next text's turn; ratios are taken within a text, figures are medians.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.default_pair import ROOT, hardware, model_path, repeated_8grams
from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.engine.detokenizer import TextStream
from outrider.engine.sequence import Request, Sequence
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.suffix import SharedTexts, SuffixProposer
from outrider.verify.noise import KeyedNoise

MODULES = (
    "argparse", "ast", "bisect", "calendar", "cmd", "code", "codecs", "configparser", "copy", "csv", "difflib", "fnmatch",
    "fractions", "getopt", "gettext", "glob", "gzip", "heapq", "inspect", "json.decoder", "locale", "mailbox", "netrc",
    "pprint", "queue", "random", "sched", "shlex", "shutil", "statistics", "string", "textwrap",
)  # fmt: skip
#: Tokens of a function: long enough to copy, short enough for the context.
LEAST, MOST = 100, 200
WAYS = {
    "plain": SpeculationConfig(),
    "ngram k=3": SpeculationConfig(proposer="ngram", num_draft_tokens=3),
    "ngram k=16": SpeculationConfig(proposer="ngram", num_draft_tokens=16),
    "suffix k=3": SpeculationConfig(proposer="suffix", num_draft_tokens=3),
    "suffix k=16": SpeculationConfig(proposer="suffix"),
    "suffix tree k=16": SpeculationConfig(proposer="suffix", suffix_tree=True),
}
console = Console()


@dataclass(frozen=True)
class Task:
    """A prompt that shows a function, and the edited function that is to be written."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class Result:
    """One text written in one way."""

    way: str
    task: str
    seconds: float
    tokens_per_second: float
    speedup: float
    tau: float
    repeated: float


class Replay:
    """A logits processor that makes a recorded text the target's choice; every other token falls far behind."""

    def __init__(self, task: Task) -> None:
        self._start, self._answer = len(task.prompt), task.answer

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        place = ids.shape[1] - self._start
        if place < len(self._answer):
            scores[:, self._answer[place]] = scores.max() + 100.0
        return scores


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self._names.get(node.arg, node.arg)
        return node


def edits() -> Iterator[tuple[str, str, str]]:
    """(module, function, the same with its first parameter renamed)"""
    for module in MODULES:
        for function in ast.walk(ast.parse(inspect.getsource(import_module(module)))):
            if isinstance(function, ast.FunctionDef):
                arguments = [n.arg for n in ast.walk(function) if isinstance(n, ast.arg) and n.arg != "self"]
                if arguments:
                    names = {arguments[0]: f"the_{arguments[0]}"}
                    yield module, ast.unparse(function), ast.unparse(_Renamed(names).visit(function))


def tasks(llm: LLM, count: int) -> list[Task]:
    """The first functions that fit, at most one a module."""
    found: dict[str, Task] = {}
    for module, before, after in edits():
        prompt = llm.encode(f"{before}\n\n\n# The same with another name for its first parameter:\n\n")
        answer = llm.encode(after)
        if LEAST <= len(answer) <= MOST and len(prompt) + len(answer) < 900:
            found.setdefault(module, Task(module, prompt, answer))
    return list(found.values())[:count]


def write(llm: LLM, task: Task, way: str) -> tuple[float, float]:
    """Seconds and mean acceptance length of one text."""
    params = SamplingParams(temperature=0, max_tokens=len(task.answer), ignore_eos=True, logits_processors=[Replay(task)])
    start = perf_counter()
    output = llm.generate(list(task.prompt), params, speculation=WAYS[way])[0]
    seconds = perf_counter() - start
    assert output.token_ids == task.answer, "the replay was not followed"
    return seconds, output.stats.mean_acceptance_length


def run(llm: LLM, work: list[Task]) -> list[Result]:
    """Every text in every way."""
    for way in WAYS:
        write(llm, work[0], way)  # warm, and the prefix cache too
    results = []
    for task in track(work, "writing", console=console):
        llm.generate(list(task.prompt), SamplingParams(max_tokens=1))  # the prompt is cached: decoding alone is timed
        times = {way: write(llm, task, way) for way in WAYS}
        plain = times["plain"][0]
        for way, (seconds, tau) in times.items():
            size = len(task.answer)
            results.append(
                Result(way, task.name, seconds, size / seconds, plain / seconds, tau, repeated_8grams(task.answer))
            )
    return results


def lookup_microseconds(work: list[Task]) -> dict[str, float]:
    """Median cost of one suffix lookup while a text grows token by token, alone and with earlier texts."""
    found = {}
    for name, shared in (("own text", None), ("own and earlier texts", SharedTexts(64 << 20))):
        proposer = SuffixProposer(2, 2.0, shared=shared)
        times = []
        for seq_id, task in enumerate(work):
            request = Request(seq_id, None, task.prompt, SamplingParams(), WAYS["suffix k=16"], None, 0, frozenset())
            seq = Sequence(seq_id, request, 0, TextStream(None, ()), 1 << 20)
            proposer.begin(seq.view)
            noise = DraftNoise(KeyedNoise())
            proposer.propose([ProposeRequest(seq.view, 16)], noise)
            for token in task.answer:
                seq.token_ids.append(token)
                start = perf_counter()
                proposer.propose([ProposeRequest(seq.view, 16)], noise)
                times.append(perf_counter() - start)
            proposer.finish(seq.view)
        found[name] = median(times) * 1e6
    return found


def table(results: dict[str, list[Result]]) -> list[str]:
    lines = ["| target | way | tokens/s | speedup | tau | eta |", "|---|---|---|---|---|---|"]
    for target, rows in results.items():
        for way in WAYS:
            mine = [r for r in rows if r.way == way]
            speedups = sorted(r.speedup for r in mine)
            speed, tau = median(speedups), median(r.tau for r in mine)
            spread = f"{speed:.2f}x ({speedups[0]:.2f}-{speedups[-1]:.2f})" if way != "plain" else "1"
            rate = median(r.tokens_per_second for r in mine)
            lines.append(f"| {target} | {way} | {rate:.1f} | {spread} | {tau:.2f} | {speed / tau:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tasks", type=int, default=6)
    arguments = parser.parse_args()
    results = {}
    for dtype in ("float32", "bfloat16"):
        llm = LLM(model_path("wide", dtype), dtype=dtype, max_num_seqs=4)
        work = tasks(llm, 2 if arguments.quick else arguments.tasks)
        results[f"wide, {dtype}"] = run(llm, work)
    lookups = lookup_microseconds(work)
    lines = table(results)
    facts = hardware()
    head = [
        "# Replayed copy-heavy text",
        "",
        f"{facts['cpu']}, {facts['instruction_set']}, {facts['threads']} threads, torch {facts['torch']}, "
        f"transformers {facts['transformers']}. Made by `python -m benchmarks.copy_heavy`.",
        f"Replay: {len(work)} recorded texts of {LEAST} to {MOST} tokens forced as the target's choice at full target "
        "cost, greedy, batch 1, prompts cached. Medians with the range over texts; speedup over our own plain decoding of "
        "the same text; tau is the mean acceptance length; eta = speedup / tau.",
        f"Repeated 8-grams within a text: median {100 * median(r.repeated for r in results['wide, float32']):.0f}%. "
        + "A suffix lookup takes "
        + ", ".join(f"{value:.0f} microseconds ({name})" for name, value in lookups.items())
        + ".",
        "",
    ]
    console.print("\n".join(head + lines), markup=False)
    if not arguments.quick:
        folder = ROOT / "benchmarks" / "results"
        (folder / "copy_heavy.md").write_text("\n".join(head + lines) + "\n", "utf-8")
        rows = {target: [asdict(r) for r in each] for target, each in results.items()}
        text = json.dumps({"environment": facts, "lookup_microseconds": lookups, "results": rows}, indent=1)
        (folder / "copy_heavy.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
