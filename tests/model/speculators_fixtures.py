"""Writes heads and what the speculators package computes with them; it runs beside that package, and not in the suite.

The package wants another transformers than this project, so it has an environment of its own:

    python -m venv APART && APART/bin/pip install torch==2.13.0 speculators==0.9.0
    APART/bin/pip uninstall -y torchvision  # where its build is not that of torch
    APART/bin/python tests/model/speculators_fixtures.py tests/model/fixtures/speculators

Each folder holds a head as the package saves it, and in `expected.safetensors` what went in and what came out:

- `token_ids` [n] and `hidden.L` [n, 16]: a text and the target's hidden states, by layer whose input they are.
- `logits`: of EAGLE-3 [levels, n - 1, draft_vocab_size]. Row i of level s reads token i + 1 + s; it sees the rows of level
  0 up to its own, and its own rows of the levels before. Of DFlash [block_size, draft_vocab_size], of a block that begins
  with the last token. Of MTP [n - 2, vocab_size], of its first level.
- `embed_tokens.weight` and `lm_head.weight` of the target.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import AutoConfig

HIDDEN, VOCAB, LEVELS, LENGTH = 16, 32, 11, 14
DRAFTED = (1, 2, 3, 5, 8, 13, 21, 28, 30, 31)
_SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "attn_implementation": "eager",
}  # fmt: skip
EAGLE3: dict[str, dict[str, Any]] = {
    "eagle3_llama": {"kind": "llama", "norm_before_residual": False},
    "eagle3_normed": {"kind": "llama", "norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "eagle3_qwen3": {"kind": "qwen3", "norm_before_residual": True, "norm_before_fc": True},
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 32}
DFLASH: dict[str, dict[str, Any]] = {
    "dflash": {"draft_vocab_size": VOCAB},
    "dflash_windows": {"draft_vocab_size": len(DRAFTED), "layers": _MIXED},
}


def main(folder: Path) -> None:
    """Write all of them."""
    for name, how in EAGLE3.items():
        eagle3(folder / name, **how)
    for name, how in DFLASH.items():
        dflash(folder / name, **how)
    mtp(folder / "mtp")


def eagle3(folder: Path, kind: str, **flags: bool) -> None:
    """A head of EAGLE-3 over eleven levels of one pass of the package's training."""
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=_layers(kind, 1),
        draft_vocab_size=len(DRAFTED),
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        embed_requires_grad=True,
        speculators_config=_origin("eagle3"),
        **flags,
    )
    model, states = _random(Eagle3DraftModel(config)), _states((1, 2, 4))
    tokens, told = _tokens(), []
    model.lm_head.register_forward_hook(lambda module, given, out: told.append(out[0]))
    joined = torch.cat(list(states.values()), -1)
    rest = tokens[1:]  # the package's rows hold the token behind the one whose feature they read
    model(joined[None, :-1], rest[None], torch.zeros_like(rest)[None], ttt_steps=LEVELS)
    _save(folder, model, tokens, states, torch.stack(told))


def dflash(folder: Path, draft_vocab_size: int, layers: dict[str, Any] | None = None) -> None:
    """A block drafter, over one block behind a text."""
    config = DFlashSpeculatorConfig(
        transformer_layer_config=_layers("qwen3", 2, **(layers or {})),
        draft_vocab_size=draft_vocab_size,
        aux_hidden_state_layer_ids=[1, 3],
        block_size=6,
        mask_token_id=VOCAB - 1,
        speculators_config=_origin("dflash"),
    )
    model, states = _random(DFlashDraftModel(config)), _states((1, 3))
    tokens = _tokens()
    more = torch.zeros(1, config.block_size, dtype=torch.long)  # the package begins no block at the end of a text
    text, joined = torch.cat([tokens[None], more], 1), torch.cat(list(states.values()), -1)[None]
    joined = torch.cat([joined, joined.new_zeros(1, config.block_size, joined.shape[-1])], 1)
    anchors = torch.zeros_like(text).index_fill(1, torch.tensor([len(tokens) - 1]), 1)
    last = torch.zeros(1, text.shape[1], HIDDEN)
    _, logits, *_ = model._backbone_forward(joined, text, anchors, last, torch.zeros_like(text), max_anchors=1)
    _save(folder, model, tokens, states, logits[0])


def mtp(folder: Path) -> None:
    """A layer that predicts several tokens. Its further levels see other rows in the package's training than in drafts."""
    config = MTPSpeculatorConfig(transformer_layer_config=_layers("qwen3", 5), speculators_config=_origin("mtp", 1))
    model, states = _random(MTPDraftModel(config)), _states((5,))
    tokens = _tokens()
    logits, *_ = model(tokens[None], states[5][None])
    _save(folder, model, tokens, states, logits[0][0])


def _layers(kind: str, count: int, **more: Any) -> Any:
    return AutoConfig.for_model(kind, **{**_SIZES, "num_hidden_layers": count, **more})


def _origin(algorithm: str, levels: int = 3) -> Any:
    proposal = GreedyTokenProposalConfig(speculative_tokens=levels)
    verifier = VerifierConfig(name_or_path=None, architectures=[])
    return SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )


def _random(model: Any) -> Any:
    """Its weights become numbers that have a short form in binary, and norms lie around 1."""
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
        weight.data = (values * 256).round() / 256
    if getattr(model, "d2t", None) is not None:
        drafted = torch.tensor(DRAFTED)
        told = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, drafted, True)
        model.load_vocab_mappings(told, drafted - torch.arange(len(drafted)))
    return model.float().eval()


def _states(layers: tuple[int, ...]) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {layer: torch.randn(LENGTH, HIDDEN, generator=generator) for layer in layers}


def _tokens() -> Tensor:
    return torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(5))


def _save(folder: Path, model: Any, tokens: Tensor, states: dict[int, Tensor], logits: Tensor) -> None:
    model.save_pretrained(str(folder))
    (folder / "config.py").unlink()  # a copy of the package's own source
    expected = {"token_ids": tokens, "logits": logits.detach().float()}
    expected |= {f"hidden.{layer}": rows for layer, rows in states.items()}
    expected["embed_tokens.weight"] = model.embed_tokens.weight.detach()
    if model.lm_head.weight.shape[0] == VOCAB:
        expected["lm_head.weight"] = model.lm_head.weight.detach()
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
