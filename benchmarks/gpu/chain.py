"""Chains of a draft model beside plain decoding: the embedded pair, widened to the width and depth of an 8B and a 1B.

The wide copies compute what the pair computes, and their last layers add zeros. So drafts stand as often as the pair's do,
while passes read as many bytes as those of large models. The vocabulary stays that of the pair, 4,096 tokens.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from benchmarks.gpu.plain import about
from benchmarks.gpu.record import Record
from benchmarks.gpu.stepping import Texts, in_short, profiled
from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.lab.measure.tasks import built_in
from outrider.lab.measure.writing import encoded_tasks
from outrider.propose.settings import PLAIN
from outrider.widen import wide_module

#: Factors for 384 hidden numbers and 1,024 feed-forward units, and layers.
TARGET, DRAFT = (11, 14, 32), (5, 8, 16)
SMALL_TARGET, SMALL_DRAFT = (3, 2, 10), (1, 1, 4)
WORKLOADS = ("code_completion", "json", "free_text", "copy_editing")
LENGTHS = (1, 3, 5)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, max_tokens=600, ignore_eos=True),
}


def chain(record: Record, device: torch.device) -> None:
    shapes = (TARGET, DRAFT) if device.type == "cuda" else (SMALL_TARGET, SMALL_DRAFT)
    made = [
        record.step_of(name, lambda name=name, shape=shape: wide(name, shape, device), sizes)
        for name, shape in zip(("target", "draft"), shapes, strict=True)
    ]
    llm = record.step_of("load", lambda: loaded(*made), backends)
    texts = tasks()
    ways = {"plain": PLAIN} | {
        f"K = {length}": SpeculationConfig(method=drafts_of(llm), num_draft_tokens=length) for length in LENGTHS
    }
    for sampling, params in SAMPLINGS.items():
        record.step(f"{sampling}, first steps", lambda params=params: first(llm, texts[0], params, ways))
        record.step(f"{sampling}, speed", lambda params=params: speeds(llm, texts, params, ways, device))
    for sampling, params in SAMPLINGS.items():
        for way, config in ways.items():
            step = f"{sampling}, {way}"
            given = (llm, texts[:1], params, config, device)
            record.step(f"{step}, profile", lambda given=given: seen(*given))
            record.step(f"{step}, phases", lambda given=given: phases(*given))
    both = {way: ways[way] for way in ("plain", "K = 3")}
    for sampling, params in SAMPLINGS.items():
        given = (llm, (texts * 4)[:16], params, both, device)
        record.step(f"{sampling}, batch 16", lambda given=given: together(*given))


def wide(name: str, shape: tuple[int, int, int], device: torch.device) -> Any:
    hidden, ffn, layers = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return wide_module(default_model(name), hidden, ffn, dtype, device=str(device), layers=layers)


def sizes(model: Any) -> dict[str, Any]:
    of = model.config
    named = {
        "layers": of.num_hidden_layers,
        "hidden": of.hidden_size,
        "ffn": of.intermediate_size,
        "vocabulary": of.vocab_size,
    }
    return named | {"heads": [of.num_attention_heads, of.num_key_value_heads, of.head_dim]} | about(model)


def loaded(target: Any, draft: Any) -> LLM:
    given: Any = {"method": "draft_model", "num_draft_tokens": 3}
    return LLM(target, consume=True, draft_model=draft, speculation=given, kv_cache_tokens=16 * 1024, prefix_caching=False)


def backends(llm: LLM) -> dict[str, str]:
    return {"target": llm.engine.runner.backend.name}


def drafts_of(llm: LLM) -> Any:
    return llm.speculation.method


def tasks() -> list[tuple[int, ...]]:
    """A prompt of each workload, in tokens."""
    found = {name: built_in(name)[:1] for name in WORKLOADS}
    encoded = encoded_tasks(default_model("target"), 2048, found, 600)
    return [encoded[name][0].prompt_ids for name in WORKLOADS]


def first(llm: LLM, prompt: tuple[int, ...], params: SamplingParams, ways: dict[str, SpeculationConfig]) -> str:
    """Every way writes a little, so that kernels are compiled."""
    for config in ways.values():
        with Texts(llm, [prompt], params, config) as texts:
            texts.run(16)
    return "done"


def speeds(
    llm: LLM,
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
    ways: dict[str, SpeculationConfig],
    device: torch.device,
) -> dict[str, Any]:
    """All ways in turn on each prompt, a text at a time."""
    length = 64 if device.type == "cuda" else 12
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for turn, prompt in enumerate(prompts):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            with Texts(llm, [prompt], params, ways[way]) as texts:
                runs[way].append(texts.run(length))
    return {way: beside(found, runs["plain"]) for way, found in runs.items()}


def beside(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a way over all prompts, and how many times as fast as plain decoding it is."""
    steps, tokens = (sum(run[name] for run in runs) for name in ("steps", "tokens"))
    spans = [span for run in runs for span in run["spans"]]
    times, plainly = ([sum(run["spans"]) / run["tokens"] for run in each] for each in (runs, plain))
    gains = [round(other / own, 3) for own, other in zip(times, plainly, strict=True)]
    found = in_short({"steps": steps, "tokens": tokens, "spans": spans})
    return found | {"tau": round(tokens / steps, 3), "over_plain": round(sum(plainly) / sum(times), 3), "by_prompt": gains}


def seen(
    llm: LLM, prompts: list[tuple[int, ...]], params: SamplingParams, config: SpeculationConfig, device: torch.device
) -> dict[str, Any]:
    with Texts(llm, prompts, params, config) as texts:
        texts.run(4)
        return profiled(texts.step, 3, device)


def phases(
    llm: LLM, prompts: list[tuple[int, ...]], params: SamplingParams, config: SpeculationConfig, device: torch.device
) -> dict[str, Any]:
    steps = 12 if device.type == "cuda" else 2
    with Texts(llm, prompts, params, config) as texts:
        texts.run(4)
        return {"as_it_is": texts.phases(steps, waiting=False), "synchronised": texts.phases(steps, waiting=True)}


def together(
    llm: LLM,
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
    ways: dict[str, SpeculationConfig],
    device: torch.device,
) -> dict[str, Any]:
    """Sixteen texts at a time, and what the profiler sees of two steps with drafts."""
    length = 32 if device.type == "cuda" else 4
    found: dict[str, Any] = {}
    for way, config in ways.items():
        with Texts(llm, prompts, params, config) as texts:
            texts.run(2 * len(prompts))
            run = texts.run(length * len(prompts))
            found[way] = in_short(run) | {"tau": round(run["tokens"] / run["steps"] / len(prompts), 3)}
            found[way]["profile"] = profiled(texts.step, 2, device)
    return found
