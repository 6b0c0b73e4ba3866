"""ParallelHead: runs a head that drafts several tokens in one pass of its layers, beside its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from outrider.cache.added_layers import AddedShape
from outrider.heads.feature_head import features_before
from outrider.heads.feature_networks import HeadLayer, LayerInput
from outrider.heads.formats.published import PublishedHead
from outrider.heads.parallel_network import ParallelNetwork
from outrider.heads.placed_network import PlacedNetwork
from outrider.heads.text_head import LookByLayer, TextHead
from outrider.model.backends.paged import Scores
from outrider.model.context import additive
from outrider.model.lone_layer import SeenRows, attend_alone
from outrider.model.target import Target


@dataclass(frozen=True)
class Continuation:
    """A text behind which tokens are to be drafted.

    Attributes:
        token: The first token that the head has not read.
        position: Where that stands: so many tokens come before it.
        feature: [width] of the token before it.
        context: By number of a layer, what is kept of the tokens before: keys and values [position, num_kv_heads,
            head_dim].
        places: Which tokens are wanted; 0 is the one behind `token`.
    """

    token: int
    position: int
    feature: Tensor
    context: Callable[[int], tuple[Tensor, Tensor]]
    places: range


class ParallelHead(TextHead):
    """A head whose rows of tokens that are to be drafted read a mask token and a mask state.

    Args:
        head: As it was published; its network is taken over.
        target: The target.

    Raises:
        HeadMismatchError: It was made for another target.
    """

    def __init__(self, head: PublishedHead, target: Target) -> None:
        super().__init__(target)
        assert isinstance(head.network, ParallelNetwork), head.config
        config = head.network.config
        self._placed = PlacedNetwork(head.folder, config, head.network, target)
        self._network, self.aux_layers, self.dtype = self._placed.network, self._placed.aux_layers, self._placed.dtype
        layer = config.layer
        self.shape = AddedShape(
            config.num_layers, layer.num_key_value_heads, layer.head_dim, feature_size=config.hidden_size
        )
        with torch.inference_mode():
            self._mask_feature = self._network.mask_feature(self.dtype).to(target.dtype)

    @torch.inference_mode()
    def read(
        self,
        texts: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        before: Tensor,
        hidden: Mapping[int, Tensor],
        keep: LookByLayer,
    ) -> Tensor:
        features = self._placed.fuse(hidden)
        read = features_before(before, features, [len(text) for text in texts])
        tokens = [token for text in texts for token in text]
        places = [place for own in positions for place in own]
        layers, tables = self._layers, self._placed.tables(places)
        given = self._enter(tokens, read)
        for number, layer in enumerate(layers[:-1]):
            left = _left(layer, given, tables, keep, number)
            given = self._further(number + 1, left)
        keep(len(layers) - 1, *layers[-1].self_attn.keys_and_values(given.rows, tables))
        return features

    @torch.inference_mode()
    def draft(self, texts: Sequence[Continuation]) -> list[Tensor]:
        """Logits [len(places), draft_vocab_size] of the wanted tokens of each text, float32 at least."""
        counts = [text.places.stop for text in texts]
        mask = self._network.config.mask_token_id
        tokens = [token for text, count in zip(texts, counts, strict=True) for token in (text.token, *[mask] * (count - 1))]
        positions = [text.position + i for text, count in zip(texts, counts, strict=True) for i in range(count)]
        features = [
            torch.cat([text.feature[None], self._mask_feature.expand(count - 1, -1)])
            for text, count in zip(texts, counts, strict=True)
        ]
        tables, given = self._placed.tables(positions), self._enter(tokens, torch.cat(features))
        left = given.residual
        for number, layer in enumerate(self._layers):
            given = self._further(number, left) if number else given
            left = _left(layer, given, tables, partial(_seen, texts), number)
        firsts = accumulate(counts[:-1], initial=0)
        wanted = [first + place for first, text in zip(firsts, texts, strict=True) for place in text.places]
        return list(torch.split(self._placed.logits(left[wanted]), [len(text.places) for text in texts]))

    @property
    def _layers(self) -> list[HeadLayer]:
        return [self._network.layer, *self._network.further_layers]

    def _enter(self, tokens: Sequence[int], features: Tensor) -> LayerInput:
        """What the first layer reads."""
        return self._network.enter(self._placed.embed(tokens), features.to(self.dtype))

    def _further(self, number: int, left: Tensor) -> LayerInput:
        """What a later layer reads of what the one before left."""
        return LayerInput(self._network.further_layers[number - 1].input_layernorm(left), left)


def _left(layer: HeadLayer, given: LayerInput, tables: tuple[Tensor, Tensor], look: LookByLayer, number: int) -> Tensor:
    """What a layer leaves [n, hidden_size] of its rows."""
    attention = layer.self_attn
    seen = look(number, *attention.keys_and_values(given.rows, tables))
    found = attend_alone(attention.queries(given.rows, tables), seen, Scores(attention.scaling))
    return layer.leave(given.residual, found)


def _seen(texts: Sequence[Continuation], number: int, keys: Tensor, values: Tensor) -> list[SeenRows]:
    """What the rows of drafts see in a layer: the text but for its first token, and the rows of their draft up to their
    own."""
    found, first = [], 0
    for text in texts:
        rows = slice(first, first + text.places.stop)
        held_keys, held_values = (kept[1:].to(keys.dtype) for kept in text.context(number))
        count = rows.stop - rows.start
        seen = torch.ones(count, len(held_keys) + count, dtype=torch.bool, device=keys.device).tril(len(held_keys))
        joined = torch.cat([held_keys, keys[rows]]), torch.cat([held_values, values[rows]])
        found.append(SeenRows(rows, *joined, additive(seen, keys.dtype) if count > 1 else None))
        first = rows.stop
    return found
