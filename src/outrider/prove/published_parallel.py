"""P-EAGLE heads with random weights in the layout in which they are published, for proofs without a trained one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.prove.published_heads import layer_shapes, random_tensors, save_random_eagle


def save_random_peagle(
    folder: Path,
    target: str,
    seed: int = 1,
    *,
    scale: float = 0.3,
    num_layers: int = 2,
    sizes: dict[str, Any] | None = None,
    **fields: Any,
) -> str:
    """Write a P-EAGLE head with random weights for a checkpoint, as the speculators package does; returns its folder.

    Args:
        folder: Where to write it.
        target: Folder of the target.
        seed: Fixes the weights.
        scale: Standard deviation of the weights.
        num_layers: Layers of its own.
        sizes: Other fields of its layers.
        fields: Other arguments of `save_random_eagle`, whose head has the first layer and all else.
    """
    from safetensors.torch import load_file, save_file

    save_random_eagle(
        folder, target, "speculators", seed, scale=scale, sizes={"num_hidden_layers": num_layers, **(sizes or {})}, **fields
    )
    file = folder / "config.json"
    mapping = json.loads(file.read_text("utf-8"))
    layer = mapping["transformer_layer_config"]
    mapping |= {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}
    mapping.setdefault("mask_token_id", layer["vocab_size"] - 1)
    mapping["speculators_config"]["algorithm"] = "peagle"
    file.write_text(json.dumps(mapping), "utf-8")
    tensors = load_file(folder / "model.safetensors")
    of_layer = {"input_layernorm.weight": (layer["hidden_size"],), **layer_shapes(layer, layer["hidden_size"])}
    shapes = {f"layers.{i}.{name}": shape for i in range(1, num_layers) for name, shape in of_layer.items()}
    shapes["mask_hidden"] = (1, 1, tensors["fc.weight"].shape[1])
    save_file(tensors | random_tensors(shapes, seed + 2, scale), folder / "model.safetensors")
    return str(folder)
