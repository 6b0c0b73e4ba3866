"""Drafting with a head that reads the target's features and keeps keys and values of its own beside the target's.

The slot of token i holds what token i and the feature of token i - 1 give, and slot 0 is seen by nobody. The rows of a text
are written as the target computes them, so a text that comes out of the prefix cache is drafted for at once. The rows of a
draft are the head's own: each token reads what the head left for the token before it in place of the target's feature.
They live as long as the draft grows, and no level of it costs a pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.cache.added_layers import AddedLayers, AddedShape
from outrider.draft import Draft
from outrider.heads.feature_head import FeatureHead
from outrider.model.target import Target
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
)
from outrider.propose.bridge import Bridge
from outrider.propose.trees.growth import Growth, add_level


class FeatureHeadProposer(Proposer):
    """Greedy, drawn or coupled chains and trees from a head that reads features, batched over sequences.

    Args:
        head: The head.
        target: Its target.
        bridge: From the tokens that the head drafts to the target's.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller.
    """

    def __init__(self, head: FeatureHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        self._head = head
        self._bridge = bridge
        self._min_confidence = min_confidence
        layer = head.config.layer
        shape = AddedShape(1, layer.num_key_value_heads, layer.head_dim, feature_size=head.config.hidden_size)
        self.added: AddedLayers = target.add_layers(shape, head.recompute, head.aux_layers)
        self.requires = Requirements(aux_layers=head.aux_layers, added_layers=self.added)
        self._features: dict[int, Tensor] = {}  # of the last token that the target has computed, by sequence

    @torch.inference_mode()
    def observe(self, rows: Sequence[ObservedRows]) -> None:
        read = [each for seen in rows if (each := self._text_rows(seen)) is not None]
        if not read:
            return
        layers = self._head.aux_layers
        states = {layer: torch.cat([seen.aux_hidden_states[layer][places] for seen, places in read]) for layer in layers}
        features = torch.split(self._head.fuse(states), [len(places) for _, places in read])
        before = [
            torch.cat([self._before(seen.sequence, seen.positions[places[0]], own), own[:-1]])
            for (seen, places), own in zip(read, features, strict=True)
        ]
        tokens = [seen.token_ids[place] for seen, places in read for place in places]
        positions = [seen.positions[place] for seen, places in read for place in places]
        kept = self._head.keys_and_values(tokens, torch.cat(before), positions)
        first = 0
        for (seen, places), own in zip(read, features, strict=True):
            kv, start, end = seen.sequence.kv, seen.positions[places[0]], first + len(places)
            self.added.write(kv, 0, start, *(rows[first:end] for rows in kept))
            self.added.fill(kv, start + len(places), own)
            self._features[seen.sequence.seq_id] = own[-1].clone()  # a view would keep all rows
            first = end

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafting = [self._begin(request) for request in requests]
        begun = [each for each in drafting if each.growth.growing]
        for row in range(max((len(each.growth.request.path) for each in begun), default=0)):
            self._run([(each, [row]) for each in begun if row < len(each.growth.request.path)])
        while alive := [each for each in begun if each.growth.growing]:
            left = self._run([(each, [each.row(node) for node in each.growth.level]) for each in alive])
            add_level([each.growth for each in alive], self._bridge.logits(self._head.logits(left)), noise)
        return [each.growth.draft() for each in drafting]

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        if parent.seq_id in self._features:
            self._features[child.seq_id] = self._features[parent.seq_id]

    def finish(self, sequence: ProposerSequence) -> None:
        self._features.pop(sequence.seq_id, None)

    def check_rest(self) -> None:
        assert not self._features, f"the head still keeps features of {len(self._features)} texts"

    def _text_rows(self, seen: ObservedRows) -> tuple[ObservedRows, list[int]] | None:
        """The rows of a text that stand; None where the head came late to it, and what lies before was not kept."""
        places = seen.where(RowStatus.TEXT, RowStatus.ACCEPTED)
        return (seen, places) if seen.positions[places[0]] == self.added.num_filled(seen.sequence.kv) else None

    def _before(self, sequence: ProposerSequence, start: int, like: Tensor) -> Tensor:
        """The feature [1, hidden_size] before a position; zeros before the first token, whose slot nobody sees."""
        return self._last_feature(sequence)[None] if start else torch.zeros_like(like[:1])

    def _last_feature(self, sequence: ProposerSequence) -> Tensor:
        """Of the last token that is held: with the block that it ends, or kept from the pass that computed it."""
        found = self.added.feature_of_last(sequence.kv)
        return self._features[sequence.seq_id] if found is None else found

    def _begin(self, request: ProposeRequest) -> _Drafting:
        """An empty draft where the head has not read the text up to its last token, or where that is the only one."""
        held = self.added.num_filled(request.sequence.kv)
        ready = held == len(request.sequence.token_ids) - 1 and held > 0
        growth = Growth.of(request, request.budget if ready else 0, request.max_depth, self._min_confidence)
        drafting = _Drafting(growth, held)
        if growth.growing:
            room = 1 + len(request.path) + growth.budget
            kept = self.added.read(request.sequence.kv, 0, held)
            drafting.keys, drafting.values = (_with_room(rows[1:], room, self._head.dtype) for rows in kept)
            drafting.features = {-1: self._last_feature(request.sequence).to(self._head.dtype)}
        return drafting

    def _run(self, work: Sequence[tuple[_Drafting, list[int]]]) -> Tensor:
        """What the head leaves [n, hidden_size] at rows of drafts."""
        rows = [(each, row) for each, own in work for row in own]
        features = torch.stack([each.features[each.parent(row)] for each, row in rows])
        positions = [each.position(row) for each, row in rows]
        entered = self._head.enter([each.token(row) for each, row in rows], features, positions)
        attended, first = [], 0
        for each, own in work:
            taken = slice(first, first + len(own))
            seen = each.write(own, entered.keys[taken], entered.values[taken])
            keys, values = each.keys[: each.num_slots], each.values[: each.num_slots]
            attended.append(self._head.attend(entered.queries[taken], keys, values, seen))
            first += len(own)
        left = self._head.leave(entered.residual, torch.cat(attended))
        for (each, row), feature in zip(rows, self._head.next_feature(left), strict=True):
            each.features[row] = feature
        return left


@dataclass
class _Drafting:
    """A draft in the making and the head's rows for it: the last token of the text, the path, then the nodes.

    Attributes:
        growth: The draft.
        held: Tokens of the text that the head holds.
        keys, values: [slots, num_kv_heads, head_dim] of the text but for its first token, then of the rows.
        features: By row, what the token behind it reads; -1 is the target's own feature.
        num_rows: Rows that have been written.
    """

    growth: Growth
    held: int
    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    features: dict[int, Tensor] = field(default_factory=dict)
    num_rows: int = 0

    @property
    def num_slots(self) -> int:
        """Slots that have been written."""
        return self.held - 1 + self.num_rows

    @property
    def _root(self) -> int:
        return len(self.growth.request.path)

    def row(self, node: int) -> int:
        """The row of a node; -1 is the token that the draft follows."""
        return self._root + 1 + node

    def token(self, row: int) -> int:
        """Its token."""
        request = self.growth.request
        if row > self._root:
            return self.growth.nodes[row - self._root - 1].token_id
        return request.path[row - 1] if row else request.sequence.token_ids[-1]

    def parent(self, row: int) -> int:
        """The row before it; -1 for the target's own."""
        return row - 1 if row <= self._root else self.row(self.growth.nodes[row - self._root - 1].parent)

    def position(self, row: int) -> int:
        """Where its token stands in the text."""
        depth = row if row <= self._root else self._root + self.growth.nodes[row - self._root - 1].depth
        return self.held + depth

    def write(self, rows: list[int], keys: Tensor, values: Tensor) -> Tensor | None:
        """Keep rows; returns what they see: a mask [len(rows), num_slots], or None where they see everything."""
        text = self.held - 1
        slots = [text + row for row in rows]
        self.keys[slots], self.values[slots] = keys, values
        self.num_rows = max(self.num_rows, rows[-1] + 1)
        mask = keys.new_full((len(rows), self.num_slots), float("-inf"))
        mask[:, :text] = 0.0
        for place, row in enumerate(rows):
            while row >= 0:
                mask[place, text + row] = 0.0
                row = self.parent(row)
        return mask if (mask < 0.0).any() else None


def _with_room(rows: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """Rows, and room for more behind them."""
    wide = rows.new_zeros((len(rows) + room, *rows.shape[1:]), dtype=dtype)  # what is masked must be a number all the same
    wide[: len(rows)] = rows
    return wide
