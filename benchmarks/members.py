"""What several methods are worth together: merges beside members, stages beside their draft model, and the choice of both.

python -m benchmarks.members --wide --out benchmarks/results/members.json

The first part writes every prompt with a merge of a lookup and a draft model, and with each of them alone, at as many rows.
It counts tokens a pass, by workload and in a mix of all. The second part writes the same texts from the same seeds with a
draft model alone and with a drafter before it, in turns. Seeded texts are the same, which is checked, and so are the drafts
of a stage and of its draft model. So the ratio of seconds is what the stage saves. It does so for two draft models: the
embedded one, and the embedded target, which is large beside it and agrees with the wide target always. The third part sets
the engine's choice with a merge among what it chooses from beside the same choice without it, and counts what was chosen.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.forced_tokens import speedup_of
from benchmarks.tokens_per_pass import ratio, written
from outrider import LLM, SamplingParams
from outrider.embedded import default_model
from outrider.measure.tasks import built_in
from outrider.measure.widen import wide_target

_PARTS = ("members", "stages", "choices")
WORKLOADS = ("code_completion", "json", "copy_editing")


def members(llm: LLM, rows: int, rounds: int, num_prompts: int) -> dict[str, Any]:
    """Tokens a pass of a merge and of each member, by workload and in a mix of all."""
    lookup = {"method": "suffix", "num_draft_tokens": rows}
    model = {"method": "draft_model", "model": default_model("draft"), "num_draft_tokens": rows}
    ways: dict[str, dict[str, Any]] = {
        "suffix": lookup,
        "draft_model": model,
        "merge": {"method": "merge", "methods": [lookup, model], "num_draft_tokens": rows},
    }
    prompts = {name: [task.prompt for task in built_in(name)][:num_prompts] for name in WORKLOADS}
    prompts["mix"] = [prompt for each in zip(*prompts.values(), strict=False) for prompt in each]
    found: dict[str, Any] = {"rows": rows}
    for workload, asked in prompts.items():
        runs = {name: written(llm, asked, way, rounds, lambda: None) for name, way in ways.items()}
        found[workload] = {
            "tokens_a_pass": {name: float(run[0].sum() / run[1].sum()) for name, run in runs.items()},
            "merge_over": {name: ratio(runs["merge"], runs[name]) for name in ("suffix", "draft_model")},
        }
    return found


def stages(llm: LLM, length: int, rounds: int, num_prompts: int) -> dict[str, Any]:
    """Seconds of a draft model alone over those with a drafter before it, text by text."""
    small, large = default_model("draft"), default_model("target")
    lookup = {"method": "suffix", "min_match": 1}
    small_drafter = {"method": "draft_model", "model": small, "num_draft_tokens": 4}
    found: dict[str, Any] = {}
    for name, model, drafters in (
        ("small", small, {"suffix": lookup}),
        ("large", large, {"suffix": lookup, "draft_model": small_drafter}),
    ):
        alone = {"method": "draft_model", "model": model, "num_draft_tokens": length}
        ways = {"alone": alone} | {way: {**alone, "method": "staged", "drafter": each} for way, each in drafters.items()}
        for workload in WORKLOADS:
            prompts = [task.prompt for task in built_in(workload)][:num_prompts]
            seconds = _in_turns(llm, prompts, ways, rounds)
            found[f"{name}, {workload}"] = {way: speedup_of(seconds["alone"], seconds[way]) for way in drafters}
    return found


def choices(llm: LLM, rows: int, rounds: int, num_prompts: int) -> dict[str, Any]:
    """Seconds of the engine's choice without a merge over those with one, text by text, and what was chosen with one."""
    model = {"method": "draft_model", "model": default_model("draft"), "num_draft_tokens": rows}
    lookup = {"method": "suffix", "num_draft_tokens": rows}
    merge = {"method": "merge", "methods": [lookup, model], "num_draft_tokens": rows}
    ways = {"without": {"method": "auto", "methods": [model, lookup]}}
    ways["with a merge"] = {"method": "auto", "methods": [model, lookup, merge]}
    prompts = {name: [task.prompt for task in built_in(name)][:num_prompts] for name in WORKLOADS}
    prompts["mix"] = [prompt for each in zip(*prompts.values(), strict=False) for prompt in each]
    found: dict[str, Any] = {}
    for workload, asked in prompts.items():
        llm.stats.reset()
        seconds = _in_turns(llm, asked, ways, rounds)
        chosen = Counter(method for method, _ in llm.stats.chosen.elements())
        found[workload] = {"speedup": speedup_of(seconds["without"], seconds["with a merge"]), "chosen": dict(chosen)}
    return found


def _in_turns(llm: LLM, prompts: Sequence[str], ways: dict[str, dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every text, by way; round 0 is not counted."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for place, prompt in enumerate(prompts):
            texts = set()
            for way in list(ways) if (turn + place) % 2 else list(reversed(ways)):
                begun = perf_counter()
                params = SamplingParams(seed=1000 * turn + place, max_tokens=96, ignore_eos=True)
                (output,) = llm.generate(prompt, params, speculation=ways[way])
                texts.add(output.token_ids)
                if turn:
                    seconds[way].append(perf_counter() - begun)
            assert len(texts) == 1, "the texts of a seed differ"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", choices=_PARTS, help="Measure this part alone.")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    parts = _PARTS if asked.only is None else (asked.only,)
    found: dict[str, Any] = {"load": os.getloadavg()}
    if "members" in parts:
        with LLM(dtype=asked.dtype, prefix_caching=False) as embedded:  # it computes what the wide one computes, and sooner
            found["members"] = members(embedded, asked.rows, asked.rounds, asked.prompts)
    target = wide_target(asked.dtype) if asked.wide else default_model("target")
    with LLM(target, dtype=asked.dtype, speculation="none", prefix_caching=False) as wide:
        found["machine"] = wide.engine.runner.backend.instruction_set(wide.engine.runner.loaded.model)
        if "stages" in parts:
            found["stages"] = stages(wide, asked.rows, asked.rounds, asked.prompts)
        if "choices" in parts:
            found["choices"] = choices(wide, 2 * asked.rows, asked.rounds, asked.prompts)
    found["load_after"] = os.getloadavg()
    text = json.dumps(found, indent=1, default=lambda value: np.asarray(value).tolist())
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
