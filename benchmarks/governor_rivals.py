"""The engine's own choice (`auto`) beside fixed settings, through a change of workload, and with a method that is wrong.

python -m benchmarks.governor_rivals --out benchmarks/results/governor_rivals.json

All of it is measured on the wide target in bfloat16.

- **best**: in each cell (a workload and a batch) all fixed settings write the same prompts in turns. The one with the best
  median is measured again beside `auto`, in fresh rounds with other prompts.
- **change**: a stream of single texts. Half of them are code at temperature 1, where a draft model serves best, and half of
  them a replay that copies, where a lookup does. The draft model does not see what a replay forces. Every way writes the
  whole stream in every round.
- **wrong**: `auto` with no other method than one whose drafts never stand, beside plain decoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.blind import Blind
from benchmarks.governor import PLAIN, encoded, lower_bound
from outrider import LLM, SpeculationConfig
from outrider.config import default_model
from outrider.draft import Draft, Law
from outrider.lab.measure.decoding_config import DecodingConfig
from outrider.lab.measure.machine import describe
from outrider.lab.measure.tasks import built_in
from outrider.lab.measure.writing import EncodedTask, copy_tasks, write
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.draft_model import DraftModel
from outrider.propose.settings import Method, ProposerContext, register
from outrider.propose.suffix import Suffix
from outrider.widen import wide_target

_LENGTHS = (1, 2, 3, 5, 7, 9, 12)
_LOOKUP_LENGTHS = (4, 8, 16)
_LONGEST = 16
_CELLS = (("code_completion", 1), ("code_completion", 4), ("code_completion", 8), ("json", 1))


@register
class Wrong(Method):
    """Drafts tokens that the target never writes."""

    name: ClassVar[str] = "wrong"
    grows_from_probabilities: ClassVar[bool] = False

    def build(self, context: ProposerContext) -> Proposer:
        return WrongProposer()


class WrongProposer(Proposer):
    """The token that begins texts follows nowhere in one."""

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [Draft.chain([0] * min(request.budget, request.max_depth), Law.OPAQUE) for request in requests]


def fixed(draft: Method) -> list[DecodingConfig]:
    """The settings that somebody might choose by hand."""
    pairs = [(draft, length) for length in _LENGTHS] + [(Suffix(), length) for length in _LOOKUP_LENGTHS]
    return [_way(method, length) for method, length in pairs]


def auto(*methods: Method) -> DecodingConfig:
    """The engine's choice among methods."""
    members = tuple(SpeculationConfig(method=method, num_draft_tokens=_LONGEST) for method in methods)
    return DecodingConfig("auto", SpeculationConfig.of({"method": "auto", "methods": members}))


def best(llm: LLM, draft: Method, workload: str, batch: int, rounds: int, num_tokens: int) -> dict[str, Any]:
    """The best fixed setting of a cell, and `auto` beside it in fresh rounds."""
    tasks, ways = built_in(workload), [PLAIN, *fixed(draft)]
    swept = _rounds(llm, ways, [encoded(llm, tasks, batch, turn, num_tokens) for turn in range(rounds // 4)])
    winner = max(ways, key=lambda way: float(np.median(swept[way.name])))
    pair = [winner, auto(draft, Suffix()), *([] if winner is PLAIN else [PLAIN])]
    fresh = range(rounds // 4, rounds // 4 + rounds)
    found = _rounds(llm, pair, [encoded(llm, tasks, batch, turn, num_tokens) for turn in fresh])
    return {
        "workload": workload,
        "batch": batch,
        "winner": winner.name,
        "over_winner": _ratios(found["auto"], found[winner.name]),
        "winner_over_plain": _ratios(found[winner.name], found["plain"]),
        "swept": {name: float(np.median(speeds)) for name, speeds in swept.items()},
    }


def change(llm: LLM, draft: Method, rounds: int, num_texts: int, num_tokens: int) -> dict[str, Any]:
    """A stream whose workload changes in the middle: tokens a second of each way, and how much faster `auto` is."""
    blind = Blind(of=draft)
    copies = [task for task in copy_tasks() if len(llm.encode(task.answer or "")) >= num_tokens]
    code = built_in("code_completion")
    ways = [PLAIN, auto(blind, Suffix()), *fixed(blind)]
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(-1, rounds):  # the first round warms up, with two texts
        few = num_texts if turn >= 0 else 2
        halves = [
            [encoded(llm, tasks, 1, max(turn, 0) * few + i, num_tokens) for i in range(few // 2)]
            for tasks in (code, copies)
        ]
        for way in ways if turn % 2 else ways[::-1]:
            runs = [write(llm, texts, way, 1.0) for half in halves for texts in half]
            if turn >= 0:
                times[way.name].append(sum(run.decode_seconds or 0.0 for run in runs))
    ratios = {
        name: _ratios([1 / seconds for seconds in times["auto"]], [1 / seconds for seconds in found])
        for name, found in times.items()
        if name != "auto"
    }
    return {"texts": num_texts, "tokens": num_tokens, "rounds": rounds, "auto_over": ratios}


def wrong(llm: LLM, rounds: int, num_tokens: int) -> dict[str, Any]:
    """What it costs that the only method is always wrong."""
    tasks, way = built_in("code_completion"), auto(Wrong())
    found = _rounds(llm, [PLAIN, way], [encoded(llm, tasks, 1, turn, num_tokens) for turn in range(rounds)])
    return {"over_plain": _ratios(found["auto"], found["plain"])}


def _way(method: Method, length: int) -> DecodingConfig:
    shown = method.of.name if isinstance(method, Blind) else method.name
    return DecodingConfig(f"{shown} {length}", SpeculationConfig(method=method, num_draft_tokens=length))


def _rounds(llm: LLM, ways: Sequence[DecodingConfig], texts: Sequence[list[EncodedTask]]) -> dict[str, list[float]]:
    """Tokens a second of every way, by round; in turns, and each begins as often as it ends."""
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for way in ways:
        write(llm, texts[0], way, 1.0)  # warms up
    for turn, tasks in enumerate(texts):
        for way in ways if turn % 2 else ways[::-1]:
            found[way.name].append(write(llm, tasks, way, 1.0).tokens_per_second or 0.0)
    return found


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(speeds, others, strict=True)]
    return {"median": float(np.median(ratios)), "at_least": lower_bound(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    llm = LLM(wide_target("bfloat16"), speculation="none", prefix_caching=False, max_num_seqs=32)
    draft, found = DraftModel(model=default_model("draft")), {"machine": describe(llm.engine.runner.loaded.device)}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        print(name, json.dumps(value), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1), "utf-8")

    keep("wrong", wrong(llm, given.rounds, given.max_tokens))
    for workload, batch in _CELLS:
        keep(f"{workload} {batch}", best(llm, draft, workload, batch, given.rounds, given.max_tokens))
    keep("change", change(llm, draft, max(3, given.rounds // 6), 8, given.max_tokens))


if __name__ == "__main__":
    main()
