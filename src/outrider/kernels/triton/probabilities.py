"""Probabilities of rows of logits, on a GPU, without sorting the vocabulary: temperature, top_k, top_p, min_p.

One program computes a row, so that its bits do not depend on other rows. The edges of top_k and top_p are found digit by
digit: the bits of a number, taken as a whole number, are ordered as the numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.attention import OPTIONS

#: Entries that a program looks at together, and values of a digit of 4 bits.
ENTRIES, DIGITS = 512, 16


def target_probs(
    logits: Tensor,  # [n, vocab_size]
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> Tensor:
    """Probabilities [n, vocab_size], see `outrider.verify.logits.target_probs`. Temperature 0 means a greedy row."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    probs = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    # Rows of even length begin at multiples of 16 bytes, so that the kernel is not compiled anew for odd numbers of rows.
    reals = torch.zeros(4, len(logits) + len(logits) % 2, dtype=torch.float64)
    reals[:, : len(logits)] = torch.tensor([temperature, top_p, min_p, top_k], dtype=torch.float64)
    if probs.numel():
        _target_probs[(len(logits),)](
            logits, logits.stride(0), *reals.to(logits.device), probs, probs.shape[1],
            BITS=8 * logits.element_size(), ENTRIES=ENTRIES, DIGITS=DIGITS, **OPTIONS,
        )  # fmt: skip
    return probs


@triton.jit
def _key(values, BITS: tl.constexpr):
    """Whole numbers without a sign that are ordered as `values` are, minus infinity included; zeros have one."""
    values = tl.where(values == 0, 0.0, values)
    bits = values.to(tl.uint64 if BITS == 64 else tl.uint32, bitcast=True)
    sign = bits >> (BITS - 1) << (BITS - 1)
    return tl.where(sign != 0, ~bits, bits + (sign + 1 << (BITS - 1)))


@triton.jit
def _edge(amounts, limit):
    """The digit at which a walk from the largest digit down reaches `limit`, and what the larger ones amount to.

    `amounts` [DIGITS] are minus infinity for digits that no entry has. Where all do not reach it, the least digit is taken.
    """
    digits = tl.arange(0, 16)
    present = amounts > float("-inf")
    amounts = tl.where(present, amounts, 0.0)
    above = tl.sum(tl.where(digits[None, :] > digits[:, None], amounts[None, :], 0.0), 1)
    reached = tl.max(tl.where(present & (above + amounts >= limit), digits, -1), 0)
    least = tl.min(tl.where(present, digits, 16), 0)
    digit = tl.where(reached < 0, least, reached)
    return digit, tl.sum(tl.where(digits == digit, above, 0.0), 0)


@triton.jit
def _weights(logits, at, size, largest, temperature, floor, BITS: tl.constexpr):
    """e^((x - largest) / temperature) of entries, and 0 where their key is below `floor`."""
    values = tl.load(logits + at, at < size, float("-inf"))
    return tl.where(_key(values, BITS) >= floor, tl.exp((values - largest) / temperature), 0.0)


@triton.jit
def _target_probs(
    logits, stride,  # [n, size] and the distance of its rows
    temperatures, nuclei, floors, counts,  # [n] float64 temperature, top_p, min_p, top_k
    probs, size,  # [n, size]
    BITS: tl.constexpr, ENTRIES: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    probs += row * size
    temperature = tl.load(temperatures + row)
    largest = _largest(logits, size, ENTRIES)
    if temperature == 0:
        _write_likeliest(logits, size, largest, probs, ENTRIES)
    else:
        # A name of its own: a compiled branch may not give a name another type, though the interpreter lets it.
        divisor = tl.maximum(temperature, 2.2250738585072014e-308 if BITS == 64 else 1.17549435e-38)
        divisor = divisor.to(logits.dtype.element_ty)
        floor = _kth_largest(logits, size, tl.load(counts + row), BITS, ENTRIES, DIGITS)
        edge, ties, mass = _nucleus(
            logits, size, largest, divisor, floor, tl.load(nuclei + row), BITS, ENTRIES, DIGITS
        )  # fmt: skip
        smallest = _key(tl.load(floors + row).to(logits.dtype.element_ty), BITS)
        if (tl.load(floors + row) > 0) & (smallest > edge):
            edge, ties = smallest, tl.full([], 2147483647, tl.int32)
            mass = _mass(logits, size, largest, divisor, floor, edge, BITS, ENTRIES)
        _write_kept(logits, size, largest, divisor, floor, edge, ties, mass, probs, BITS, ENTRIES)


@triton.jit
def _largest(logits, size, ENTRIES: tl.constexpr):
    entries = tl.arange(0, ENTRIES)
    most = tl.full([ENTRIES], float("-inf"), logits.dtype.element_ty)
    for begin in range(0, size, ENTRIES):
        most = tl.maximum(most, tl.load(logits + begin + entries, begin + entries < size, float("-inf")))
    return tl.max(most, 0)


@triton.jit
def _write_likeliest(logits, size, largest, probs, ENTRIES: tl.constexpr):
    """All probability lies with the first of the entries that are equal to the largest."""
    entries = tl.arange(0, ENTRIES)
    best = tl.full([], 2147483647, tl.int32)
    for begin in range(0, size, ENTRIES):
        at = begin + entries
        equal = tl.load(logits + at, at < size, float("-inf")) == largest
        best = tl.minimum(best, tl.min(tl.where(equal & (at < size), at, 2147483647), 0))
    for begin in range(0, size, ENTRIES):
        at = begin + entries
        tl.store(probs + at, (at == best).to(probs.dtype.element_ty), at < size)


@triton.jit
def _kth_largest(logits, size, count, BITS: tl.constexpr, ENTRIES: tl.constexpr, DIGITS: tl.constexpr):
    """The key of the `count`-th largest entry, which is the smallest that top_k keeps; 0 where it keeps all."""
    entries, digits = tl.arange(0, ENTRIES), tl.arange(0, DIGITS)
    floor = tl.full([], 0, tl.uint64 if BITS == 64 else tl.uint32)
    if (count > 0) & (count < size):
        for turn in range(BITS // 4):
            shift = BITS - 4 - 4 * turn
            amounts = tl.zeros([DIGITS], tl.float64)
            for begin in range(0, size, ENTRIES):
                at = begin + entries
                key = _key(tl.load(logits + at, at < size, float("-inf")), BITS)
                alike = (at < size) & (key >> shift >> 4 == floor >> shift >> 4)
                alike = alike[:, None] & ((key >> shift & 15)[:, None] == digits[None, :].to(floor.dtype))
                amounts += tl.sum(alike.to(tl.int32), 0).to(tl.float64)
            digit, above = _edge(tl.where(amounts > 0, amounts, float("-inf")), count)
            count -= above
            floor += digit.to(floor.dtype) << shift
    return floor


@triton.jit
def _mass(logits, size, largest, temperature, floor, edge, BITS: tl.constexpr, ENTRIES: tl.constexpr):
    """The sum of the weights whose key is not below `edge`."""
    entries = tl.arange(0, ENTRIES)
    mass = tl.zeros([], tl.float64)
    for begin in range(0, size, ENTRIES):
        weights = _weights(logits, begin + entries, size, largest, temperature, floor, BITS)
        mass += tl.sum(tl.where(_key(weights, BITS) >= edge, weights.to(tl.float64), 0.0), 0)
    return mass


@triton.jit
def _nucleus(
    logits, size, largest, temperature, floor, nucleus, BITS: tl.constexpr, ENTRIES: tl.constexpr, DIGITS: tl.constexpr
):  # fmt: skip
    """What top_p keeps: the key of the smallest weight, how many of those that are equal to it, and the sum of all kept."""
    entries, digits = tl.arange(0, ENTRIES), tl.arange(0, DIGITS)
    edge = floor * 0
    ties = tl.full([], 2147483647, tl.int32)
    mass = _mass(logits, size, largest, temperature, floor, edge, BITS, ENTRIES)
    if nucleus < 1:
        limit = nucleus * mass
        larger, here = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
        for turn in range(BITS // 4):
            shift = BITS - 4 - 4 * turn
            amounts = tl.zeros([DIGITS], tl.float64)
            present = tl.zeros([DIGITS], tl.int32)
            for begin in range(0, size, ENTRIES):
                weights = _weights(logits, begin + entries, size, largest, temperature, floor, BITS)
                key = _key(weights, BITS)
                alike = (begin + entries < size) & (key >> shift >> 4 == edge >> shift >> 4)
                alike = alike[:, None] & ((key >> shift & 15)[:, None] == digits[None, :].to(floor.dtype))
                amounts += tl.sum(tl.where(alike, weights[:, None].to(tl.float64), 0.0), 0)
                present += tl.sum(alike.to(tl.int32), 0)
            digit, above = _edge(tl.where(present > 0, amounts, float("-inf")), limit - larger)
            larger += above
            ties = tl.sum(tl.where(digits == digit, present, 0), 0)
            here = tl.sum(tl.where(digits == digit, amounts, 0.0), 0)
            edge += digit.to(floor.dtype) << shift
        each = here / ties
        wanted = tl.maximum(tl.ceil((limit - larger) / tl.maximum(each, 2.2250738585072014e-308)), 1.0)
        ties = tl.minimum(wanted, ties.to(tl.float64)).to(tl.int32)
        mass = larger + ties * each
    return edge, ties, mass


@triton.jit
def _write_kept(
    logits, size, largest, temperature, floor, edge, ties, mass, probs, BITS: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """Weights above the edge, and the first `ties` of those that are equal to it, over their sum."""
    entries = tl.arange(0, ENTRIES)
    scale = (1.0 / mass).to(logits.dtype.element_ty)
    before = tl.zeros([], tl.int32)  # entries equal to the edge that came already
    for begin in range(0, size, ENTRIES):
        at = begin + entries
        weights = _weights(logits, at, size, largest, temperature, floor, BITS)
        key = _key(weights, BITS)
        tied = ((key == edge) & (at < size)).to(tl.int32)
        stays = (key > edge) | ((tied > 0) & (before + tl.cumsum(tied, 0) <= ties))
        tl.store(probs + at, tl.where(stays, weights * scale, 0.0), at < size)
        before += tl.sum(tied, 0)
