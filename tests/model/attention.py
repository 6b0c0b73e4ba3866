"""A decoder of one layer whose other parts are known, so that its output is its attention; and the same sums in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.decoder import DecoderKernel, DecoderLayer, DecoderShape, Norm, PassRows
from outrider.kernels.formats import plain
from outrider.kernels.layout import NormKind
from outrider.kernels.library import kernels_for
from outrider.kernels.packed import PackedWeights
from outrider.model.batch import Segment

HIDDEN = 32
#: The number of tokens of a text that crosses the borders of two runs.
LONG = 530


@dataclass(frozen=True)
class Attention:
    """What a layer's attention is. Keys are shared by `group` query heads."""

    head_dim: int = 16
    kv_heads: int = 2
    group: int = 2
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    block_size: int = 4

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


class Layer:
    """A layer whose output is its attention: positions are not rotated, and the feed-forward brings nothing.

    Args:
        attention: What its attention is.
        instruction_set: The kernels.
        threads: The number of threads.
    """

    def __init__(self, attention: Attention, instruction_set: str, threads: int = 1) -> None:
        self.attention, self._threads = attention, threads
        generator = torch.Generator().manual_seed(attention.head_dim + attention.group)
        width = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        self.qkv = self._matrix(generator, width, HIDDEN)
        self.out = self._matrix(generator, HIDDEN, attention.heads * attention.head_dim)
        self.sinks = torch.randn(attention.heads, generator=generator).double() * 3 if attention.sinks else None
        library = kernels_for(instruction_set)

        def packed(matrix: Tensor) -> PackedWeights:
            return PackedWeights(library, plain(matrix.to(attention.dtype)), None)

        norm = Norm(NormKind.RMS, 0.0, torch.ones(HIDDEN, dtype=attention.dtype))
        nothing = packed(torch.zeros(HIDDEN, HIDDEN))
        layer = DecoderLayer(
            attention_norm=norm, attention_post_norm=None, mlp_norm=norm, mlp_post_norm=None, query_norm=None,
            key_norm=None, whole_norms=False, qkv=packed(self.qkv), out=packed(self.out), gate=nothing, up=nothing,
            down=nothing, rotary=None, scale=attention.head_dim**-0.5, softcap=attention.softcap, residual_scale=1.0,
            window=attention.window, chunk=attention.chunk, sinks=self.sinks, experts=None,
        )  # fmt: skip
        shape = DecoderShape(HIDDEN, HIDDEN, attention.heads, attention.kv_heads, attention.head_dim, "silu")
        head = packed(torch.eye(HIDDEN))
        self._kernel = DecoderKernel(library, shape, [layer], None, None, norm, head, attention.dtype)
        self.clear()

    def _matrix(self, generator: torch.Generator, rows: int, columns: int) -> Tensor:
        matrix = torch.randn(rows, columns, generator=generator) * (2 / columns**0.5)
        return matrix.to(self.attention.dtype).double()  # as the kernels read it

    def clear(self) -> None:
        """Forget all keys and values. What nobody wrote is not a number."""
        of = self.attention
        slots = torch.full((2, 2048, of.kv_heads, of.head_dim), float("nan"), dtype=of.dtype)
        self._kernel.use_memory([(slots[0], slots[1])])
        self.memory = slots

    def forward(self, hidden: Sequence[Tensor], segments: Sequence[Segment]) -> list[Tensor]:
        """The attention of every row of every segment, given their hidden states [num_rows, HIDDEN]."""
        rows = torch.cat(list(hidden)).to(self._kernel.real)
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            left = self._kernel.forward_part(_rows(segments, self.attention.block_size), (), [0], rows)[2]
        finally:
            torch.set_num_threads(before)
        return list((left - rows).split([s.num_rows for s in segments]))

    def reference(self, hidden: Tensor) -> Tensor:
        """The attention of every row of a text, summed in float64."""
        of, count = self.attention, len(hidden)
        hidden = hidden.double()
        normed = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
        sizes = [of.heads * of.head_dim, of.kv_heads * of.head_dim, of.kv_heads * of.head_dim]
        q, k, v = (t.view(count, -1, of.head_dim).transpose(0, 1) for t in (normed @ self.qkv.t()).split(sizes, -1))
        k, v = (t.repeat_interleave(of.group, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * of.head_dim**-0.5
        if of.softcap:
            scores = of.softcap * torch.tanh(scores / of.softcap)
        row, column = torch.arange(count)[:, None], torch.arange(count)[None]
        seen = column <= row
        if of.window:
            seen &= row - column < of.window
        if of.chunk:
            seen &= row // of.chunk == column // of.chunk
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., :count]
        return (weights @ v).transpose(0, 1).reshape(count, -1) @ self.out.t()


def _rows(segments: Sequence[Segment], size: int) -> PassRows:
    trees = [np.empty(0, bool) if s.parents is None else s.ancestry.reshape(-1) for s in segments]
    return PassRows(
        tokens=[0 for s in segments for _ in s.token_ids],
        positions=[int(p) for s in segments for p in s.positions],
        slots=[int(slot) for s in segments for slot in s.row_slots(size)],
        long_rows=[0 for s in segments for _ in s.token_ids],
        first=[sum(s.num_rows for s in segments[:i]) for i in range(len(segments) + 1)],
        start=[s.start for s in segments],
        tables=[block for s in segments for block in s.block_table],
        table_at=[sum(len(s.block_table) for s in segments[:i]) for i in range(len(segments))],
        ancestry_at=[
            -1 if s.parents is None else sum(len(t) for t in trees[:i]) for i, s in enumerate(segments)
        ],
        logit_rows=[],
        ancestry=np.concatenate(trees).view(np.uint8),
        block_size=size,
    )  # fmt: skip


def text_of(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def segment(start: int, end: int, table: Sequence[int], parents: tuple[int, ...] | None = None) -> Segment:
    return Segment([0] * (end - start), start, table, parents)


def in_pieces(layer: Layer, hidden: Tensor, cuts: Sequence[int], *, beside: bool = False) -> Tensor:
    """The text computed chunk by chunk, in blocks that lie in disorder; alone, or between two neighbours."""
    layer.clear()
    size = layer.attention.block_size
    blocks = -(-len(hidden) // size)
    table = [(7 * i) % blocks + 12 if blocks % 7 else blocks - i + 11 for i in range(blocks)]
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(hidden)], strict=True):
        hiddens, segments = [hidden[start:end]], [segment(start, end, table)]
        if beside:
            other = text_of(9, seed=5)
            hiddens, segments = [other, *hiddens, other[:3]], [
                segment(0, 9, range(9)), *segments, segment(0, 3, range(9, 12)),
            ]  # fmt: skip
        found.append(layer.forward(hiddens, segments)[int(beside)])
    return torch.cat(found)
