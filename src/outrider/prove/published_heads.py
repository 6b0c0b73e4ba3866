"""Heads with random weights in the layouts in which EAGLE heads are published, for proofs without a trained one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: What NVIDIA nests in a configuration, with the layers whose outputs are read.
_NVIDIA = {
    "eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True, "use_mtp_layernorm": False,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True,
    "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
}  # fmt: skip
#: Where each layout puts the layer. The first one is that of EAGLE-1.
LAYOUTS = {"safeailab1": "layers.0.", "safeailab": "midlayer.", "nvidia": "layers.0.", "speculators": "layers.0."}


def save_random_eagle(
    folder: Path,
    target: str,
    layout: str,
    seed: int = 1,
    *,
    scale: float = 0.3,
    draft_tokens: tuple[int, ...] | None = None,
    sizes: dict[str, Any] | None = None,
    own_embedding: bool = False,
    own_output: bool = True,
    **fields: Any,
) -> str:
    """Write a head with random weights for a checkpoint; returns its folder.

    Args:
        folder: Where to write it.
        target: Folder of the target.
        layout: A key of LAYOUTS.
        seed: Fixes the weights.
        scale: Standard deviation of the weights.
        draft_tokens: The target's tokens that it drafts, in ascending order; None for all.
        sizes: Other fields of its layer.
        own_embedding: Whether it brings embeddings: the target's where they are as wide, else random ones.
        own_output: Whether it brings an output layer; one of EAGLE-1 never does.
        fields: Other fields of its configuration.
    """
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    layer = {
        "model_type": "llama", "hidden_size": config.hidden_size, "intermediate_size": 2 * config.hidden_size,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": config.hidden_size // 2, "num_hidden_layers": 1,
        "vocab_size": config.vocab_size, "rms_norm_eps": 1e-5, "hidden_act": "silu", **(sizes or {}),
    }  # fmt: skip
    chosen = torch.arange(config.vocab_size) if draft_tokens is None else torch.tensor(draft_tokens)
    mapping = _mapping(
        layout, target, layer, fields if layout == "safeailab1" else {"draft_vocab_size": len(chosen), **fields}
    )
    wide = int(mapping.get("target_hidden_size") or layer["hidden_size"])
    of_eagle1 = layout == "safeailab1"
    shapes = _eagle1_shapes(layer, mapping) if of_eagle1 else _eagle3_shapes(layout, layer, mapping, wide, len(chosen))
    if not own_output:
        del shapes["lm_head.weight"]
    tensors = random_tensors(shapes, seed, scale)
    if draft_tokens is not None:
        tensors["d2t"] = chosen - torch.arange(len(chosen))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    if own_embedding:
        copy = load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"]
        random = random_tensors({"": (config.vocab_size, layer["hidden_size"])}, seed + 1, scale)[""]
        tensors["embed_tokens.weight"] = copy.clone() if copy.shape == random.shape else random
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(mapping), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def _mapping(layout: str, target: str, layer: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration as each of them writes it."""
    if layout == "nvidia":
        return {"architectures": ["LlamaForCausalLMEagle3"], **layer, "eagle_config": _NVIDIA, **fields}
    if layout != "speculators":
        return {"architectures": ["LlamaForCausalLM"], **layer, **fields}
    verifier = {"name_or_path": target, "architectures": []}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.5.0",
        "norm_before_residual": False, "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier}, **fields,
    }  # fmt: skip


def layer_shapes(layer: dict[str, Any], read: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a layer but for its first norms.

    Args:
        layer: Its sizes, by transformers' names.
        read: Numbers that its attention reads.
    """
    hidden, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, kept = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    for name, size in (("q", queries), ("k", kept), ("v", kept)):
        shapes[f"self_attn.{name}_proj.weight"] = (size, read)
        if layer.get("qkv_bias"):
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    shapes |= {
        "self_attn.o_proj.weight": (hidden, queries), "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner),
    }  # fmt: skip
    if layer["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def _eagle1_shapes(layer: dict[str, Any], mapping: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all tensors of an EAGLE-1 head but the embeddings."""
    hidden = layer["hidden_size"]
    shapes = {LAYOUTS["safeailab1"] + name: shape for name, shape in layer_shapes(layer, hidden).items()}
    return shapes | {"fc.weight": (hidden, 2 * hidden)} | ({"fc.bias": (hidden,)} if mapping.get("bias", True) else {})


def _eagle3_shapes(
    layout: str, layer: dict[str, Any], mapping: dict[str, Any], wide: int, drafted: int
) -> dict[str, tuple[int, ...]]:
    """Of all tensors of an EAGLE-3 head but the embeddings and the columns of tokens."""
    hidden, named = layer["hidden_size"], mapping.get("eagle_config", mapping).get("eagle_aux_hidden_state_layer_ids")
    count = len(named or (0, 0, 0))
    of_layer = dict.fromkeys(("hidden_norm.weight", "input_layernorm.weight"), (hidden,)) | layer_shapes(layer, 2 * hidden)
    shapes = {LAYOUTS[layout] + name: shape for name, shape in of_layer.items()}
    shapes |= {"fc.weight": (hidden, count * wide), "norm.weight": (hidden,), "lm_head.weight": (drafted, hidden)}
    if mapping.get("norm_before_fc"):
        shapes["input_norm.weight"] = (count * wide,)
    if mapping.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(count)}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, scale: float) -> dict[str, Tensor]:
    """Normal numbers; norms lie around 1.

    Args:
        shapes: By name.
        seed: Fixes them.
        scale: Their standard deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
    return {name: values + 1.0 if "norm" in name else values for name, values in found.items()}
