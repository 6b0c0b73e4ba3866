"""Heads that keep keys and values of the text beside the target's: how they read texts and begin drafts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.cache.memory import AddedLayers, AddedShape, Recompute
from outrider.heads.eagle import TextHead
from outrider.heads.fused_head import FusedHead
from outrider.heads.lone import SeenContext
from outrider.model.target import Target
from outrider.propose.base import ObservedRows, Proposer, ProposeRequest, ProposerSequence, Requirements
from outrider.propose.bridge import Bridge
from outrider.propose.feature_rows import LastFeatures, TextRows, unread_tokens
from outrider.propose.trees.growth import Growth

# --- Drafting with a head that reads the target's features and keeps keys and values of the text beside the target's.
#
# What is kept of a text is written as the target computes it, so a text that comes out of the prefix cache is drafted
# for at once.


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
        """An empty draft. Its budget is 0 if the head has not yet read the whole text.

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


# --- Reading texts with a head that reads the target's features and keeps keys and values of its own beside the target's.
#
# The slot of token i holds what token i and the features of token i - 1 give, and slot 0 is seen by nobody. The rows of
# a text are written as the target computes them, so a text that comes out of the prefix cache is drafted for at once.


class FeatureTextProposer(ProposerBesideTarget):
    """Keeps what a head makes of texts, and the features of their last tokens. Subclasses draft.

    Args:
        head: The head.
        target: Its target.
        bridge: From the tokens that the head drafts to the target's.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller.
    """

    def __init__(self, head: TextHead | FusedHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        super().__init__(head.shape, head.recompute, head.aux_layers, target, bridge, min_confidence)
        self._features: dict[int, LastFeatures] = {}  # by sequence

    @abstractmethod
    def _compute(self, read: Sequence[TextRows], before: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        """Keep what the head makes of rows of texts.

        Args:
            read: The rows of each text.
            before: [num_texts, feature_size] the features of the tokens before them.
            states: As for `_read`.

        Returns:
            The features [n, feature_size] of the rows in turn.
        """

    def _read(self, read: Sequence[TextRows], states: Mapping[int, Tensor]) -> None:
        like = states[self.added.aux_layers[0]]
        before = torch.stack([self._features_before(text, like) for text in read])
        features = self._compute(read, before, states)
        for text, own in zip(read, torch.split(features, [len(text) for text in read]), strict=True):
            self.added.fill(text.kv, text.stop, own)
            seq_id = text.sequence.seq_id
            self._features[seq_id] = LastFeatures.of(text, own, self._features.get(seq_id))

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        if parent.seq_id in self._features:
            self._features[child.seq_id] = self._features[parent.seq_id]

    def finish(self, sequence: ProposerSequence) -> None:
        self._features.pop(sequence.seq_id, None)

    def check_rest(self) -> None:
        assert not self._features, f"the head still keeps features of {len(self._features)} texts"

    def _features_before(self, text: TextRows, like: Tensor) -> Tensor:
        """The features [feature_size] before the first row; zeros before the first token, whose slot nobody sees."""
        return self._last_features(text.sequence) if text.start else like.new_zeros(self.added.shape.feature_size)

    def _last_features(self, sequence: ProposerSequence) -> Tensor:
        """Of the last token that is held: with the block that it ends, or kept from the pass that computed it."""
        found = self.added.feature_of_last(sequence.kv)
        return self._features[sequence.seq_id].at(self.added.num_filled(sequence.kv) - 1) if found is None else found


def read_texts(
    added: AddedLayers, head: TextHead, read: Sequence[TextRows], before: Tensor, states: Mapping[int, Tensor]
) -> Tensor:
    """Let a head whose layers are modules read rows of texts; the arguments are those of `FeatureTextProposer._compute`.

    Args:
        added: Where its keys and values go.
        head: The head.
    """
    tokens, positions = [text.token_ids for text in read], [text.positions for text in read]
    return head.read(tokens, positions, before, states, partial(_keep, added, head, read))


def _keep(
    added: AddedLayers, head: TextHead, read: Sequence[TextRows], layer: int, keys: Tensor, values: Tensor
) -> list[SeenContext]:
    """Write rows of texts; returns what they see, but for the last layer, where nobody looks."""
    seen, first = [], 0
    for text in read:
        rows = slice(first, first + len(text))
        added.write(text.kv, layer, text.start, keys[rows], values[rows])
        if layer < head.num_layers - 1:
            held = added.read(text.kv, layer, text.stop)
            seen.append(head.seen_of_text(layer, text.start, rows, *held))
        first = rows.stop
    return seen
