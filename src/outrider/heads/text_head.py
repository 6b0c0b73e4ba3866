"""TextHead: a head with attention of its own, which reads texts beside the target's features of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from outrider.cache.added_layers import AddedShape
from outrider.model.lone_layer import SeenRows
from outrider.model.target import Target

#: `Look` for any layer of a head, which is the first argument.
LookByLayer = Callable[[int, Tensor, Tensor], Sequence[SeenRows]]


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

        def keep(layer: int, keys: Tensor, values: Tensor) -> list[SeenRows]:
            rows = keys.to(self._target.dtype), values.to(self._target.dtype)
            kept.append(rows)
            return [self.seen_of_text(layer, 0, slice(0, len(keys)), *rows)]

        before = torch.zeros(1, self.shape.feature_size, dtype=self._target.dtype, device=self._target.device)
        self.read([token_ids], [range(len(token_ids))], before, hidden, keep)
        return kept

    def seen_of_text(self, layer: int, start: int, rows: slice, keys: Tensor, values: Tensor) -> SeenRows:
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
        return SeenRows(rows, keys.to(self.dtype), values.to(self.dtype), mask)
