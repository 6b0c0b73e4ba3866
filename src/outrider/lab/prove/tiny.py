"""Real checkpoints that are so small that every path through the engine can be walked, and heads for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.lab.prove.tiny_heads import save_tiny_heads
from outrider.llm import LLM
from outrider.loading.exclusive import exclusive_transformers
from outrider.propose.base import Proposer

#: The text of the token that ends a text.
END = "<end>"
#: The texts of the tokens of `save_tiny_llama(..., speaks=True)`. The last one ends a text.
PIECES = ('"', "a", END)
#: The same for a target and a draft model of different vocabularies: each has a token that the other lacks, the ids of the
#: others differ, and the draft writes the target's "aa" in two tokens.
CROSSED_PIECES = {"target": ("a", "aa", END), "draft": (END, "b", "a")}


#: Sizes and ends of the decoders.
_SIZES = {
    "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def save_tiny_llama(
    folder: Path,
    seed: int,
    *,
    vocab_size: int = 3,
    num_layers: int = 1,
    speaks: bool = False,
    pieces: tuple[str, ...] = PIECES,
) -> str:
    """Write a Llama of few layers with random weights in float64; returns its path. One that speaks has a tokenizer with
    these pieces, and an end of text. The weights have a wide spread. At the usual spread of 0.02 all probabilities would be
    nearly equal, and a wrong mask would change nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    end = pieces.index(END) if speaks else None
    config = LlamaConfig(vocab_size=vocab_size, num_hidden_layers=num_layers, eos_token_id=end, **_SIZES)
    _save_random(LlamaForCausalLM(config), seed, folder)
    if speaks:
        _save_tokenizer(folder, pieces)
    return str(folder)


def save_tiny_hybrid(folder: Path, seed: int, *, num_layers: int = 2) -> str:
    """Write an LFM2 over three tokens, short convolutions and a last layer that attends; returns its path. Stock
    transformers computes a convolution in float64, so that bounds are as tight as for a Llama. The states of other layers
    are float32 there."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = [*("conv",) * (num_layers - 1), "full_attention"]
    config = Lfm2Config(vocab_size=3, num_hidden_layers=num_layers, layer_types=kinds, eos_token_id=None, **_SIZES)
    _save_random(Lfm2ForCausalLM(config), seed, folder)
    return str(folder)


def save_tiny_t5(folder: Path, seed: int) -> str:
    """Write a T5 over three tokens, whose bias by distance has few buckets; returns its path."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=3,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=2,
        relative_attention_num_buckets=4,
        relative_attention_max_distance=4,
        decoder_start_token_id=2,
        pad_token_id=None,
        eos_token_id=None,
    )
    _save_random(T5ForConditionalGeneration(config), seed, folder)
    return str(folder)


def _save_random(model: Any, seed: int, folder: Path) -> None:
    """Write a model with random weights in float64."""
    model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.7)
    with exclusive_transformers():
        model.save_pretrained(folder)


def _save_tokenizer(folder: Path, pieces: tuple[str, ...]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [(piece[0], piece[1]) for piece in pieces if len(piece) == 2]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)


def raise_norms(model: Any) -> None:
    """Let the norms of a float64 model compute in float64. transformers normalises in float32, where a difference of 1e-16
    between two batch shapes may become one of 1e-7. With float64 throughout, two passes over the same tokens agree to about
    1e-15, and the bounds of the proofs can be tight. Norms of another form than Llama's stay as they are."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")) and hasattr(module, "variance_epsilon"):
            module.forward = _Norm(module)


class _Norm:
    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self._module.variance_epsilon)
        result: Tensor = self._module.weight * hidden_states * scale
        return result


def raise_engine_norms(llm: LLM) -> None:
    """Apply `raise_norms` to the target and to every draft model that is loaded."""
    raise_norms(llm.engine.runner.loaded.model)
    for proposer in llm.proposers:
        _raise_norms_of(proposer)


def _raise_norms_of(proposer: Proposer) -> None:
    """Raises the norms of the model of a proposer, and those of its drafter's where it has one."""
    runner, stage = getattr(proposer, "runner", None), getattr(proposer, "stage", None)
    if runner is not None:
        raise_norms(runner.loaded.model)
    if stage is not None:
        _raise_norms_of(stage.proposer)


def save_layered(folder: Path, num_layers: int) -> dict[str, Any]:
    """Write a draft model of several layers for the proofs, and its heads; returns both as `EngineProof` takes them."""
    draft = save_tiny_llama(folder / "model", 5, num_layers=num_layers)
    return {"layered": draft, "layered_heads": save_tiny_heads(folder, draft)}
