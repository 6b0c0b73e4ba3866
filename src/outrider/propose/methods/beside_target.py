"""Drafting with a head that reads the target's features and keeps keys and values of the text beside the target's.

What is kept of a text is written as the target computes it, so a text that comes out of the prefix cache is drafted for at
once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.cache.added_layers import AddedLayers, AddedShape, Recompute
from outrider.model.target import Target
from outrider.propose.base import ObservedRows, Proposer, ProposeRequest, Requirements
from outrider.propose.bridge import Bridge
from outrider.propose.methods.feature_rows import TextRows, unread_tokens
from outrider.propose.trees.growth import Growth


class ProposerBesideTarget(Proposer):
    """What heads with layers beside the target's own have in common, however they draft.

    Args:
        shape: What the head's layers keep.
        recompute: How it is computed anew, for the proofs.
        aux_layers: Hidden states of the target that the head reads, low to high.
        target: The target.
        bridge: From the tokens that the head drafts to the target's.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller.
    """

    def __init__(
        self,
        shape: AddedShape,
        recompute: Recompute,
        aux_layers: tuple[int, ...],
        target: Target,
        bridge: Bridge,
        min_confidence: float,
    ) -> None:
        self._bridge = bridge
        self._min_confidence = min_confidence
        self.added: AddedLayers = target.add_layers(shape, recompute, aux_layers)
        self.requires = Requirements(aux_layers=aux_layers, added_layers=self.added)

    @torch.inference_mode()
    def observe(self, rows: Sequence[ObservedRows]) -> None:
        read = [text for seen in rows if (text := TextRows.of(seen, self.added.num_filled(seen.sequence.kv)))]
        if read:
            self._read(read, {layer: _joined([text.hidden(layer) for text in read]) for layer in self.added.aux_layers})

    @abstractmethod
    def _read(self, read: Sequence[TextRows], states: Mapping[int, Tensor]) -> None:
        """Keep what the head makes of rows of texts.

        Args:
            read: The rows of each text.
            states: The target's hidden states [n, hidden_size] of all of them in turn, by layer.
        """

    def _growth(self, request: ProposeRequest, depth: int, least: int) -> Growth:
        """An empty draft, which cannot grow where the head has not read the text up to its last token.

        Args:
            request: What is asked for.
            depth: Most tokens of a path.
            least: Tokens that the head must have read.
        """
        held = self.added.num_filled(request.sequence.kv)
        ready = held >= least and unread_tokens(request, held)
        return Growth.of(request, request.budget if ready else 0, depth, self._min_confidence)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of texts one behind another; those of a single text are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
