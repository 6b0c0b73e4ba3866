"""Runs heads that draft several tokens in one pass beside their target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from outrider.cache.memory import AddedShape
from outrider.heads.block_networks import BlockHeadConfig, BlockHeadNetwork, BlockLayer, BlockReach, ParallelNetwork
from outrider.heads.eagle import LookByLayer, TextHead, features_before
from outrider.heads.features import HeadLayer, LayerInput
from outrider.heads.formats.published import PublishedHead
from outrider.heads.lone import SeenContext, attend_alone
from outrider.heads.placed import PlacedNetwork
from outrider.model.attention import Scores
from outrider.model.context import additive
from outrider.model.target import Target

# --- BlockHead: runs a head that drafts a whole block in one pass beside its target.


@dataclass(frozen=True)
class Block:
    """A block that is to be drafted.

    Attributes:
        anchor: The last token of the text, which the block begins with.
        position: Where that stands: so many tokens come before the block.
        context: By number of a layer, what is kept of these tokens: keys and values [position, num_kv_heads, head_dim].
        places: Which tokens are wanted; 0 is the one behind the anchor.
    """

    anchor: int
    position: int
    context: Callable[[int], tuple[Tensor, Tensor]]
    places: range


class BlockHead:
    """A head whose layers take keys and values of the text from the target's features, and draft at mask tokens.

    Args:
        head: As it was published; its network is taken over.
        target: The target.

    Attributes:
        config: Its shape.
        aux_layers: Hidden states of the target that it reads, low to high.

    Raises:
        HeadMismatchError: It was made for another target.
    """

    def __init__(self, head: PublishedHead, target: Target) -> None:
        assert isinstance(head.network, BlockHeadNetwork), head.config
        self.config: BlockHeadConfig = head.network.config
        self._placed = PlacedNetwork(head.folder, self.config, head.network, target)
        self._layers, self._target = head.network.own_layers, target
        self.aux_layers = self._placed.aux_layers

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Features [n, hidden_size] in the target's dtype, of its hidden states [n, target_hidden_size] by layer."""
        return self._placed.fuse(hidden)

    @torch.inference_mode()
    def keys_and_values(self, features: Tensor, positions: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """What each layer keeps of tokens of the text, [n, num_kv_heads, head_dim] each in the target's dtype.

        Args:
            features: [n, hidden_size] of the tokens, from `fuse`.
            positions: Of the tokens.
        """
        tables, rows, dtype = self._placed.tables(positions), features.to(self._placed.dtype), self._target.dtype
        kept = [layer.self_attn.keys_and_values(rows, tables) for layer in self._layers]
        return [(keys.to(dtype), values.to(dtype)) for keys, values in kept]

    @torch.inference_mode()
    def draft(self, blocks: Sequence[Block]) -> list[Tensor]:
        """Logits [len(places), draft_vocab_size] of the wanted tokens of each block, float32 at least.

        A block is computed whole, as it was in training, however few of its tokens are wanted.
        """
        size, masks = self.config.block_size, [self.config.mask_token_id] * (self.config.block_size - 1)
        rows = self._placed.embed([token for block in blocks for token in (block.anchor, *masks)])
        tables = self._placed.tables([block.position + i for block in blocks for i in range(size)])
        for number, (layer, reach) in enumerate(zip(self._layers, self.config.reaches, strict=True)):
            rows = self._through(layer, reach, rows, tables, [(block.position, block.context(number)) for block in blocks])
        wanted = [i * size + 1 + place for i, block in enumerate(blocks) for place in block.places]
        return list(torch.split(self._placed.logits(rows[wanted]), [len(block.places) for block in blocks]))

    def recompute(self, token_ids: Sequence[int], hidden: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What is kept of a whole text, for the proofs: see `AddedLayers`."""
        return self.keys_and_values(self.fuse(hidden), range(len(token_ids)))

    def _through(
        self,
        layer: BlockLayer,
        reach: BlockReach,
        rows: Tensor,
        tables: tuple[Tensor, Tensor],
        contexts: Sequence[tuple[int, tuple[Tensor, Tensor]]],
    ) -> Tensor:
        """What a layer leaves of the rows [num_blocks * block_size, hidden_size] of blocks, given where each of them begins
        and what is kept of the text before it."""
        normed, size = layer.input_layernorm(rows), self.config.block_size
        queries = layer.self_attn.queries(normed, tables)
        own = layer.self_attn.keys_and_values(normed, tables)
        seen = []
        for i, (position, context) in enumerate(contexts):
            block = slice(i * size, (i + 1) * size)
            keys, values = (torch.cat([old.to(new.dtype), new[block]]) for old, new in zip(context, own, strict=True))
            seen.append(SeenContext(block, keys, values, _mask(reach, position, queries[block])))
        return layer.leave(rows, attend_alone(queries, seen, Scores(layer.self_attn.scaling)))


def _mask(reach: BlockReach, position: int, rows: Tensor) -> Tensor | None:
    """What the rows of a block that begins at a position see of the text before it and of the block: an additive mask
    [block_size, position + block_size]; None for all."""
    if reach.window is None and not reach.causal:
        return None
    slots = torch.arange(position + len(rows), device=rows.device)
    ahead = slots[None] - slots[position:, None]
    seen = ahead <= 0 if reach.causal else torch.ones_like(ahead, dtype=torch.bool)
    return additive(seen if reach.window is None else seen & (ahead.abs() < reach.window), rows.dtype)


# --- ParallelHead: runs a head that drafts several tokens in one pass of its layers, beside its target.


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


def _seen(texts: Sequence[Continuation], number: int, keys: Tensor, values: Tensor) -> list[SeenContext]:
    """What the rows of drafts see in a layer: the text but for its first token, and the rows of their draft up to their
    own."""
    found, first = [], 0
    for text in texts:
        rows = slice(first, first + text.places.stop)
        held_keys, held_values = (kept[1:].to(keys.dtype) for kept in text.context(number))
        count = rows.stop - rows.start
        seen = torch.ones(count, len(held_keys) + count, dtype=torch.bool, device=keys.device).tril(len(held_keys))
        joined = torch.cat([held_keys, keys[rows]]), torch.cat([held_values, values[rows]])
        found.append(SeenContext(rows, *joined, additive(seen, keys.dtype) if count > 1 else None))
        first = rows.stop
    return found
