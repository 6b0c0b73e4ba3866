"""UnrolledMtp: layers for the prediction of several tokens that draft behind every token of a text at once.

Layer d of them, from 0, drafts token i + d + 1 behind token i, and the last layer goes on alone, as it will in the engine.
The row of token i reads, in the first layer, the token beside what the target's final norm left of token i - 1; in layer d
it reads token i + d beside what layer d - 1 left in this row. A row sees the first rows of its text up to its own, and its
own later rows in the same layer. Tokens that were drafted are those of the text, as in `UnrolledHead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from outrider.heads.mtp_head import MtpLayer
from outrider.heads.networks import TargetHead
from outrider.model.lone_layer import SeenRows
from outrider.train.depths import shifted


class UnrolledMtp(nn.Module):
    """Such layers in training.

    Args:
        layers: First to last.
        window: How many tokens back their rows look; None for all.
    """

    def __init__(self, layers: Sequence[MtpLayer], window: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._window = window

    def forward(
        self, embeddings: Tensor, hidden: list[Tensor], wanted: Sequence[Tensor], target_head: TargetHead
    ) -> list[Tensor]:
        """Logits [n, vocab_size] of the draft tokens of each depth; see `Design`."""
        (states,) = hidden
        features = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        logits = []
        kept: list[tuple[Tensor, Tensor]] = []
        for depth, rows in enumerate(wanted):
            if depth < len(self.layers):
                layer, kept = self.layers[depth], []
            assert isinstance(layer, MtpLayer)
            features = self._through(layer, shifted(embeddings, depth), features, depth, kept)
            logits.append(target_head(features[rows]))
        return logits

    def _through(
        self, layer: MtpLayer, embeddings: Tensor, features: Tensor, depth: int, kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """What a layer leaves [num_texts, num_tokens, hidden_size], behind its norm. What it keeps of the rows is added to
        `kept`."""
        texts, length = embeddings.shape[:2]
        rows = layer.enter(embeddings, features).flatten(0, 1).float()
        positions = [depth + place for place in range(length)] * texts
        left: Tensor = layer.decoder(rows, positions, partial(self._look, texts, kept))
        return left.reshape(embeddings.shape)

    def _look(self, texts: int, kept: list[tuple[Tensor, Tensor]], keys: Tensor, values: Tensor) -> list[SeenRows]:
        """What the rows of each text see in a layer, of keys and values [num_texts * num_tokens, num_kv_heads, dim]."""
        kept.append((keys, values))
        length = len(keys) // texts
        mask = self._mask(length, len(kept), keys)
        spans = [slice(text * length, (text + 1) * length) for text in range(texts)]
        return [SeenRows(span, *_joined(kept, span), mask) for span in spans]

    def _mask(self, length: int, depths: int, like: Tensor) -> Tensor:
        """[length, depths * length] additive: a row sees the first rows up to its own, and its own later rows. Row 0, which
        nobody may look at, sees itself, to be a number."""
        places = torch.arange(length, device=like.device)
        own = places == places[:, None]
        first = (places <= places[:, None]) & (places > 0) | own
        seen = torch.cat([first, *[own] * (depths - 1)], 1)
        if self._window is not None:
            positions = torch.cat([places + depth for depth in range(depths)])
            seen &= places[:, None] + depths - 1 - positions < self._window
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


def _joined(kept: Sequence[tuple[Tensor, Tensor]], rows: slice) -> tuple[Tensor, Tensor]:
    """The keys and values of some rows of all depths, one depth behind the other."""
    return torch.cat([keys[rows] for keys, _ in kept]), torch.cat([values[rows] for _, values in kept])
