"""Keywords of `LLM` and of its calls: their types and meanings, and what is said of those that belong elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter, signature
from os import PathLike
from typing import Any, TypedDict, TypeVar, cast

import torch

from outrider.config import (
    CONFIGS,
    ActivationsName,
    AttentionName,
    DraftQuantizationName,
    DTypeName,
    Elsewhere,
    Frozen,
    QuantizationName,
    declared,
    field_by_option,
    unknown_setting,
)
from outrider.errors import InvalidParameterError
from outrider.params import SamplingParams
from outrider.propose.settings import FORMERLY, LLAMA_CPP_TYPES, Method, SpeculationConfig, find

F = TypeVar("F", bound=Callable[..., Any])
#: Any form that SpeculationConfig.of takes.
Speculation = SpeculationConfig | Method | Mapping[str, Any] | str

# --- The keywords, for type checkers and editors. A test compares those of an engine with the fields that check them.


class LLMSettings(TypedDict, total=False):
    """`LLM`, `AsyncLLM` and `patch` take these keywords."""

    tokenizer: Any
    """A tokenizer of transformers, a local folder or a hub id, in place of the one beside the model; code that it brings is
    not run. A model that is given loaded has none unless it is given too."""
    consume: bool
    """Take the weights of a model that is given loaded without a copy. It is changed in place, and is of no use for
    anything else from then on."""
    speculation: Speculation | None
    """Who drafts, unless a call says otherwise: a SpeculationConfig, a flat mapping of the same settings, a method or its
    name. None is "auto": the engine chooses in every step among `suffix`, the draft model, or `token_recycling` where there
    is none, and plain decoding, by what each costs and brings. "none" decodes plainly."""
    draft_model: str | PathLike[str] | torch.nn.Module | None
    """A draft model for that choice, or for speculation="draft_model": local folder or hub id; or a causal language model
    of transformers with the target's tokens, which is copied and stays as it is. A published head or an assistant of
    Gemma 4 in a local folder or file takes its place in that choice. The embedded pair brings its own."""
    profile: str | PathLike[str] | None
    """A file that `outrider tune` wrote, in place of both: its settings are used. Where it was made for another dtype or
    another machine, a warning says so and it is ignored."""
    dtype: DTypeName | torch.dtype
    """Type of weights and activations: "auto" (the checkpoint's), "float64", "float32", "bfloat16" or "float16", or
    PyTorch's own name for one."""
    device: str | torch.device | None
    """A torch device; None takes the CPU, also where there is a GPU."""
    revision: str | None
    """Hub revision."""
    trust_remote_code: bool
    """Lets transformers run code that this checkpoint brings; a draft model's is not run."""
    attention_backend: AttentionName
    """How attention is computed: "auto", the usual one, probes; "fused" (our kernels) is fastest, "paged" (most models)
    fast, "gather" portable."""
    quantization: QuantizationName | None
    """Rounds linear layers' weights at load: "int8" (a scale for each output), "int8-g128" (for each group of 128 inputs;
    also 64, 32), "int4" (the same as "int4-g128"; also "int4-g64", "int4-g32"), or with a zero point for each group
    "int4-g128-asym" (also 64, 32). In a GGUF file, "int4-g32" makes Q4_0 of matrices in blocks of Q5_0 and Q8_0. What is
    lossless is then relative to the rounded model."""
    activations: ActivationsName | None
    """Rounds what enters products with rounded weights, too, those of a file among them: "int8" is faster, and not as near
    to the original; "none" does not. None does so for GGUF files with blocks, as llama.cpp does, where our kernels compute
    them on a CPU. Draft models whose weights are rounded do the same. What is lossless is then relative to the model that
    rounds both."""
    draft_quantization: DraftQuantizationName | None
    """Rounds the weights of draft models as quantization does the target's, unless their own settings say otherwise. None
    rounds them where that makes them faster: those of 16 bits in folders to "int8", those in files to blocks of 4 bits.
    "none" rounds none. A rounded draft may be refused a little more often, but no text changes its distribution."""
    batch_invariant: bool
    """Same seed, same bits: with any proposer or none, in any batch, in any chunks. Free where our kernels run the model;
    elsewhere every row is computed alone, which is slow. On a GPU it is refused."""
    max_model_len: int | None
    """Longest sequence, prompt and output together; None takes the checkpoint's context."""
    max_num_seqs: int
    """Sequences that run at a time; 32 unless given."""
    max_num_batched_tokens: int
    """Rows in one target pass: prefill chunks, last tokens and draft tokens together; 1024 unless given."""
    block_size: int
    """Tokens a KV block; 16 unless given."""
    kv_cache_tokens: int | None
    """KV capacity in tokens, rounded down to blocks; None sizes it from free memory."""
    prefix_caching: bool
    """Lets prompts that begin alike share KV; True unless given."""
    state_cache_mib: int | None
    """Memory, in MiB, for running states that prompts which begin alike share; only models with such states use it. None
    takes a sixteenth of free memory."""


class TextOptions(TypedDict, total=False):
    """A call takes these keywords beside its prompts, its parameters and who drafts."""

    namespace: str | None
    """Name of whoever the prompt belongs to: caches are shared within a namespace and never beyond it, and namespaces take
    turns."""
    trace: bool
    """Lets outputs tell of every round: draft tree, probabilities, coins, verdict, times (`rounds`)."""
    prediction: str | Sequence[int] | None
    """A text, or token ids, that the caller expects the output to have. The method `prediction` drafts from it; it changes
    no text."""
    references: Sequence[str | Sequence[int]]
    """Texts, or token ids, that the output may quote and the prompt does not hold as they stand, such as a retrieved
    document. The method `suffix` also looks in them; they change no text."""
    priority: int
    """Among the requests of one namespace that wait, lower numbers go first. The usual number is 0."""
    decoder_prompt: str | Sequence[int] | None
    """For models whose encoder reads the prompts: what the text begins with and goes on from, which is no part of the
    output. A text, or token ids from the decoder's start token on."""
    shown_tokens: Collection[int]
    """Ids of special tokens that stand in the text, as others do not."""


class CallOptions(TextOptions, total=False):
    """A call for one text takes these keywords, and those of `TextOptions`, beside its prompt and its parameters."""

    speculation: Speculation | None
    """Who drafts, in place of the LLM's own; "none" decodes plainly."""


#: Methods with settings that llama.cpp's commands have options for.
_WITH_NAMES_ELSEWHERE = ("draft_model", "mtp", "ngram", "suffix")
#: What keywords are where nothing else is given; None where they are not here.
_USUAL: dict[str, Any] = {name: field.default for kind in CONFIGS for name, field in kind.model_fields.items()}
_USUAL |= {"consume": False, "trace": False, "priority": 0, "references": (), "shown_tokens": ()}


def names_keywords(typed: Any) -> Callable[[F], F]:
    """Gives a function whose last parameter takes the keywords of a TypedDict a signature that names them one by one, for
    those who look at it while Python runs."""

    def decorate(function: F) -> F:
        found = signature(function)
        *own, _ = found.parameters.values()
        named = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=_USUAL.get(name), annotation=hint.__forward_arg__)
            for name, hint in typed.__annotations__.items()
        ]
        function.__signature__ = found.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        return function

    return decorate


# --- What is said of other keywords.


#: Settings of other engines that have another one in their place here, or none.
_OTHERS = {
    "speculative_config": "Its name here is speculation.",
    "gpu_memory_utilization": "Use LLM(kv_cache_tokens=...); None takes what memory is free.",
    "tensor_parallel_size": "Leave it out: a model lies on one device. Use device=... to choose it.",
}


def named_elsewhere(name: str) -> tuple[type[Frozen], str] | None:
    """The setting that has this name as an option of llama.cpp's commands, or as a keyword made of one: its owner, and its
    name here. None for other names."""
    owners: list[type[Frozen]] = [*CONFIGS, SamplingParams, SpeculationConfig, *map(find, _WITH_NAMES_ELSEWHERE)]
    return field_by_option(owners, name)


def draft_setting(owner: type[Frozen], name: str, value: object) -> dict[str, Any]:
    """The flat mapping of speculation that says what a setting of llama.cpp does, by its owner and its name here."""
    if owner is SpeculationConfig and name == "method":
        kinds = [LLAMA_CPP_TYPES.get(kind, kind) for kind in str(value).split(",")]
        return {"method": kinds[0]} if len(kinds) == 1 else {"method": "auto", "methods": kinds}
    return {name: value} if owner is SpeculationConfig else {"method": cast(type[Method], owner).name, name: value}


def refuse_settings(given: Mapping[str, Any]) -> None:
    """Raise InvalidParameterError for the first of these that LLM does not have; it may be one that belongs elsewhere."""
    places: dict[type[Frozen], str] = {
        SpeculationConfig: "LLM(speculation=SpeculationConfig({}=...))",
        SamplingParams: "generate(prompts, SamplingParams({}=...))",
    }
    renamed = {name: f"Its name here is {ours}." for kind in CONFIGS for name, ours in _other_names(kind).items()}
    _refuse("LLM", given, ("model", *LLMSettings.__annotations__), {**_OTHERS, **renamed}, places)


def refuse_keywords(method: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise InvalidParameterError for the first of these that `method` does not take, and show the call that is right."""
    known = tuple(signature(method).parameters)
    if given.keys() <= set(known):
        return
    call = f"{method.__name__}({known[0]}, "
    renamed = {
        **_OTHERS,
        "sampling_params": f"Its name here is params: {call}SamplingParams(...)).",
        "do_sample": f"Use {call}SamplingParams(temperature=0)) for greedy texts; any other temperature samples.",
    }
    for name, ours in _other_names(SamplingParams).items():
        renamed[name] = f"Its name here is {ours}: {call}SamplingParams({ours}=...))."
    places: dict[type[Frozen], str] = {
        SamplingParams: call + "SamplingParams({}=...))",
        SpeculationConfig: call + "speculation=SpeculationConfig({}=...))",
    }
    _refuse(method.__name__, given, known, renamed, places)


def _other_names(kind: type[Frozen]) -> dict[str, str]:
    """Lists the names that fields of a model have as keywords of other engines, and their names here."""
    found = declared(kind, Elsewhere)
    return {name: ours for ours, names in found for name in (names.transformers, names.vllm) if name not in (None, ours)}


def _refuse(
    owner: str,
    given: Mapping[str, Any],
    known: Collection[str],
    renamed: Mapping[str, str],
    places: Mapping[type[Frozen], str],
) -> None:
    """Raise for the first name that is not known: by where it belongs, or what it is called here."""
    for name, value in given.items():
        if name in known:
            continue
        for kind, place in places.items():
            if name in kind.model_fields:
                problem = f"a setting of {kind.__name__}, not of {owner}"
                raise InvalidParameterError(name, value, problem, f"Give it in {place.format(name)}.")
        if name in renamed:
            raise InvalidParameterError(name, value, "no such setting", renamed[name])
        found = named_elsewhere(name)
        if found is not None:
            raise InvalidParameterError(name, value, "a name of llama.cpp", _said_here(*found, value))
        if name in FORMERLY:
            said = FORMERLY[name].format(value=value).removesuffix(".")
            raise InvalidParameterError(name, value, "no such setting", f"{said}, in speculation=SpeculationConfig(...).")
        raise unknown_setting(owner, name, value, known)


def _said_here(owner: type[Frozen], name: str, value: object) -> str:
    if owner is SamplingParams:
        return f"Use SamplingParams({name}={value!r})."
    if owner in CONFIGS:
        return f"Use LLM({name}={value!r})."
    return f"Use speculation={draft_setting(owner, name, value)}."


def check_namespace(namespace: Any) -> None:
    """Raise InvalidParameterError unless it is a name or None; 1 and True would share what they must not."""
    if namespace is not None and not (isinstance(namespace, str) and namespace):
        problem = "it is empty" if isinstance(namespace, str) else "not a name"
        raise InvalidParameterError("namespace", namespace, problem, "Give a string that is not empty, or None.")


def spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for each of `count` prompts: the value itself repeated, or a list of the right length."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidParameterError(
            name, value, f"{len(value)} entries for {count} prompts", "Give one for all, or one for each."
        )
    return list(value)
