"""The layouts of quantised checkpoints: GPTQ, AWQ, FP8 and compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.errors import UnsupportedModelError
from outrider.kernels.formats import FORMATS, GROUPS, StoredWeight, folded, is_plain, plain
from outrider.kernels.gguf_blocks import UNIT, in_order, stored_blocks, whole_numbers
from outrider.kernels.rounding import parts
from outrider.loading.fit import StoredTensor

# --- Which layout a checkpoint has, by what transformers' configuration declares; or a refusal that says what to use.


_ORIGINAL = 'Give the original checkpoint; quantization="int8" or "int4" rounds it while it is loaded.'
_KNOWN = "Give a checkpoint of compressed-tensors (pack-quantized or int-quantized), GPTQ, AWQ or FP8, or the original one."
#: The formats of compressed-tensors with whole numbers.
_WHOLE = ("pack-quantized", "int-quantized", "naive-quantized")


def layout_of(model: str, hf_config: Any) -> Layout | None:
    """The layout of a checkpoint's matrices. None where they are not quantised."""
    found = declared(hf_config)
    if found is None:
        return None
    method = str(getattr(found.get("quant_method"), "value", found.get("quant_method"))).lower()
    if method == "compressed-tensors":
        return _compressed(model, found)
    if method in ("gptq", "awq"):
        bits = _whole(model, found, "bits", 4)
        return _gptq(model, found, bits) if method == "gptq" else _awq(model, found, bits)
    if method == "fp8":
        return Fp8(_block(model, found))
    remedy = _ORIGINAL if method.startswith("bitsandbytes") else _KNOWN
    raise UnsupportedModelError(model, f"its weights are quantised by {method}, which is not supported", remedy)


def declared(hf_config: Any) -> Mapping[str, Any] | None:
    """Returns what a configuration says of quantised weights; None where it says nothing."""
    found = getattr(hf_config, "quantization_config", None)
    if found is None or isinstance(found, Mapping):
        return found
    as_dict: Mapping[str, Any] = found.to_dict()
    return as_dict


def rounded_while_computing(hf_config: Any) -> list[str]:
    """Returns what a configuration wants rounded in every pass beside the weights, which is not done here."""
    found = declared(hf_config) or {}
    wanted = {name for group in _groups(found) for name in ("input_activations", "output_activations") if group.get(name)}
    return sorted(wanted | {name for name in ("activation_scheme", "kv_cache_scheme") if found.get(name)})


def _gptq(model: str, found: Mapping[str, Any], bits: int) -> Gptq:
    version = str(found.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(model, f"its weights are in the layout {version} of GPTQ", _KNOWN)
    return Gptq(bits, first_version=version == "gptq")


def _awq(model: str, found: Mapping[str, Any], bits: int) -> Awq:
    version = str(found.get("version") or found.get("checkpoint_format") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(
            model, f"its weights are in the layout {version} of AWQ", "Give one in the layout gemm."
        )
    return Awq(bits)


def _compressed(model: str, found: Mapping[str, Any]) -> Compressed:
    formats = {str(group.get("format") or found.get("format")) for group in _groups(found)} or {str(found.get("format"))}
    unknown = sorted(formats - set(_WHOLE))
    if unknown:
        problem = f"its weights are in the format {unknown[0]} of compressed-tensors, which is not supported"
        raise UnsupportedModelError(model, problem, _KNOWN)
    return Compressed()


def _block(model: str, found: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of FP8; None where each matrix has one scale."""
    block = found.get("weight_block_size")
    if block is None:
        return None
    try:
        rows, columns = (index(size) for size in block)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        problem = f"its quantization_config says weight_block_size={block!r}, and two whole numbers from 1 on are wanted"
        raise UnsupportedModelError(model, problem, "Correct config.json, or get the checkpoint again.")
    return rows, columns


def _groups(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns what compressed-tensors' configuration says of groups of layers."""
    groups = found.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def _whole(model: str, found: Mapping[str, Any], name: str, default: int) -> int:
    value = found.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        problem = f"its quantization_config says {name}={value!r}, which is no whole number"
        raise UnsupportedModelError(model, problem, "Correct config.json, or get the checkpoint again.")
    return value


# --- What the layouts of quantised matrices share: a protocol, codes in words of 32 bits, and groups of inputs.


#: The headers and the tensors of a matrix, by what stands behind the path of its layer.
Headers = Mapping[str, StoredTensor]
Tensors = Mapping[str, Tensor]
#: Reads one of the tensors.
Read = Callable[[str], Tensor]


class MisshapenError(ValueError):
    """Tensors of a matrix that do not belong together. The message is what is wrong."""


class Layout(Protocol):
    """Says how a method keeps a matrix in several tensors."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The last parts of the names of its tensors, the codes first."""

    @property
    def stays_rounded(self) -> bool:
        """Tells whether matrices are kept as few bits, so that rows of 8 bits can be multiplied with them."""

    def holds(self, headers: Headers) -> bool:
        """Tells whether a layer with these tensors is quantised."""

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        """[out_features, in_features]. Raises MisshapenError, or KeyError and ValueError where tensors are not what they
        are."""

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        """The weights, which stand for `dtype`. Raises MisshapenError."""


def from_words(words: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, n * 32 / bits] of words int32 [rows, n], the first one in the lowest bits."""
    check(words.dtype == torch.int32, f"codes are kept in {words.dtype}, and not in int32")
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)


def check(condition: bool, problem: str) -> None:
    """Raise MisshapenError where the condition does not hold."""
    if not condition:
        raise MisshapenError(problem)


def check_bits(bits: int) -> None:
    """Raise MisshapenError where weights have other than 4 or 8 bits."""
    check(bits in (4, 8), f"weights of {bits} bits are not known, but those of 4 or 8")


def grouped(
    codes: Tensor,
    bits: int,
    scale: Tensor,
    zero: Tensor | None,
    dtype: torch.dtype,
    group_of: Tensor | None = None,
    *,
    in_blocks: bool = False,
) -> StoredWeight:
    """Weights in groups of inputs.

    Args:
        codes: uint8 [out_features, in_features] from 0 on.
        scale: [out_features, groups]
        zero: uint8 [out_features, groups], or None for the middle of the codes everywhere.
        group_of: [in_features] the group of each input; None where groups follow one another.
    """
    rows, cols = codes.shape
    check(scale.dim() == 2 and len(scale) == rows, f"scales of shape {list(scale.shape)} do not fit {rows} outputs")
    groups = scale.shape[1]
    check(groups > 0 and cols % groups == 0, f"{groups} groups do not divide {cols} inputs")
    check(zero is None or zero.shape == scale.shape, "zero points have another shape than scales")
    check(bool(scale.isfinite().all()), "scales are not finite")
    group, order = cols // groups, _order(group_of, groups, cols)
    if order is not None:
        codes = codes[:, order]
    if not in_blocks and zero is not None and bool((zero == 2 ** (bits - 1)).all()):
        zero = None
    scale = _narrow(scale)
    known = _known(codes, bits, group, scale, zero, dtype) if order is None and not in_blocks else None
    if known is not None:
        return known
    check(group % UNIT == 0, f"groups of {group} inputs are not known, but those of {UNIT} or multiples of it")
    check(scale.dtype != torch.float32, "scales of groups are float32, and neither float16 nor bfloat16 holds them exactly")
    fmt = whole_numbers(bits, group, scale.dtype, has_zeros=zero is not None)
    return in_order(stored_blocks(fmt, dtype, codes, scale.contiguous(), zero), order)


def _known(
    codes: Tensor, bits: int, group: int, scale: Tensor, zero: Tensor | None, dtype: torch.dtype
) -> StoredWeight | None:
    """Returns the same weights in a format that has kernels of its own, where one holds them exactly."""
    signed = bits == 8 and zero is None and not bool((codes == 0).any())  # -128 has no counterpart
    numbers = (codes ^ 128).view(torch.int8)
    if signed and group == codes.shape[1]:
        return StoredWeight(FORMATS["int8"], dtype, numbers, scale[:, 0].to(torch.float32))
    if group not in GROUPS or scale.dtype != torch.bfloat16:
        return None
    if bits == 4:
        fmt = FORMATS[f"int4-g{group}" + "-asym" * (zero is not None)]
        return StoredWeight(fmt, dtype, folded(codes), scale.contiguous(), zero)
    return StoredWeight(FORMATS[f"int8-g{group}"], dtype, numbers, scale.contiguous()) if signed else None


def _narrow(scale: Tensor) -> Tensor:
    """Scales in 16 bits where these hold them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if scale.dtype == torch.float32 and torch.equal(scale.to(dtype).to(torch.float32), scale):
            return scale.to(dtype)
    return scale


def _order(group_of: Tensor | None, groups: int, cols: int) -> Tensor | None:
    """The inputs in the order of their groups; None where that is their own order."""
    if group_of is None:
        return None
    check(group_of.shape == (cols,), f"groups of {list(group_of.shape)} inputs are given, and there are {cols}")
    group_of = group_of.long()
    check(bool(((group_of >= 0) & (group_of < groups)).all()), f"an input has a group beyond the {groups} that there are")
    sizes = torch.bincount(group_of, minlength=groups)
    check(bool((sizes == cols // groups).all()), f"groups have between {int(sizes.min())} and {int(sizes.max())} inputs")
    order = torch.argsort(group_of, stable=True)
    return None if torch.equal(order, torch.arange(cols)) else order


# --- The layout of GPTQ, as AutoGPTQ and GPTQModel write it.
#
# Codes lie in words of 32 bits along the inputs, `qweight` [in_features * bits / 32, out_features], and zero points
# along the outputs, `qzeros` [groups, out_features * bits / 32]. `scales` are [groups, out_features], and `g_idx`
# [in_features] says the group of each input. In the first version a zero point is kept less 1, and the subtraction
# borrows from its neighbour in the word where it was 0; so 1 is added to whole words, as GPTQModel does.


#: One in every code of a word.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Gptq:
    """Matrices of GPTQ."""

    bits: int  # of a code
    first_version: bool  # whether zero points are kept less 1
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    stays_rounded: bool = True

    def holds(self, headers: Headers) -> bool:
        return "qweight" in headers

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        check_bits(self.bits)
        words, outputs = headers["qweight"].shape
        return outputs, words * (32 // self.bits)

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        codes = from_words(tensors["qweight"].t(), self.bits)
        zeros = tensors["qzeros"]
        check(zeros.dtype == torch.int32, f"zero points are kept in {zeros.dtype}, and not in int32")
        if self.first_version:
            zeros = zeros + _ONES[self.bits]
        zero = from_words(zeros, self.bits)[:, : len(codes)].t().contiguous()
        return grouped(codes, self.bits, tensors["scales"].t(), zero, dtype, tensors.get("g_idx"), in_blocks=in_blocks)


# --- The layout of AWQ that AutoAWQ calls "gemm".
#
# Codes and zero points lie in words of 32 bits along the outputs, `qweight` [in_features, out_features / 8] and
# `qzeros` [groups, out_features / 8]. The eight codes of a word belong to its outputs 0, 2, 4, 6, 1, 3, 5 and 7, from
# the lowest bits on. `scales` are [groups, out_features].


#: Where in its word the code of each output lies.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq:
    """Matrices of AWQ."""

    bits: int  # of a code
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales")
    stays_rounded: bool = True

    def holds(self, headers: Headers) -> bool:
        return "qweight" in headers

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        check(self.bits == 4, f"weights of {self.bits} bits are not known, but those of 4")
        inputs, words = headers["qweight"].shape
        return 8 * words, inputs

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        codes, zero = (_by_output(tensors[name]) for name in ("qweight", "qzeros"))
        return grouped(codes, 4, tensors["scales"].t(), zero, dtype, in_blocks=in_blocks)


def _by_output(words: Tensor) -> Tensor:
    """uint8 [8 * n, rows] of words [rows, n]."""
    codes = from_words(words, 4).reshape(len(words), -1, 8)
    return codes[..., list(_PLACES)].flatten(1).t().contiguous()


# --- Matrices of numbers of 8 bits with a scale for each block of rows and columns: FP8, as transformers'
# FineGrainedFP8Config declares it.
#
# `weight` [out_features, in_features] is float8, and `weight_scale_inv` [row blocks, column blocks] is what each block
# is multiplied with, or a single number. The kernels have no products with such blocks, so a matrix is unfolded to the
# dtype of the model, as transformers unfolds it on a CPU, and takes as much memory as in the original checkpoint.


_SCALE = "weight_scale_inv"


@dataclass(frozen=True)
class Fp8:
    """Matrices of float8 in blocks."""

    block: tuple[int, int] | None  # rows and columns of a block. None where a matrix has one scale.
    suffixes: tuple[str, ...] = ("weight", _SCALE, "activation_scale")
    stays_rounded: bool = False

    def holds(self, headers: Headers) -> bool:
        return _SCALE in headers or ("weight" in headers and headers["weight"].dtype.startswith("F8_"))

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        kept = headers["weight"].dtype
        check(kept.startswith("F8_E"), f"weights are {kept}, and not numbers of 8 bits with a fraction")
        outputs, inputs = headers["weight"].shape
        return outputs, inputs

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        codes, scale = tensors["weight"], self._by_column(_wide(tensors[_SCALE]), tensors["weight"].shape)
        found = torch.empty(codes.shape, dtype=dtype)
        height = codes.shape[0] if self.block is None else self.block[0]
        for rows in parts(codes):
            block_of = torch.arange(rows.start, min(rows.stop, len(codes))) // height
            wide = codes[rows].to(torch.float32).mul_(scale[block_of])
            check(bool(wide.isfinite().all()), "weights are not finite")
            found[rows] = wide.to(dtype)
        return plain(found if is_plain(dtype) else found.to(torch.float32))

    def _by_column(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """float32 [row blocks, in_features]"""
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(-(-shape[0] // (self.block or shape)[0]), shape[1])
        check(self.block is not None, f"there are {scale.numel()} scales, and the configuration has no weight_block_size")
        assert self.block is not None, "this was checked"
        wanted = [-(-size // step) for size, step in zip(shape, self.block, strict=True)]
        check(list(scale.shape) == wanted, f"scales of shape {list(scale.shape)} do not fit {wanted} blocks")
        return scale.repeat_interleave(self.block[1], 1)[:, : shape[1]]


def _wide(scale: Tensor) -> Tensor:
    """Scales in float32. Bytes are powers of two, by their exponents and 127."""
    return (scale.to(torch.float32) - 127.0).exp2() if scale.dtype == torch.uint8 else scale.to(torch.float32)


# --- The layouts of compressed-tensors with whole numbers.
#
# "pack-quantized" keeps codes in words of 32 bits along the inputs, `weight_packed`, beside `weight_shape`; zero points
# lie in words along the outputs. "int-quantized" keeps int8 as `weight`. Both have `weight_scale` [out_features,
# groups], and older files a `weight_g_idx` [in_features] with the group of each input.


@dataclass(frozen=True)
class Compressed:
    """Matrices of compressed-tensors."""

    suffixes: tuple[str, ...] = (
        "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    )  # fmt: skip
    stays_rounded: bool = True

    def holds(self, headers: Headers) -> bool:
        return "weight_packed" in headers or ("weight" in headers and "weight_scale" in headers)

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        if "weight" in headers:
            check(
                headers["weight"].dtype == "I8", f"weights are {headers['weight'].dtype}, and not whole numbers of 8 bits"
            )
            outputs, inputs = headers["weight"].shape
            return outputs, inputs
        outputs, inputs = read("weight_shape").tolist()
        check(headers["weight_packed"].shape[0] == outputs, f"codes of {outputs} outputs are missing")
        return outputs, inputs

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        if "weight" in tensors:
            bits, codes = 8, tensors["weight"].view(torch.uint8) ^ 128
        else:
            outputs, inputs = tensors["weight_shape"].tolist()
            words = tensors["weight_packed"]
            bits = 32 * words.shape[1] // inputs
            check_bits(bits)
            codes = from_words(words, bits)[:, :inputs]
            check(codes.shape == (outputs, inputs), f"there are codes for {codes.shape[1]} inputs of {inputs}")
        scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
        if scale.numel() == 1:  # one for the whole matrix
            scale = scale.reshape(1, 1).expand(len(codes), 1)
            zero = None if zero is None else zero.reshape(1, 1).expand(len(codes), 1)
        if scale.dim() == 1:
            scale = scale[:, None]
        zeros, order = _zeros(zero, bits, len(codes)), tensors.get("weight_g_idx")
        return grouped(codes, bits, scale, zeros, dtype, order, in_blocks=in_blocks)


def _zeros(zero: Tensor | None, bits: int, outputs: int) -> Tensor | None:
    """uint8 [outputs, groups]"""
    if zero is None:
        return None
    if zero.dtype == torch.int32:
        return from_words(zero.t(), bits)[:, :outputs].t().contiguous()
    check(zero.dtype == torch.int8, f"zero points are kept in {zero.dtype}, and neither in int32 nor in int8")
    codes = zero.to(torch.int16) + 2 ** (bits - 1)
    return torch.as_tensor(codes.to(torch.uint8).reshape(outputs, -1))
