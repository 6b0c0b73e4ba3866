"""Draws from rows of probabilities and debts of the target, on a GPU, with the bits of noise that a CPU has.

One program computes a row, so that its result does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.attention import OPTIONS

ENTRIES = 1024


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
        kernel[(len(probs),)](probs, probs.stride(0), noise, tokens, probs.shape[1], ENTRIES=ENTRIES, **OPTIONS)
    return tokens


def _owed(target: Tensor, draft: Tensor, weight: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    target, draft = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (target, draft))
    mass = torch.empty(weight.shape, dtype=target.dtype, device=target.device)
    if mass.numel():
        _debt[(weight.shape[0], weight.shape[1])](
            target, *target.stride()[:2], draft, *draft.stride()[:2], weight.to(target.dtype).contiguous(), mass, probs,
            target.shape[2], ENTRIES=ENTRIES, PROBS=probs.numel() > 0, **OPTIONS,
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
