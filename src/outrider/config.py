"""Configurations of an engine: frozen values, checked once, whose errors name the field, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from outrider.errors import ContradictionError, InputError, InvalidParameterError, UnsupportedParameterError

# --- Frozen, validated value types whose errors name the field, the value and the remedy.


class Refusal(NamedTuple):
    """A name is known elsewhere, and is not taken here."""

    reason: str  # why it is not taken
    remedy: str = "Leave it out."
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, which requests to the server may have


class Frozen(BaseModel):
    """An immutable record; unknown names and values out of range raise an InputError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    #: Names other engines accept that are refused here.
    refused: ClassVar[dict[str, Refusal]] = {}

    def __init__(self, **values: Any) -> None:
        for name in sorted(values.keys() & self.refused.keys()):
            raise UnsupportedParameterError(name, values[name], self.refused[name].reason, self.refused[name].remedy)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _first_problem(type(self), error) from None

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self)(**{**dict(self), **changes})


def unknown_setting(owner: str, name: str, value: object, known: Iterable[str]) -> InvalidParameterError:
    """The error for a name that `owner` does not know: the nearest one that it does, and all of them."""
    names = sorted(known)
    return InvalidParameterError(
        name, value, "no such setting", f"{nearest(name, names)}{owner} knows: {', '.join(names)}."
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the known name that is most like this one, with a blank behind it; empty where none is like it."""
    return "".join(f"Did you mean {near}? " for near in get_close_matches(name, sorted(known), n=1))


def _first_problem(kind: type[Frozen], error: ValidationError) -> InputError:
    detail = min(
        error.errors(), key=lambda each: each["type"] == "missing"
    )  # what is missing may be there under a wrong name
    raised = detail.get("ctx", {}).get("error")
    if isinstance(raised, InputError):
        return raised
    field = ".".join(str(part) for part in detail["loc"][:1]) or kind.__name__
    if detail["type"] == "extra_forbidden":
        return unknown_setting(kind.__name__, field, detail["input"], kind.model_fields)
    problem = detail["msg"][0].lower() + detail["msg"][1:]
    described = kind.model_fields.get(field)
    remedy = (described.description if described else None) or f"See {kind.__name__}."
    return InvalidParameterError(field, detail["input"], problem, remedy)


# --- What a field declares beside its type and its range, in `Annotated`: from this follow the options of the command, the
# --- fields of requests, and what is understood of the files and the words of other engines.


T = TypeVar("T")
#: The verbs that write texts, whose options most settings are.
WRITING = ("generate", "chat", "serve")


@dataclass(frozen=True)
class Flag:
    """The command has an option that sets the field. A field may have another one for other verbs."""

    help: str
    verbs: tuple[str, ...] = WRITING
    names: tuple[str, ...] = ()  # as ("--temperature", "-t"), where it has more than its own
    default: Any = ...  # where the command leaves it open otherwise than the field does


@dataclass(frozen=True)
class Asked:
    """Requests to the server have a field of the same name and meaning."""

    kind: Any  # its type in JSON
    description: str | None = None  # in words of JSON, where the field's own are those of Python


@dataclass(frozen=True)
class Elsewhere:
    """The field has these names elsewhere."""

    transformers: str | None = None  # in generation_config.json, and as a keyword
    gguf: str | None = None  # behind general.sampling. in a file
    llama_cpp: str | None = None  # in requests to its server
    vllm: str | None = None  # as a keyword
    options: tuple[str, ...] = ()  # of llama.cpp's commands


def declared(kind: type[BaseModel], what: type[T]) -> Iterator[tuple[str, T]]:
    """Yields all declarations of one type that the fields of a model have, each with the name of its field."""
    return (
        (name, found) for name, field in kind.model_fields.items() for found in field.metadata if isinstance(found, what)
    )


def field_by_option(owners: Iterable[type[Frozen]], option: str) -> tuple[type[Frozen], str] | None:
    """The field that has this name as an option of llama.cpp's commands, or as a keyword made of one: its owner, and its
    name here. None for other names."""
    for owner in owners:
        for ours, names in declared(owner, Elsewhere):
            if option in names.options or option in (each.lstrip("-").replace("-", "_") for each in names.options):
                return owner, ours
    return None


def part_of(kind: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the values that are fields of a model."""
    return {name: given[name] for name in given if name in kind.model_fields}


# --- Frozen, composed configurations, validated once.


DTypeName = Literal["auto", "float64", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "fused", "paged", "gather"]
QuantizationName = Literal[
    "int8",
    "int8-g32",
    "int8-g64",
    "int8-g128",
    "int4",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-g32-asym",
    "int4-g64-asym",
    "int4-g128-asym",
]

DraftQuantizationName = QuantizationName | Literal["none"]

ActivationsName = Literal["int8", "none"]

QUANTIZATIONS: tuple[str, ...] = get_args(QuantizationName)

#: What the name of a precision ends with where rows are rounded to 8 bits before they meet rounded weights.
ROUNDED_ROWS = "+a8"


def _named(value: object) -> object:
    """The name of one of PyTorch's dtypes or devices; anything else as it is."""
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _no_quantization(value: object) -> object:
    if value in QUANTIZATIONS:
        raise InvalidParameterError(
            "dtype",
            value,
            "a way to round weights, not a dtype to compute in",
            f"Use quantization={value!r}.",
        )
    return value


#: Verbs that measure a model, which take of its settings what changes the numbers.
_MEASURING = ("doctor", "tune")
_EVERYWHERE = (*WRITING, *_MEASURING, "data")
_SERVING = ("serve",)


class ModelConfig(Frozen):
    """Which checkpoint to load and how. `LLMSettings` says what each field means."""

    model: str = Field(min_length=1, description="Use a local folder or a hub id.")  # of a loaded one, what to call it
    dtype: Annotated[
        DTypeName,
        BeforeValidator(_no_quantization),
        BeforeValidator(_named),
        Flag("auto, bfloat16, float16, float32 or float64.", _EVERYWHERE),
        Elsewhere(transformers="torch_dtype"),
    ] = Field("auto", description="Use auto, float64, float32, bfloat16 or float16.")
    device: Annotated[str | None, BeforeValidator(_named), Flag("cpu, cuda, cuda:1, ...", _EVERYWHERE)] = Field(
        None, description="Use cpu, cuda, cuda:1 or another device of PyTorch, or None."
    )
    revision: str | None = None
    trust_remote_code: bool = False
    attention_backend: Annotated[AttentionName, Flag("auto, fused, paged or gather.")] = Field(
        "auto", description="Use auto, fused, paged or gather."
    )
    quantization: Annotated[
        QuantizationName | None, Flag("Round weights: int8, int8-g128, int4, int4-g32-asym, ...", (*WRITING, *_MEASURING))
    ] = Field(None, description=f"Use {', '.join(QUANTIZATIONS)} or None.")
    activations: Annotated[
        ActivationsName | None,
        Flag(
            "int8 rounds what enters products with rounded weights, none does not. For GGUF files int8 is usual.",
            _EVERYWHERE,
        ),
    ] = Field(None, description="Use int8, none or None.")
    draft_quantization: Annotated[
        DraftQuantizationName | None, Flag("The same for draft models: int8 or 4 bits are usual, none rounds nothing.")
    ] = Field(None, description=f"Use {', '.join(QUANTIZATIONS)}, none or None.")
    batch_invariant: Annotated[
        bool, Flag("Same seed, same bits, in any batch with any method.", verbs=("generate", "serve"))
    ] = False
    max_model_len: Annotated[
        int | None,
        Flag("Longest text, prompt and output together.", _SERVING),
        Elsewhere(options=("--ctx-size", "-c")),
    ] = Field(None, ge=2, description="Use 2 tokens or more, or None.")

    @property
    def asks_for_rounded_rows(self) -> bool:
        """Tells whether rows are to be rounded, and not only where it is usual."""
        return self.activations == "int8"

    def rounding(self, *, rounds_rows: bool) -> str | None:
        """All that is rounded, in words, where the loaded model rounds its rows or not. None where nothing is."""
        rows = "int8 activations" if rounds_rows else None
        return ", ".join(each for each in (self.quantization, rows) if each is not None) or None

    @model_validator(mode="after")
    def _backend_can_be_invariant(self) -> ModelConfig:
        if self.batch_invariant and self.attention_backend not in ("auto", "fused", "paged"):
            raise ContradictionError(
                "attention_backend",
                self.attention_backend,
                "its bits depend on the batch, and batch_invariant=True asks that none do",
                "Use auto, fused or paged, or leave one of them out.",
            )
        return self


class CacheConfig(Frozen):
    """Says how much key-value memory there is and how it is cut."""

    block_size: int = Field(16, ge=1, le=1024, description="Use 1 to 1024 tokens.")
    kv_cache_tokens: Annotated[int | None, Flag("KV memory; sized from free memory unless given.", _SERVING)] = Field(
        None, ge=1, description="Use 1 token or more, or None."
    )
    prefix_caching: Annotated[
        bool,
        Flag("Read every prompt anew. Otherwise prompts of a tenant share the KV of equal beginnings.", _SERVING),
        Elsewhere(vllm="enable_prefix_caching"),
    ] = True
    state_cache_mib: Annotated[
        int | None,
        Flag("MiB for running states that equal beginnings share; a sixteenth of free memory unless given.", _SERVING),
    ] = Field(None, ge=0, description="Use 0 MiB or more, or None.")


class SchedulerConfig(Frozen):
    """Says how much work one step may hold."""

    max_num_seqs: Annotated[
        int,
        Flag("Prompts that run at a time.", ("generate",)),
        Flag("Texts that are written at a time.", _SERVING),
        Elsewhere(options=("--parallel", "-np")),
    ] = Field(32, ge=1, description="Use 1 or more.")
    max_num_batched_tokens: Annotated[int, Flag("Rows of a pass.", _SERVING), Elsewhere(options=("--batch-size", "-b"))] = (
        Field(1024, ge=1, description="Use 1 or more.")
    )

    @model_validator(mode="after")
    def _every_sequence_gets_a_row(self) -> SchedulerConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ContradictionError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"below max_num_seqs={self.max_num_seqs}, so a running sequence could find no row",
                "Raise it or lower max_num_seqs.",
            )
        return self


# --- RequestOptions: what a request carries beside its prompt, its sampling parameters and its speculation.


#: The configurations whose fields are keywords of `LLM`, but for the model's name.
CONFIGS = (ModelConfig, SchedulerConfig, CacheConfig)


@dataclass(frozen=True)
class RequestOptions:
    """The keywords of a call come to this; `options.TextOptions` says what they mean."""

    namespace: str | None = None
    prediction: tuple[int, ...] = ()  # token ids
    references: tuple[tuple[int, ...], ...] = ()  # token ids of each
    priority: int = 0
    trace: bool = False
    streaming: bool = False  # whether pieces of the text are kept for a stream
    decoder_prompt: tuple[int, ...] = ()  # from the decoder's start token on; empty for what the model always begins with
    shown_tokens: frozenset[int] = frozenset()


NO_OPTIONS = RequestOptions()


# --- Models by name: the pair that comes with the package, and files that must be there.


def default_model(part: str) -> str:
    """Folder of the embedded default pair: part is "target" or "draft"."""
    return str(files("outrider") / "assets" / part)


def check_file(field: str, source: str) -> None:
    """Raise InvalidParameterError where a GGUF file is named that is not there."""
    if source.lower().endswith(".gguf") and not Path(source).exists():
        raise InvalidParameterError(field, source, "no such file", "Give the path of a GGUF file.")


def shown_name(model: str | None) -> str | None:
    """A model's name for people; where the package lies is of no interest to them."""
    return "embedded" if model in (default_model("target"), default_model("draft")) else model
