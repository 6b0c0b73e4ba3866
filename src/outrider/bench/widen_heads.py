"""Carries heads over to the wide copy of their target, so that they draft there what they draft here.

The hidden state of the wide copy is that of its source, repeated. Medusa's heads and heads to exit with get a projection
that takes the mean of the copies, and keep everything behind it; where they use the target's output layer, they take along
that of the source. The hidden layer of blockwise heads reads the copies in the same way, and what it adds is repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from outrider.embedded import default_model
from outrider.heads.checkpoint import FILE, Witness, load_heads, save_heads
from outrider.heads.config import BlockwiseConfig, ExitConfig, HeadsConfig, MedusaConfig
from outrider.heads.networks import build_network
from outrider.measure.widen import HIDDEN, cache_folder
from outrider.model.loading.exclusive import exclusive_transformers


def wide_heads(heads: str) -> str:
    """The folder of heads of the embedded target for its wide copy. They are carried over when they are first asked for.

    Args:
        heads: The folder of the heads.

    Raises:
        InvalidParameterError: No such folder.
        ModelLoadError: It holds no heads that can be read.
    """
    load_heads(heads)
    folder = cache_folder() / f"heads-{hashlib.sha256((Path(heads) / FILE).read_bytes()).hexdigest()[:8]}-{HIDDEN}"
    if not (folder / FILE).exists():
        widen_heads(default_model("target"), heads, str(folder), HIDDEN)
    return str(folder)


def widen_heads(source: str, heads: str, folder: str, hidden: int) -> None:
    """Write the heads of `source` for its wide copy to `folder`.

    Args:
        source: The folder of the target that they were made for.
        heads: Their folder.
        folder: Where to write.
        hidden: The factor for the hidden size, as for `widen`.
    """
    narrow = load_heads(heads)
    config, weights = narrow.config, narrow.network.state_dict()
    # The final norm of a wide copy divides by the factor, since the output layer adds up the copies.
    scale = 1.0 / hidden if config.normed else 1.0
    target = config.target
    wide_target = target.replace(name=f"{target.name}, {hidden} times as wide", hidden_size=hidden * target.hidden_size)
    wide: HeadsConfig
    if isinstance(config, BlockwiseConfig):
        weights, wide = _repeated(weights, hidden, scale), config.replace(target=wide_target)
    else:
        assert isinstance(config, MedusaConfig | ExitConfig), type(config)
        weights = _averaged(weights, config, hidden, scale, source)
        wide = config.replace(target=wide_target, output="own")
    network = build_network(wide).to(next(iter(weights.values())).dtype)
    network.load_state_dict(weights)
    token_ids, features = narrow.witness
    save_heads(folder, network, Witness(token_ids, features.repeat(1, hidden) * scale))


def _repeated(weights: Mapping[str, Tensor], hidden: int, scale: float) -> dict[str, Tensor]:
    """Blockwise heads whose hidden layer takes the mean of the copies, and that add the same to each copy."""
    found = dict(weights)
    for name, weight in weights.items():
        if name == "up.weight":
            found[name] = weight.repeat(1, hidden) / (hidden * scale)
        elif name.startswith("downs."):
            found[name] = weight.repeat(hidden, *[1] * (weight.dim() - 1)) * scale
    return found


def _averaged(
    weights: Mapping[str, Tensor], config: MedusaConfig | ExitConfig, hidden: int, scale: float, source: str
) -> dict[str, Tensor]:
    """Heads that begin with the mean of the copies, with output layers of their own."""
    found = dict(weights)
    if config.output == "target":
        output = _output_layer(source)
        found |= {f"outputs.{head}.weight": output for head in range(config.num_heads)}
    size, dtype = config.target.hidden_size, next(iter(found.values())).dtype
    reduce = found.get("reduce.weight", torch.eye(size, dtype=dtype))
    found["reduce.weight"] = reduce.repeat(1, hidden) / (hidden * scale)
    return found


def _output_layer(source: str) -> Tensor:
    """The weight [vocab_size, hidden_size] of a checkpoint's output layer."""
    from transformers import AutoModelForCausalLM

    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weight: Tensor = model.get_output_embeddings().weight.detach()
    return weight
