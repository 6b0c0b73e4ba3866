"""Heads that keep keys and values of the text beside the target's: how they read texts, and where their drafts begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.cache.memory import AddedLayers
from outrider.heads.rows import TextRows
from outrider.heads.runner import HeadRunner
from outrider.propose.base import ObservedRows, Proposer, ProposeRequest, ProposerSequence, Requirements, RowStatus, rows_at
from outrider.propose.bridge import Bridge
from outrider.propose.draft_vocabulary import DraftVocabulary
from outrider.propose.trees.growth import Growth


class ProposerBesideTarget(Proposer):
    """Lets a head read texts as the target computes them, so a text that comes out of the prefix cache is drafted for at
    once. Subclasses draft.

    Args:
        bridge: From the tokens that the head drafts to the target's.
        vocabulary: The tokens that are drafted, where the head uses the target's output layer; None for all.
    """

    def __init__(
        self,
        head: HeadRunner[Any],
        bridge: Bridge,
        min_confidence: float = 0.0,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._head, self._bridge, self._min_confidence = head, bridge, min_confidence
        self._vocabulary = vocabulary
        if vocabulary is not None:
            head.head_panels = lambda: vocabulary.panels
        self.added: AddedLayers = head.join()
        self.requires = Requirements(aux_layers=head.aux_layers, added_layers=self.added)
        self._features: dict[int, LastFeatures] = {}  # by sequence
        # Rows that are not read yet, by sequence, as their passes brought them. If nothing is drafted for a text, its rows
        # wait until their block is full. So the head makes one pass for a whole block of such a text, and not one in each
        # step.
        self._waiting: dict[int, list[TextRows]] = {}
        self._asked: set[int] = set()  # sequences that have been drafted for since they were last observed

    @torch.inference_mode()
    def observe(self, rows: Sequence[ObservedRows]) -> None:
        read = []
        for seen in rows:
            pieces, number = self._unread_rows(seen), seen.sequence.seq_id
            if pieces:
                self._waiting[number] = pieces
            if pieces and (self.keeps_up or number in self._asked or self._fills_block(pieces)):
                read.append((seen.sequence, self._waiting_rows(seen.sequence)))
            self._asked.discard(number)
        self._read([(sequence, text) for sequence, text in read if text is not None])

    def _fills_block(self, pieces: Sequence[TextRows]) -> bool:
        """Whether others may find a block with these rows from now on, so that they cannot wait."""
        size = self.added.block_size
        return pieces[-1].span.stop // size > pieces[0].start // size

    @torch.inference_mode()
    def _catch_up(self, requests: Sequence[ProposeRequest]) -> None:
        """Read what waits of texts that are drafted for."""
        self._asked |= {request.sequence.seq_id for request in requests}
        waiting = [(request.sequence, self._waiting_rows(request.sequence)) for request in requests]
        self._read([(sequence, text) for sequence, text in waiting if text is not None])

    def _waiting_rows(self, sequence: ProposerSequence) -> TextRows | None:
        """The rows of a text that wait; None if none do, or if they do not follow what the head holds, as after a
        preemption."""
        pieces = self._waiting.pop(sequence.seq_id, None)
        if pieces is None:
            return None
        text = TextRows.joined(pieces)
        own = list(sequence.token_ids[text.start : text.span.stop])
        stands = text.start == self.added.num_filled(sequence.kv) and text.token_ids == own
        return text._replace(kv=sequence.kv) if stands else None

    def _read(self, read: Sequence[tuple[ProposerSequence, TextRows]]) -> None:
        """Let the head hold these rows, too."""
        if not read:
            return
        texts, size = [text for _, text in read], self.added.shape.feature_size
        like = texts[0].hidden[self.added.aux_layers[0]]
        before = [self._features_before(sequence, text, like) for sequence, text in read if size]
        features = self._head.read(self.added, texts, torch.stack(before) if before else like[:, :0])
        parts = torch.split(features, [len(text.span) for text in texts]) if size else [None] * len(texts)
        for (sequence, text), own in zip(read, parts, strict=True):
            self.added.fill(text.kv, text.span.stop, own)
            if own is not None:
                self._features[sequence.seq_id] = LastFeatures.of(text, own, self._features.get(sequence.seq_id))

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        if parent.seq_id in self._features:
            self._features[child.seq_id] = self._features[parent.seq_id]
        if parent.seq_id in self._waiting:
            self._waiting[child.seq_id] = self._waiting[parent.seq_id]

    def finish(self, sequence: ProposerSequence) -> None:
        self._features.pop(sequence.seq_id, None)
        self._waiting.pop(sequence.seq_id, None)
        self._asked.discard(sequence.seq_id)
        if self._vocabulary is not None:
            self._vocabulary.forget(sequence.seq_id)

    def check_rest(self) -> None:
        kept = len(self._features.keys() | self._waiting.keys() | self._asked)
        assert not kept, f"the head still keeps something of {kept} texts"

    def _unread_rows(self, seen: ObservedRows) -> list[TextRows]:
        """The rows that stand, from the token on that the head does not hold yet, behind those that waited; where that one
        is not among them, only what waited."""
        kv, waiting = seen.sequence.kv, self._waiting.pop(seen.sequence.seq_id, [])
        filled = self.added.num_filled(kv)
        if waiting and waiting[0].start != filled:  # as after a preemption
            waiting = []
        held = waiting[-1].span.stop if waiting else filled
        places = [row for row in seen.where(RowStatus.TEXT, RowStatus.ACCEPTED) if seen.positions[row] >= held]
        if not places or seen.positions[places[0]] != held:
            return waiting
        hidden = {layer: seen.aux_hidden_states[layer][rows_at(places)] for layer in self.added.aux_layers}
        hidden = {layer: _alone(rows) for layer, rows in hidden.items()}
        return [*waiting, TextRows(kv, held, [seen.token_ids[place] for place in places], hidden)]

    def _features_before(self, sequence: ProposerSequence, text: TextRows, like: Tensor) -> Tensor:
        """The features [feature_size] before the first row; zeros before the first token, whose slot nobody sees."""
        return self._last_features(sequence) if text.start else like.new_zeros(self.added.shape.feature_size)

    def _last_features(self, sequence: ProposerSequence) -> Tensor:
        """Features of the last token that is held: with the block that it ends, or kept from the pass that computed it."""
        found = self.added.feature_of_last(sequence.kv)
        return self._features[sequence.seq_id].at(self.added.num_filled(sequence.kv) - 1) if found is None else found

    def _growth(self, request: ProposeRequest, least: int, depth: int | None = None) -> Growth:
        """An empty draft with paths of `depth` at most. Its budget is 0 if the head has not yet read the whole text, of
        `least` tokens at least."""
        held = self.added.num_filled(request.sequence.kv)
        ready = held >= least and unread_tokens(request, held)
        if self._vocabulary is not None:
            self._vocabulary.see(request.sequence.seq_id, request.sequence.token_ids)
        depth = request.max_depth if depth is None else min(request.max_depth, depth)
        return Growth.of(request, request.budget if ready else 0, depth, self._min_confidence)


def _alone(rows: Tensor) -> Tensor:
    """The rows without the others of their pass, which a view would keep."""
    return rows if rows.untyped_storage().nbytes() == rows.nbytes else rows.clone()


@dataclass(frozen=True)
class LastFeatures:
    """Features of the last tokens that a head holds of a text: all that it may go on behind. A draft model may take back
    what it has computed ahead of the text, and its last token of the text too."""

    start: int  # position of the first
    rows: Tensor  # [n, feature_size]

    @staticmethod
    def of(text: TextRows, rows: Tensor, before: LastFeatures | None) -> LastFeatures:
        """With the features of rows of a text behind those that were held before them."""
        first = max(text.kv.num_computed - 2, 0)
        if before is not None and first < text.start:
            kept = before.rows[max(first - before.start, 0) : text.start - before.start]
            return LastFeatures(text.start - len(kept), torch.cat([kept, rows]))
        start = max(first, text.start)
        return LastFeatures(start, _alone(rows[start - text.start :]))

    def at(self, position: int) -> Tensor:
        """The feature [feature_size] of a token."""
        assert self.start <= position, f"features are kept from position {self.start} on, and not of {position}"
        return self.rows[position - self.start]


def unread_tokens(request: ProposeRequest, held: int) -> list[int]:
    """The tokens that a head has not read of what its draft follows: the last one of the text, and the path. Inside a stage
    there may be one more, since the draft model computes its last two tokens together with the guess. None where the head
    lacks more of the text, as where it came late."""
    return request.text(held) if held > 0 and held >= len(request.sequence.token_ids) - 2 else []
