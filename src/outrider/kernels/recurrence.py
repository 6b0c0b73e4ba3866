"""Rows of a text over a running state of matrices, by the compiled kernel.

`outrider.model.running` has the same in operators of PyTorch, which define what is right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.layout import Decay, RecurrenceCall
from outrider.kernels.library import KernelLibrary


@dataclass(frozen=True)
class MatrixRows:
    """What rows do to the matrices of a text, [num_heads, key_dim, value_dim].

    A row multiplies the matrix of a head by its decay, and adds the key times the value to it; or the key times a share
    of the difference between the value and what the matrix says of the key. The same key serves num_heads / num_key_heads
    heads in a row.

    Attributes:
        keys: [num_rows, num_key_heads, key_dim]
        values: [num_rows, num_heads, value_dim]
        decays: [num_rows, num_heads, 1], [num_rows, num_heads, key_dim] or [num_rows, num_heads, key_dim, value_dim]
        shares: [num_rows, num_heads, 1]; None where values are added as they are.
    """

    keys: Tensor
    values: Tensor
    decays: Tensor
    shares: Tensor | None = None

    @property
    def decay(self) -> Decay:
        """What has a factor of its own."""
        if self.decays.dim() == 4:
            return Decay.OF_ALL
        return Decay.OF_HEADS if self.decays.shape[-1] == 1 else Decay.OF_KEYS


def usable(state: Tensor) -> bool:
    """Whether the kernel takes this state."""
    return state.device.type == "cpu" and state.dtype in (torch.float32, torch.float64)


def advance(
    library: KernelLibrary,
    state: Tensor,  # [num_heads, key_dim, value_dim]
    rows: MatrixRows,
    queries: Tensor,  # [num_rows, num_key_heads, key_dim]
    parents: tuple[int, ...] | None,
    wanted: Collection[int],
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute rows one after another.

    Args:
        library: The kernels.
        state: Before the first row; it is not changed.
        rows: What they do.
        queries: In which direction they read the state behind them.
        parents: The row before each one, -1 for the state; None for a chain.
        wanted: Rows behind which the state is asked for.

    Returns:
        What they read [num_rows, num_heads, value_dim], and the states by row.
    """
    num_rows, num_heads, value_dim = rows.values.shape
    key_heads, key_dim = rows.keys.shape[1:]
    threads, real = library.num_threads, state.dtype
    given = [
        None if t is None else t.contiguous() for t in (state, rows.keys, rows.values, rows.decays, rows.shares, queries)
    ]
    states = {row: torch.empty(state.shape, dtype=real) for row in wanted}
    kept = np.zeros(num_rows, np.uint64)
    for row, found in states.items():
        kept[row] = found.data_ptr()
    order = None if parents is None else np.array(parents, np.int64)
    out = torch.empty(num_rows, num_heads, value_dim, dtype=real)
    in_columns = key_dim * library.panel(real)
    scratch = torch.empty(threads * in_columns * (1 if parents is None else num_rows + 1), dtype=real)
    call = RecurrenceCall(
        num_rows,
        num_heads,
        key_heads,
        key_dim,
        value_dim,
        rows.decay,
        *(None if t is None else t.data_ptr() for t in given),
        None if order is None else order.ctypes.data,
        kept.ctypes.data,
        out.data_ptr(),
        scratch.data_ptr(),
        threads,
    )
    library.function("advance_rows", real)(ctypes.byref(call))
    return out, states
