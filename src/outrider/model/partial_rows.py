"""Rows whose first layers a proposer has computed, and on which the target's own pass may continue.

A proposer that drafts with the first layers of the target leaves two things behind: the KV of these layers, in the very
slots that the target's own pass will use, and the hidden states that the next layer reads. Whether they are still what the
target needs is not left to proposers. `Target.run` alone writes down what it has computed, keeps a copy of the hidden
states that nobody else holds, and forgets a sequence as soon as any other run touches it. The engine asks with the rows
that it is about to compute, and gets those whose tokens, positions and blocks are the same. So it does not matter who
drafted, or whether the draft was cut, demoted or continued by somebody else: rows that have changed are not found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.cache.state import KVView
from outrider.model.batch import Segment


@dataclass(frozen=True)
class PartialChain:
    """Rows of one sequence, a chain, that the first layers have computed. Nothing has written over their KV since.

    Attributes:
        depth: How many layers: 0 to depth - 1.
        start: Position of the first row.
        token_ids: Tokens of the rows.
        block_table: The blocks that the sequence had.
        long_rope: Whether they were computed with the rotary factors of long texts.
        hidden: [num_rows, hidden_size] what layer `depth` reads.
    """

    depth: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    long_rope: bool
    hidden: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> PartialChain:
        """The first `count` rows."""
        return replace(self, token_ids=self.token_ids[:count], hidden=self.hidden[:count])

    def same_memory(self, segment: Segment) -> bool:
        """Whether rows of `segment` lie in the same blocks, under the same rotary factors."""
        return self.long_rope == segment.long_rope and self.block_table == tuple(segment.block_table)


class PartialRows:
    """The rows that were begun in this step, one chain for each sequence."""

    def __init__(self) -> None:
        self._chains: dict[KVView, PartialChain] = {}

    def clear(self) -> None:
        """Forget everything: between two steps blocks change their owners."""
        self._chains.clear()

    def take(self, kv: KVView) -> PartialChain | None:
        """What is known of a sequence, which is forgotten: its KV is about to be written."""
        return self._chains.pop(kv, None)

    def add(self, kv: KVView, segment: Segment, depth: int, hidden: Tensor, before: PartialChain | None) -> None:
        """Write down rows that the first layers have just computed from the embeddings.

        Args:
            kv: The sequence's.
            segment: The rows. Of a tree nothing is written down: its rows can only be computed all together.
            depth: How many layers.
            hidden: [num_rows, hidden_size] what they left.
            before: What `take` gave before these rows were computed. They go on behind its rows, or in the place of the
                last of them.
        """
        if segment.parents is not None:
            return
        tokens, states, start = tuple(segment.token_ids), hidden.clone(), segment.start
        if before is not None and before.depth == depth and before.same_memory(segment):
            kept = segment.start - before.start
            if 0 <= kept <= len(before):
                tokens, start = before.token_ids[:kept] + tokens, before.start
                states = torch.cat([before.hidden[:kept], states])
        self._chains[kv] = PartialChain(depth, start, tokens, tuple(segment.block_table), segment.long_rope, states)

    def find(self, kvs: Sequence[KVView], segments: Sequence[Segment]) -> list[PartialChain | None]:
        """For each segment of the target's own pass, the first of its rows that were begun; None where there are none."""
        return [self._leading(self._chains.get(kv), segment) for kv, segment in zip(kvs, segments, strict=True)]

    def _leading(self, begun: PartialChain | None, segment: Segment) -> PartialChain | None:
        if begun is None or segment.parents is not None:
            return None
        if begun.start != segment.start or not begun.same_memory(segment):
            return None
        count = 0
        for ours, theirs in zip(begun.token_ids, segment.token_ids, strict=False):
            if ours != theirs:
                break
            count += 1
        return begun.first(count) if count else None
