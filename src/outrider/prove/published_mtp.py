"""Layers with random weights that predict several tokens, in the layouts in which checkpoints are published with them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from outrider.model.loading.exclusive import exclusive_transformers
from outrider.model.lone_decoder import lone_config

#: By layout: where a layer's names begin, with its number; where those of all layers begin; the names of what is beside the
#: decoder layer; and its kind of attention.
LAYOUTS: dict[str, tuple[str, str | None, tuple[str, str, str, str], str]] = {
    "qwen3_next": (
        "mtp.layers.{}.", "mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "full_attention",
    ),
    "deepseek_v3": ("model.layers.{}.", None, ("eh_proj", "enorm", "hnorm", "shared_head.norm"), "full_attention"),
    "mimo_7b": (
        "model.mtp_layers.{}.", None, ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        "full_attention",
    ),
    "speculators": (
        "mtp_layers.{}.", None, ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"), "full_attention",
    ),
    "mimo_v2": ("model.mtp.layers.{}.", None, ("eh_proj", "enorm", "hnorm", "final_layernorm"), "sliding_attention"),
}  # fmt: skip


def save_random_mtp(
    folder: Path, target: str, layout: str, num_layers: int = 1, seed: int = 1, *, scale: float = 0.3
) -> str:
    """Write layers with random weights for a checkpoint; returns their folder.

    Args:
        folder: Where to write them. What `model.safetensors` there holds already stays, so it may be the checkpoint's own.
        target: Folder of the checkpoint.
        layout: A key of LAYOUTS.
        num_layers: How many.
        seed: Fixes the weights.
        scale: Standard deviation of the weights.
    """
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    file = folder / "model.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(file) if file.exists() else {}
    prefix, shared, (fc, embedding, hidden, norm), layer_type = LAYOUTS[layout]
    names = _layer_names(config, layer_type)
    size = config.hidden_size
    beside = {fc: (size, 2 * size), embedding: (size,), hidden: (size,), norm: (size,)}
    first = config.num_hidden_layers if layout == "deepseek_v3" else 0
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(first, first + num_layers):
        start = prefix.format(number)
        shapes |= {f"{start}{name}": shape for name, shape in names.items()}
        shapes |= {f"{start if shared is None else shared}{name}.weight": shape for name, shape in beside.items()}
        if layout == "deepseek_v3":  # copies of what the target has
            shapes |= {f"{start}{name}.weight": (config.vocab_size, size) for name in ("embed_tokens", "shared_head.head")}
    plain = 0.0 if layout == "qwen3_next" else 1.0  # its norms multiply by 1 + w
    save_file(tensors | _random(shapes, seed, scale, plain), file, {"format": "pt"})
    return str(folder)


def _layer_names(config: object, layer_type: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a decoder layer, as transformers writes them."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    experts = layer_type == "full_attention" and hasattr(config, "num_experts_per_tok")
    with tempfile.TemporaryDirectory() as folder, exclusive_transformers():
        model = AutoModelForCausalLM.from_config(lone_config(config, experts=experts, layer_type=layer_type))
        model.save_pretrained(folder)
        found = load_file(Path(folder) / "model.safetensors")
    own = sorted(name for name in found if name.startswith("model.layers.0."))  # files are read in any order
    shapes = {name: tuple(found[name].shape) for name in own}
    renamed = {"post_attention_layernorm.": "pre_mlp_layernorm."} if layer_type == "sliding_attention" else {}
    shown = {}
    for name, shape in shapes.items():
        inner = name.removeprefix("model.layers.0.")
        start = next((old for old in renamed if inner.startswith(old)), "")
        shown[renamed.get(start, "") + inner.removeprefix(start)] = shape
    return shown


def _random(shapes: dict[str, tuple[int, ...]], seed: int, scale: float, plain: float) -> dict[str, Tensor]:
    """Normal numbers; norms lie around what leaves their rows as they are."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
    return {name: values + plain if "norm" in name else values for name, values in found.items()}
