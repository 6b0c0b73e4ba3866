"""What is learnt and held for one number of texts behind contexts of one length, apart from all others.

What rows and drafts cost beside sixteen texts says little of one text alone, and a pause that drafting takes there must not
last when they have gone.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field

from outrider.govern.costs import CostModel

#: Changes between drafting and not within so many steps that count as going to and fro, and for how long experience of
#: longer standing decides then; twice as long each time it happens again.
_FLIPS, _FLIP_WINDOW, _STEADY_STEPS = 4, 256, 512
#: Contexts up to so many tokens a text are of one length; each further length reaches four times as far.
_SHORT = 1024
#: Numbers of texts and lengths of which something is remembered; those unused for longest are forgotten.
_MOST_STANDINGS = 64


@dataclass
class Standing:
    """What holds at one number of texts.

    Attributes:
        costs: What steps take there.
        gain: By which factor the last plan was expected to beat plain decoding.
        speed: Tokens that a text which drafts in it was expected to write in a step.
        was_on: Whether that plan drafted for at least half of the texts; None before the first one.
        longer_every: Drafts between two of which one is longer by a token.
        plain_due: Whether the next step is to be plain, to be measured.
        steady_until: The step up to which experience of longer standing decides.
    """

    costs: CostModel
    gain: float = 1.0
    speed: float = 1.0
    was_on: bool | None = None
    longer_every: int = 0
    plain_due: bool = False
    steady_until: int = 0
    _flips: deque[int] = field(default_factory=lambda: deque(maxlen=_FLIPS))
    _steady_steps: int = _STEADY_STEPS

    def note_plan(self, step: int, *, is_on: bool) -> None:
        """A plan was made. Where drafting goes on and off again and again, experience of longer standing decides for a
        while."""
        if self.was_on is not None and is_on != self.was_on:
            self._flips.append(step)
            if len(self._flips) == _FLIPS and step - self._flips[0] <= _FLIP_WINDOW:
                self.steady_until = step + self._steady_steps
                self._steady_steps *= 2
                self._flips.clear()
        self.was_on = is_on
        if step - self.steady_until > 4 * _STEADY_STEPS:
            self._steady_steps = _STEADY_STEPS


class Standings:
    """Finds what holds for a batch. Each number of texts begins with what was calibrated. Contexts of another length begin
    with what was learnt for as many texts, believed less.

    Args:
        begun: What is known of costs before any step.
    """

    def __init__(self, begun: CostModel) -> None:
        self._begun = begun
        self._known: dict[tuple[int, int], Standing] = {}

    def of(self, num_texts: int, context: int) -> Standing:
        """What holds for so many texts with so many tokens, all together."""
        texts, length = max(num_texts - 1, 0).bit_length(), _length(context // max(num_texts, 1))
        found = self._known.pop((texts, length), None) or self._new(texts, length)
        self._known[texts, length] = found  # the most recently used come last
        if len(self._known) > _MOST_STANDINGS:
            del self._known[next(iter(self._known))]
        return found

    def _new(self, texts: int, length: int) -> Standing:
        near = [key for key in self._known if key[0] == texts]
        if not near:
            return Standing(deepcopy(self._begun))
        found = deepcopy(self._known[min(near, key=lambda key: abs(key[1] - length))])
        found.costs.doubt()
        return found


def _length(context: int) -> int:
    """Which of the lengths a context has: 0 is short, and each further one is four times as long."""
    return ((context // _SHORT).bit_length() + 1) // 2
