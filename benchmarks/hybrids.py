"""Models with a running state: what passes of a few rows cost, and how fast a prompt is read beside transformers.

    python -m benchmarks.hybrids qwen3_5          one model, 2 to 4 minutes
    python -m benchmarks.hybrids --out FILE       all of them, and the figures as JSON
    python -m benchmarks.hybrids --file qwen3_5 qwen3_next      as files of llama.cpp with blocks of 4 bits (Q4_K_M)

Every model is random, in bfloat16 or in drawn blocks, with the layer shapes of a published model and fewer layers. The
figures are:

- the least time of a pass of one row, and the time of reading its weights over that of the pass;
- C(2) to C(8): the time of so many rows over that of one, as medians of rounds in which all of them take turns;
- seconds of a prompt here and in a forward pass of transformers, which take turns, too. transformers reads no such files;
- the memory of the states of a text, as it is counted before texts run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from tests.model.drawn_files import q4_k_m, write_drawn

from outrider import LLM
from outrider.lab.measure.machine import describe, read_bandwidth
from outrider.model.memory import PassTimer, weight_bytes

ROWS = (1, 2, 3, 4, 8)
_CONTEXT = 64
_SIZES: dict[str, Any] = {
    "vocab_size": 32_000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
#: The configurations by name: their class, and the sizes of the model that they are taken from.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (  # Qwen3.5-0.8B, 8 of 24 layers
        "Qwen3_5TextConfig",
        {
            "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16, "linear_num_key_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": _LINEAR * 2,
        },
    ),
    "qwen3_5-4b": (  # Qwen3.5-4B, 4 of 32 layers
        "Qwen3_5TextConfig",
        {
            "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 4, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": _LINEAR,
        },
    ),
    "qwen3_next": (  # Qwen3-Next-80B-A3B, 4 of 48 layers and 64 of 512 experts
        "Qwen3NextConfig",
        {
            "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 4, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": _LINEAR, "num_experts": 64,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    "granite": (  # Granite-4-tiny, 5 of 40 layers and 16 of 64 experts
        "GraniteMoeHybridConfig",
        {
            "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_hidden_layers": 5,
            "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 6,
            "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2,
            "layer_types": ["mamba"] * 4 + ["attention"],
        },
    ),
    "lfm2": (  # LFM2-1.2B, 8 of 16 layers
        "Lfm2Config",
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
            "num_key_value_heads": 8, "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
        },
    ),
}  # fmt: skip


def configuration(name: str) -> Any:
    """transformers' configuration of a model."""
    import transformers

    kind, sizes = MODELS[name]
    return getattr(transformers, kind)(**{**_SIZES, **sizes})


def random_model(name: str) -> Any:
    """A model with random weights."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration(name), dtype=torch.bfloat16).eval()
    model.generation_config = transformers.GenerationConfig()  # so no token ends a text
    return model


def steps(timer: PassTimer, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Passes of a few rows, and of reading as many bytes as the weights have, in turns."""
    timer.compute(_CONTEXT)
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    shares = []
    for turn in range(rounds + 1):
        spent = {rows: timer.seconds(_CONTEXT, rows, logits=True) for rows in ROWS}
        reading = num_bytes / read_bandwidth(torch.device("cpu"), num_bytes, repeats=1)
        if turn:  # the first round warms up
            shares.append(reading / spent[1])
            for rows, seconds in spent.items():
                found[rows].append(seconds)
    ratios = {rows: median(many / one for many, one in zip(found[rows], found[1], strict=True)) for rows in ROWS}
    return {"row_ms": 1e3 * min(found[1]), "share_of_bandwidth": median(shares), "rows_over_one": ratios}


def prompts(timer: PassTimer, model: Any, length: int, rounds: int) -> dict[str, float]:
    """Seconds of a prompt in each way, as medians of rounds in which the ways take turns. A file has one way."""
    ways: dict[str, Callable[[], float]] = {"outrider": partial(timer.seconds, 0, length, logits=False)}
    if not isinstance(model, str):
        ways["transformers"] = partial(_by_transformers, model, length)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, read in ways.items():
            seconds = read()
            if turn:
                found[name].append(seconds)
    return {name: median(seconds) for name, seconds in found.items()}


@torch.inference_mode()
def _by_transformers(model: Any, length: int) -> float:
    ids = torch.tensor([[(7919 * position + 1) % model.config.vocab_size for position in range(length)]])
    began = perf_counter()
    model(ids, use_cache=False, logits_to_keep=1)
    return perf_counter() - began


def measure_file(name: str, length: int, rounds: int) -> dict[str, Any]:
    """All figures of a file of drawn blocks, which is deleted behind them."""
    with tempfile.TemporaryDirectory() as folder:
        path, config = Path(folder) / f"{name}.gguf", configuration(name)
        write_drawn(path, config, q4_k_m(config))
        return measure(str(path), length, rounds)


def measure(model: Any, length: int, rounds: int) -> dict[str, Any]:
    """All figures of a model, or of a file."""
    with LLM(model, speculation="none", prefix_caching=False, kv_cache_tokens=2 * length, max_num_seqs=4) as llm:
        runner = llm.engine.runner
        num_bytes = runner.backend.weight_bytes(runner.loaded.model) or weight_bytes(runner.loaded.model)
        timer = PassTimer(runner, length + max(ROWS))
        return {
            "backend": runner.backend.name,
            "weight_bytes": num_bytes,
            "text_bytes": runner.text_bytes,
            **steps(timer, num_bytes, 5 * rounds),
            "prompt_tokens": length,
            "prompt_seconds": prompts(timer, model, length, rounds),
        }


def shown(found: dict[str, Any]) -> Table:
    """The figures as a table of Markdown."""
    names = (
        "model",
        "MB",
        "T(1), ms",
        "of bandwidth",
        *(f"C({rows})" for rows in ROWS[1:]),
        "states, MB",
        "prompt, s",
        "transformers",
    )
    table = Table(*names, box=MARKDOWN)
    for name, entry in found.items():
        ratios, seconds = entry["rows_over_one"], entry["prompt_seconds"]
        table.add_row(
            name,
            f"{entry['weight_bytes'] / 1e6:.0f}",
            f"{entry['row_ms']:.1f}",
            f"{entry['share_of_bandwidth']:.0%}",
            *(f"{ratios[rows]:.2f}" for rows in ROWS[1:]),
            f"{entry['text_bytes'] / 1e6:.1f}",
            *(f"{seconds[way]:.2f}" if way in seconds else "" for way in ("outrider", "transformers")),
        )
    return table


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description="Passes and prompts of models with a running state.")
    parser.add_argument("model", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--file", action="store_true", help="as files with blocks of 4 bits")
    parser.add_argument("--tokens", type=int, default=1500, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.model or MODELS:
        given = (arguments.tokens, arguments.rounds)
        found[name] = measure_file(name, *given) if arguments.file else measure(random_model(name), *given)
        Console(width=140).print(shown({name: found[name]}))
    if arguments.out is not None:
        facts = {"environment": describe(torch.device("cpu")), "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps({**facts, "models": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
