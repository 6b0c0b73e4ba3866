"""A model of the size that people run, in the blocks that they have: its passes, its memory, and what a draft would gain.

    python -m benchmarks.large_files                      8 billion weights as Q4_K_M: 5 GB of disk and 6 GB of memory
    python -m benchmarks.large_files --size 1B            1 billion weights

The files are written directly, from blocks that are drawn, and never exist in full precision: a target in the shape of
Qwen3 of this size, and a draft model in the shape of Qwen3 0.6B as Q8_0. So their texts mean nothing, and no acceptance can
be measured. What is measured: the seconds until a file is loaded, the peak of memory over what the process had before, the
seconds of a pass by its rows, which are the fastest of five, and plain decoding. From these follows what `outrider plan`
predicts for an acceptance: the best length of drafts, and its speedup.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tests.model.drawn_files import q4_k_m, write_drawn
from transformers import Qwen3Config

from outrider import LLM, SamplingParams
from outrider.lab.economics import Economics, PassCost
from outrider.lab.measure.machine import MemoryWatch, describe
from outrider.model.memory import measure_passes

#: Shapes by the size that they are named for: hidden size, width of the feed-forward, layers, heads.
SHAPES = {"8B": (4096, 12288, 36, 32), "1B": (2048, 6144, 16, 16), "0.6B": (1024, 3072, 28, 16), "tiny": (256, 512, 2, 4)}
SETTINGS: dict[str, Any] = {"speculation": "none", "max_model_len": 1024, "kv_cache_tokens": 1024, "max_num_seqs": 1}
LONGEST = 16


def shape(size: str, vocab_size: int) -> Qwen3Config:
    """transformers' configuration of a size. The smallest one has tied embeddings, as its original."""
    hidden, width, layers, heads = SHAPES[size]
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=min(8, heads),
        head_dim=128,
        tie_word_embeddings=size == "0.6B",
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )


def measured(path: Path, num_tokens: int) -> dict[str, Any]:
    """What a file takes to load, and its passes."""
    watch = MemoryWatch(torch.device("cpu"))
    before, begun = watch.peak().resident or 0, perf_counter()
    with LLM(str(path), **SETTINGS) as llm:
        loading = perf_counter() - begun
        passes = measure_passes(llm.engine.runner)
        begun = perf_counter()
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
        seconds = perf_counter() - begun
        size = path.stat().st_size
        return {
            "file_bytes": size,
            "loading_seconds": loading,
            "peak_over_file": ((watch.peak().resident or 0) - before) / size,
            "pass_seconds": passes,
            "tokens_per_second": num_tokens / seconds,
        }


def cost(passes: dict[int, float]) -> PassCost:
    """The cost of a pass as `outrider plan` has it: that of one row, or of its rows' arithmetic."""
    most = max(passes)
    return PassCost(passes[1], passes[most] / most)


def show(found: dict[str, Any], console: Console) -> None:
    """Print the figures."""
    table = Table("rows", *(f"{name}, ms (C)" for name in ("target", "draft")), title="seconds of a pass")
    for rows in found["target"]["pass_seconds"]:
        times = [found[name]["pass_seconds"] for name in ("target", "draft")]
        table.add_row(str(rows), *(f"{1000 * each[rows]:.1f} ({each[rows] / each[1]:.2f})" for each in times))
    console.print(table)
    for name in ("target", "draft"):
        own = found[name]
        console.print(
            f"{name}: {own['file_bytes'] / 1e9:.2f} GB, loaded in {own['loading_seconds']:.1f} s, "
            f"peak {own['peak_over_file']:.2f} of the file, {own['tokens_per_second']:.1f} tokens a second"
        )
    plan = found["plan"]
    console.print(
        f"predicted at an acceptance of {plan['acceptance']:g}: {plan['num_draft_tokens']} draft tokens, "
        f"{plan['tokens']:.2f} tokens a round, {plan['speedup']:.2f} times plain decoding"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[size for size in SHAPES if size != "0.6B"], default="8B")
    parser.add_argument("--draft-size", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=16, help="that are written plainly")
    parser.add_argument("--folder", type=Path, help="where the files are written; they are deleted afterwards")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {"machine": describe(torch.device("cpu")), "size": asked.size, "draft_size": asked.draft_size}
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for name, size in (("first", "tiny"), ("draft", asked.draft_size), ("target", asked.size)):  # no import counts
            config, path = shape(size, asked.vocab_size), Path(folder) / f"{name}.gguf"
            write_drawn(path, config, q4_k_m(config) if name == "target" else lambda _: "Q8_0")
            found[name] = measured(path, asked.max_tokens)
            path.unlink()
    del found["first"]
    economics = Economics(cost(found["target"]["pass_seconds"]), cost(found["draft"]["pass_seconds"]))
    best = economics.best(asked.acceptance, LONGEST)
    found["plan"] = {**asdict(best), "speedup": best.speedup, "acceptance": asked.acceptance}
    show(found, Console(width=120))
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
