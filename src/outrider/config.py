"""Configurations of an engine: frozen values, checked once, whose errors name the field, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from outrider.errors import ContradictionError, InputError, InvalidParameterError, UnsupportedParameterError

# --- Frozen, validated value types whose errors name the field, the value and the remedy.


class Frozen(BaseModel):
    """An immutable record; unknown names and values out of range raise an InputError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    #: Names other engines accept that are refused here, each with the reason.
    refused: ClassVar[dict[str, str]] = {}
    #: What to use instead of a refused name, where there is something.
    remedies: ClassVar[dict[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        for name in sorted(values.keys() & self.refused.keys()):
            raise UnsupportedParameterError(
                name, values[name], self.refused[name], self.remedies.get(name, "Leave it out.")
            )
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


def _no_quantization(value: object) -> object:
    if value in QUANTIZATIONS:
        raise InvalidParameterError(
            "dtype",
            value,
            "a way to round weights, not a dtype to compute in",
            f"Use quantization={value!r}, on the command line --quantization {value}.",
        )
    return value


class ModelConfig(Frozen):
    """Which checkpoint to load and how.

    Attributes:
        model: Local folder or hub id, as transformers takes it; for a model that is loaded already, what to call it.
        dtype: Weights and activations; "auto" takes the checkpoint's own.
        device: A torch device; None takes the CPU, also where there is a GPU.
        revision: Hub revision.
        trust_remote_code: Whether transformers may run code that the checkpoint brings.
        attention_backend: "fused" (our kernels: Llama-like decoders on CPUs), "paged" (most models), "gather" (portable)
            or "auto", which probes at load.
        max_model_len: Longest sequence, prompt and output together; None takes the checkpoint's context.
        quantization: How the linear layers' weights are rounded at load, or None. In a GGUF file, "int4-g32"
            makes Q4_0 of matrices in blocks of Q5_0 and Q8_0. "int8" has a scale for each output, and "int8-g32",
            "int8-g64" and "int8-g128" have one for each group of inputs. "int4-g32", "int4-g64" and
            "int4-g128" ("int4" for short) take half as much, and with "-asym" each group has a zero point, too. The model
            that is decoded losslessly is then the rounded one.
        activations: "int8" rounds what enters a product with rounded weights to whole numbers of 8 bits, too, row by row
            and group by group: with weights that are rounded at load, and with those that a file brings quantised. The
            model that is decoded losslessly is then the one that rounds both. Draft models whose weights are rounded do
            the same. "none" rounds no rows. None is "int8" for a GGUF file with blocks where our kernels compute it on a
            CPU, as llama.cpp does, and "none" for all else.
        draft_quantization: How the weights of its draft models are rounded, unless their own settings say it. "none" rounds
            none. None is "int8" for a draft model of 16 bits in a folder and "int4-g32" for one in a file, where our
            kernels compute it on a CPU and it is not small. A rounded draft may be refused a little more often, but no text
            changes its distribution.
        batch_invariant: Whether a token's bits must not depend on batch, chunk or draft.
    """

    model: str = Field(min_length=1, description="Use a local folder or a hub id.")
    dtype: Annotated[DTypeName, BeforeValidator(_no_quantization)] = Field(
        "auto", description="Use auto, float64, float32, bfloat16 or float16."
    )
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    attention_backend: AttentionName = Field("auto", description="Use auto, fused, paged or gather.")
    max_model_len: int | None = Field(None, ge=2, description="Use 2 tokens or more, or None.")
    quantization: QuantizationName | None = Field(None, description=f"Use {', '.join(QUANTIZATIONS)} or None.")
    activations: ActivationsName | None = Field(None, description="Use int8, none or None.")
    draft_quantization: DraftQuantizationName | None = Field(
        None, description=f"Use {', '.join(QUANTIZATIONS)}, none or None."
    )
    batch_invariant: bool = False

    @property
    def asks_for_rounded_rows(self) -> bool:
        """Whether rows are to be rounded, and not only where it is usual."""
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
    """How much key-value memory there is and how it is cut.

    Attributes:
        block_size: Tokens a block.
        num_tokens: Capacity in tokens, rounded down to blocks; None sizes it from free memory and the scheduler's limits.
        prefix_caching: Whether finished blocks are kept for later requests that start with the same tokens.
        state_cache_mib: Memory for running states beside these blocks, in MiB; None for a share of free memory.
    """

    block_size: int = Field(16, ge=1, le=1024, description="Use 1 to 1024 tokens.")
    num_tokens: int | None = Field(None, ge=1, description="Use 1 token or more, or None.")
    prefix_caching: bool = True
    state_cache_mib: int | None = Field(None, ge=0, description="Use 0 MiB or more, or None.")


class SchedulerConfig(Frozen):
    """How much work one step may hold.

    Attributes:
        max_num_seqs: Sequences that run at a time.
        max_num_batched_tokens: Rows in one target pass: prefill chunks, last tokens and draft tokens together.
    """

    max_num_seqs: int = Field(32, ge=1, description="Use 1 or more.")
    max_num_batched_tokens: int = Field(1024, ge=1, description="Use 1 or more.")

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


@dataclass(frozen=True)
class RequestOptions:
    """Declared once, and handed from the caller to the engine as it is.

    Attributes:
        namespace: Whose request it is. Caches are shared within a namespace and never beyond it; namespaces take turns.
        prediction: Token ids that the caller expects the output to have, for the method `prediction`.
        priority: Among the requests of one namespace that wait, lower numbers go first.
        trace: Whether outputs tell of every round.
        streaming: Whether pieces of the text are kept for a stream.
        decoder_prompt: Token ids that the decoder begins with, where an encoder reads the prompt, from its start token on;
            empty for those that the model always begins with.
        shown_tokens: Special tokens that stand in the text, as others do not.
    """

    namespace: str | None = None
    prediction: tuple[int, ...] = ()
    priority: int = 0
    trace: bool = False
    streaming: bool = False
    decoder_prompt: tuple[int, ...] = ()
    shown_tokens: frozenset[int] = frozenset()


NO_OPTIONS = RequestOptions()


# --- The model pair that comes with the package.


def default_model(part: str) -> str:
    """Folder of the embedded default pair: part is "target" or "draft"."""
    return str(files("outrider") / "assets" / part)


def shown_name(model: str | None) -> str | None:
    """A model's name for people; where the package lies is of no interest to them."""
    return "embedded" if model in (default_model("target"), default_model("draft")) else model
