"""Small engines on a GPU beside the same on a CPU: tiny models of random weights, and the pair of the package."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.record import Record
from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.propose.draft_model import DraftModel

PROMPTS = [[1, 5, 9, 2, 7, 7, 3, 11, 4], [3, 1, 4], [2, 2, 8, 6]]
TEXTS = ["def parse(line):\n", "class Reader:\n    def __init__(self, path):\n", "import os\nimport sys\n\n"]
DTYPES = ("float32", "bfloat16", "float16")


def engines(record: Record, device: torch.device) -> None:
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(name)s: %(message)s"
    )  # says why a backend did not fit
    with tempfile.TemporaryDirectory() as folder:
        target = save_tiny_llama(Path(folder) / "target", seed=1, vocab_size=13, num_layers=2)
        draft = save_tiny_llama(Path(folder) / "draft", seed=2, vocab_size=13, num_layers=1)
        for dtype in DTYPES[:1] if os.environ.get("TRITON_INTERPRET") == "1" else DTYPES:
            record.step(f"tiny, {dtype}", lambda dtype=dtype: tiny(target, draft, dtype, device))
            if dtype != "float16" and os.environ.get("TRITON_INTERPRET") != "1":
                record.step(f"embedded pair, {dtype}", lambda dtype=dtype: embedded(dtype, device))


def ways(draft: str | None) -> dict[str, SpeculationConfig]:
    """Drafts of a model, as chains and as trees, and branches of a method without one."""
    method: Any = "draft_model" if draft is None else DraftModel(model=draft)
    return {
        "plain": SpeculationConfig(method="none"),
        "chain": SpeculationConfig(method=method, num_draft_tokens=3),
        "tree": SpeculationConfig(method=method, num_draft_tokens=6, tree=(2, 2, 1)),
        "token_recycling": SpeculationConfig(method="token_recycling", num_draft_tokens=4),
    }


def sampling(length: int) -> dict[str, SamplingParams]:
    return {
        "greedy": SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
        "seeded": SamplingParams(temperature=0.9, seed=7, max_tokens=length, ignore_eos=True),
        "cut": SamplingParams(temperature=0.9, top_p=0.9, top_k=8, seed=7, max_tokens=length, ignore_eos=True),
        "sampled": SamplingParams(temperature=0.9, max_tokens=length, ignore_eos=True),
    }


def tiny(target: str, draft: str, dtype: str, device: torch.device) -> dict[str, Any]:
    """Texts of random weights. Only in float32 must they be the CPU's, but for tokens that are nearly as likely."""
    settings = {"dtype": dtype, "block_size": 4, "kv_cache_tokens": 512, "speculation": "none"}
    return compared(target, ways(draft), sampling(24), PROMPTS, settings, device, dtype == "float32")


def embedded(dtype: str, device: torch.device) -> dict[str, Any]:
    """Texts of the trained pair."""
    return compared(None, ways(None), sampling(48), TEXTS, {"dtype": dtype, "kv_cache_tokens": 4096}, device, False)


def compared(
    model: str | None,
    drafts: dict[str, SpeculationConfig],
    params: dict[str, SamplingParams],
    prompts: list[Any],
    settings: dict[str, Any],
    device: torch.device,
    must_agree: bool,
) -> dict[str, Any]:
    """Texts on the device beside the CPU's plain ones: tokens before the first that differs, of all tokens."""
    found: dict[str, Any] = {"right": True}
    with kernels_off(), LLM(model, device="cpu", **settings) as llm:
        wanted = {
            name: [text.token_ids for text in llm.generate(prompts, each, speculation="none")]
            for name, each in params.items()
            if name != "sampled"
        }
    with LLM(model, device=str(device), **settings) as llm:
        found["backend"] = llm.engine.runner.backend.name
        found["right"] = found["backend"] == "paged"
        for way, config in drafts.items():
            for name, each in params.items():
                outputs = llm.generate(prompts, each, speculation=config)
                errors = [repr(text.error) for text in outputs if text.error is not None]
                faults = sum(text.stats.num_proposer_faults for text in outputs if text.error is None)
                here: dict[str, Any] = {"errors": errors, "proposer_faults": faults}
                if not errors and name in wanted:
                    alike = [agreeing(got.token_ids, want) for got, want in zip(outputs, wanted[name], strict=True)]
                    here["alike"] = f"{sum(alike)} of {sum(map(len, wanted[name]))}"
                    if must_agree and name == "greedy" and here["alike"].split(" of ")[0] != here["alike"].split(" of ")[1]:
                        found["right"] = False
                with suppress(Exception):
                    stats = outputs[0].stats
                    here["drafts"] = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens accepted"
                found["right"] = found["right"] and not errors and not faults
                found[f"{way}, {name}"] = here
    return found


class kernels_off:
    """The stock operators compute, while a rehearsal on a CPU takes the kernels otherwise."""

    def __enter__(self) -> None:
        self._before = os.environ.get("OUTRIDER_KERNELS")
        if self._before == "triton":
            os.environ["OUTRIDER_KERNELS"] = "off"

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            os.environ["OUTRIDER_KERNELS"] = self._before


def agreeing(got: tuple[int, ...], want: tuple[int, ...]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
