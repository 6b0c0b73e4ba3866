"""Structures, enumerations and widths that Python and the C sources of the kernels share.

The C sources list their own values (native/layout.inc), and both lists are compared when the library is opened. So a
library that was compiled from other sources is refused before it misreads a structure.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

from outrider.errors import KernelMismatchError

_I64, _F64, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p

#: The names of the instruction sets, the best one last, and the bytes of their vectors.
INSTRUCTION_SETS = {
    "generic": 16, "avx2": 32, "avx2vnni": 32, "avx512": 64, "avx512bf16": 64, "neon": 16, "neondot": 16, "neonbf16": 16,
}  # fmt: skip
#: Those whose processors multiply pairs of bf16.
_OF_PAIRS = ("avx512bf16", "neonbf16")
#: The dtypes that kernels compute in, by their names in C.
REALS = {torch.float32: "f32", torch.float64: "f64"}
#: The activations of a feed-forward.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "quick_gelu": 3, "relu": 4, "relu_squared": 5}


class FormatCode(IntEnum):
    """Says how packed weights are stored (kernels/formats)."""

    REAL = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    BLOCKS = 4


class BlockValues(IntEnum):
    """Says what the codes of weights in blocks stand for: themselves, a number of a table, or a number of 16 bits."""

    WHOLE = 0
    NL = 1
    MX = 2
    HALF = 3
    BF16 = 4


class Scales(IntEnum):
    """The kind of the scales of blocks."""

    NONE = 0
    HALF = 1
    BF16 = 2


class Lows(IntEnum):
    """Says what is added to scaled codes: nothing, a number of their block, or one of their part of it."""

    NONE = 0
    OF_BLOCKS = 1
    OF_PARTS = 2


class Operand(IntEnum):
    """Says as what rows enter a product: as the numbers that they are, rounded to bf16 and in pairs, or rounded to 8
    bits."""

    REAL = 0
    PAIRS = 1
    BYTES = 2


class NormKind(IntEnum):
    """Says what a norm does: nothing, divide by the root of the mean square, or subtract the mean before that."""

    NONE = 0
    RMS = 1
    LAYER = 2


class FeedForward(IntEnum):
    """Says what a feed-forward does between its products: an activation, or an activation times another product."""

    PLAIN = 0
    GATED = 1
    EXPERTS = 2


class Decay(IntEnum):
    """Says what has a factor of its own by which a running state decays: a head, a key of it, or every number."""

    OF_HEADS = 0
    OF_KEYS = 1
    OF_ALL = 2


class MixerKind(IntEnum):
    """Says what a layer with a running state computes: a short convolution, or that and a gated delta rule, or the scan of
    Mamba-2."""

    CONVOLUTION = 0
    DELTA = 1
    SCAN = 2


class BlocksStruct(ctypes.Structure):
    """Says what weights in blocks are."""

    _fields_ = [(name, _I64) for name in ("bits", "values", "subtracted", "part", "scales", "lows")]


class LinearStruct(ctypes.Structure):
    """Packed weights."""

    _fields_ = [
        ("format", _I64),
        ("operand", _I64),
        ("rows", _I64),
        ("cols", _I64),
        ("group", _I64),
        ("zeros", _I64),
        ("data", _POINTER),
        ("scale", _POINTER),
        ("bias", _POINTER),
        ("blocks", BlocksStruct),
        ("places", _POINTER),
        ("next", _POINTER),
    ]


class NormStruct(ctypes.Structure):
    """A norm."""

    _fields_ = [
        ("kind", _I64),
        ("epsilon", _F64),
        ("weight", _POINTER),
        ("bias", _POINTER),
    ]


class RotaryStruct(ctypes.Structure):
    """Rotary tables. The second pair is for long texts."""

    _fields_ = [
        ("cosines", _POINTER * 2),
        ("sines", _POINTER * 2),
    ]


#: The norms and the matrices of a layer.
LAYER_NORMS = (
    "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "query_norm", "key_norm", "beside_norm",
    "source_norm",
)  # fmt: skip
LAYER_MATRICES = ("qkv", "out", "gate", "up", "down", "source_query", "source_out")


class ExpertsStruct(ctypes.Structure):
    """A feed-forward of experts."""

    _fields_ = [
        *((name, _I64) for name in ("count", "chosen", "normalised", "activation")),
        ("slope", _F64),
        ("limit", _F64),
        ("router", LinearStruct),
        ("gate_up", _POINTER),
        ("down", _POINTER),
    ]


class MixerStruct(ctypes.Structure):
    """Holds what a layer with a running state has beside its matrices."""

    _fields_ = [
        *((name, _I64) for name in ("kind", "channels", "width", "heads", "key_heads", "key_dim", "value_dim")),
        *((name, _I64) for name in ("norm_size", "gates_first")),
        *((name, _F64) for name in ("epsilon", "least_step", "most_step")),
        *((name, _POINTER) for name in ("taps", "tap_bias", "rates", "step_bias", "skip", "norm_weight")),
    ]


class MixerRowsStruct(ctypes.Structure):
    """Holds what the rows of a pass read and leave in a layer with a running state."""

    _fields_ = [
        *((name, _POINTER) for name in ("inputs", "keys", "values", "decays", "shares")),
        *((name, _POINTER) for name in ("windows", "states", "kept_windows", "kept_states")),
    ]


class LayerStruct(ctypes.Structure):
    """A layer of a decoder."""

    _fields_ = [
        *((name, NormStruct) for name in LAYER_NORMS),
        *((name, LinearStruct) for name in LAYER_MATRICES),
        ("mixer", _POINTER),
        ("experts", _POINTER),
        ("beside_gate", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("rotary", _POINTER),
        ("sinks", _POINTER),
        ("biases", _POINTER),
        *((name, _I64) for name in ("distances", "window", "chunk", "unseen", "normed_residual")),
        *((name, _I64) for name in ("gated_heads", "whole_norms", "feed_forward")),
        ("scale", _F64),
        ("softcap", _F64),
        ("residual_scale", _F64),
    ]


class DecoderStruct(ctypes.Structure):
    """A decoder."""

    _fields_ = [
        *((name, _I64) for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "rotary_dim")),
        *((name, _I64) for name in ("interleaved", "kv_bf16", "activation", "parallel", "embed_bf16")),
        *((name, _F64) for name in ("embed_scale", "logit_scale", "logit_cap")),
        ("layers", _POINTER),
        ("embedding", _POINTER),
        ("packed_embedding", _POINTER),
        ("position_table", _POINTER),
        ("head", LinearStruct),
        ("final_norm", NormStruct),
        ("entry", LinearStruct),
        ("entry_norms", NormStruct * 2),
    ]


#: The fields of a pass that are lists of whole numbers.
PASS_LISTS = (
    "tokens", "positions", "slots", "long_rows", "first", "start", "tables", "table_at", "ancestry_at", "logit_rows",
)  # fmt: skip


class PassStruct(ctypes.Structure):
    """The rows of one pass through a decoder."""

    _fields_ = [
        *((name, _I64) for name in ("rows", "segments", "logits", "block_size")),
        *((name, _POINTER) for name in PASS_LISTS),
        ("ancestry", _POINTER),
        ("parents", _POINTER),
        ("mixed", _POINTER),
        ("known", _POINTER),
        ("tree_positions", _POINTER),
        ("keeps_only", _I64),
        ("of_sources", _I64),
        ("sources", _POINTER),
        ("head_ranges", _POINTER),
        ("num_head_ranges", _I64),
        ("out", _POINTER),
        ("states", _POINTER),
        ("hidden_in", _POINTER),
        ("hidden_out", _POINTER),
        ("scratch", _POINTER),
    ]


#: The lists of a pass that attention needs.
ATTENTION_LISTS = ("positions", "first", "start", "tables", "table_at", "ancestry_at")


class AttendCall(ctypes.Structure):
    """The rows of one pass and their attention in one layer."""

    _fields_ = [
        *((name, _I64) for name in ("rows", "segments", "heads", "kv_heads", "head_dim", "kv_bf16", "block_size")),
        *((name, _I64) for name in ("window", "chunk", "distances", "of_sources")),
        *((name, _F64) for name in ("scale", "softcap")),
        *((name, _POINTER) for name in ATTENTION_LISTS),
        *((name, _POINTER) for name in ("ancestry", "sinks", "biases", "keys", "values", "query", "out", "scratch")),
    ]


class ProbsCall(ctypes.Structure):
    """Rows of logits that become probabilities."""

    _fields_ = [
        ("rows", _I64),
        ("size", _I64),
        ("logits", _POINTER),
        ("stride", _I64),
        *((name, _POINTER) for name in ("temperature", "top_k", "top_p", "min_p", "probs", "scratch", "histograms")),
        ("threads", _I64),
    ]


class DrawCall(ctypes.Structure):
    """Rows of probabilities or logits. A token is drawn from each row, or the chance of its largest entry is computed."""

    _fields_ = [
        ("rows", _I64),
        ("size", _I64),
        ("probs", _POINTER),
        ("stride", _I64),
        ("noise", _POINTER),
        ("tokens", _POINTER),
        ("chances", _POINTER),
        ("threads", _I64),
    ]


class ResidualCall(ctypes.Structure):
    """Rows of target probabilities, from which draft probabilities are subtracted."""

    _fields_ = [
        *((name, _I64) for name in ("rows", "size", "together", "target_stride", "draft_stride")),
        *((name, _POINTER) for name in ("target_probs", "draft_probs", "weight", "mass", "probs")),
        ("threads", _I64),
    ]


class RecurrenceCall(ctypes.Structure):
    """Rows of a text over a running state."""

    _fields_ = [
        *((name, _I64) for name in ("rows", "heads", "key_heads", "key_dim", "value_dim", "decay")),
        *((name, _POINTER) for name in ("state", "keys", "values", "decays", "shares", "queries")),
        *((name, _POINTER) for name in ("parents", "kept", "out", "scratch")),
        ("threads", _I64),
    ]


#: The structures by their names in C.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "blocks": BlocksStruct,
    "linear": LinearStruct,
    "norm": NormStruct,
    "rotary": RotaryStruct,
    "experts": ExpertsStruct,
    "mixer": MixerStruct,
    "mixer_rows": MixerRowsStruct,
    "layer": LayerStruct,
    "decoder": DecoderStruct,
    "pass": PassStruct,
    "attend_call": AttendCall,
    "probs_call": ProbsCall,
    "draw_call": DrawCall,
    "residual_call": ResidualCall,
    "recurrence_call": RecurrenceCall,
}


class _Constant(ctypes.Structure):
    """An entry of a list of constants of the C sources. The last entry has no name."""

    _fields_ = [("name", ctypes.c_char_p), ("value", _I64)]


def panel_width(instruction_set: str, real: torch.dtype) -> int:
    """The number of output columns that packed weights keep together, which fill two vectors."""
    return 2 * INSTRUCTION_SETS[instruction_set] // real.itemsize


def multiplies_pairs(instruction_set: str, real: torch.dtype) -> bool:
    """Tells whether products can take rows in pairs of bf16."""
    return instruction_set in _OF_PAIRS and real == torch.float32


def check_layout(library: ctypes.CDLL) -> None:
    """Compare the library's constants with those written here."""
    _compare(library, "outrider_constants", {f"instruction set {name}": 1 << i for i, name in enumerate(INSTRUCTION_SETS)})
    for instruction_set in INSTRUCTION_SETS:
        for real, suffix in REALS.items():
            if hasattr(library, f"decode_{suffix}_{instruction_set}"):  # an old compiler cannot build the newest set
                _compare(library, f"constants_{suffix}_{instruction_set}", _constants(instruction_set, real))


def _constants(instruction_set: str, real: torch.dtype) -> dict[str, int]:
    constants = {f"weight format {code.name}": code.value for code in FormatCode}
    constants |= {f"values {value.name}": value.value for value in BlockValues}
    constants |= {f"scales {kind.name}": kind.value for kind in Scales}
    constants |= {f"lows {kind.name}": kind.value for kind in Lows}
    constants |= {f"operand {operand.name}": operand.value for operand in Operand}
    constants["products of pairs"] = multiplies_pairs(instruction_set, real)
    constants |= {f"norm {kind.name}": kind.value for kind in NormKind}
    constants |= {f"feed-forward {kind.name}": kind.value for kind in FeedForward}
    constants |= {f"activation {name}": value for name, value in ACTIVATIONS.items()}
    constants |= {f"mixer {kind.name}": kind.value for kind in MixerKind}
    constants |= {f"decay {kind.name}": kind.value for kind in Decay}
    constants["panel width"] = constants["columns at once"] = panel_width(instruction_set, real)
    for name, struct in STRUCTS.items():
        last = struct._fields_[-1][0]
        constants[f"size of {name}"] = ctypes.sizeof(struct)
        constants[f"offset of {name}.{last}"] = getattr(struct, last).offset
    return constants


def _compare(library: ctypes.CDLL, symbol: str, written: dict[str, int]) -> None:
    compiled = _listed(library, symbol)
    for name in sorted(written.keys() | compiled.keys()):
        if written.get(name) != compiled.get(name):
            raise KernelMismatchError(f"{name} in {symbol}", compiled.get(name), written.get(name))


def _listed(library: ctypes.CDLL, symbol: str) -> dict[str, int]:
    """The constants that the library lists. Empty where it has no such list."""
    try:
        function = library[symbol]
    except AttributeError:
        return {}
    function.restype = ctypes.POINTER(_Constant)
    constants = function()
    found: dict[str, int] = {}
    while constants[len(found)].name is not None:
        found[constants[len(found)].name.decode()] = constants[len(found)].value
    return found
