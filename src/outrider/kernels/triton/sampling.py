"""Probabilities and draws on a GPU, without sorting the vocabulary, with the bits of noise that a CPU has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.attention import OPTIONS

# --- Probabilities of rows of logits, on a GPU, without sorting the vocabulary: temperature, top_k, top_p, min_p.
#
# One program computes a row, so that its bits do not depend on other rows. The edges of top_k and top_p are found digit
# by digit: the bits of a number, taken as a whole number, are ordered as the numbers are.


#: Entries that a program looks at together, and its warps (`make gpu STAGE=cuts` tries others); values of 4 bits.
_PROBABILITY_ENTRIES, _PROBABILITY_WARPS, DIGITS = 512, 4, 16


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
    reals = _parameters(tuple(temperature), tuple(top_p), tuple(min_p), tuple(top_k), logits.device)
    if probs.numel():
        _target_probs[(len(logits),)](
            logits, logits.stride(0), *reals, probs, probs.shape[1],
            BITS=8 * logits.element_size(), ENTRIES=_PROBABILITY_ENTRIES, DIGITS=DIGITS, num_warps=_PROBABILITY_WARPS,
            **OPTIONS,
        )  # fmt: skip
    return probs


@lru_cache(maxsize=128)  # texts keep their parameters, so most steps have those of the step before
def _parameters(*columns: Any) -> Tensor:
    """Temperatures, top_p, min_p and top_k [4, n] in float64 on a device, which is the last argument."""
    *lists, device = columns
    # Rows of even length begin at multiples of 16 bytes, so that the kernel is not compiled anew for odd numbers of rows.
    reals = torch.zeros(4, len(lists[0]) + len(lists[0]) % 2, dtype=torch.float64)
    reals[:, : len(lists[0])] = torch.tensor(lists, dtype=torch.float64)
    return reals.to(device)


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
    """Finds what top_p keeps: the key of the smallest weight, how many of those that are equal to it, and the sum of all
    kept."""
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


# --- Draws from rows of probabilities and debts of the target, on a GPU, with the bits of noise that a CPU has.
#
# One program computes a row, so that its result does not depend on other rows.


_DRAW_ENTRIES = 1024


def race(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw tokens [n] by Gumbel-max: the largest p / -log(u), where each token has a u from the bits [n] of `noise`."""
    return _drawn(_race, probs, noise)


def invert(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw tokens [n] by inverting the cumulative distribution, with one uniform number from the bits [n] of `noise`."""
    return _drawn(_invert, probs, noise)


def owed_mass(target: Tensor, draft: Tensor, weight: Tensor) -> Tensor:
    """The sums [b, n] of max(weight * target - draft, 0) over rows of probabilities [b, n, vocab_size]."""
    return _owed(target, draft, weight, target.new_empty(0))[0]


def owed_probs(target: Tensor, draft: Tensor, weight: Tensor) -> Tensor:
    """max(weight * target - draft, 0), normalised [b, n, vocab_size]. It is the target where all of it is 0."""
    return _owed(target, draft, weight, torch.empty(target.shape, dtype=target.dtype, device=target.device))[1]


def _drawn(kernel: triton.JITFunction, probs: Tensor, noise: Tensor) -> Tensor:
    probs = probs if probs.stride(-1) == 1 else probs.contiguous()
    tokens = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    if len(probs):
        kernel[(len(probs),)](probs, probs.stride(0), noise, tokens, probs.shape[1], ENTRIES=_DRAW_ENTRIES, **OPTIONS)
    return tokens


def _owed(target: Tensor, draft: Tensor, weight: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    target, draft = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (target, draft))
    mass = torch.empty(weight.shape, dtype=target.dtype, device=target.device)
    if mass.numel():
        _debt[(weight.shape[0], weight.shape[1])](
            target, *target.stride()[:2], draft, *draft.stride()[:2], weight.to(target.dtype).contiguous(), mass, probs,
            target.shape[2], ENTRIES=_DRAW_ENTRIES, PROBS=probs.numel() > 0, **OPTIONS,
        )  # fmt: skip
    return mass, probs


@triton.jit
def _uniform(bits):
    """Numbers strictly between 0 and 1 from bits, in float64."""
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _race(probs, stride, noise, tokens, size, ENTRIES: tl.constexpr):
    row, entries = tl.program_id(0).to(tl.int64), tl.arange(0, ENTRIES)
    own = tl.load(noise + row).to(tl.uint64, bitcast=True)
    best, winner = tl.full([], -1.0, tl.float64), tl.full([], 0, tl.int32)
    for begin in range(0, size, ENTRIES):
        at = begin + entries
        p = tl.load(probs + row * stride + at, at < size, 0.0).to(tl.float64)
        x = own + (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        times = tl.where(p > 0, p / -tl.log(_uniform(x ^ (x >> 31))), -1.0)
        here = tl.max(times, 0)
        first = tl.min(tl.where(times == here, at, 2147483647), 0)
        winner = tl.where(here > best, first, winner)
        best = tl.maximum(best, here)
    tl.store(tokens + row, winner.to(tl.int64))


@triton.jit
def _invert(probs, stride, noise, tokens, size, ENTRIES: tl.constexpr):
    row, entries = tl.program_id(0).to(tl.int64), tl.arange(0, ENTRIES)
    total = tl.zeros([], tl.float64)
    for begin in range(0, size, ENTRIES):
        at = begin + entries
        total += tl.sum(tl.load(probs + row * stride + at, at < size, 0.0).to(tl.float64), 0)
    wanted = _uniform(tl.load(noise + row).to(tl.uint64, bitcast=True)) * total
    before = tl.zeros([], tl.float64)
    found, last = tl.full([], 2147483647, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, size, ENTRIES):
        at = begin + entries
        p = tl.load(probs + row * stride + at, at < size, 0.0).to(tl.float64)
        # Sums in parallel may grow by a rounding where p is 0, so that such a token is left out by name.
        inside = (p > 0) & (before + tl.cumsum(p, 0) > wanted)
        found = tl.minimum(found, tl.min(tl.where(inside, at, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(p > 0, at, 0), 0))
        before += tl.sum(p, 0)
    tl.store(tokens + row, tl.minimum(found, last).to(tl.int64))  # rounding may carry the walk past the last one


@triton.jit
def _debt(
    target, target_group, target_row, draft, draft_group, draft_row,  # [b, n, size], and distances of groups and rows
    weights, mass, probs,  # [b, n] twice, [b, n, size], which is written with PROBS alone
    size, ENTRIES: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    group, within, entries = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ENTRIES)
    target += group * target_group + within * target_row
    draft += group * draft_group + within * draft_row
    row = group * tl.num_programs(1) + within
    weight = tl.load(weights + row)
    total = tl.zeros([], tl.float64)
    for begin in range(0, size, ENTRIES):
        at = begin + entries
        owed = weight * tl.load(target + at, at < size, 0.0) - tl.load(draft + at, at < size, 0.0)
        total += tl.sum(tl.maximum(owed, 0.0).to(tl.float64), 0)
    tl.store(mass + row, total.to(mass.dtype.element_ty))
    if PROBS:
        for begin in range(0, size, ENTRIES):
            at = begin + entries
            wanted = tl.load(target + at, at < size, 0.0)
            owed = tl.maximum(weight * wanted - tl.load(draft + at, at < size, 0.0), 0.0)
            share = (owed.to(tl.float64) / tl.where(total > 0, total, 1.0)).to(wanted.dtype)
            tl.store(probs + row * size + at, tl.where(total > 0, share, wanted), at < size)
