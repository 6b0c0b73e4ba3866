"""What trained drafts are worth beside each other: tokens of a pass, acceptance by position, the time of drafting, speed.

    python -m benchmarks.drafts --prompts held.jsonl --way shipped=draft_model:5 --way new=draft_model=DIR:5 \\
        --way heads=medusa=DIR:4 --way tree=medusa=DIR:3,2,1 --wide --out benchmarks/results/drafts.json

A way is written as in `outrider bench --way`, behind a name of its own. The first one is what the others are compared with,
and plain decoding always runs too. Prompts are lines of {"prompt": ...}; where a line has an "answer", `--replay` forces it
as the target's choice. With `--data DIR` they are those that a training with these data is measured with. Every way writes
every prompt in every round, in turns that change with the prompt, alone and without a prefix cache. A ratio of speeds is
that of total times, with the 95% range of a bootstrap over prompts, which pairs them. The time of drafting is the median
over the drafts of one prompt, in turns of all ways. Heads of DSpark end their drafts where they like, and with `--whole`
they draft whole blocks.

In a replay the drafts are greedy and see nothing of the text that is forced: the target alone is made to follow it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.blind import Blind
from outrider import LLM, DSpark, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.lab.measure.decoding_config import DecodingConfig, parse_ways
from outrider.lab.measure.machine import describe
from outrider.lab.measure.widen_heads import wide_heads
from outrider.lab.measure.writing import EncodedTask, Run, write
from outrider.propose.row_heads import FolderMethod
from outrider.records import read_manifest, read_records
from outrider.results import RequestStats
from outrider.widen import wide_target

#: Times that each way writes one prompt for the time of its drafts.
_TURNS = 5


@dataclass
class Measured:
    """Runs of one way, in the order of prompts and rounds."""

    runs: list[Run] = field(default_factory=list)
    drafting_seconds: float = 0.0

    def seconds(self, num_prompts: int) -> np.ndarray:
        """[prompts] seconds of decoding for a token, summed over rounds."""
        each = [(run.decode_seconds or 0.0) / max(1, run.decode_tokens) for run in self.runs]
        found: np.ndarray = np.array(each).reshape(-1, num_prompts).sum(0)
        return found

    def stats(self) -> RequestStats:
        found = RequestStats()
        for run in self.runs:
            if run.drafts is not None:
                found.add(run.drafts)
        return found


def parse(text: str, *, wide: bool, replay: bool, whole: bool) -> tuple[str, DecodingConfig]:
    """A name and a way; heads are carried over to the wide target."""
    name, _, form = text.partition("=")
    way = parse_ways([form], default_model("draft"))[-1]
    method = way.config.method
    if wide and isinstance(method, FolderMethod) and method.model is not None:
        method = method.replace(model=wide_heads(method.model))
    if whole and isinstance(method, DSpark):
        method = method.replace(min_confidence=0.0)
    if replay and method is not None:
        method = Blind(of=method)
    return name, replace(way, config=way.config.replace(method=method))


def encoded(llm: LLM, lines: list[dict[str, str]], num_tokens: int, *, replay: bool) -> list[EncodedTask]:
    """The prompts in tokens; with a replay those whose answer is long enough."""
    found = []
    for place, line in enumerate(lines):
        prompt = llm.encode(line["prompt"])
        answer = llm.prompts.encode(line["answer"], add_special_tokens=False)[1][:num_tokens] if replay else None
        if answer is None or len(answer) == num_tokens:
            found.append(EncodedTask(str(place), prompt, num_tokens, answer))
    return found


def held_out(data: Path, num_tokens: int) -> list[EncodedTask]:
    """The prompts of a folder of data that no training learns from."""
    records = [record for record in read_records(data, read_manifest(data)) if record.held_out]
    prompts = [tuple(record.token_ids[: record.num_prompt_tokens].tolist()) for record in records]
    return [EncodedTask(str(place), prompt, num_tokens, None) for place, prompt in enumerate(prompts)]


def measure(
    llm: LLM, ways: dict[str, DecodingConfig], tasks: list[EncodedTask], rounds: int, temperature: float
) -> dict[str, Measured]:
    """Every way on every prompt in every round."""
    found = {name: Measured() for name in ways}
    for way in ways.values():
        write(llm, [tasks[0]], way, temperature)  # warms up, and does not count
    names = list(ways)
    for turn in range(rounds):
        for place, task in enumerate(tasks):
            shift = (turn + place) % len(names)
            for name in names[shift:] + names[:shift]:
                found[name].runs.append(write(llm, [task], ways[name], temperature))
    seconds: dict[str, list[float]] = {name: [] for name, way in ways.items() if way.config.enabled}
    for _ in range(_TURNS):
        for name, taken in seconds.items():
            taken += drafting(llm, ways[name], tasks[0])
    for name, taken in seconds.items():
        found[name].drafting_seconds = float(np.median(taken))
    return found


def drafting(llm: LLM, way: DecodingConfig, task: EncodedTask) -> list[float]:
    """The time of drafting in each step, in seconds."""
    params = SamplingParams(max_tokens=task.max_tokens, ignore_eos=True)
    output = llm.generate(list(task.prompt_ids), params, speculation=way.config, trace=True)[0]
    return [each.seconds["propose"] for each in output.outputs[0].rounds or ()]


def ratio(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """How much faster `one` is than `other`, seconds [prompts] of both, with its 95% range over prompts."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(one), (4000, len(one)))
    low, high = np.percentile(other[chosen].sum(1) / one[chosen].sum(1), [2.5, 97.5])
    return {"ratio": float(other.sum() / one.sum()), "low": float(low), "high": float(high)}


def summary(found: dict[str, Measured], num_prompts: int) -> dict[str, Any]:
    """The figures of every way."""
    first = next(name for name in found if name != "plain")
    times = {name: each.seconds(num_prompts) for name, each in found.items()}
    figures: dict[str, Any] = {}
    for name, each in found.items():
        stats, rounds = each.stats(), len(each.runs) // num_prompts
        figures[name] = {
            "tokens_per_second": num_prompts * rounds / float(times[name].sum()),
            "over_plain": ratio(times[name], times["plain"]),
            f"over_{first}": ratio(times[name], times[first]),
        }
        if name != "plain":
            tried = zip(stats.accepted_per_position, stats.tried_per_position, strict=False)
            figures[name] |= {
                "tau": stats.mean_acceptance_length,
                "by_position": [a / b for a, b in tried if b],
                "drafts": stats.num_drafts,
                "drafting_ms": each.drafting_seconds * 1e3,
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help='lines of {"prompt": ...}')
    source.add_argument("--data", type=Path, help="a folder of `outrider train data`, whose held-out prompts are taken")
    parser.add_argument("--way", action="append", required=True, help="NAME=WAY")
    parser.add_argument("--target", help="folder or hub id; the embedded one unless given")
    parser.add_argument("--wide", action="store_true", help="the wide copy of the embedded target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--limit", type=int, default=32, help="prompts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--whole", action="store_true", help="heads of DSpark draft whole blocks")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    target = wide_target(asked.dtype) if asked.wide else asked.target
    llm = LLM(target, speculation="none", dtype=asked.dtype, prefix_caching=False)
    if asked.data is not None:
        tasks = held_out(asked.data, asked.tokens)[: asked.limit]
    else:
        lines = [json.loads(line) for line in asked.prompts.read_text("utf-8").splitlines() if line.strip()]
        tasks = encoded(llm, lines, asked.tokens, replay=asked.replay)[: asked.limit]
    plain = {"plain": DecodingConfig("plain", SpeculationConfig.of("none"))}
    ways = plain | dict(parse(text, wide=asked.wide, replay=asked.replay, whole=asked.whole) for text in asked.way)
    found = {
        "machine": describe(llm.engine.runner.loaded.device),
        "target": "wide" if asked.wide else asked.target or "embedded",
        "dtype": asked.dtype,
        "replay": asked.replay,
        "prompts": len(tasks),
        "tokens": asked.tokens,
        "temperature": asked.temperature,
        "rounds": asked.rounds,
        "ways": summary(measure(llm, ways, tasks, asked.rounds, asked.temperature), len(tasks)),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
