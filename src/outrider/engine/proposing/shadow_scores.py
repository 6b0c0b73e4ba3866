"""Scores of idle methods: drafts that nobody verifies are compared with the text that comes.

A model reads what it has yet to read, and what it would have drafted there is compared with what was written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import thread_time

from outrider.draft import Draft
from outrider.engine.sequence import Sequence
from outrider.govern.governor import Governor
from outrider.govern.shadows import Shadow
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.methods.draft_model import CATCH_UP_ROWS
from outrider.verify.noise import NoiseSource

#: Names whoever draws a shadow in keys, apart from the turns of the step.
_SHADOWS = 1 << 19


@dataclass
class _Pending:
    """A draft that an idle lookup would have made, until the text has come past it.

    Attributes:
        method: Whose.
        draft: The draft.
        length: Of the text up to which it was compared.
        asked: Tokens that were asked for.
        seconds: That it took.
        node: Where the text is in it.
        accepted: Tokens of it that stand.
    """

    method: str
    draft: Draft
    length: int
    asked: int
    seconds: float = 0.0
    node: int = -1
    accepted: int = 0

    def follow(self, token_ids: Seq[int]) -> bool:
        """Go along the text; returns whether there may be more to come.

        Args:
            token_ids: The whole text.
        """
        for token in token_ids[self.length :]:
            child = self.draft.child(self.node, token)
            if child is None:
                return False
            self.node, self.accepted = child, self.accepted + 1
        self.length = len(token_ids)
        return bool(self.draft.children(self.node))


class ShadowScores:
    """Scores idle methods of all texts."""

    def __init__(self) -> None:
        self._pending: dict[int, list[_Pending]] = {}
        self._probs: dict[int, deque[float]] = {}

    def drop(self, seq_id: int) -> None:
        """A text has ended, or is not governed any more."""
        self._pending.pop(seq_id, None)
        self._probs.pop(seq_id, None)

    def clear(self) -> None:
        """Forget all texts."""
        self._pending, self._probs = {}, {}

    def awaits(self, seq: Sequence, method: str | None = None) -> bool:
        """Whether there is a draft, by this method or by any, that the text has not come past."""
        found = self._pending.get(seq.seq_id, ())
        return any(each.method == method for each in found) if method else bool(found)

    def note(self, seq: Sequence, probs: Iterable[float]) -> None:
        """The target wrote tokens with these probabilities."""
        self._probs.setdefault(seq.seq_id, deque(maxlen=CATCH_UP_ROWS)).extend(probs)

    def break_off(self, seq: Sequence) -> None:
        """What the target writes next does not follow on what was noted."""
        self._probs.pop(seq.seq_id, None)

    def ask(
        self, seq: Sequence, governor: Governor, proposer: Proposer, index: int, shadow: Shadow, noise: NoiseSource
    ) -> list[float] | None:
        """Ask a lookup for a draft, and remember it. Of a model: how often its draft tokens would have stood in the last
        tokens of the text (`Proposer.overlaps`)."""
        if not governor.candidates[shadow.method].lookup:
            return proposer.overlaps(seq.view, list(self._probs.get(seq.seq_id, ())))
        asked = governor.candidates[shadow.method].longest
        request = ProposeRequest(seq.view, asked, asked, drafter=_SHADOWS + index)
        (draft,) = proposer.propose([request], DraftNoise(noise))
        pending = _Pending(shadow.method, draft, len(seq.token_ids), asked)
        self._pending.setdefault(seq.seq_id, []).append(pending)
        return None

    def charge(self, seq: Sequence, method: str, seconds: float) -> bool:
        """A draft took so long, which is paid when it is known what it was worth; False where it has none."""
        pending = [each for each in self._pending.get(seq.seq_id, ()) if each.method == method]
        if pending:
            pending[-1].seconds = seconds
        return bool(pending)

    def settle(self, seq: Sequence, governor: Governor, believed: Callable[[float], float]) -> None:
        """Score the drafts that the text has come past.

        Args:
            seq: The text.
            governor: Who is told.
            believed: The seconds of a task as the governor is to believe them, from those that a clock measured.
        """
        left = []
        for pending in self._pending.pop(seq.seq_id, ()):
            if pending.follow(seq.token_ids):
                left.append(pending)
                continue
            begun = thread_time()
            governor.observe_draft(
                seq.seq_id,
                pending.method,
                pending.asked,
                len(pending.draft),
                pending.accepted,
                rejected=bool(pending.draft.children(pending.node)),
                shadow=True,
            )
            seconds = pending.seconds + believed(thread_time() - begun)
            governor.observe_shadow_seconds(pending.method, 1, seconds)
        if left:
            self._pending[seq.seq_id] = left
