"""The rows of a pass in the form of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from outrider.cache.source import SourceState
from outrider.kernels.decoder import PassRows
from outrider.model.batch import RaggedBatch, Segment


def pass_rows(batch: RaggedBatch) -> PassRows:
    """The rows of a batch as the kernels read them."""
    segments, size = batch.segments, batch.block_size
    trees = [np.empty(0, bool) if s.parents is None else s.ancestry.reshape(-1) for s in segments]
    table_at = list(accumulate((len(s.block_table) for s in segments), initial=0))[:-1]
    tree_at = list(accumulate((len(tree) for tree in trees), initial=0))[:-1]
    spans = list(zip(batch.row_spans, segments, strict=True))
    return PassRows(
        tokens=[token for s in segments for token in s.token_ids],
        positions=[p for s in segments for p in _positions(s)],
        slots=[s.block_table[p // size] * size + p % size for s in segments for p in range(s.start, s.context_len)],
        long_rows=[int(s.long_rope) for s in segments for _ in s.token_ids],
        first=[0, *(end for _, end in batch.row_spans)],
        start=[s.start for s in segments],
        tables=[block for s in segments for block in s.block_table],
        table_at=table_at,
        ancestry_at=[-1 if s.parents is None else at for s, at in zip(segments, tree_at, strict=True)],
        logit_rows=[first + row for (first, _), s in spans for row in range(s.logits_from, s.logits_end)],
        ancestry=np.concatenate(trees).view(np.uint8),
        block_size=size,
        parents=[parent for s in segments for parent in s.row_parents],
    )


def source_rows(rows: PassRows, sources: Sequence[SourceState]) -> PassRows:
    """The same rows where they attend to the source of each sequence, all of which they see: as if each was its last token.

    Args:
        rows: Of the pass.
        sources: By sequence.
    """
    lengths, tables = [len(each.token_ids) for each in sources], [each.block_table for each in sources]
    counts = [end - first for first, end in pairwise(rows.first)]
    return replace(
        rows,
        positions=[length - 1 for length, count in zip(lengths, counts, strict=True) for _ in range(count)],
        start=lengths,
        tables=[block for table in tables for block in table],
        table_at=list(accumulate(map(len, tables), initial=0))[:-1],
        ancestry_at=[-1] * len(sources),
        ancestry=np.empty(0, np.uint8),
    )


def _positions(segment: Segment) -> Sequence[int]:
    if segment.parents is None:
        return range(segment.start, segment.context_len)
    positions: list[int] = segment.positions.tolist()
    return positions
