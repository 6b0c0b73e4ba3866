"""Carries heads over to the wide copy of their target, so that they draft there what they draft here.

The hidden state of the wide copy is that of its source, repeated. Medusa's heads and heads to exit with get a projection
that takes the mean of the copies, and keep everything behind it; where they use the target's output layer, they take along
that of the source. The hidden layer of blockwise heads reads the copies in the same way, and what it adds is repeated. The
projection of heads of EAGLE-3 and DFlash takes the mean of the copies; they take along the embeddings and the output layer
of the source, and keep their layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.config import default_model
from outrider.errors import UnsupportedModelError
from outrider.heads.block_networks import BlockHeadNetwork
from outrider.heads.checkpoint import FILE, Witness, load_heads, save_heads
from outrider.heads.features import Eagle3Network
from outrider.heads.formats.folder import CONFIG
from outrider.heads.formats.published import PublishedHead, is_head, read_head
from outrider.heads.formats.writing import write_head
from outrider.heads.networks import BlockwiseConfig, ExitConfig, HeadsConfig, MedusaConfig, build_network
from outrider.loading.exclusive import exclusive_transformers
from outrider.loading.sources import WHOLE
from outrider.widen import HIDDEN, cache_folder


def wide_heads(heads: str) -> str:
    """The folder of heads of the embedded target for its wide copy. They are carried over when they are first asked for."""
    published = is_head(heads)
    weights, last, widened = (WHOLE, CONFIG, widen_published) if published else (FILE, FILE, widen_heads)
    if not published:
        load_heads(heads)
    folder = cache_folder() / f"heads-{hashlib.sha256((Path(heads) / weights).read_bytes()).hexdigest()[:8]}-{HIDDEN}"
    if not (folder / last).exists():
        widened(default_model("target"), heads, str(folder), HIDDEN)
    return str(folder)


def widen_published(source: str, heads: str, folder: str, hidden: int) -> None:
    """Write a head of EAGLE-3 or DFlash; the arguments are those of `widen_heads`."""
    narrow = read_head(heads)
    if not isinstance(narrow.network, Eagle3Network | BlockHeadNetwork):
        problem = f"heads of {narrow.config.method} continue the final states, and are not carried over to a wide copy"
        raise UnsupportedModelError(heads, problem, "Measure it on the target that it was made for.")
    count, size = narrow.config.num_features, narrow.config.target_hidden_size
    config = replace(narrow.config, target_hidden_size=hidden * size, verifier=f"{source}, {hidden} times as wide")
    table, output = _weight(source, "input"), _weight(source, "output")
    weights = {"embed_tokens.weight": table, "lm_head.weight": output} | dict(narrow.network.state_dict())
    weights["fc.weight"] = weights["fc.weight"].unflatten(1, (count, -1)).repeat(1, 1, hidden).flatten(1) / hidden
    for name in weights:
        if name.startswith(("fc_norm.", "input_norm.")):  # the mean square of the copies is that of one
            weights[name] = weights[name].unflatten(0, (-1, size)).repeat(1, hidden).flatten()
    build: Any = type(narrow.network)
    network = build(config, own_embedding=True, own_output=True)
    network.load_state_dict(weights)
    write_head(Path(folder), PublishedHead(folder, config, network, narrow.tokens), "speculators")


def widen_heads(source: str, heads: str, folder: str, hidden: int) -> None:
    """Write the heads of `source` for its wide copy to `folder`."""
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
        output = _weight(source, "output")
        found |= {f"outputs.{head}.weight": output for head in range(config.num_heads)}
    size, dtype = config.target.hidden_size, next(iter(found.values())).dtype
    reduce = found.get("reduce.weight", torch.eye(size, dtype=dtype))
    found["reduce.weight"] = reduce.repeat(1, hidden) / (hidden * scale)
    return found


def _weight(source: str, which: str) -> Tensor:
    """[vocab_size, hidden_size] of a checkpoint's "input" embeddings, or of its "output" layer."""
    from transformers import AutoModelForCausalLM

    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weight: Tensor = getattr(model, f"get_{which}_embeddings")().weight.detach()
    return weight
