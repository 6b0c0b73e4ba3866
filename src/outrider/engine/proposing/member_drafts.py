"""What became of the drafts of several members, each by itself, from one verified draft of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.draft import Law
from outrider.engine.proposing.drafting import DraftPart, StepDraft
from outrider.engine.scheduling.scheduler import ScheduledSequence
from outrider.engine.sequence import Status
from outrider.govern.decision import MemberDraft
from outrider.verify.verifier import Verdict


def member_drafts(
    members: Sequence[str], item: ScheduledSequence, step: StepDraft, verdict: Verdict, entered: int
) -> list[MemberDraft]:
    """What became of each member's part.

    Args:
        members: Their names, in the order of their turns.
        item: What was planned.
        step: What they drafted.
        verdict: What stands.
        entered: Draft tokens that entered the text.
    """
    parts = {part.turn: part for part in step.parts if part.drafter is not None}
    found = []
    for place, (name, turn) in enumerate(zip(members, item.turns, strict=True)):
        part = parts.get(place)
        if part is not None:
            scores = _scores(item, step, part, verdict, entered)
            found.append(MemberDraft(name, max(turn.budget, len(part.draft)), len(part.draft), scores))
        elif turn.budget:
            found.append(MemberDraft(name, turn.budget, 0, ()))
    return found


def _scores(item: ScheduledSequence, step: StepDraft, part: DraftPart, verdict: Verdict, entered: int) -> list[float]:
    """For each place where it proposed a token and to which the text came: whether one of its tokens stood."""
    path, ended = (-1, *verdict.path[:entered]), item.seq.status is Status.FINISHED
    tokens = [*(step.draft.token_ids[node] for node in path[1:]), verdict.token_id]
    tested = bool(verdict.chances) and item.rule not in ("walk", "coupled") and not item.coupled
    found: list[float] = []
    if part.root not in path:
        return found
    for place in range(path.index(part.root), len(path)):
        own = [node for node, parent in enumerate(part.draft.parents) if _behind(part, parent) == path[place]]
        if not own or (place == entered and ended):
            break  # nothing is known of the next one
        stood = place < entered and any(part.nodes[node] == path[place + 1] for node in own)
        contested = tested and _is_contested(step, part, path[place])
        found.append(_overlap(part, own[0], tokens[place], verdict.chances[place]) if contested else float(stood))
        if not stood:
            break
    return found


def _behind(part: DraftPart, parent: int) -> int:
    """The node of the whole draft behind which a node of a part stands, from its parent in the part."""
    return part.root if parent < 0 else part.nodes[parent]


def _is_contested(step: StepDraft, part: DraftPart, behind: int) -> bool:
    """Whether a token that it drew behind a node was tested beside those that others drew there. Then it depends on which
    was tested first whether it stood. Guesses that nobody drew are compared behind all tests."""
    draft = step.draft
    draws = [draw for draw, node in enumerate(draft.nodes) if draft.parents[node] == behind]
    drawn = {part.draws[0] <= draw < part.draws[1] for draw in draws if draft.laws[draw] is Law.SAMPLED}
    return drawn == {True, False}


def _overlap(part: DraftPart, node: int, token: int, target: float) -> float:
    """The chance with which a drawn token would have stood alone, by the token that the target chose: the overlap of both
    laws is the mean of min(1, q / p) over tokens of the target, whose probability for one is p."""
    assert part.draft.draft_probs is not None, "a sampled draft carries its probabilities"
    return min(1.0, float(part.draft.draft_probs[part.draft.nodes.index(node), token]) / max(target, 1e-12))
