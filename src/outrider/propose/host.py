"""Proposers at work for texts: they are asked and shown rows, their answers are inspected, and their faults contained.

The engine hosts proposers for its texts, and a stage hosts its drafter. A proposer that raises, or answers nonsense, has a
fault with the texts concerned. What it drew before stays in the draft (see `Drawn`), and the rest is cut by the first
faulty row, never by what the tokens say (see `sound_prefix`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.errors import Contained
from outrider.model.runner import ForwardOutput
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
    TopK,
    rows_at,
)
from outrider.propose.inspection import inspected


class HostedText(Protocol):
    """The standing of a proposer with one text."""

    @property
    def believed(self) -> bool:
        """True if the laws that it gives for its draws are believed."""

    def report_fault(self, problem: str, *, useless: bool = True) -> None:
        """Count a fault; a useless one leaves nothing of a draft."""


def blaming(texts: Iterable[HostedText], doing: str) -> Contained:
    """A block in which a proposer works for texts: if it raises, it has a fault with each of them."""

    def report(error: BaseException) -> None:
        for text in texts:
            text.report_fault(f"{doing} raised {error!r}")

    return Contained(report)


@dataclass(eq=False)
class ProposerHost:
    """One proposer, and those who ask it."""

    proposer: Proposer
    vocab_size: int  # width of the target's logits

    def ask(self, texts: Sequence[HostedText], requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Draft]:
        """A sound draft for each request. Whether the laws are believed is decided before anything is drawn."""
        believed = [text.believed for text in texts]
        answers: list[object] = []
        with Contained(lambda error: answers.extend([error] * len(requests))):
            found = list(self.proposer.propose(requests, noise))
            if len(found) != len(requests):
                raise ValueError(f"{len(found)} drafts for {len(requests)} requests")
            answers += found
        drafts = list[Draft]()
        for text, request, answer, truthful in zip(texts, requests, answers, believed, strict=True):
            sound, problem = inspected(request, answer, self.vocab_size)
            if problem is not None:
                text.report_fault(problem, useless=not sound.num_rows)
            drafts.append(sound if truthful else sound.opaque())
        return drafts


@dataclass
class PassRows:
    """The rows of one text in a pass, after the verdict: tokens of the text, then the draft behind the last of them."""

    sequence: ProposerSequence
    start: int  # position of the first row
    num_due: int  # rows of the text
    draft: Draft
    accepted: Collection[int]  # nodes of the draft that entered the text
    place: int  # of its segment in the pass

    def shown(self, needed: Requirements, out: ForwardOutput, scratch: Iterable[int] = ()) -> ObservedRows:
        """The rows as a proposer is shown them: those of its own scratch rows, and no others' ones."""
        draft, num_due, own = self.draft, self.num_due, list(scratch)
        root, first_node, first_scratch = num_due - 1, num_due, num_due + len(draft)
        rows = [*range(first_scratch), *(first_scratch + row for row in own)]
        places = {row: place for place, row in enumerate(rows)}
        parents = [row - 1 for row in range(num_due)]
        parents += [root if parent < 0 else first_node + parent for parent in draft.row_parents]
        depths: list[int] = []
        for row, parent in enumerate(parents):
            depths.append(row if row < num_due else depths[parent] + 1)
        accepted = frozenset(self.accepted)
        statuses = [RowStatus.TEXT] * num_due
        statuses += [RowStatus.ACCEPTED if node in accepted else RowStatus.REJECTED for node in range(len(draft))]
        statuses += [RowStatus.SCRATCH] * len(own)
        tokens = (*self.sequence.token_ids[self.start : self.start + num_due], *draft.row_token_ids)
        return ObservedRows(
            sequence=self.sequence,
            token_ids=tuple(tokens[row] for row in rows),
            positions=tuple(self.start + depths[row] for row in rows),
            parents=tuple(places[parents[row]] if parents[row] >= 0 else -1 for row in rows),
            statuses=tuple(statuses),
            aux_hidden_states=self._hidden_states(needed, rows, out),
            target_top_k=self._top_k(needed, rows, out),
        )

    def _hidden_states(self, needed: Requirements, rows: list[int], out: ForwardOutput) -> dict[int, Tensor]:
        if not needed.aux_layers:
            return {}
        first = out.row_spans[self.place][0]
        chosen = rows_at([first + row for row in rows])
        return {layer: out.aux_hidden_states[layer][chosen] for layer in needed.aux_layers}

    def _top_k(self, needed: Requirements, rows: list[int], out: ForwardOutput) -> TopK | None:
        if not needed.target_top_k:
            return None
        (begin, end), first_row = out.logits_spans[self.place], out.logits_first_rows[self.place]
        found = [(place, row) for place, row in enumerate(rows) if 0 <= row - first_row < end - begin]
        index = torch.tensor([begin + row - first_row for _, row in found], dtype=torch.long, device=out.logits.device)
        values, tokens = out.logits[index].topk(min(needed.target_top_k, out.logits.shape[-1]), -1)
        return TopK(tuple(place for place, _ in found), tokens, values)
