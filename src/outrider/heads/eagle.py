"""Runs heads that draft token by token, with attention of their own, beside their target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.cache.memory import AddedShape
from outrider.heads.features import FeatureHeadNetwork, LayerInput
from outrider.heads.formats.published import PublishedHead
from outrider.heads.lone import Look, SeenContext, attend_alone
from outrider.heads.placed import PlacedNetwork
from outrider.model.attention import Scores
from outrider.model.target import Target

# --- TextHead: a head with attention of its own, which reads texts beside the target's features of them.


#: `Look` for any layer of a head, which is the first argument.
LookByLayer = Callable[[int, Tensor, Tensor], Sequence[SeenContext]]


class TextHead(ABC):
    """A head beside its target, whose first layer reads a token beside the target's feature of the token before it.

    Args:
        target: The target.

    Attributes:
        shape: What its layers keep.
        aux_layers: Hidden states of the target that it reads, low to high.
        dtype: That its rows are computed in.
        window: How many tokens back its rows look; None for all.
    """

    shape: AddedShape
    aux_layers: tuple[int, ...]
    dtype: torch.dtype
    window: int | None = None

    def __init__(self, target: Target) -> None:
        self._target = target

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return self.shape.num_layers

    def unseen(self, layer: int) -> int:
        """How many tokens at the beginning of a text no later row sees in a layer: the first one has no feature before
        it."""
        return 1

    @abstractmethod
    def read(
        self,
        texts: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        before: Tensor,
        hidden: Mapping[int, Tensor],
        keep: LookByLayer,
    ) -> Tensor:
        """Read what the target has computed of texts.

        Args:
            texts: The tokens of each.
            positions: Of these tokens.
            before: [num_texts, feature_size] the features of the tokens before them.
            hidden: [n, target_hidden_size] of all tokens in turn, by layer of the target.
            keep: Keeps the keys and values of a layer. It is not asked what rows see in the last layer.

        Returns:
            The features [n, feature_size] of the tokens, in the target's dtype.
        """

    def recompute(self, token_ids: Sequence[int], hidden: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What is kept of a whole text, for the proofs: see `AddedLayers`. The first token has no features before it."""
        kept = []

        def keep(layer: int, keys: Tensor, values: Tensor) -> list[SeenContext]:
            rows = keys.to(self._target.dtype), values.to(self._target.dtype)
            kept.append(rows)
            return [self.seen_of_text(layer, 0, slice(0, len(keys)), *rows)]

        before = torch.zeros(1, self.shape.feature_size, dtype=self._target.dtype, device=self._target.device)
        self.read([token_ids], [range(len(token_ids))], before, hidden, keep)
        return kept

    def seen_of_text(self, layer: int, start: int, rows: slice, keys: Tensor, values: Tensor) -> SeenContext:
        """What rows of a text see in a layer.

        Args:
            layer: Which of its layers.
            start: Position of the first row.
            rows: Which rows.
            keys, values: [num_slots, num_kv_heads, dim] of the text up to its last row.
        """
        slots = torch.arange(len(keys), device=keys.device)
        own = slots[start:, None]
        seen = (slots >= self.unseen(layer)) & (slots <= own)
        if self.window is not None:
            seen &= own - slots < self.window
        seen |= slots == own  # rows that nobody looks at must be numbers all the same
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=keys.device).masked_fill_(~seen, float("-inf"))
        return SeenContext(rows, keys.to(self.dtype), values.to(self.dtype), mask)


# --- FeatureHead: a head that drafts token by token, with attention of its own.


class FeatureHead(TextHead):
    """A head that drafts token by token.

    Layer i reads the token beside what layer i - 1 left of the token before, and guesses one token further ahead. So what
    the next token reads, its *features*, are num_layers rows. In layer i the rows of the first i + 1 tokens have nothing to
    read, and no row looks at them.

    Attributes:
        width: Of what one layer reads.
    """

    @property
    def width(self) -> int:
        """Of what one layer reads."""
        return self.shape.feature_size // self.num_layers

    @abstractmethod
    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The target's features [n, width] in the target's dtype, of its hidden states [n, target_hidden_size] by layer."""

    @abstractmethod
    def keys_and_values(
        self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """What a layer keeps of tokens, [n, num_kv_heads, dim] each in the target's dtype.

        Args:
            layer: Which of its layers.
            token_ids: The tokens.
            features: [n, width] that it reads beside them.
            positions: Of the tokens.
        """

    @abstractmethod
    def run(self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int], look: Look) -> Tensor:
        """What a layer leaves [n, width] of tokens; the arguments are those of `keys_and_values`.

        Args:
            look: Is given the keys and values of the rows, in `dtype`.
        """

    @abstractmethod
    def next_feature(self, left: Tensor) -> Tensor:
        """What the next token reads of what a layer left: [n, width]."""

    @abstractmethod
    def logits(self, left: Tensor) -> Tensor:
        """Logits [n, draft_vocab_size] of what a layer left, float32 at least."""

    @torch.inference_mode()
    def read(
        self,
        texts: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        before: Tensor,
        hidden: Mapping[int, Tensor],
        keep: LookByLayer,
    ) -> Tensor:
        tokens = [token for text in texts for token in text]
        places = [place for own in positions for place in own]
        features = [self.fuse(hidden)]
        for layer in range(self.num_layers):
            first = before[:, layer * self.width : (layer + 1) * self.width]
            read = features_before(first, features[-1], [len(text) for text in texts])
            if layer == self.num_layers - 1:
                keep(layer, *self.keys_and_values(layer, tokens, read, places))
                break
            left = self.run(layer, tokens, read, places, partial(keep, layer))
            features.append(self.next_feature(left).to(self._target.dtype))
        return torch.cat(features, -1)

    def unseen(self, layer: int) -> int:
        return layer + 1

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        """The target's embeddings."""
        return self._target.embed(token_ids).to(self.dtype)


def features_before(first: Tensor, features: Tensor, lengths: Sequence[int]) -> Tensor:
    """The features [n, width] of the tokens before those of texts.

    Args:
        first: [num_texts, width] of the token before each text.
        features: [n, width] of the tokens.
        lengths: Of the texts.
    """
    own = torch.split(features, list(lengths))
    return torch.cat([part for i, rows in enumerate(own) for part in (first[i : i + 1], rows[:-1])])


# --- EagleHead: runs a published EAGLE head beside its target.


class EagleHead(FeatureHead):
    """A head of one layer.

    Args:
        head: As it was published; its network is taken over.
        target: The target.

    Raises:
        HeadMismatchError: It was made for another target.
    """

    def __init__(self, head: PublishedHead, target: Target) -> None:
        super().__init__(target)
        assert isinstance(head.network, FeatureHeadNetwork), head.config
        self._placed = PlacedNetwork(head.folder, head.config, head.network, target)
        self._network, self.aux_layers, self.dtype = self._placed.network, self._placed.aux_layers, self._placed.dtype
        layer, width = head.config.layer, head.config.hidden_size
        self.shape = AddedShape(1, layer.num_key_value_heads, layer.head_dim, feature_size=width)

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        return self._placed.fuse(hidden)

    @torch.inference_mode()
    def keys_and_values(
        self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        rows = self._enter(token_ids, features).rows
        keys, values = self._network.layer.self_attn.keys_and_values(rows, self._placed.tables(positions))
        return keys.to(self._target.dtype), values.to(self._target.dtype)

    @torch.inference_mode()
    def run(self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int], look: Look) -> Tensor:
        read, tables = self._enter(token_ids, features), self._placed.tables(positions)
        attention = self._network.layer.self_attn
        queries = attention.queries(read.rows, tables)
        seen = look(*attention.keys_and_values(read.rows, tables))
        found = attend_alone(queries, seen, Scores(attention.scaling))
        return self._network.layer.leave(read.residual, found)

    @torch.inference_mode()
    def next_feature(self, left: Tensor) -> Tensor:
        return self._network.next_feature(left)

    @torch.inference_mode()
    def logits(self, left: Tensor) -> Tensor:
        return self._placed.logits(left)

    def _enter(self, token_ids: Sequence[int], features: Tensor) -> LayerInput:
        return self._network.enter(self._embed(token_ids), features.to(self.dtype))

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        return self._placed.embed(token_ids)
