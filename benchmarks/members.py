"""What several methods are worth together: merges beside members, stages beside their draft model, and the choice of both.

python -m benchmarks.members --wide --out benchmarks/results/members.json

The first part writes every prompt with a merge of a lookup and a draft model, and with each of them alone, at as many rows:
code, JSON, copies, JSON with a schema, strict tool calls, and recorded texts that copy much, which are forced on the target
and hidden from the draft model. It counts tokens a pass, by workload and in a mix of all.

The second part writes the same texts from the same seeds with a draft model alone and with a drafter before it, in turns.
Seeded texts are the same, which is checked, and so are the drafts of a stage and of its draft model. So the ratio of
seconds is what the stage saves. It does so for two draft models: the embedded one, and the embedded target, which is large
beside it and agrees with the wide target always.

The third part sets the engine's choice with a merge among what it chooses from beside the same choice without it. It counts
passes of the target, seconds by phase of a step, and what was chosen. The choice without it is made twice, as a control.

What each round brought is printed to the error stream as soon as it is over.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.blind import Blind
from benchmarks.forced_tokens import speedup_of
from benchmarks.forced_tokens import workloads as structured
from benchmarks.tokens_per_pass import WRITING, ratio
from outrider import LLM, DraftModel, Merge, SamplingParams, SpeculationConfig, Suffix
from outrider.config import default_model
from outrider.engine.stats import PHASES
from outrider.lab.measure.tasks import Task, built_in
from outrider.lab.measure.writing import Replay, copy_tasks
from outrider.propose.settings import Method
from outrider.widen import wide_target

_PARTS = ("members", "stages", "choices")
WORKLOADS = ("code_completion", "json", "copy_editing")
#: Prompts of each load; and where the engine chooses, whose rounds write three times as many texts.
_PROMPTS, _CHOSEN_FOR = 8, 3


@dataclass(frozen=True)
class Asked:
    """A text to write.

    Attributes:
        prompt: What it goes on from.
        params: Of the request.
        model: The draft model, which may not see what a replay forces.
    """

    prompt: str
    params: SamplingParams
    model: Method


def loads(llm: LLM, num_prompts: int) -> dict[str, list[Asked]]:
    """What is to be written, by workload: prompts, outputs with a structure, and recorded texts that copy much."""
    model = DraftModel(model=default_model("draft"))
    found = {name: [Asked(task.prompt, WRITING, model) for task in built_in(name)] for name in WORKLOADS}
    for name, tasks in structured().items():
        params = SamplingParams(max_tokens=200)
        asked = [Asked(prompt, params.replace(structured_outputs=structure), model) for prompt, structure in tasks]
        found[name] = asked * -(-num_prompts // len(asked))
    found["replay"] = [_replay(llm, task, model) for task in copy_tasks()]
    return {name: asked[:num_prompts] for name, asked in found.items()}


def _replay(llm: LLM, task: Task, model: Method) -> Asked:
    assert task.answer is not None, "a replay has an answer"
    answer = tuple(llm.prompts.encode(task.answer, add_special_tokens=False)[1][: WRITING.max_tokens])
    forced = Replay(len(llm.encode(task.prompt)), answer)
    return Asked(task.prompt, WRITING.replace(logits_processors=(forced,), max_tokens=len(answer)), Blind(of=model))


def members(llm: LLM, rows: int, rounds: int, num_prompts: int) -> dict[str, Any]:
    """Tokens a pass of a merge and of each member, by workload and in a mix of all."""
    asked = loads(llm, num_prompts)
    asked["mix"] = [each for group in zip(*asked.values(), strict=False) for each in group]
    found: dict[str, Any] = {"rows": rows}
    for workload, texts in asked.items():
        runs = {way: np.zeros((2, rounds, len(texts))) for way in ("suffix", "draft_model", "merge")}
        for turn in range(rounds):
            for place, text in enumerate(texts):
                for way, config in _ways(text.model, rows).items():
                    (output,) = llm.generate(text.prompt, text.params, speculation=config)
                    runs[way][:, turn, place] = len(output.token_ids), output.stats.num_target_passes
            so_far = {way: run[0, : turn + 1].sum() / run[1, : turn + 1].sum() for way, run in runs.items()}
            _tell("members", workload, turn + 1, rounds, ", ".join(f"{way} {tokens:.2f}" for way, tokens in so_far.items()))
        found[workload] = {
            "tokens_a_pass": {name: float(run[0].sum() / run[1].sum()) for name, run in runs.items()},
            "merge_over": {name: ratio(runs["merge"], runs[name]) for name in ("suffix", "draft_model")},
        }
    return found


def _ways(model: Method, rows: int) -> dict[str, SpeculationConfig]:
    """A lookup, a draft model and a merge of both, with as many rows each."""
    alone = {each.name: SpeculationConfig(method=each, num_draft_tokens=rows) for each in (Suffix(), model)}
    merge = SpeculationConfig(method=Merge(methods=tuple(alone.values())), num_draft_tokens=rows)
    return {"suffix": alone["suffix"], "draft_model": alone[model.name], "merge": merge}


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
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(rounds + 1):
                written = _in_turns(llm, prompts, ways, turn)
                for way, texts in written.items() if turn else ():
                    seconds[way] += [text.seconds for text in texts]
                times = ", ".join(f"{way} {sum(text.seconds for text in texts):.2f} s" for way, texts in written.items())
                _tell("stages", f"{name}, {workload}", turn, rounds, times)
            found[f"{name}, {workload}"] = {way: speedup_of(seconds["alone"], seconds[way]) for way in drafters}
    return found


def choices(llm: LLM, rows: int, rounds: int, num_prompts: int) -> dict[str, Any]:
    """The engine's choice without a merge over the same with one, text by text: seconds and tokens a pass, and what was
    chosen. "again" is the choice without a merge a second time."""
    model = {"method": "draft_model", "model": default_model("draft"), "num_draft_tokens": rows}
    lookup = {"method": "suffix", "num_draft_tokens": rows}
    merge = {"method": "merge", "methods": [lookup, model], "num_draft_tokens": rows}
    ways = {
        "without": {"method": "auto", "methods": [model, lookup]},
        "again": {"method": "auto", "methods": [lookup, model]},
        "with a merge": {"method": "auto", "methods": [model, lookup, merge]},
    }
    prompts = {name: [task.prompt for task in built_in(name)][:num_prompts] for name in WORKLOADS}
    prompts["mix"] = [prompt for each in zip(*prompts.values(), strict=False) for prompt in each]
    runs: dict[str, dict[str, list[Text]]] = {workload: {way: [] for way in ways} for workload in prompts}
    for turn in range(rounds + 1):
        for workload, asked in prompts.items():
            written = _in_turns(llm, asked, ways, turn)
            for way, texts in written.items() if turn else ():
                runs[workload][way] += texts
            figures = _chosen(written)
            chosen = figures["with a merge"]["chosen"]
            result = "; ".join(
                f"{way} {found['speedup']['median']:.3f} in speed, {found['tokens_a_pass_over'][0]:.3f} in tokens a pass"
                for way, found in figures.items()
                if way != "without"
            )
            result += f"; merge in {chosen.get('merge', 0)} of {sum(chosen.values())}"
            _tell("choices", workload, turn, rounds, result)
    return {workload: _chosen(texts) for workload, texts in runs.items()}


def _chosen(runs: dict[str, list[Text]]) -> dict[str, dict[str, Any]]:
    """Each way of the engine's choice beside the one without a merge, from the texts that each has written."""
    counts = {way: np.array([(text.tokens, text.passes) for text in texts]).T[:, None] for way, texts in runs.items()}
    base = [text.seconds for text in runs["without"]]
    return {
        way: {
            "speedup": speedup_of(base, [text.seconds for text in texts]),
            "tokens_a_pass_over": ratio(counts[way], counts["without"]),
            "seconds_a_pass": {phase: sum(t.phases[phase] for t in texts) / counts[way][1].sum() for phase in PHASES},
            "chosen": dict(sum((text.chosen for text in texts), Counter())),
        }
        for way, texts in runs.items()
    }


def _tell(part: str, workload: str, turn: int, rounds: int, result: str) -> None:
    """Print what a round has brought, since all of them take long."""
    counted = f"round {turn} of {rounds}" if turn else "a first round that is not counted"
    print(f"{part}, {workload}, {counted}: {result}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Text:
    """How one text was written.

    Attributes:
        token_ids: It.
        seconds: Of the whole request.
        passes: Of the target.
        phases: Seconds by phase of a step.
        chosen: Rounds by method, where the engine chooses.
    """

    token_ids: tuple[int, ...]
    seconds: float
    passes: int
    phases: dict[str, float]
    chosen: Counter[str]

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.token_ids)


def _in_turns(llm: LLM, prompts: Sequence[str], ways: dict[str, dict[str, Any]], turn: int) -> dict[str, list[Text]]:
    """The texts of each way in one round."""
    found: dict[str, list[Text]] = {way: [] for way in ways}
    for place, prompt in enumerate(prompts):
        params = SamplingParams(seed=1000 * turn + place, max_tokens=96, ignore_eos=True)
        for way in list(ways) if (turn + place) % 2 else list(reversed(ways)):
            found[way].append(_write(llm, prompt, params, ways[way]))
        assert len({texts[-1].token_ids for texts in found.values()}) == 1, "the texts of a seed differ"
    return found


def _write(llm: LLM, prompt: str, params: SamplingParams, way: dict[str, Any]) -> Text:
    llm.stats.reset()
    begun = perf_counter()
    (output,) = llm.generate(prompt, params, speculation=way)
    seconds = perf_counter() - begun
    chosen = Counter(method for method, _ in llm.stats.chosen.elements())
    return Text(output.token_ids, seconds, output.stats.num_target_passes, dict(llm.stats.seconds), chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", choices=_PARTS, help="Measure this part alone.")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, help=f"Of each load: {_PROMPTS}, or {_CHOSEN_FOR} for choices.")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    parts = _PARTS if asked.only is None else (asked.only,)
    found: dict[str, Any] = {"load": os.getloadavg()}
    if "members" in parts:
        with LLM(dtype=asked.dtype, prefix_caching=False) as embedded:  # it computes what the wide one computes, and sooner
            found["members"] = members(embedded, asked.rows, asked.rounds, asked.prompts or _PROMPTS)
    target = wide_target(asked.dtype) if asked.wide else default_model("target")
    with LLM(target, dtype=asked.dtype, speculation="none", prefix_caching=False) as wide:
        found["machine"] = wide.engine.runner.backend.instruction_set(wide.engine.runner.loaded.model)
        if "stages" in parts:
            found["stages"] = stages(wide, asked.rows, asked.rounds, asked.prompts or _PROMPTS)
        if "choices" in parts:
            found["choices"] = choices(wide, 2 * asked.rows, asked.rounds, asked.prompts or _CHOSEN_FOR)
    found["load_after"] = os.getloadavg()
    text = json.dumps(found, indent=1, default=lambda value: np.asarray(value).tolist())
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
