"""Loads a model from a folder, a file or the hub, or takes one that is loaded already."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.config import ModelConfig
from outrider.errors import ContradictionError, InvalidParameterError, ModelLoadError, UnsupportedModelError
from outrider.kernels.formats import FORMATS
from outrider.kernels.library import kernel_library
from outrider.kernels.weights import ExpertStack, quantise_linears, round_rows, unfold_weights, unfolded_bytes
from outrider.loading import hf_modules
from outrider.loading.configuration import (
    check_decoder,
    check_rounded_rows,
    check_rounding,
    longest_text,
    read_file_config,
    read_hf_config,
    usually_rounds_rows,
)
from outrider.loading.exclusive import attempt, exclusive_transformers
from outrider.loading.fit import check_fit, leaves_room
from outrider.loading.gguf.checkpoint import GgufCheckpoint
from outrider.loading.gguf.header import GgufFile, is_gguf, read_gguf
from outrider.loading.gguf.tokenizer import end_tokens, read_gguf_tokenizer, sampling_defaults
from outrider.loading.loaded_model import LoadedModel, describe_model
from outrider.loading.quantised import declared, layout_of, rounded_while_computing
from outrider.loading.quantised_checkpoint import QuantisedCheckpoint
from outrider.loading.sources import check_invariant, local_folder, missing_head, source_options, usable_device, wrong_shape
from outrider.loading.tokenizers import checkpoint_tokenizer, given_tokenizer

logger = logging.getLogger(__name__)


def load_model(config: ModelConfig, tokenizer: Any | None = None, *, kv_tokens: int | None = None) -> LoadedModel:
    """Load weights and tokenizer through transformers.

    Args:
        tokenizer: Used in place of the checkpoint's own: a folder, a hub id, or a tokenizer of transformers (copied).
        kv_tokens: Tokens of keys and values that are to fit beside the weights; None for whatever fits.
    """
    device = usable_device(config.device)
    check_invariant(config.batch_invariant, device)
    if is_gguf(config.model):
        return _load_gguf(config, tokenizer, device, kv_tokens)
    source = source_options(config)
    hf_config = read_hf_config(config, source)
    longest = longest_text(config, hf_config)
    check_fit(config, hf_config, device, kv_tokens)
    own_tokenizer = checkpoint_tokenizer(config, source) if tokenizer is None else given_tokenizer(tokenizer)
    load = _load_weights if layout_of(config.model, hf_config) is None else _load_quantised
    with exclusive_transformers():
        loaded = _loaded(config, load(config, hf_config, source, device), own_tokenizer, device, longest)
    return replace(loaded, source=source)


def adopt_model(model: Any, config: ModelConfig, tokenizer: Any | None = None, *, consume: bool = False) -> LoadedModel:
    """Use a model of transformers that the caller has loaded. It is copied, and stays as it is, unless `consume`.

    Args:
        config: Its `model` is the name to show. A device of None is that of the module.
        tokenizer: As in `load_model`; None for a model whose prompts are token ids.
    """
    check_given(model, config)
    check_decoder(config.model, model.config)
    check_rounding(config, model.config)
    check_rounded_rows(config, brought=declared(model.config) is not None)
    device = usable_device(str(model.device) if config.device is None else config.device)
    check_invariant(config.batch_invariant, device)
    longest = longest_text(config, model.config)
    own_tokenizer = None if tokenizer is None else given_tokenizer(tokenizer)
    # All that may be refused is refused by now: a module that is consumed is changed from here on.
    with exclusive_transformers():
        return _loaded(config, make_own(model, config, device, consume=consume), own_tokenizer, device, longest)


def _check_rounded_rows(config: ModelConfig, model: Any, stacks: Sequence[ExpertStack]) -> None:
    """Refuse activations of 8 bits where nothing rounds them."""
    remedy = "Leave activations out."
    unknown = _unrounded_experts(stacks)
    if unknown is not None:
        layer = next(path for path, module in model.named_modules() if module is unknown)
        problem = f"the activations of its experts are not rounded: no product with {layer} takes rows of 8 bits"
        raise UnsupportedModelError(config.model, problem, remedy)
    if not _rounds_rows_in(model):
        problem = f"the CPU rounds them, in models of float32 and bfloat16; this one is {model.dtype} on {model.device}"
        raise ContradictionError("activations", config.activations, problem, remedy)


def _unrounded_experts(stacks: Sequence[ExpertStack]) -> nn.Module | None:
    """The first experts whose products take no rows of 8 bits."""
    return next((stack.module for stack in stacks if not hf_modules.takes_packed_experts(stack.module)), None)


def _rounds_rows_in(model: Any) -> bool:
    """Tells whether rows can be rounded where this model lies, and in its dtype."""
    return model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16)


def _as_llama_cpp(config: ModelConfig, file: GgufFile, model: Any) -> ModelConfig:
    """The settings of a file where the caller leaves open whether rows are rounded: they are where the kernels do it."""
    takes = usually_rounds_rows(file) and _rounds_rows_in(model)
    if config.activations is not None or not takes or _unrounded_experts(hf_modules.expert_stacks(model)) is not None:
        return config
    return config.replace(activations="int8")


def _loaded(
    config: ModelConfig, model: Any, tokenizer: Any | None, device: torch.device, max_model_len: int
) -> LoadedModel:
    """Prepare a model that is ours, and find out about it."""
    model.eval().requires_grad_(False)
    stacks = hf_modules.expert_stacks(model)
    if config.asks_for_rounded_rows:
        _check_rounded_rows(config, model, stacks)
        round_rows(model, stacks)
    if config.quantization is not None:
        fmt = replace(FORMATS[config.quantization], rounds_rows=config.asks_for_rounded_rows)
        quantise_linears(model, fmt, stacks, name=config.model)
        hf_modules.use_stored_experts(model)
    if model.dtype == torch.float64:
        hf_modules.use_plain_experts(model)
    if kernel_library() is None and not config.asks_for_rounded_rows:
        _unfold(config, model, stacks, device)
    return describe_model(config, model, tokenizer, device, max_model_len)


def _unfold(config: ModelConfig, model: Any, stacks: Sequence[ExpertStack], device: torch.device) -> None:
    """Unfold quantised weights once, where memory has room for them."""
    size = unfolded_bytes(model, stacks)
    if leaves_room(size, device):
        unfold_weights(model, stacks)
        return
    logger.warning(
        "%s: without kernels every pass unfolds its weights, which is slow. Unfolded once they would take %.1f GB, and "
        "that is more than half of the memory that is available",
        config.model,
        size / 1e9,
    )


def _load_weights(config: ModelConfig, hf_config: Any, source: dict[str, Any], device: torch.device) -> Any:
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    load = _auto_model(hf_config).from_pretrained
    if not hf_modules.is_language_part(hf_config):
        return _complete(config, hf_config, load, config.model, config=hf_config, dtype=dtype, **source).to(device)
    logger.info("%s: its language model is loaded alone, which reads text", config.model)
    how = {"key_mapping": hf_modules.LANGUAGE_NAMES, "dtype": dtype}
    model = _complete(config, hf_config, load, config.model, config=hf_config, **how, **source).to(device)
    model.config.tie_word_embeddings = model.lm_head.weight is model.get_input_embeddings().weight  # whatever was said
    return model


def _auto_model(hf_config: Any) -> Any:
    """transformers' class that makes a model that writes text of a configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if hf_modules.has_encoder(hf_config) else AutoModelForCausalLM


def _load_quantised(config: ModelConfig, hf_config: Any, source: dict[str, Any], device: torch.device) -> Any:
    """A model whose quantised matrices stay as the files have them."""
    layout = layout_of(config.model, hf_config)
    assert layout is not None, "its configuration says how its weights are quantised"
    left_out = rounded_while_computing(hf_config)
    if left_out:
        logger.warning(
            "%s: its configuration declares %s; only its weights are rounded here, and texts may differ from others",
            config.model,
            " and ".join(left_out),
        )
    folder = local_folder(config.model, source)
    dtype = _quantised_dtype(config, hf_config)
    with QuantisedCheckpoint(config.model, folder, layout) as files:
        empty = _empty_model(config, hf_config, source)
        files.check(empty)
        model = _model_from_state(config, empty, files.state(empty, dtype), dtype).to(device)
        files.fill(model, dtype)
    model.generation_config = _read_generation_config(folder) or model.generation_config
    return model


def _load_gguf(config: ModelConfig, tokenizer: Any | None, device: torch.device, kv_tokens: int | None) -> LoadedModel:
    """A model from a GGUF file."""
    file = read_gguf(config.model)
    hf_config = read_file_config(config, file)
    longest = longest_text(config, hf_config)
    check_fit(config, hf_config, device, kv_tokens, file.nbytes)
    own_tokenizer = read_gguf_tokenizer(file) if tokenizer is None else given_tokenizer(tokenizer)
    narrowed = config.quantization
    checkpoint = GgufCheckpoint(file, hf_config, narrow=narrowed is not None)
    config = config.replace(quantization=None)  # the checkpoint rounds blocks as it reads them
    with exclusive_transformers():
        empty = _empty_model(config, hf_config, {})
        checkpoint.check(empty)
        dtype = checkpoint.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        model = _model_from_state(config, empty, checkpoint.state(empty, dtype), dtype).to(device)
        checkpoint.fill(model, dtype)
        model.generation_config.eos_token_id = end_tokens(file) or None
        loaded = _loaded(_as_llama_cpp(config, file, model), model, own_tokenizer, device, longest)
    return replace(loaded, generation_defaults=sampling_defaults(file), file=config.model, quantization=narrowed)


def _quantised_dtype(config: ModelConfig, hf_config: Any) -> torch.dtype:
    """Returns the dtype of what is not quantised. The kernels do not compute float16, whose numbers float32 holds
    exactly."""
    if config.dtype != "auto":
        asked: torch.dtype = getattr(torch, config.dtype)
        return asked
    written = getattr(hf_config, "dtype", None)
    return torch.float32 if written in (None, torch.float16) else written


def _read_generation_config(folder: Path) -> Any | None:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return None
    return attempt(str(folder), "its generation_config.json cannot be read", GenerationConfig.from_pretrained, folder)


def _empty_model(config: ModelConfig, hf_config: Any, source: dict[str, Any]) -> Any:
    """The model that a configuration describes, without memory for its weights."""
    plain = deepcopy(hf_config)
    plain.__dict__.pop("quantization_config", None)
    trusted = {"trust_remote_code": source.get("trust_remote_code", False)}
    with torch.device("meta"):
        return attempt(config.model, "it cannot be built", _auto_model(plain).from_config, plain, **trusted)


def _model_from_state(config: ModelConfig, empty: Any, state: dict[str, Any], dtype: torch.dtype) -> Any:
    """Returns the same model with these tensors, whose names are checked as those of files are."""
    load = type(empty).from_pretrained
    return _complete(config, empty.config, load, None, config=empty.config, state_dict=state, dtype=dtype)


def _complete(asked: ModelConfig, hf_config: Any, load: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Returns what a function of transformers loads, where nothing is missing and everything has its shape."""
    model, info = attempt(
        asked.model,
        "its weights cannot be read",
        load,
        *args,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        **kwargs,
    )
    if info.get("mismatched_keys"):
        raise wrong_shape(asked.model, sorted(info["mismatched_keys"]))
    missing = sorted(info["missing_keys"])
    if missing and _untied(model, missing):
        raise ModelLoadError(
            asked.model,
            f"its tied weights were not tied ({missing[0]}): other code of this process has transformers load a model too, "
            "and replaces parts of transformers meanwhile",
            "Load models one after another. Outrider's own loads take turns; others do within "
            "outrider.loading.exclusive.exclusive_transformers().",
        )
    if missing:
        problem = f"{len(missing)} weights are missing, {missing[0]} first"
        raise missing_head(asked.model, hf_config, missing) or ModelLoadError(
            asked.model, problem, "Download or save the checkpoint again."
        )
    return model


def _untied(model: Any, missing: list[str]) -> bool:
    """Tells whether what is missing are copies that transformers makes itself, so that no file has to hold them."""
    tied = hf_modules.decoder_config(model.config).tie_word_embeddings
    return bool(tied) and set(missing) <= set(getattr(model, "_tied_weights_keys", None) or ())


# --- Takes over a transformers model that the caller has loaded, merged or trained.


#: Left on a module whose weights were taken, so that nobody takes it for a model again.
_CONSUMED = "_outrider_consumed"


def check_given(model: Any, config: ModelConfig, field: str = "model") -> None:
    """Refuse a module that is no causal language model with all its weights in one place, and settings it has no use
    for."""
    for name in ("revision", "trust_remote_code"):
        value = getattr(config, name)
        if value:
            raise ContradictionError(
                name, value, "the model is loaded already", "Leave it out, or give a folder or a hub id."
            )
    problem = _problem(model)
    if problem is not None:
        raise InvalidParameterError(field, type(model), *problem)


def _problem(model: Any) -> tuple[str, str] | None:
    """Returns what speaks against a module, and what would help."""
    if getattr(model, _CONSUMED, False):
        return "its weights were taken by consume=True", "Load the model again, and leave consume=True out to keep it."
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not hasattr(model, "config") or not hasattr(model, "generate") or head is None:
        return (
            "not a causal language model of transformers: it has no generate, no config or no head over tokens",
            "Load it with AutoModelForCausalLM of transformers, or give a folder or a hub id.",
        )
    if hasattr(model, "merge_and_unload") or getattr(model, "_hf_peft_config_loaded", False):
        return "it has adapters that are not merged into its weights", "Give what merge_and_unload() of PEFT returns."
    places = sorted({str(p.device) for p in model.parameters()})
    if len(places) > 1 or "meta" in places:
        return f"its weights lie on {' and '.join(places)}", "Give a model that lies on one device as a whole."
    return None


def make_own(model: Any, config: ModelConfig, device: torch.device, *, consume: bool) -> Any:
    """A module that we may change: a copy, or with `consume` the module itself, marked as taken.

    Hooks are part of what a module computes, and are copied with it.
    """
    own = model if consume else _copied(model, config.model)
    if consume:
        setattr(model, _CONSUMED, True)
    if config.dtype != "auto":
        convert(own, getattr(torch, config.dtype))
    return own.to(device)


def _copied(model: nn.Module, name: str) -> nn.Module:
    try:
        return deepcopy(model)
    except Exception as error:  # whatever the parts of a module that was changed by hand may raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            name, f"it cannot be copied ({reason})", "Save it and give the folder, or use consume=True."
        ) from error


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Converts a module as loading in this dtype would: what a checkpoint holds is converted, and what a module computes
    for itself, as rotary frequencies, keeps its precision. Weights that hold no numbers still take no memory."""
    saved = model.state_dict(keep_vars=True).values()
    for tensor in [*model.parameters(), *saved]:
        if tensor.is_floating_point():
            numbers = tensor.data if any(tensor.stride()) else tensor.data[(0,) * tensor.dim()]  # one in all places
            tensor.data = numbers.to(dtype).expand(tensor.shape)
