"""A head of random weights that keeps keys and values of its own beside the target's: token i with feature i - 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outrider.cache.memory import AddedLayers, AddedShape
from outrider.cache.state import KVView
from outrider.draft import Draft
from outrider.loading.loaded_model import LoadedModel
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
)
from outrider.propose.settings import Method, ProposerContext
from outrider.propose.trees.growth import Growth, add_level

HEADS, DIM = 2, 4


class FeatureHead(Method):
    """One layer of attention over the features of the target, and the target's own head."""

    name: ClassVar[str] = "feature_head"
    takes_tree: ClassVar[bool] = False

    def added_token_bytes(self, target: LoadedModel) -> int:
        return 2 * HEADS * DIM * target.dtype.itemsize

    def build(self, context: ProposerContext) -> Proposer:
        return FeatureHeadProposer(context)


class FeatureHeadProposer(Proposer):
    """Drafts chains from its own keys and values, which it keeps up with the target's."""

    def __init__(self, context: ProposerContext) -> None:
        self.target = target = context.target
        generator = torch.Generator().manual_seed(5)
        sizes = [(2 * target.hidden_size, HEADS * DIM)] * 3 + [(HEADS * DIM, target.hidden_size)]
        weights = [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]
        self.keys, self.values, self.queries, self.out = (weight.to(target.dtype) for weight in weights)
        self.layer = target.num_layers  # behind the final norm
        shape = AddedShape(1, HEADS, DIM, feature_size=target.hidden_size)
        self.added: AddedLayers = target.add_layers(shape, self.recompute, [self.layer])
        self.requires = Requirements(aux_layers=(self.layer,), added_layers=self.added)
        self.features: dict[int, Tensor] = {}  # of the last token that the target has computed, by sequence
        self.num_late = 0

    def recompute(self, token_ids: Sequence[int], hidden: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        features = hidden[self.layer]
        return [self._rows(token_ids, torch.cat([torch.zeros_like(features[:1]), features[:-1]]))[:2]]

    @torch.inference_mode()
    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            kv, places = seen.sequence.kv, seen.where(RowStatus.TEXT, RowStatus.ACCEPTED)
            start, features = seen.positions[places[0]], seen.aux_hidden_states[self.layer][places]
            if start != self.added.num_filled(kv):  # it came late to this text
                self.num_late += 1
                continue
            before = self._feature(seen.sequence) if start else torch.zeros_like(features[0])
            tokens = [seen.token_ids[place] for place in places]
            keys, values, _ = self._rows(tokens, torch.cat([before[None], features[:-1]]))
            self.added.write(kv, 0, start, keys, values)
            self.added.fill(kv, start + len(places), features)
            self.features[seen.sequence.seq_id] = features[-1].clone()

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [Growth.of(r, r.budget, r.max_depth) for r in requests]
        ready = [g for g in growths if self.added.num_filled(g.request.sequence.kv) == g.request.length - 1]
        features = {id(g): self._feature(g.request.sequence) for g in ready}
        while ready:
            for growth in ready:
                token = growth.nodes[-1].token_id if growth.nodes else growth.request.last_token_id
                place = growth.request.length - 1 + len(growth.nodes)
                features[id(growth)] = self._next(growth.request.sequence.kv, token, place, features[id(growth)])
            add_level(ready, self.target.head(torch.stack([features[id(g)] for g in ready])), noise)
            ready = [g for g in ready if g.growing]
        return [g.draft() for g in growths]

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        if parent.seq_id in self.features:
            self.features[child.seq_id] = self.features[parent.seq_id]

    def finish(self, sequence: ProposerSequence) -> None:
        self.features.pop(sequence.seq_id, None)

    def check_rest(self) -> None:
        assert not self.features

    def _feature(self, sequence: ProposerSequence) -> Tensor:
        """Of the last token that is held: kept from the pass that computed it, or with the block that it ends."""
        found = self.added.feature_of_last(sequence.kv)
        return self.features[sequence.seq_id] if found is None else found

    def _next(self, kv: KVView, token: int, place: int, feature: Tensor) -> Tensor:
        """What follows a token, as far as this head knows."""
        keys, values, query = self._rows([token], feature[None])
        self.added.write(kv, 0, place, keys, values)
        keys, values = self.added.read(kv, 0, place + 1)
        weights = torch.einsum("hd,nhd->hn", query[0], keys).softmax(-1)
        return torch.einsum("hn,nhd->hd", weights, values).flatten() @ self.out

    def _rows(self, token_ids: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = torch.cat([self.target.embed(list(token_ids)).to(features), features], -1)
        keys, values, queries = ((inputs @ w).view(-1, HEADS, DIM) for w in (self.keys, self.values, self.queries))
        return keys, values, queries
