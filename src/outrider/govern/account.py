"""Pays for steps from what trials may cost: before they begin as if no draft token stood, and afterwards what they took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from outrider.govern.costs import CostModel, StepTimes, StepWork
from outrider.govern.purse import Purse


@dataclass
class _Open:
    """A step that was decided and has not ended yet.

    Attributes:
        work: What it was to do at most.
        plain: Seconds of a plain step of its texts.
        longer: Seconds by which it was expected to be longer.
    """

    work: StepWork
    plain: float
    longer: float = 0.0


class Account:
    """What speculation may still lose, and the step that is under way.

    Args:
        plain: Seconds of a plain step of one text.
    """

    def __init__(self, plain: float) -> None:
        self._purse = Purse(plain)
        self._open: _Open | None = None

    @property
    def left(self) -> float:
        """Seconds that may be lost now."""
        return self._purse.left

    @property
    def most(self) -> float:
        """Seconds that are saved up at most."""
        return self._purse.most

    @property
    def is_empty(self) -> bool:
        """Whether nothing may be lost."""
        return self.left <= 0.0

    def spend(self, seconds: float) -> None:
        """So much was lost beside the step."""
        self._purse.spend(seconds)

    def begin_step(self, work: StepWork, costs: CostModel) -> bool:
        """Pay for a step as if no draft token stood; returns whether it may cost so much. If not, it is plain."""
        if self._open is not None:
            self._purse.end_step(self._open.plain + self._open.longer, self._open.plain)
        plain = costs.step_seconds(work.texts, work.context)
        longer = costs.most_longer(work)
        if not self._purse.affords(longer):
            self._open = _Open(replace(work, rows=work.plain_rows, drafts=()), plain)
            return False
        self._open = _Open(work, plain, longer)
        self._purse.spend(longer)
        return True

    def win(self, tokens: float) -> None:
        """So many draft tokens of the step stand: what they would have taken plainly comes back."""
        if self._open is not None:
            self._purse.spend(-tokens * self._open.plain / self._open.work.texts)

    def as_begun(self, work: StepWork) -> StepWork:
        """What a step did, with the tokens that methods caught up with in it."""
        if self._open is None or not work.drafts:
            return work
        late: Counter[str] = Counter()
        for each in self._open.work.drafts:
            late[each.method] += each.rows
        return replace(work, drafts=tuple(replace(each, rows=late.pop(each.method, 0)) for each in work.drafts))

    def end_step(self, work: StepWork, times: StepTimes, costs: CostModel) -> None:
        """Pay for a step that has ended what it cost by all that is known of costs now, instead of what was expected."""
        if self._open is None:
            return
        self._purse.spend(costs.most_longer(work) - self._open.longer)
        self._purse.end_step(times.total, costs.step_seconds(work.texts, work.context))
        self._open = None
