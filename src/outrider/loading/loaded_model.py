"""A causal language model in memory, and what the engine must know of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from outrider.cache.pool import LayerSpec
from outrider.config import Elsewhere, ModelConfig, declared
from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.loading import hf_modules
from outrider.loading.sources import local_folder
from outrider.params import SamplingParams

#: Tokens of the longest text, and of the longest source, where a configuration sets no limit.
LONGEST_TEXT = 2048
#: Tokens of the source of texts that try something out.
_TRIAL_SOURCE_LEN = 16


@dataclass(frozen=True)
class EncoderFacts:
    """Holds what must be known of the encoder of a model."""

    max_source_len: int  # tokens of the longest source
    width: int  # of the hidden states that it leaves
    # The tokens that every text begins with: the decoder's start token, and tokens that the checkpoint's generation config
    # forces behind it.
    text_start: tuple[int, ...]

    def begin(self, decoder_prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Returns what a text begins with whose caller gives so much of it, the start tokens among it; empty for
        nothing."""
        return decoder_prompt if len(decoder_prompt) > len(self.text_start) else self.text_start


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory."""

    name: str  # path or hub id
    model: Any  # the transformers model, in evaluation mode
    tokenizer: Any | None  # its tokenizer; None where the checkpoint brings none, and then prompts are token ids
    vocab_size: int  # width of the logits
    max_model_len: int  # longest sequence it may hold
    eos_token_ids: frozenset[int]  # tokens that end a text
    device: torch.device  # where it lies
    dtype: torch.dtype  # of its weights
    slices_logits: bool  # whether its forward computes the head for chosen rows only
    # Texts longer than this use other rotary factors for all their tokens; None where none do.
    long_rope_after: int | None = None
    # What its generation config, or its file, says of sampling, by the names of SamplingParams; not validated.
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    rounds_rows: bool = False  # whether what enters its linear layers is rounded to 8 bits
    quantization: str | None = None  # the format that its weights were rounded to at load, where they were
    # How the files of its checkpoint are found again; None where it is no folder and not on the hub.
    source: Mapping[str, Any] | None = None
    file: str | None = None  # the GGUF file that it comes from, if it comes from one
    encoder: EncoderFacts | None = None  # what reads a source before a text begins; None for a decoder alone

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Returns what each of its layers keeps of a text, and how far back it looks."""
        return hf_modules.layer_specs(self.model.config)

    @cached_property
    def key_owners(self) -> Mapping[int, int]:
        """The layers whose keys and values other layers read, by these."""
        return hf_modules.owners_of_keys(self.model.config)

    @cached_property
    def running_layers(self) -> Mapping[int, str]:
        """The names of the types of the layers that keep more of a text than keys and values, by layer."""
        return {index: layer.type_name for index, layer in enumerate(self.layers) if not layer.forgets_rows}

    @property
    def text_start(self) -> tuple[int, ...] | None:
        """Returns what every text begins with, where an encoder reads the prompt; None where texts begin with their
        prompts."""
        return None if self.encoder is None else self.encoder.text_start

    @cached_property
    def trial_source(self) -> tuple[int, ...] | None:
        """A source for texts that try something out; None for a model without an encoder."""
        if self.encoder is None:
            return None
        return tuple((5 * i + 3) % self.vocab_size for i in range(min(_TRIAL_SOURCE_LEN, self.encoder.max_source_len)))

    @property
    def precision(self) -> torch.dtype:
        """The dtype by whose rounding two right passes may differ. Where rows are rounded to 8 bits, a number in the middle
        between two may go to either, and that is as much as the rounding of bfloat16."""
        return torch.bfloat16 if self.rounds_rows else self.dtype

    @property
    def arithmetic(self) -> str:
        """Returns what it computes in, in words."""
        rows = ", rows of 8 bits where weights are rounded" if self.rounds_rows else ""
        return f"{str(self.dtype).removeprefix('torch.')}{rows}"

    def folder(self, *, local: bool = False) -> str:
        """The folder of its checkpoint, or its GGUF file."""
        if self.file is not None:
            return self.file
        if self.source is None:
            problem = "its weights are not in a folder with safetensors"
            raise UnsupportedModelError(self.name, problem, "Load the model from its folder or from the hub.")
        source = {**self.source, "local_files_only": True} if local else dict(self.source)
        return str(local_folder(self.name, source))


def describe_model(
    config: ModelConfig, model: Any, tokenizer: Any | None, device: torch.device, max_model_len: int
) -> LoadedModel:
    """Find out about a model that is ready to compute.

    Args:
        tokenizer: Its tokenizer, or None.
    """
    text_config = hf_modules.decoder_config(model.config)
    return LoadedModel(
        name=config.model,
        model=model,
        tokenizer=tokenizer,
        vocab_size=_vocab_size(model, text_config),
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(model, text_config, tokenizer),
        device=device,
        dtype=model.dtype,
        rounds_rows=config.asks_for_rounded_rows,
        quantization=config.quantization,
        slices_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        long_rope_after=hf_modules.long_rope_after(model.config),
        generation_defaults=_generation_defaults(model),
        encoder=_encoder_facts(config.model, model, text_config) if hf_modules.has_encoder(model.config) else None,
    )


def _encoder_facts(name: str, model: Any, text_config: Any) -> EncoderFacts:
    """Facts of a model with an encoder."""
    generation = getattr(model, "generation_config", None)
    holders = (generation, model.config)
    start = next((n for n in (getattr(each, "decoder_start_token_id", None) for each in holders) if n is not None), None)
    forced = getattr(generation, "forced_bos_token_id", None)
    if not isinstance(start, int):
        problem = f"its configuration says decoder_start_token_id={start!r}"
        raise ModelLoadError(name, problem, "Put the token that texts begin with into generation_config.json.")
    longest = getattr(model.config, "max_position_embeddings", None)
    return EncoderFacts(
        max_source_len=LONGEST_TEXT if longest is None else int(longest),
        width=int(text_config.hidden_size),
        text_start=(start,) if forced is None else (start, int(forced)),
    )


def _vocab_size(model: Any, text_config: Any) -> int:
    head = model.get_output_embeddings()
    return int(head.weight.shape[0] if head is not None else text_config.vocab_size)


def _eos_token_ids(model: Any, text_config: Any, tokenizer: Any | None) -> frozenset[int]:
    """Those of the configurations, and that of the tokenizer: chat models are published that name theirs there alone."""
    generation = getattr(model, "generation_config", None)
    found: set[int] = set()
    for holder in (generation, text_config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def _generation_defaults(model: Any) -> dict[str, Any]:
    """The values that it gives, the same as vLLM takes. `do_sample` is ignored, as in vLLM."""
    config = getattr(model, "generation_config", None)
    named = {ours: names.transformers for ours, names in declared(SamplingParams, Elsewhere) if names.transformers}
    found = {ours: getattr(config, theirs, None) for ours, theirs in named.items()}
    return {name: value for name, value in found.items() if value is not None}
