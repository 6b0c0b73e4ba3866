"""A causal language model in memory, and what the engine must know of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from outrider.cache.layer_spec import LayerSpec
from outrider.config import ModelConfig
from outrider.errors import UnsupportedModelError
from outrider.model import hf
from outrider.model.loading.hub import local_folder

#: What is taken from a generation config, and its name here; the same as vLLM takes.
_GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory.

    Attributes:
        name: Path or hub id.
        model: The transformers model, in evaluation mode.
        tokenizer: Its tokenizer; None where the checkpoint brings none, and then prompts are token ids.
        vocab_size: Width of the logits.
        max_model_len: Longest sequence it may hold.
        eos_token_ids: Tokens that end a text.
        device: Where it lies.
        dtype: Of its weights.
        slices_logits: Whether its forward computes the head for chosen rows only.
        long_rope_after: Texts longer than this use other rotary factors for all their tokens; None where none do.
        generation_defaults: What its generation config says of sampling, by the names of SamplingParams; not validated.
        rounds_rows: Whether what enters its linear layers is rounded to 8 bits.
        source: How the files of its checkpoint are found again; None where it is no folder and not on the hub.
    """

    name: str
    model: Any
    tokenizer: Any | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    slices_logits: bool
    long_rope_after: int | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    rounds_rows: bool = False
    source: Mapping[str, Any] | None = None

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each of its layers keeps of a text, and how far back it looks."""
        return hf.layer_specs(self.model.config)

    @cached_property
    def running_layers(self) -> Mapping[int, str]:
        """The names of the types of the layers that keep more of a text than keys and values, by layer."""
        return {index: layer.type_name for index, layer in enumerate(self.layers) if not layer.forgets_rows}

    @property
    def precision(self) -> torch.dtype:
        """The dtype by whose rounding two right passes may differ. Where rows are rounded to 8 bits, a number in the middle
        between two may go to either, and that is as much as the rounding of bfloat16."""
        return torch.bfloat16 if self.rounds_rows else self.dtype

    def folder(self) -> str:
        """The folder of its checkpoint.

        Raises:
            UnsupportedModelError: It comes from a file of another kind, or was handed over as a module.
            ModelLoadError: The hub does not give it.
        """
        if self.source is None:
            problem = "its weights are not in a folder with safetensors"
            raise UnsupportedModelError(self.name, problem, "Load the model from its folder or from the hub.")
        return str(local_folder(self.name, dict(self.source)))

    def uses_long_rope(self, num_tokens: int) -> bool:
        """Whether a text of so many tokens uses the long rotary factors."""
        return self.long_rope_after is not None and num_tokens > self.long_rope_after


def describe_model(
    config: ModelConfig, model: Any, tokenizer: Any | None, device: torch.device, max_model_len: int
) -> LoadedModel:
    """Find out about a model that is ready to compute.

    Args:
        config: How it was loaded.
        model: The transformers model.
        tokenizer: Its tokenizer, or None.
        device: Where it lies.
        max_model_len: Longest sequence it may hold, in tokens.
    """
    text_config = model.config.get_text_config(decoder=True)
    return LoadedModel(
        name=config.model,
        model=model,
        tokenizer=tokenizer,
        vocab_size=_vocab_size(model, text_config),
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(model, text_config),
        device=device,
        dtype=model.dtype,
        rounds_rows=config.activations is not None,
        slices_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        long_rope_after=hf.long_rope_after(model.config),
        generation_defaults=_generation_defaults(model),
    )


def _vocab_size(model: Any, text_config: Any) -> int:
    head = model.get_output_embeddings()
    return int(head.weight.shape[0] if head is not None else text_config.vocab_size)


def _eos_token_ids(model: Any, text_config: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    found: set[int] = set()
    for holder in (generation, text_config):
        value = getattr(holder, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def _generation_defaults(model: Any) -> dict[str, Any]:
    """The values that it gives. `do_sample` is ignored, as in vLLM."""
    config = getattr(model, "generation_config", None)
    found = {ours: getattr(config, theirs, None) for theirs, ours in _GENERATION_DEFAULTS.items()}
    return {name: value for name, value in found.items() if value is not None}
