"""Writes the keys and values of new rows to their slots of the KV memory, on a GPU, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_rows(keys: Tensor, values: Tensor, key_memory: Tensor, value_memory: Tensor, slots: Tensor) -> None:
    """Store keys and values [num_rows, num_kv_heads, dim] into memory [num_slots, num_kv_heads, dim].

    Args:
        keys, values: Of the new rows, of one dtype with the memory. The width of values may be another one.
        key_memory, value_memory: The memory of a layer, contiguous.
        slots: [num_rows] int64, where each row goes.
    """
    if not len(keys):
        return
    keys, values = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (keys, values))
    sizes = keys.shape[1], keys.shape[2], values.shape[2]
    width = triton.next_power_of_2(sizes[0] * max(sizes[1:]))
    _write[(len(keys),)](
        keys, values, key_memory, value_memory, slots, *keys.stride()[:2], *values.stride()[:2],
        HEADS=sizes[0], KEY_DIM=sizes[1], VALUE_DIM=sizes[2], WIDTH=width,
    )  # fmt: skip


@triton.jit
def _write(
    keys, values, key_memory, value_memory, slots,  # see `write_rows`
    key_row, key_head, value_row, value_head,  # strides
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    slot = tl.load(slots + row)
    inside = at < HEADS * KEY_DIM
    key = tl.load(keys + row * key_row + at // KEY_DIM * key_head + at % KEY_DIM, inside)
    tl.store(key_memory + slot * (HEADS * KEY_DIM) + at, key, inside)
    inside = at < HEADS * VALUE_DIM
    value = tl.load(values + row * value_row + at // VALUE_DIM * value_head + at % VALUE_DIM, inside)
    tl.store(value_memory + slot * (HEADS * VALUE_DIM) + at, value, inside)
