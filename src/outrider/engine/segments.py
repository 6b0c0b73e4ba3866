"""Maps sequences to their rows in a pass."""

from __future__ import annotations

from outrider.engine.proposing import observation
from outrider.engine.proposing.drafting import StepDraft
from outrider.engine.scheduling.scheduler import ScheduledSequence
from outrider.model.batch import Segment


def segment_of(item: ScheduledSequence, step: StepDraft) -> Segment:
    """Rows of one sequence: committed tokens, then the draft behind the last of them, then scratch rows."""
    seq, draft = item.seq, step.draft
    start = seq.state.num_computed
    stop = start + item.num_rows
    parents = None
    if not draft.rows_are_chain:  # row 0 is the last committed token, node i is row i + 1
        parents = (-1, *(parent + 1 for parent in draft.row_parents))
    needed = observation.requirements(item)
    first_logit = item.num_rows - 1 if item.completes else item.num_rows
    if any(n.target_top_k and n.needs_uncached_prompt for n in needed) or (
        seq.index == 0 and seq.request.params.prompt_logprobs is not None
    ):
        first_logit = 0
    last_logit = None if any(n.target_top_k for n in needed) else item.num_rows + len(draft)
    rows = (*seq.token_ids[start:stop], *draft.row_token_ids)
    return Segment.of(seq.state, rows, start, parents, first_logit, last_logit, certain=stop)
