"""Drafting token by token with a head that reads the target's features.

The rows of a draft are the head's own: each token reads what the head left for the token before it in place of the target's
feature. They live as long as the draft grows, and no level of it costs a pass of the target.

A head of several layers guesses the first token of a draft with its first layer, the second token with its second layer,
and so on; the last layer guesses all tokens that are left.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.heads.feature_head import FeatureHead
from outrider.model.lone_layer import SeenRows
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.bridge import Bridge
from outrider.propose.methods.feature_rows import DraftRows, GrowingRows, TextRows, unread_tokens
from outrider.propose.methods.feature_texts import FeatureTextProposer, read_texts
from outrider.propose.trees.growth import add_level

RowsT = TypeVar("RowsT", bound=GrowingRows)


class FeatureHeadProposer(FeatureTextProposer, Generic[RowsT]):
    """Greedy, drawn or coupled chains and trees from a head that reads features, batched over sequences. Subclasses compute
    its rows. The arguments are those of `FeatureTextProposer`."""

    @abstractmethod
    def _begin(self, request: ProposeRequest) -> RowsT:
        """An empty draft, and the head's rows for it."""

    @abstractmethod
    def _run(self, work: Sequence[tuple[RowsT, list[int]]]) -> None:
        """Compute rows of drafts that no guess is wanted of."""

    @abstractmethod
    def _guess(self, work: Sequence[tuple[RowsT, list[int]]]) -> Tensor:
        """Logits [n, draft_vocab_size] of the tokens behind rows of drafts."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafting = [self._begin(request) for request in requests]
        begun = [each for each in drafting if each.growth.growing]
        for row in range(max((len(each.unread) - 1 for each in begun), default=0)):
            self._run([(each, [row]) for each in begun if row < len(each.unread) - 1])
        while alive := [each for each in begun if each.growth.growing]:
            logits = self._guess([(each, [each.row(node) for node in each.growth.level]) for each in alive])
            add_level([each.growth for each in alive], self._bridge.logits(logits), noise)
        return [each.growth.draft() for each in drafting]


class LayerHeadProposer(FeatureHeadProposer[DraftRows]):
    """The same from a head whose layers are modules; the arguments are those of `FeatureHeadProposer`."""

    def __init__(self, head: FeatureHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        super().__init__(head, target, bridge, min_confidence)
        self._head = head

    def _compute(self, read: Sequence[TextRows], before: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        return read_texts(self.added, self._head, read, before, states)

    def _begin(self, request: ProposeRequest) -> DraftRows:
        growth = self._growth(request, request.max_depth, self._head.num_layers)
        held = self.added.num_filled(request.sequence.kv)
        drafting = DraftRows(growth, held, unread_tokens(request, held), self._head.window)
        if growth.growing:
            text = [self.added.read(request.sequence.kv, layer, held) for layer in range(self._head.num_layers)]
            features = self._last_features(request.sequence).to(self._head.dtype)
            drafting.begin(text, features.reshape(self._head.num_layers, -1), self._head.dtype)
        return drafting

    def _run(self, work: Sequence[tuple[DraftRows, list[int]]]) -> None:
        self._leave(work)

    def _guess(self, work: Sequence[tuple[DraftRows, list[int]]]) -> Tensor:
        return self._head.logits(self._leave(work))

    def _leave(self, work: Sequence[tuple[DraftRows, list[int]]]) -> Tensor:
        """What the head leaves [n, width] at rows of drafts, in the layer that guesses the token behind each."""
        rows = [(each, row) for each, own in work for row in own]
        last = self._head.num_layers - 1
        guessing = [min(each.depth(row), last) for each, row in rows]
        read = torch.stack([each.features[each.parent(row)] for each, row in rows])  # [n, num_layers, width]
        found, following = torch.empty_like(read[:, 0]), torch.zeros_like(read)
        for layer in range(min(guessing), last + 1):
            chosen = [i for i, first in enumerate(guessing) if first <= layer]
            guess = [place for place, i in enumerate(chosen) if guessing[i] == layer]
            left = self._run_layer(layer, [rows[i] for i in chosen], read[chosen, layer])
            follows, guessed = self._head.next_feature(left), [chosen[place] for place in guess]
            found[guessed] = left[guess]
            if layer < last:
                following[chosen, layer + 1] = follows
            else:
                following[guessed, last] = follows[guess]
        for (each, row), features in zip(rows, following, strict=True):
            each.features[row] = features
        return found

    def _run_layer(self, layer: int, rows: Sequence[tuple[DraftRows, int]], features: Tensor) -> Tensor:
        """What a layer leaves [n, width] at rows of drafts, those of each draft in one run."""

        def look(keys: Tensor, values: Tensor) -> list[SeenRows]:
            seen, first = [], 0
            while first < len(rows):
                each = rows[first][0]
                own = [row for drafting, row in rows[first:] if drafting is each]
                taken = slice(first, first + len(own))
                seen.append(each.write(layer, own, taken, keys[taken], values[taken]))
                first = taken.stop
            return seen

        tokens, positions = [each.token(row) for each, row in rows], [each.position(row) for each, row in rows]
        return self._head.run(layer, tokens, features, positions, look)
