"""Block drafters with random weights in the layouts in which they are published, for proofs without a trained one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from outrider.prove.published_heads import layer_shapes, random_tensors

LAYOUTS = ("z-lab", "z-lab, old", "speculators")


def save_random_dflash(
    folder: Path,
    target: str,
    layout: str = "z-lab",
    seed: int = 1,
    *,
    scale: float = 0.3,
    block_size: int = 6,
    inputs: tuple[int, ...] = (1, 2),
    draft_tokens: tuple[int, ...] | None = None,
    sizes: dict[str, Any] | None = None,
    **fields: Any,
) -> str:
    """Write a block drafter with random weights for a checkpoint; returns its folder.

    Args:
        folder: Where to write it.
        target: Folder of the target.
        layout: One of LAYOUTS.
        seed: Fixes the weights.
        scale: Standard deviation of the weights.
        block_size: Rows of its block.
        inputs: The target's layers whose inputs it reads, from 1 on.
        draft_tokens: The target's tokens that it drafts, in ascending order, in the layout of speculators; None for all.
        sizes: Other fields of its layers.
        fields: Other fields of its configuration.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    layers = {
        "model_type": "qwen3", "hidden_size": config.hidden_size, "intermediate_size": 2 * config.hidden_size,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": config.hidden_size // 2, "num_hidden_layers": 2,
        "vocab_size": config.vocab_size, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, **(sizes or {}),
    }  # fmt: skip
    chosen = torch.arange(config.vocab_size) if draft_tokens is None else torch.tensor(draft_tokens)
    shape = {"block_size": block_size, "mask_token_id": config.vocab_size - 1, **fields}
    mapping = _mapping(layout, target, layers, inputs, len(chosen), shape)
    shapes = _shapes(layers, len(inputs), int(mapping.get("target_hidden_size") or config.hidden_size))
    if draft_tokens is not None:
        shapes["lm_head.weight"] = (len(chosen), layers["hidden_size"])
    tensors = random_tensors(shapes, seed, scale)
    if draft_tokens is not None:
        tensors["d2t"] = chosen - torch.arange(len(chosen))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(mapping), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def _mapping(
    layout: str, target: str, layers: dict[str, Any], inputs: tuple[int, ...], num_drafted: int, shape: dict[str, Any]
) -> dict[str, Any]:
    """The configuration as each of them writes it."""
    if layout == "speculators":
        return {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
            "transformer_layer_config": layers, "draft_vocab_size": num_drafted,
            "aux_hidden_state_layer_ids": list(inputs),
            "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": target, "architectures": []}},
            **shape,
        }  # fmt: skip
    nested = {"target_layer_ids": [i - 1 for i in inputs], "mask_token_id": shape.pop("mask_token_id")}
    block = {"block_size": shape.pop("block_size")}
    old = layout == "z-lab, old"
    return {
        "architectures": ["DFlashDraftModel"], **layers, **(block if old else {}),
        "dflash_config": {**nested, **({} if old else block)}, **shape,
    }  # fmt: skip


def _shapes(layers: dict[str, Any], num_read: int, wide: int) -> dict[str, tuple[int, ...]]:
    """Of the tensors that every layout has."""
    hidden = layers["hidden_size"]
    of_layer = {"input_layernorm.weight": (hidden,), **layer_shapes(layers, hidden)}
    shapes = {f"layers.{i}.{name}": shape for i in range(layers["num_hidden_layers"]) for name, shape in of_layer.items()}
    return shapes | {"fc.weight": (hidden, num_read * wide), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
