"""What the layouts of quantised matrices share: a protocol, codes in words of 32 bits, and groups of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.formats.blocks import UNIT, in_order, stored_blocks, whole_numbers
from outrider.kernels.formats.int4 import folded
from outrider.kernels.formats.registry import FORMATS, GROUPS
from outrider.kernels.formats.stored import StoredWeight
from outrider.model.loading.fit import StoredTensor

#: The headers and the tensors of a matrix, by what stands behind the path of its layer.
Headers = Mapping[str, StoredTensor]
Tensors = Mapping[str, Tensor]
#: Reads one of the tensors.
Read = Callable[[str], Tensor]


class MisshapenError(ValueError):
    """Tensors of a matrix that do not belong together. The message is what is wrong."""


class Layout(Protocol):
    """How a method keeps a matrix in several tensors."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The last parts of the names of its tensors, the codes first."""

    @property
    def stays_rounded(self) -> bool:
        """Whether matrices are kept as few bits, so that rows of 8 bits can be multiplied with them."""

    def holds(self, headers: Headers) -> bool:
        """Whether a layer with these tensors is quantised."""

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        """[out_features, in_features]. Raises MisshapenError, or KeyError and ValueError where tensors are not what they
        are."""

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        """The weights, which stand for `dtype`. Raises MisshapenError.

        Args:
            tensors: Those of the matrix.
            dtype: What they stand for.
            in_blocks: Whether rounded weights are kept in blocks, so that matrices of one layout have one format, whatever
                their numbers are.
        """


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
        bits: 4 or 8.
        scale: [out_features, groups]
        zero: uint8 [out_features, groups], or None for the middle of the codes everywhere.
        dtype: The dtype that the weights stand for.
        group_of: [in_features] the group of each input; None where groups follow one another.
        in_blocks: See Layout.stored.

    Raises:
        MisshapenError: Shapes do not fit, or scales cannot be kept.
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
    """The same weights in a format that has kernels of its own, where one holds them exactly."""
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
