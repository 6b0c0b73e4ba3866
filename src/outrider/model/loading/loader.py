"""Loads a model from a path or hub id, with the facts that the engine needs."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from outrider.config import ModelConfig
from outrider.errors import ContradictionError, InvalidParameterError, ModelLoadError, UnsupportedModelError
from outrider.kernels.formats.registry import FORMATS
from outrider.kernels.weights import quantise_linears
from outrider.model import hf
from outrider.model.loading.exclusive import check_wanted, exclusive_transformers
from outrider.model.loading.files import check_files
from outrider.model.loading.fit import Needs, check_fit, needs, stored_tensors
from outrider.model.loading.from_module import check_given, make_own
from outrider.model.loading.gguf.architecture import read_config
from outrider.model.loading.gguf.checkpoint import GgufCheckpoint
from outrider.model.loading.gguf.header import GgufFile, is_gguf, read_gguf
from outrider.model.loading.gguf.tokenizer import end_tokens, read_gguf_tokenizer
from outrider.model.loading.hub import hub_options, local_folder
from outrider.model.loading.kinds import check_is_checkpoint, missing_head, wrong_shape
from outrider.model.loading.quantised.checkpoint import QuantisedCheckpoint
from outrider.model.loading.quantised.scheme import declared, layout_of

logger = logging.getLogger(__name__)

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

    @property
    def precision(self) -> torch.dtype:
        """The dtype by whose rounding two right passes may differ. Where rows are rounded to 8 bits, a number in the middle
        between two may go to either, and that is as much as the rounding of bfloat16."""
        return torch.bfloat16 if self.rounds_rows else self.dtype

    def uses_long_rope(self, num_tokens: int) -> bool:
        """Whether a text of so many tokens uses the long rotary factors."""
        return self.long_rope_after is not None and num_tokens > self.long_rope_after


def check_sources(**sources: str | None) -> None:
    """Refuse what is no checkpoint and cannot be a hub id either, before anything is loaded and without asking the hub.

    Args:
        sources: What was given for each field; None asks for nothing.

    Raises:
        InvalidParameterError: No such folder, a file, or a folder without a configuration.
        UnsupportedModelError: An adapter.
    """
    for name, source in sources.items():
        if source is None:
            continue
        if os.path.exists(source):
            check_is_checkpoint(name, source)
        elif not _may_be_hub_id(source):
            remedy = "Give the folder that holds config.json and the weights, or a hub id like owner/name."
            raise InvalidParameterError(name, source, "no such folder", remedy)


def _may_be_hub_id(source: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def load_model(config: ModelConfig, tokenizer: Any | None = None, *, kv_tokens: int | None = None) -> LoadedModel:
    """Load weights and tokenizer through transformers.

    Args:
        config: Which checkpoint, and how.
        tokenizer: Used in place of the checkpoint's own: a folder, a hub id, or a tokenizer of transformers (copied).
        kv_tokens: Tokens of keys and values that are to fit beside the weights; None for whatever fits.

    Raises:
        ModelLoadError: Not on the hub, unreadable or corrupt.
        ModelTooLargeError: It takes more memory than there is. No weight has been read.
        InvalidParameterError: The device cannot be used, max_model_len exceeds the context, or the tokenizer is none.
        UnsupportedModelError: Not a causal decoder.
    """
    device = usable_device(config.device)
    if is_gguf(config.model):
        return _load_gguf(config, tokenizer, device, kv_tokens)
    source = _source(config)
    hf_config = _read_config(config, source)
    longest = _max_model_len(config, hf_config)
    check_fit(config, hf_config, device, kv_tokens)
    own_tokenizer = _load_tokenizer(config, source) if tokenizer is None else given_tokenizer(tokenizer)
    load = _load_weights if layout_of(config.model, hf_config) is None else _load_quantised
    with exclusive_transformers():
        return _loaded(config, load(config, hf_config, source, device), own_tokenizer, device, longest)


def read_context(config: ModelConfig) -> int:
    """The longest sequence of a checkpoint, in tokens. Its configuration alone is read.

    Raises:
        ModelLoadError: Not on the hub, or unreadable.
        InvalidParameterError: max_model_len exceeds the context.
        UnsupportedModelError: Not a causal decoder.
    """
    if is_gguf(config.model):
        return _max_model_len(config, _read_gguf_config(config, read_gguf(config.model)))
    source = _source(config)
    return _max_model_len(config, _read_config(config, source))


def read_needs(config: ModelConfig) -> Needs | None:
    """What a checkpoint takes of memory; None where that is not known. Its configuration and headers alone are read.

    Raises:
        ModelLoadError: Not on the hub, or unreadable.
        UnsupportedModelError: Not a causal decoder.
    """
    if is_gguf(config.model):
        file = read_gguf(config.model)
        return needs(config, _read_gguf_config(config, file), file.nbytes)
    source = _source(config)
    return needs(config, _read_config(config, source))


def read_tokenizer(config: ModelConfig) -> Any | None:
    """The tokenizer of a checkpoint. None where its folder holds none.

    Raises:
        ModelLoadError: Not on the hub, unreadable or corrupt.
    """
    if is_gguf(config.model):
        return read_gguf_tokenizer(read_gguf(config.model))
    return _load_tokenizer(config, _source(config))


def _source(config: ModelConfig) -> dict[str, Any]:
    """Where transformers finds a checkpoint, and what it may do with it."""
    options = hub_options(config.model, config.revision)
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code, **options}


def _read_config(config: ModelConfig, source: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    check_files(config.model)
    found = _attempt(config.model, "its configuration cannot be read", AutoConfig.from_pretrained, config.model, **source)
    _check_decoder(config.model, found)
    _check_depth(config.model, found)
    _check_rounding(config, found)
    layout_of(config.model, found)  # refuses what is not loaded here
    return found


def adopt_model(model: Any, config: ModelConfig, tokenizer: Any | None = None, *, consume: bool = False) -> LoadedModel:
    """Use a model of transformers that the caller has loaded. It is copied, and stays as it is, unless `consume`.

    Args:
        model: The module.
        config: Its `model` is the name to show. A device of None is that of the module.
        tokenizer: As in `load_model`; None for a model whose prompts are token ids.
        consume: Whether its weights may be taken without a copy; it is of no use afterwards.

    Raises:
        InvalidParameterError: The module, the device, the tokenizer or max_model_len cannot be used.
        ContradictionError: A setting that says how to load a checkpoint.
        ModelLoadError: It cannot be copied.
        UnsupportedModelError: Not a causal decoder.
    """
    check_given(model, config)
    _check_decoder(config.model, model.config)
    _check_rounding(config, model.config)
    device = usable_device(str(model.device) if config.device is None else config.device)
    longest = _max_model_len(config, model.config)
    own_tokenizer = None if tokenizer is None else given_tokenizer(tokenizer)
    # All that may be refused is refused by now: a module that is consumed is changed from here on.
    with exclusive_transformers():
        return _loaded(config, make_own(model, config, device, consume=consume), own_tokenizer, device, longest)


def given_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer that the caller names, or a copy of the one that he gives: ours is used in threads of its own.

    Code that comes with a folder or from the hub is not run.

    Raises:
        InvalidParameterError: It is no tokenizer, or no such folder.
        ModelLoadError: Not on the hub, unreadable or corrupt.
    """
    from transformers import AutoTokenizer

    if isinstance(tokenizer, str | os.PathLike):
        source = os.fspath(tokenizer)
        check_sources(tokenizer=source)
        if is_gguf(source):
            return _tokenizer_of_file(source)
        check_files(source)
        return _attempt(source, "its tokenizer cannot be read", AutoTokenizer.from_pretrained, source)
    if callable(tokenizer) and hasattr(tokenizer, "decode"):
        return deepcopy(tokenizer)
    remedy = "Give a tokenizer of transformers, a folder or a hub id."
    raise InvalidParameterError("tokenizer", tokenizer, "neither a tokenizer nor the name of one", remedy)


def _tokenizer_of_file(source: str) -> Any:
    found = read_gguf_tokenizer(read_gguf(source))
    if found is None:
        raise InvalidParameterError("tokenizer", source, "this file has no vocabulary", "Give one that has.")
    return found


#: More layers than any model has. Files that tell how many tensors they hold set a lower limit.
_MOST_LAYERS = 10_000


def _check_depth(name: str, hf_config: Any) -> None:
    """Refuse a number of layers that no files can hold, before transformers makes so many."""
    layers = getattr(hf_config.get_text_config(decoder=True), "num_hidden_layers", 1)
    if not isinstance(layers, int) or layers < 1:
        problem = f"its configuration says num_hidden_layers={layers!r}"
        raise ModelLoadError(name, problem, "Correct config.json: a decoder has 1 layer or more.")
    most = len(stored_tensors(Path(name))) or _MOST_LAYERS  # a layer has one tensor at least
    if layers > most:
        problem = f"its configuration says num_hidden_layers={layers}, and its files hold no more than {most}"
        raise ModelLoadError(name, problem, "Correct config.json, or download the checkpoint again.")


def _check_decoder(name: str, hf_config: Any) -> None:
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(name, "it is an encoder-decoder", "Use a decoder-only (causal) model.")


def _check_rounding(config: ModelConfig, hf_config: Any) -> None:
    given = declared(hf_config)
    if config.quantization is None or given is None:
        return
    method = given.get("quant_method")
    raise UnsupportedModelError(
        config.model,
        f"its weights are quantised already ({method}), and quantization={config.quantization!r} would round them again",
        "Leave quantization out, or give the original checkpoint.",
    )


def _check_rounded_rows(config: ModelConfig, model: Any, has_experts: bool) -> None:
    """Refuse activations of 8 bits where nothing rounds them."""
    remedy = "Leave activations out."
    if has_experts:
        raise UnsupportedModelError(config.model, "the activations of its experts are not rounded", remedy)
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        problem = f"the CPU rounds them, in models of float32 and bfloat16; this one is {model.dtype} on {model.device}"
        raise ContradictionError("activations", config.activations, problem, remedy)


def _loaded(
    config: ModelConfig, model: Any, tokenizer: Any | None, device: torch.device, max_model_len: int
) -> LoadedModel:
    """Prepare a model that is ours, and find out about it."""
    model.eval().requires_grad_(False)
    if config.quantization is not None:
        fmt, stacks = FORMATS[config.quantization], hf.expert_stacks(model)
        if config.activations is not None:
            fmt = replace(fmt, rounds_rows=True)
            _check_rounded_rows(config, model, bool(stacks))
        quantise_linears(model, fmt, stacks, name=config.model)
    if model.dtype == torch.float64:
        hf.use_plain_experts(model)
    text_config = model.config.get_text_config(decoder=True)
    long_rope_after = hf.long_rope_after(model.config)
    if long_rope_after is not None:
        hf.split_rotary_regimes(model, long_rope_after)
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
        long_rope_after=long_rope_after,
        generation_defaults=_generation_defaults(model),
    )


def usable_device(name: str | None) -> torch.device:
    """The device of that name; for None CUDA where there is one, else the CPU.

    Raises:
        InvalidParameterError: It cannot hold a tensor here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).sum().item()  # a device without numbers, as "meta", is none
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = shorten(str(error).splitlines()[0], 160, placeholder=" ...")
        raise InvalidParameterError("device", name, f"it cannot be used here ({reason})", _device_remedy(name)) from error
    return device


def _device_remedy(name: str) -> str:
    """What can be used here; and where CUDA is missing from PyTorch, that no driver would help."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return f"Use cpu or {'cuda' if count == 1 else f'cuda:0 to cuda:{count - 1}'}."
    if name.startswith("cuda") and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return "Use cpu, or install a PyTorch that is built for CUDA."
    return "Use cpu."


def _load_weights(config: ModelConfig, hf_config: Any, source: dict[str, Any], device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    load = AutoModelForCausalLM.from_pretrained
    return _complete(config, hf_config, load, config.model, config=hf_config, dtype=dtype, **source).to(device)


def _load_quantised(config: ModelConfig, hf_config: Any, source: dict[str, Any], device: torch.device) -> Any:
    """A model whose quantised matrices stay as the files have them."""
    layout = layout_of(config.model, hf_config)
    assert layout is not None, "its configuration says how its weights are quantised"
    folder = local_folder(config.model, source)
    dtype = _quantised_dtype(config, hf_config)
    with QuantisedCheckpoint(config.model, folder, layout) as files:
        empty = _empty_model(config, hf_config, source)
        files.check(empty)
        model = _model_from_state(config, empty, files.state(dtype), dtype).to(device)
        files.fill(model, dtype)
    model.generation_config = _read_generation_config(folder) or model.generation_config
    return model


def _load_gguf(config: ModelConfig, tokenizer: Any | None, device: torch.device, kv_tokens: int | None) -> LoadedModel:
    """A model from a GGUF file."""
    file = read_gguf(config.model)
    hf_config = _read_gguf_config(config, file)
    longest = _max_model_len(config, hf_config)
    check_fit(config, hf_config, device, kv_tokens, file.nbytes)
    own_tokenizer = read_gguf_tokenizer(file) if tokenizer is None else given_tokenizer(tokenizer)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    checkpoint = GgufCheckpoint(file, hf_config)
    with exclusive_transformers():
        empty = _empty_model(config, hf_config, {})
        checkpoint.check(empty)
        model = _model_from_state(config, empty, checkpoint.state(dtype), dtype).to(device)
        checkpoint.fill(model, dtype)
        model.generation_config.eos_token_id = end_tokens(file) or None
        return _loaded(config, model, own_tokenizer, device, longest)


def _read_gguf_config(config: ModelConfig, file: GgufFile) -> Any:
    """The configuration that a file describes. It is quantised already, so it is not rounded again."""
    found = read_config(file)
    if config.quantization is not None:
        raise UnsupportedModelError(
            config.model,
            f"its weights are in blocks already, and quantization={config.quantization!r} would round them again",
            "Leave quantization out.",
        )
    return found


def _quantised_dtype(config: ModelConfig, hf_config: Any) -> torch.dtype:
    """That of what is not quantised. The kernels do not compute float16, whose numbers float32 holds exactly."""
    if config.dtype != "auto":
        asked: torch.dtype = getattr(torch, config.dtype)
        return asked
    written = getattr(hf_config, "dtype", None)
    return torch.float32 if written in (None, torch.float16) else written


def _read_generation_config(folder: Path) -> Any | None:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return None
    return _attempt(str(folder), "its generation_config.json cannot be read", GenerationConfig.from_pretrained, folder)


def _empty_model(config: ModelConfig, hf_config: Any, source: dict[str, Any]) -> Any:
    """The model that a configuration describes, without memory for its weights."""
    from transformers import AutoModelForCausalLM

    plain = deepcopy(hf_config)
    plain.__dict__.pop("quantization_config", None)
    trusted = {"trust_remote_code": source.get("trust_remote_code", False)}
    with torch.device("meta"):
        return _attempt(config.model, "it cannot be built", AutoModelForCausalLM.from_config, plain, **trusted)


def _model_from_state(config: ModelConfig, empty: Any, state: dict[str, Any], dtype: torch.dtype) -> Any:
    """The same model with these tensors, whose names are checked as those of files are."""
    load = type(empty).from_pretrained
    return _complete(config, empty.config, load, None, config=empty.config, state_dict=state, dtype=dtype)


def _complete(asked: ModelConfig, hf_config: Any, load: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What a function of transformers loads, where nothing is missing and everything has its shape."""
    model, info = _attempt(
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
            "outrider.model.loading.exclusive.exclusive_transformers().",
        )
    if missing:
        problem = f"{len(missing)} weights are missing, {missing[0]} first"
        raise missing_head(asked.model, hf_config, missing) or ModelLoadError(
            asked.model, problem, "Download or save the checkpoint again."
        )
    return model


def _untied(model: Any, missing: list[str]) -> bool:
    """Whether what is missing are copies that transformers makes itself, so that no file has to hold them."""
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    return bool(tied) and set(missing) <= set(getattr(model, "_tied_weights_keys", None) or ())


def _load_tokenizer(config: ModelConfig, source: dict[str, Any]) -> Any | None:
    from transformers import AutoTokenizer

    check_files(config.model)
    folder = Path(config.model)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    return _attempt(config.model, "its tokenizer cannot be read", AutoTokenizer.from_pretrained, config.model, **source)


def _attempt(model: str, problem: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call into transformers; whatever it raises becomes a ModelLoadError that keeps the first line of the reason."""
    check_wanted()
    try:
        with exclusive_transformers():
            return function(*args, **kwargs)
    except Exception as error:
        raise ModelLoadError(model, f"{problem} ({_reason(error)})", _load_remedy(model, error)) from error


def _reason(error: Exception) -> str:
    """The first line of what an error says, and the second where the first announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def _load_remedy(model: str, error: Exception) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    if "trust_remote_code" in str(error):
        return "It brings code of its own. If you trust that code, pass trust_remote_code=True."
    if os.path.isdir(model):
        return "Check the files in this folder."
    if isinstance(error.__cause__, LocalEntryNotFoundError):  # the hub does not answer
        return (
            "There is no folder of that name here. Give one, or connect to the network; where there is none, "
            "HF_HUB_OFFLINE=1 in the environment spares the retries."
        )
    return "There is no folder of that name here. Give one, or check the hub id."


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
    """Values that are given; that `do_sample` is not makes nothing greedy, as in vLLM."""
    config = getattr(model, "generation_config", None)
    found = {ours: getattr(config, theirs, None) for theirs, ours in _GENERATION_DEFAULTS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _max_model_len(config: ModelConfig, hf_config: Any) -> int:
    """The checkpoint's context, or less where the caller asks or where rotary factors begin to change with every token."""
    text_config = hf_config.get_text_config(decoder=True)
    written = getattr(text_config, "max_position_embeddings", None)
    context = 2048 if written is None else written
    if not isinstance(context, int) or context < 1:
        problem = f"its configuration says max_position_embeddings={context!r}"
        raise ModelLoadError(config.model, problem, "Correct config.json: a context has 1 token or more.")
    fixed = hf.fixed_rope_context(text_config)
    if fixed is not None and fixed < context:
        logger.warning("%s: context limited to %d tokens, where its rotary factors begin to change", config.model, fixed)
        context = fixed
    if config.max_model_len is not None and config.max_model_len > context:
        raise InvalidParameterError(
            "max_model_len",
            config.max_model_len,
            f"the context of {config.model} is {context}",
            "Lower it or leave it out.",
        )
    return config.max_model_len or int(context)
