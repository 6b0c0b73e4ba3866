"""Rows of a draft model as its drafter in a stage is shown them: those of the passes that verify the drafter's guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from outrider.cache.state import KVView
from outrider.model.batch import Segment
from outrider.model.runner import ForwardOutput
from outrider.propose.base import ObservedRows, ProposerSequence, Requirements, RowStatus, TopK
from outrider.propose.methods.draft_model import OwnText, Reading
from outrider.propose.methods.stage_drafter import StageDrafter


@dataclass(frozen=True)
class VerifiedRows:
    """Rows of one text in a pass of the draft model, after its verdict.

    Attributes:
        sequence: Whose.
        text: The text, with the tokens that stand and the one behind them.
        segment: The rows: first those of the text, then those of a guess.
        num_due: How many are of the text.
        place: Of the segment in the pass.
        path: Nodes of the guess that stand.
    """

    sequence: ProposerSequence
    text: OwnText
    segment: Segment
    num_due: int
    place: int
    path: tuple[int, ...]

    @staticmethod
    def of_text(reading: Reading, place: int) -> VerifiedRows:
        """Rows of a text without a guess behind them."""
        return VerifiedRows(reading.sequence, reading.text, reading.segment, reading.segment.num_rows, place, ())


@dataclass(frozen=True)
class _Kept:
    """The rows of a text that the latest draft has run through.

    Attributes:
        start: Position of the last token that was committed when the draft began.
        tokens: Of the text from there on, with those of the draft.
        states: By position: the hidden states of its row, [1, hidden_size] by layer.
    """

    start: int
    tokens: list[int]
    states: dict[int, dict[int, Tensor]]


class StageRows:
    """Shows a drafter what its draft model computed, as the engine shows a proposer the rows of the target.

    The text of a drafter goes on with each token that the stage drafts. Where the target takes another one, the drafter is
    shown the last row again that still stands; without such a row it forgets the text. One with added layers is shown every
    row of the text, and those that its layers lack are computed again; the state of the text says what they hold.

    Args:
        drafter: Who is shown them.
    """

    def __init__(self, drafter: StageDrafter) -> None:
        self._drafter = drafter
        self._needs = drafter.proposer.requires or Requirements()
        self._kept: dict[int, _Kept] = {}

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Hidden states that a pass must bring."""
        return self._needs.aux_layers

    @property
    def reads_all(self) -> bool:
        """Whether every row of a text must be shown, since layers are kept beside those of the draft model."""
        return self._needs.added_layers is not None

    def needs(self, sequence: ProposerSequence) -> frozenset[int]:
        """Added layers that must hold all that is computed of a text; none where the drafter is set aside for it."""
        added = self._needs.added_layers
        return frozenset() if added is None or self._drafter.is_set_aside(sequence) else frozenset({added.number})

    def begin_draft(self, sequence: ProposerSequence, text: OwnText) -> None:
        """A draft behind this text begins."""
        kept = self._kept.pop(sequence.seq_id, None)
        if kept is None:
            return
        pairs = zip(kept.tokens, text.tokens(kept.start), strict=False)
        stands = kept.start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        end = min(stands, text.length - 1)  # nothing was written behind the last token
        last = max((position for position in kept.states if position < end), default=None)
        if last is None:
            self._drafter.forget(sequence)
        elif last < max(kept.states):
            view = self._drafter.view(sequence, text.tokens()[: last + 2], KVView(text.state))
            self._show_again(view, last, kept.states[last])

    def show(self, verified: Sequence[VerifiedRows], out: ForwardOutput) -> None:
        """Show the rows of a pass."""
        if not self._needs.aux_layers and not self._needs.target_top_k and not self.reads_all:
            return
        shown = [self._observed(each, out) for each in verified]
        for each, seen in zip(verified, shown, strict=True):
            self._keep(each, seen)
        self._drafter.observe(shown)

    def finish(self, sequence: ProposerSequence) -> None:
        """The text has ended."""
        self._kept.pop(sequence.seq_id, None)

    def _observed(self, each: VerifiedRows, out: ForwardOutput) -> ObservedRows:
        segment, first = each.segment, out.row_spans[each.place][0]
        parents = segment.parents or tuple(range(-1, len(segment.token_ids) - 1))
        positions = list[int]()
        for parent in parents:
            positions.append(segment.start if parent < 0 else positions[parent] + 1)
        guess = range(len(parents) - each.num_due)
        return ObservedRows(
            sequence=self._drafter.view(each.sequence, each.text.tokens(), KVView(each.text.state)),
            token_ids=tuple(segment.token_ids),
            positions=tuple(positions),
            parents=parents,
            statuses=(
                *[RowStatus.TEXT] * each.num_due,
                *(RowStatus.ACCEPTED if node in each.path else RowStatus.REJECTED for node in guess),
            ),
            aux_hidden_states={
                layer: out.aux_hidden_states[layer][first : first + len(parents)] for layer in self._needs.aux_layers
            },
            target_top_k=self._top_k(each.place, out),
        )

    def _top_k(self, place: int, out: ForwardOutput) -> TopK | None:
        if not self._needs.target_top_k:
            return None
        (begin, end), first_row = out.logits_spans[place], out.logits_first_rows[place]
        values, tokens = out.logits[begin:end].topk(min(self._needs.target_top_k, out.logits.shape[-1]), -1)
        return TopK(tuple(range(first_row, first_row + end - begin)), tokens, values)

    def _keep(self, each: VerifiedRows, seen: ObservedRows) -> None:
        """Rows that stand, with their states, until the next draft begins."""
        if not self._needs.aux_layers or self.reads_all:
            return
        seq_id, start = each.sequence.seq_id, len(each.sequence.token_ids) - 1
        states = self._kept[seq_id].states if seq_id in self._kept else {}
        for row in seen.where(RowStatus.TEXT, RowStatus.ACCEPTED):
            if seen.positions[row] >= start:
                index = torch.tensor([row])  # a copy: a view would keep all rows
                states[seen.positions[row]] = {layer: rows[index] for layer, rows in seen.aux_hidden_states.items()}
        self._kept[seq_id] = _Kept(start, each.text.tokens(start), states)

    def _show_again(self, view: ProposerSequence, position: int, states: Mapping[int, Tensor]) -> None:
        token, status = view.token_ids[position], (RowStatus.TEXT,)
        self._drafter.observe([ObservedRows(view, (token,), (position,), (-1,), status, dict(states))])
