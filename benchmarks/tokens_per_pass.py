"""Tokens a target pass of the embedded pair: trees beside chains of as many rows, and token recycling cold and warm.

python -m benchmarks.tokens_per_pass --out benchmarks/results/tokens_per_pass.json

The wide target computes the same function as the embedded one, so these figures are its own, too, and come much sooner.
Trees weigh rows by the times of the wide target in bfloat16 with AVX-512. Each way writes every prompt in every
round, at temperature 1, 128 tokens. Ratios are of all tokens over all passes; their range is a bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.draft import Law
from outrider.lab.measure.tasks import built_in
from outrider.propose.trees.adaptive import FixedPace, SequoiaTree
from outrider.results import RequestStats

#: Seconds of a pass of the wide target in bfloat16 with AVX-512, by rows.
WIDE = {1: 0.0201, 8: 0.0201, 12: 0.0201, 16: 0.0201, 32: 0.0302}
WRITING = SamplingParams(max_tokens=128, temperature=1.0, ignore_eos=True)


def written(llm: LLM, prompts: Sequence[str], way: dict[str, Any], rounds: int, before: Callable[[], None]) -> np.ndarray:
    """Tokens and passes [2, rounds, prompts] of a way; `before` runs before each prompt."""
    found = np.zeros((2, rounds, len(prompts)))
    for turn in range(rounds):
        for place, prompt in enumerate(prompts):
            before()
            output = llm.generate(prompt, WRITING, speculation=SpeculationConfig.of(way))[0]
            found[:, turn, place] = len(output.token_ids), output.stats.num_target_passes
    return found


def ratio(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Tokens a pass of one way over those of another, with the 95% range of a bootstrap over prompts."""
    (a, b), (c, d) = one.sum(1), other.sum(1)
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(a), (4000, len(a)))
    drawn = a[chosen].sum(1) / b[chosen].sum(1) * d[chosen].sum(1) / c[chosen].sum(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(a.sum() / b.sum() * d.sum() / c.sum()), float(low), float(high)


def trees(llm: LLM, prompts: Sequence[str], rows: int, rounds: int) -> dict[str, Any]:
    """Best-first and Sequoia's trees beside the chain of as many rows, and what Sequoia's programme expected."""
    llm.engine.drafting.builders.use_pace(FixedPace(WIDE))
    shapes: dict[str, Any] = {"chain": (), "best_first": "best_first", "sequoia": "sequoia"}
    runs, ranks = {}, {}
    for name, shape in shapes.items():
        llm.engine.stats.reset()
        way = {"method": "draft_model", "num_draft_tokens": rows, "tree": shape}
        runs[name] = written(llm, prompts, way, rounds, lambda: None)
        ranks[name] = llm.engine.stats.finished.copy()
    builder = llm.engine.drafting.builders.of(llm.proposers.find(llm.resolve({"method": "draft_model"}).method), "sequoia")
    assert isinstance(builder, SequoiaTree)
    planned = builder.plan((Law.SAMPLED, False), rows)
    return {
        "rows": rows,
        "ways": {name: _way(runs[name], runs["chain"], ranks[name]) for name in shapes},
        "sequoia": {"parents": planned.parents, "expected_tau": 1.0 + planned.expected},
    }


def recycling(llm: LLM, prompts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Token recycling that knows nothing, and that has seen 16 other prompts, beside plain decoding."""
    way = {"method": "token_recycling"}
    warming, measured = prompts[:16], prompts[16:]
    proposer = llm.proposers.get(SpeculationConfig.of(way).method)
    nothing = proposer.snapshot()
    plain = np.ones((2, rounds, len(measured)))
    cold = written(llm, measured, way, rounds, lambda: proposer.restore(nothing))
    proposer.restore(nothing)
    for prompt in warming:
        llm.generate(prompt, WRITING, speculation=SpeculationConfig.of(way))
    warm_state = proposer.snapshot()
    llm.engine.stats.reset()
    warm = written(llm, measured, way, rounds, lambda: proposer.restore(warm_state))
    found = {name: _way(run, plain, None) for name, run in (("cold", cold), ("warm", warm))}
    found["warm"] |= _ranks(llm.engine.stats.finished)
    return found


def _way(run: np.ndarray, base: np.ndarray, stats: RequestStats | None) -> dict[str, Any]:
    tokens, passes = run.sum((1, 2))
    value, low, high = ratio(run, base)
    found = {"tokens_a_pass": tokens / passes, "ratio": value, "low": low, "high": high}
    return found if stats is None else found | _ranks(stats)


def _ranks(stats: RequestStats) -> dict[str, Any]:
    offered, stood = stats.offered_per_rank, stats.accepted_per_rank
    return {
        "tau": stats.mean_acceptance_length,
        "by_position": [a / b for a, b in zip(stats.accepted_per_position, stats.tried_per_position, strict=False) if b],
        "by_rank": [a / b for a, b in zip(stood, offered, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    llm = LLM(dtype="bfloat16", prefix_caching=False)
    prompts = [task.prompt for workload in ("code_completion", "json") for task in built_in(workload)]
    found = {
        "machine": llm.engine.runner.backend.instruction_set(llm.engine.runner.loaded.model),
        "trees": [trees(llm, prompts, rows, asked.rounds) for rows in asked.rows or (8, 12)],
        "token_recycling": recycling(llm, prompts, asked.rounds),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
