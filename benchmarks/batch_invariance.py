"""Checks over many tokens that in batch-invariant mode the bits are a function of the text.

    python -m benchmarks.batch_invariance              10,000 tokens, some minutes; writes benchmarks/results/
    python -m benchmarks.batch_invariance --tokens 500

In bfloat16 and float32, seeded and greedy texts are first decoded plainly and alone. Then one engine writes them with
little memory, small chunks, and several ways to draft in shuffled batches. It counts preemptions, prefix hits, and tokens
that differ. Three ways to compute are compared: our kernels, stock operators row by row, and stock operators in ordinary
mode, which shows what the mode is worth. This says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from outrider import LLM, Ngram, SamplingParams, SpeculationConfig, Suffix
from outrider.lab.measure.machine import describe
from outrider.lab.measure.tasks import built_in

RESULTS = Path(__file__).parent / "results"
PROMPTS = [task.prompt for task in built_in("code_completion")[:8]]
LENGTH = 32
WAYS = (
    SpeculationConfig(),
    SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=4),
    SpeculationConfig(method=Suffix(min_match=1, branches=True)),
    SpeculationConfig(method="draft_model", num_draft_tokens=3),
    SpeculationConfig(method="draft_model", num_draft_tokens=6),
    SpeculationConfig(method="draft_model", tree=(3, 2)),
)
console = Console()


def params(turn: int) -> SamplingParams:
    """Parameters of a text: greedy and seeded in turn, some with filters and penalties."""
    kinds: tuple[dict[str, Any], ...] = (
        {"seed": turn}, {"temperature": 0.0}, {"seed": turn, "top_p": 0.9}, {"seed": turn, "repetition_penalty": 1.2},
    )  # fmt: skip
    return SamplingParams(max_tokens=LENGTH, **kinds[turn % len(kinds)])


def compare(dtype: Any, num_tokens: int, mode: str) -> dict[str, Any]:
    """The numbers of tokens that were compared, and that differ, between texts alone and the same texts in a batch."""
    os.environ["OUTRIDER_KERNELS"] = "" if mode == "kernels" else "off"
    batch_invariant = mode != "ordinary, stock"
    alone = LLM(dtype=dtype, speculation="none", batch_invariant=batch_invariant, prefix_caching=False)
    tight: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 40, "max_num_seqs": 6, "kv_cache_tokens": 200}
    crowd = LLM(dtype=dtype, batch_invariant=batch_invariant, **tight)
    jobs = [(PROMPTS[i % len(PROMPTS)], params(i)) for i in range(-(-num_tokens // (LENGTH * len(WAYS))))]
    compared = differing = first = 0
    for turn, (prompt, asked) in enumerate(track(jobs, f"{dtype}", console=console)):
        want = alone.generate(prompt, asked)[0].token_ids
        work = list(WAYS)
        random.Random(turn).shuffle(work)
        for output in crowd.generate([prompt] * len(work), asked, speculation=work):
            wrong = [a != b for a, b in zip(want, output.token_ids, strict=False)]
            compared += len(want)
            differing += sum(wrong) + abs(len(want) - len(output.token_ids))
            first += any(wrong)
    stats = crowd.stats.finished
    return {
        "mode": mode, "backend": crowd.engine.runner.backend.name, "dtype": dtype, "tokens": compared,
        "tokens_differing": differing,
        "texts_differing": first, "preemptions": stats.num_preemptions, "cached_prompt_tokens": stats.num_cached_tokens,
        "accepted_draft_tokens": stats.num_accepted_tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000)
    tokens = parser.parse_args().tokens
    rows = [compare(dtype, tokens // 2, "kernels") for dtype in ("bfloat16", "float32")]
    rows += [  # a tenth of the tokens, since stock operators are slow here
        compare(dtype, tokens // 20, mode)
        for mode in ("row by row, stock", "ordinary, stock")
        for dtype in ("bfloat16", "float32")
    ]
    for row in rows:
        console.print(row)
    if tokens >= 10_000:
        text = json.dumps({"environment": describe(torch.device("cpu")), "results": rows}, indent=1)
        (RESULTS / "batch_invariance.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
