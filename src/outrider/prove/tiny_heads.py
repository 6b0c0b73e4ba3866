"""Heads with random weights for a small target, so that drafts from heads can be proven without training any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.heads.checkpoint import save_heads
from outrider.heads.config import BlockwiseConfig, ExitConfig, HeadsConfig, HeadTarget, MedusaConfig
from outrider.heads.networks import build_network, randomise
from outrider.heads.pairing import describe_target, take_witness
from outrider.model.loading.exclusive import exclusive_transformers
from outrider.prove.published_blocks import save_random_dflash
from outrider.prove.published_heads import save_random_eagle
from outrider.prove.published_mtp import save_random_mtp
from outrider.prove.published_parallel import save_random_peagle
from outrider.prove.tiny import save_tiny_llama

#: Methods that draft with heads, and a spread of random weights for a tiny target, so that they guess unevenly and are not
#: sure of anything.
HEAD_METHODS = {"medusa": 0.7, "blockwise": 0.25, "exit": 0.7}
#: Methods whose heads keep keys and values of the text.
FEATURE_METHODS = frozenset({"eagle1", "eagle3", "mtp", "dflash", "peagle"})


def random_config(method: str, target: HeadTarget) -> HeadsConfig:
    """Heads of a method as small as they can be for a target.

    Args:
        method: "medusa", "blockwise" or "exit".
        target: Whom they are for.
    """
    if method == "medusa":
        width = target.hidden_size
        return MedusaConfig(target=target, layer=target.num_layers, normed=True, heads=3, width=width)
    if method == "blockwise":
        return BlockwiseConfig(target=target, layer=target.num_layers, normed=True, heads=3, inner=target.hidden_size)
    assert method == "exit", method
    return ExitConfig(target=target, layer=max(1, target.num_layers - 1), normed=False, width=target.hidden_size)


def save_tiny_heads(folder: Path, target: str) -> dict[str, str]:
    """Write heads of each method for a tiny target; returns their folders by method. Those that read features need three
    layers, and layers that predict several tokens serve a Llama alone.

    Args:
        folder: Where to write them.
        target: Folder of the target.
    """
    found = {name: save_random_heads(folder / name, target, name, scale=scale) for name, scale in HEAD_METHODS.items()}
    eagle3 = save_random_eagle(
        folder / "eagle3",
        target,
        "speculators",
        draft_tokens=(0, 2),
        scale=0.7,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )
    eagle1 = save_random_eagle(folder / "eagle1", target, "safeailab1", scale=0.7)
    mtp = save_random_mtp(folder / "mtp", target, "deepseek_v3", 2, scale=0.7)
    dflash = save_random_dflash(folder / "dflash", target, "speculators", scale=0.7, block_size=4, draft_tokens=(0, 2))
    peagle = save_random_peagle(
        folder / "peagle", target, scale=0.7, draft_tokens=(0, 2), eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    )
    return found | {"eagle1": eagle1, "eagle3": eagle3, "mtp": mtp, "dflash": dflash, "peagle": peagle}


def save_layered(folder: Path, num_layers: int) -> dict[str, Any]:
    """Write a draft model of several layers for the proofs, and its heads; returns both as `EngineProof` takes them."""
    draft = save_tiny_llama(folder / "model", 5, num_layers=num_layers)
    return {"layered": draft, "layered_heads": save_tiny_heads(folder, draft)}


def save_random_heads(folder: Path, target: str, method: str, seed: int = 1, *, scale: float = 0.3, **changes: Any) -> str:
    """Write heads with random weights for a checkpoint; returns their folder.

    Args:
        folder: Where to write them.
        target: Folder of the target.
        method: "medusa", "blockwise" or "exit".
        seed: Fixes the weights.
        scale: Standard deviation of the weights.
        changes: Other values for fields of their configuration.
    """
    from transformers import AutoModelForCausalLM

    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    config = random_config(method, describe_target(model, target)).replace(**changes)
    network = build_network(config)
    randomise(network, seed, scale)
    save_heads(folder, network, take_witness(model, config))
    return str(folder)
