"""FeatureHead: a head that drafts token by token, with attention of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.heads.text_head import LookByLayer, TextHead
from outrider.model.lone_layer import Look


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
