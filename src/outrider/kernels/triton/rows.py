"""Norms and rotary embeddings of rows on a GPU, in one launch each."""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.devices import KNOWN_DTYPES

# Stock operators launch eight kernels for a norm and ten for the rotary embedding of a layer, of which each reads and
# writes the rows. Here every row is computed by programs of its own, in a fixed order, so that its bits do not depend on
# other rows. Numbers are rounded to the dtype of the rows where the stock operators round them.

#: A product and a sum are rounded one after the other, as stock operators do it.
OPTIONS = {"enable_fp_fusion": False}


class NormForm(IntEnum):
    """Says how a norm multiplies with its weight: w * round(x), round(w * x), or round((1 + w) * x)."""

    ROUNDED = 0
    EXACT = 1
    ONE_MORE = 2


def rms_norm(rows: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """Root mean square norm of rows [..., size] with a weight [size], both of one known dtype (Zhang and Sennrich 2019)."""
    size = rows.shape[-1]
    flat = rows.reshape(-1, size)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    padded = triton.next_power_of_2(size)
    if len(flat):
        _rms_norm[(len(flat),)](
            flat, weight, out, flat.stride(0), eps, FORM=int(form), SIZE=size, PADDED=padded,
            num_warps=min(max(padded // 512, 1), 16), **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["row_stride"])
def _rms_norm(
    rows, weight, out,  # see `rms_norm`
    row_stride, eps,
    FORM: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    numbers = tl.load(rows + row * row_stride + at, inside, 0.0).to(tl.float32)
    factors = tl.load(weight + at, inside, 0.0).to(tl.float32)
    normed = numbers / tl.sqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    if FORM == 0:
        normed = _rounded(normed, out)
    if FORM == 2:
        factors = factors + 1.0
    tl.store(out + row * SIZE + at, (normed * factors).to(out.dtype.element_ty), inside)


def rotates(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Tells whether `rotate` takes these: one known dtype, and heads that turn as a whole."""
    same = query.dtype == key.dtype == cos.dtype == sin.dtype and query.dtype in KNOWN_DTYPES
    width = query.shape[-1] == key.shape[-1] == cos.shape[-1] == sin.shape[-1]
    shaped = query.dim() == key.dim() == 4 and cos.dim() == sin.dim() == 3 and len(query) == len(key) == len(cos) == 1
    return same and width and shaped and query.shape[-1] % 2 == 0 and query.shape[2] == key.shape[2] == cos.shape[1]


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding whose pairs are the halves of a head (Su et al. 2021), as transformers computes it.

    Args:
        query, key: [1, num_heads, num_rows, dim] and the same of the key-value heads.
        cos, sin: [1, num_rows, dim]

    Returns:
        The turned queries and keys, in the same shapes.
    """
    num_rows, dim = query.shape[2:]
    query, key = (part[0] if part.stride(-1) == 1 else part[0].contiguous() for part in (query, key))
    cos, sin = (part[0] if part.stride(-1) == 1 else part[0].contiguous() for part in (cos, sin))
    turned = [torch.empty(num_rows, len(part), dim, dtype=part.dtype, device=part.device) for part in (query, key)]
    if num_rows:
        _rotate[(num_rows, len(query) + len(key))](
            query, key, cos, sin, *turned, *query.stride()[:2], *key.stride()[:2], cos.stride(0), sin.stride(0),
            HEADS=len(query), KV_HEADS=len(key), DIM=dim, PADDED=triton.next_power_of_2(dim // 2), num_warps=1, **OPTIONS,
        )  # fmt: skip
    return turned[0].transpose(0, 1)[None], turned[1].transpose(0, 1)[None]


@triton.jit
def _turn(rows, cos, sin, out, DIM: tl.constexpr, PADDED: tl.constexpr):
    """One head of one row."""
    at, half = tl.arange(0, PADDED), DIM // 2
    inside = at < half
    low, high = tl.load(rows + at, inside).to(tl.float32), tl.load(rows + half + at, inside).to(tl.float32)
    near, far = low * tl.load(cos + at, inside).to(tl.float32), high * tl.load(sin + at, inside).to(tl.float32)
    tl.store(out + at, _rounded(near, out) - _rounded(far, out), inside)
    near, far = (
        high * tl.load(cos + half + at, inside).to(tl.float32),
        low * tl.load(sin + half + at, inside).to(tl.float32),
    )
    tl.store(out + half + at, _rounded(near, out) + _rounded(far, out), inside)


@triton.jit
def _rounded(numbers, like):
    """Numbers in float32 that have the precision of what `like` points to."""
    return numbers.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["query_head", "query_row", "key_head", "key_row", "cos_row", "sin_row"])
def _rotate(
    query, key, cos, sin, query_out, key_out,  # see `rotate`; the results by row first
    query_head, query_row, key_head, key_row, cos_row, sin_row,  # strides
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += row * cos_row
    sin += row * sin_row
    if head < HEADS:
        _turn(query + head * query_head + row * query_row, cos, sin, query_out + (row * HEADS + head) * DIM, DIM, PADDED)
    else:
        head -= HEADS
        _turn(key + head * key_head + row * key_row, cos, sin, key_out + (row * KV_HEADS + head) * DIM, DIM, PADDED)
