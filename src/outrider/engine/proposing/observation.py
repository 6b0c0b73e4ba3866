"""Shows proposers the rows that a pass computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.proposing.drafter import Drafter
from outrider.engine.proposing.drafting import StepDraft
from outrider.engine.scheduling.scheduler import ScheduledSequence
from outrider.model.runner import ForwardOutput
from outrider.propose.base import ObservedRows, Requirements, RowStatus, TopK, rows_at


@dataclass(frozen=True)
class ComputedRows:
    """The rows of one sequence in a pass, after the verdict.

    Attributes:
        item: What was scheduled.
        step: Its draft.
        place: Of its segment in the pass.
        start: Position of the first row.
        accepted: Draft tokens that entered the text.
    """

    item: ScheduledSequence
    step: StepDraft
    place: int
    start: int
    accepted: tuple[int, ...]


def requirements(item: ScheduledSequence) -> list[Requirements]:
    """What the proposers of a sequence want to be shown."""
    return [drafter.requires for drafter in item.seq.drafters if drafter.requires is not None]


def aux_layers(items: Seq[ScheduledSequence]) -> list[int]:
    """Hidden states that a pass must bring."""
    return sorted({layer for item in items for needed in requirements(item) for layer in needed.aux_layers})


def show(computed: Seq[ComputedRows], out: ForwardOutput) -> None:
    """Call `observe` of every proposer that asked; one that raises has a fault with the sequences concerned."""
    groups: defaultdict[int, list[tuple[Drafter, ComputedRows]]] = defaultdict(list)
    for rows in computed:
        for drafter in rows.item.seq.drafters:
            if drafter.requires is not None:
                groups[id(drafter.proposer)].append((drafter, rows))
    for pairs in groups.values():
        try:
            pairs[0][0].proposer.observe([_shown_to(drafter, rows, out) for drafter, rows in pairs])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            for drafter, rows in pairs:
                drafter.report_fault(rows.item.seq.request.request_id, f"observe raised {error!r}")
                rows.item.seq.stats.num_proposer_faults += 1


def _shown_to(drafter: Drafter, rows: ComputedRows, out: ForwardOutput) -> ObservedRows:
    """What one proposer is shown of one sequence: all rows but the scratch rows of others."""
    needed = drafter.requires
    assert needed is not None
    seq, num_rows, draft = rows.item.seq, rows.item.num_rows, rows.step.draft
    first_node, first_scratch = num_rows, num_rows + len(draft)
    own = [row for part in rows.step.parts if part.drafter is drafter for row in range(*part.scratch)]
    shown = [*range(first_scratch), *(first_scratch + row for row in own)]
    places = {row: place for place, row in enumerate(shown)}
    root = num_rows - 1
    parents = [row - 1 for row in range(num_rows)]
    parents += [root if parent < 0 else first_node + parent for parent in draft.row_parents]
    depths: list[int] = []
    for row, parent in enumerate(parents):
        depths.append(row if row < num_rows else depths[parent] + 1)
    accepted = frozenset(rows.accepted)
    statuses = [RowStatus.TEXT] * num_rows
    statuses += [RowStatus.ACCEPTED if node in accepted else RowStatus.REJECTED for node in range(len(draft))]
    statuses += [RowStatus.SCRATCH] * len(own)
    tokens = (*seq.token_ids[rows.start : rows.start + num_rows], *draft.row_token_ids)
    return ObservedRows(
        sequence=seq.view,
        token_ids=tuple(tokens[row] for row in shown),
        positions=tuple(rows.start + depths[row] for row in shown),
        parents=tuple(places[parents[row]] if parents[row] >= 0 else -1 for row in shown),
        statuses=tuple(statuses),
        aux_hidden_states=_hidden_states(needed, shown, rows.place, out),
        target_top_k=_top_k(needed, shown, rows.place, out),
    )


def _hidden_states(needed: Requirements, shown: list[int], place: int, out: ForwardOutput) -> dict[int, Tensor]:
    if not needed.aux_layers:
        return {}
    first = out.row_spans[place][0]
    chosen = rows_at([first + row for row in shown])
    return {layer: out.aux_hidden_states[layer][chosen] for layer in needed.aux_layers}


def _top_k(needed: Requirements, shown: list[int], place: int, out: ForwardOutput) -> TopK | None:
    if not needed.target_top_k:
        return None
    (begin, end), first_row = out.logits_spans[place], out.logits_first_rows[place]
    rows = [(place, row) for place, row in enumerate(shown) if 0 <= row - first_row < end - begin]
    index = torch.tensor([begin + row - first_row for _, row in rows], dtype=torch.long, device=out.logits.device)
    values, tokens = out.logits[index].topk(needed.target_top_k, -1)
    return TopK(tuple(place for place, _ in rows), tokens, values)
