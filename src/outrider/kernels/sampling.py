"""Probabilities and draws over large vocabularies by kernels, which do not sort: compiled C on a CPU, Triton on a GPU.

Every function takes float32 or float64 tensors on one device, and `usable` says whether they are such.
`outrider.verify` has the stock functions, which give the same results up to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.layout import DrawCall, ProbsCall, ResidualCall
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.kernels.triton.devices import runs_on

_I64 = ctypes.c_int64


def usable(*tensors: Tensor) -> bool:
    """Tells whether there are kernels and they take these tensors [n, vocab_size]."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if dtype not in (torch.float32, torch.float64) or any(t.dtype != dtype or t.device != device for t in tensors):
        return False
    return runs_on(device) or (device.type == "cpu" and kernel_library() is not None)


def target_probs(
    logits: Tensor,  # [n, vocab_size]
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> Tensor:
    """Probabilities [n, vocab_size], see `outrider.verify.logits.target_probs`. Temperature 0 means a greedy row."""
    if runs_on(logits.device):
        from outrider.kernels.triton import sampling  # which imports Triton

        return sampling.target_probs(logits, temperature, top_k, top_p, min_p)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, size = logits.shape
    probs = torch.empty(num_rows, size, dtype=logits.dtype)
    library = _library()
    threads = min(library.num_threads, num_rows)
    scratch = torch.empty(threads, size, dtype=logits.dtype)
    histogram_bytes = library.function("histogram_bytes", logits.dtype, _I64)()
    histograms = torch.empty(threads, histogram_bytes, dtype=torch.uint8)
    reals = np.array([temperature, top_p, min_p], np.float64)
    counts = np.array(top_k, np.int64)
    temperatures, nuclei, floors = (row.ctypes.data for row in reals)
    call = ProbsCall(
        num_rows,
        size,
        logits.data_ptr(),
        logits.stride(0),
        temperatures,
        counts.ctypes.data,
        nuclei,
        floors,
        probs.data_ptr(),
        scratch.data_ptr(),
        histograms.data_ptr(),
        threads,
    )
    library.function("target_probs", logits.dtype)(ctypes.byref(call))
    return probs


def race(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw tokens [n] by Gumbel-max: the largest p / -log(u), where each token has a u from the bits [n] of `noise`."""
    if runs_on(probs.device):
        from outrider.kernels.triton import sampling  # which imports Triton

        return sampling.race(probs, noise)
    return _drawn("race", probs, noise)


def invert(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw tokens [n] by inverting the cumulative distribution, with one uniform number from the bits [n] of `noise`."""
    if runs_on(probs.device):
        from outrider.kernels.triton import sampling  # which imports Triton

        return sampling.invert(probs, noise)
    return _drawn("invert", probs, noise)


def likeliest(logits: Tensor) -> Tensor:
    """The place of the largest entry of each row [n], on a CPU; the lowest one among equals."""
    return _drawn("likeliest", logits, None)


def likeliest_finite(logits: Tensor) -> list[int]:
    """As `likeliest`, but -1 where the largest entry of a row is not finite, or an entry of it is not a number."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens = (_I64 * len(logits))()  # no tensor: behind a pass each operation waits for its code
    call = DrawCall(*logits.shape, logits.data_ptr(), logits.stride(0), None, ctypes.addressof(tokens))
    _run("likeliest_finite", logits.dtype, call)
    return list(tokens)


def largest_chances(logits: Tensor) -> list[float]:
    """The probability of the largest entry of each row of logits, on a CPU."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    chances = (ctypes.c_double * len(logits))()
    call = DrawCall(*logits.shape, logits.data_ptr(), logits.stride(0), None, None, ctypes.addressof(chances))
    _run("largest_chances", logits.dtype, call)
    return list(chances)


def owed_mass(target: Tensor, draft: Tensor, weight: Tensor) -> Tensor:
    """The sums [b, n] of max(weight * target - draft, 0) over rows of probabilities [b, n, vocab_size]."""
    if runs_on(target.device):
        from outrider.kernels.triton import sampling  # which imports Triton

        return sampling.owed_mass(target, draft, weight)
    mass = torch.empty(weight.shape, dtype=target.dtype)
    _owed(target, draft, weight, mass, None)
    return mass


def owed_probs(target: Tensor, draft: Tensor, weight: Tensor) -> Tensor:
    """max(weight * target - draft, 0), normalised [b, n, vocab_size]. It is the target where all of it is 0."""
    if runs_on(target.device):
        from outrider.kernels.triton import sampling  # which imports Triton

        return sampling.owed_probs(target, draft, weight)
    probs = torch.empty(target.shape, dtype=target.dtype)
    _owed(target, draft, weight, None, probs)
    return probs


def _drawn(name: str, probs: Tensor, noise: Tensor | None) -> Tensor:
    probs = probs if probs.stride(-1) == 1 else probs.contiguous()
    tokens = torch.empty(len(probs), dtype=torch.int64)
    bits = None if noise is None else noise.contiguous()
    address = None if bits is None else bits.data_ptr()
    call = DrawCall(*probs.shape, probs.data_ptr(), probs.stride(0), address, tokens.data_ptr())
    _run(name, probs.dtype, call)
    return tokens


def _owed(target: Tensor, draft: Tensor, weight: Tensor, mass: Tensor | None, probs: Tensor | None) -> None:
    target, draft = _in_groups(target), _in_groups(draft)  # slices are not copied, which would take as long as the sums
    weight = weight.to(target.dtype).contiguous()
    size, together = target.shape[-1], target.shape[1]
    strides = target.stride(0), draft.stride(0)
    results = [None if t is None else t.data_ptr() for t in (mass, probs)]
    pointers = [t.data_ptr() for t in (target, draft, weight)]
    _run("residual", target.dtype, ResidualCall(weight.numel(), size, together, *strides, *pointers, *results))


def _in_groups(rows: Tensor) -> Tensor:
    """Values [b, n, vocab_size] whose n rows lie one after another in memory."""
    adjoining = rows.stride(-1) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[-1])
    return rows if adjoining else rows.contiguous()


def _run(name: str, real: torch.dtype, call: Any) -> None:
    library = _library()
    call.threads = min(library.num_threads, call.rows)  # a row is one thread's, and waking a second takes time
    library.function(name, real)(ctypes.byref(call))


def _library() -> KernelLibrary:
    library = kernel_library()
    assert library is not None, "callers ask `usable` first"
    return library
