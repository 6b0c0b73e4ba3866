"""What trials may cost: a token bucket of seconds that speculation may lose against plain decoding.

A hundredth of the time is earned, and little of it is saved up. What a step costs beyond a plain one is paid for before it
begins, as if no draft token stood. What its tokens would have taken plainly comes back afterwards. So in any stretch of
time the loss is at most what was saved up and a hundredth of the stretch.
"""

from __future__ import annotations

#: The share of the time that speculation may lose, and the seconds of it that are saved up.
SHARE, MOST_SAVED = 0.01, 0.08
#: The share of a plain step that is saved up where this is more.
_OF_PLAIN = 0.8


class Purse:
    """Seconds that may be lost.

    A target whose plain steps take long could hardly pay for a draft. It saves up a part of such a step.

    Args:
        plain: Seconds of a plain step.

    Attributes:
        most: Seconds that are saved up at most.
    """

    def __init__(self, plain: float) -> None:
        self.most = max(MOST_SAVED, _OF_PLAIN * plain)
        self._saved, self._spent = self.most, 0.0

    @property
    def left(self) -> float:
        """Seconds that may be lost now."""
        return self._saved - self._spent

    def affords(self, seconds: float) -> bool:
        """Whether so much may be lost; nothing may always."""
        return seconds <= 0.0 or seconds <= self.left

    def spend(self, seconds: float) -> None:
        """So much is lost by the step under way, or won where it is negative."""
        self._spent += seconds

    def end_step(self, seconds: float, plain: float) -> None:
        """A step has ended. No more is owed than may be saved up: where the machine paused in a trial, drafts are tried
        again within seconds.

        Args:
            seconds: That it took.
            plain: That a plain one takes.
        """
        self.most = max(MOST_SAVED, _OF_PLAIN * plain)
        self._saved, self._spent = max(min(self.left + SHARE * seconds, self.most), -self.most), 0.0
