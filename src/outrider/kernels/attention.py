"""Attention over the KV memory, for models whose other operators are PyTorch's.

All rows of a pass attend in one call, whatever sequences they belong to. Keys and values are read in place, through the
block tables. Each row sums over the keys that it may see, in the order of their positions, and over nothing else. So its
bits are a function of its text.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.decoder import PassRows
from outrider.kernels.layout import ATTENTION_LISTS, AttendCall
from outrider.kernels.library import KernelLibrary

_I64 = ctypes.c_int64
#: Dtypes of queries, keys and values, and the dtype that the kernels compute in.
KNOWN_DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


class RowAttention(Protocol):
    """The attention of the rows of one pass, layer by layer, by kernels of this project."""

    @property
    def knows_biases(self) -> bool:
        """Tells whether the kernels add biases to scores."""
        ...

    def takes(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Tells whether the kernels take such rows and memory [..., heads, dim]."""
        ...

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        window: int,
        chunk: int,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Attention of all rows over their contexts: [num_rows, num_heads, head_dim] in the dtype of `query`.

        Args:
            query: [num_rows, num_heads, head_dim]
            keys, values: [num_slots, num_kv_heads, head_dim] the memory of a layer, which holds the rows, too.
            window, chunk: How far rows look back. 0 means that they see everything.
            softcap: Scores stay between -softcap and softcap by a scaled tanh. None for no such bound.
            sinks: [num_heads] a logit for each head that takes weight and gives nothing, or None.
            biases: [num_heads, num_distances] what is added to scores by the distance of a key; the last one holds for all
                greater distances. None for nothing.
        """
        ...


class PassAttention:
    """Attention by the kernels for CPUs, see RowAttention.

    Args:
        rows: The rows. Their lists are copied once for all layers.
        of_sources: Whether the rows see all of a source, as `source_rows` describes them.
    """

    knows_biases = True

    def __init__(self, library: KernelLibrary, rows: PassRows, *, of_sources: bool = False) -> None:
        self._library = library
        lists = [getattr(rows, name) for name in ATTENTION_LISTS]
        self._numbers = np.array(list(chain.from_iterable(lists)), np.int64)
        self._ancestry = rows.ancestry
        begins = accumulate((len(values) for values in lists[:-1]), initial=0)
        self._call = AttendCall(
            rows=len(rows.positions), segments=len(rows.start), block_size=rows.block_size, of_sources=of_sources
        )
        for name, begin in zip(ATTENTION_LISTS, begins, strict=True):
            setattr(self._call, name, self._numbers.ctypes.data + 8 * begin)
        self._call.ancestry = self._ancestry.ctypes.data
        self._scratch = torch.empty(0)

    def takes(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        """One known dtype, one width, on a CPU."""
        same = query.dtype == keys.dtype == values.dtype and query.shape[-1] == keys.shape[-1] == values.shape[-1]
        return same and query.dtype in KNOWN_DTYPES and query.device.type == "cpu"

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        window: int,
        chunk: int,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """See RowAttention."""
        real = KNOWN_DTYPES[query.dtype]
        rows = query.to(real).contiguous()
        out = torch.empty_like(rows)
        taken, added = (None if each is None else each.to(real).contiguous() for each in (sinks, biases))
        call = self._call
        call.heads, call.kv_heads, call.head_dim = query.shape[1], keys.shape[1], query.shape[2]
        call.kv_bf16 = keys.dtype == torch.bfloat16
        call.window, call.chunk, call.scale, call.softcap = window, chunk, scale, softcap or 0.0
        call.keys, call.values, call.query, call.out = (t.data_ptr() for t in (keys, values, rows, out))
        call.sinks, call.biases = (None if each is None else each.data_ptr() for each in (taken, added))
        call.distances = 0 if added is None else added.shape[1]
        threads, passed = _I64(self._library.num_threads), ctypes.byref(call)
        needed = self._library.function("attend_scratch_size", real, _I64)(passed, threads)
        if needed > len(self._scratch) or self._scratch.dtype != real:
            self._scratch = torch.empty(needed, dtype=real)
        call.scratch = self._scratch.data_ptr()
        self._library.function("attend_rows", real)(passed, threads)
        return out.to(query.dtype)
