"""Scores of idle methods: which of them are due, and what scoring may take of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.govern.account import Account
from outrider.govern.costs import CostModel
from outrider.govern.decision import Candidate, Running

#: Share of the time in which idle methods may show what they would be worth. Lookups and models have half of it each where
#: there are both, so that lookups, of which each is cheap, leave something for models that have much to read. It is down
#: to a quarter of this where many texts decode, since what is learnt from one helps all of them.
_SHADOW_SHARE = 0.007
#: Share of what may be saved up for all trials that the scoring of lookups leaves for drafts.
_FOR_DRAFTS = 0.5
#: By which factor one score may take longer than usual and be believed.
_MOST_BELIEVED = 6.0
#: Unspent time of that kind is kept up to so many steps' worth.
_SAVED_STEPS = 16.0
#: Tokens that should be new before a method with a model of its own reads them to be scored.
SHADOW_TOKENS = 12


@dataclass(frozen=True)
class Shadow:
    """An idle method that is to be scored without a row of the target: a model on text that is committed, a lookup on text
    that is to come.

    Attributes:
        request: On whose text.
        method: Which.
    """

    request: int
    method: str


@dataclass(frozen=True)
class Idle:
    """A method that might be scored on a text.

    Attributes:
        request: Whose text.
        method: Which.
        waited: Steps since it was last scored there, or since the text began.
        cost: Seconds that it would take.
        lookup: Whether it needs no model of its own.
    """

    request: int
    method: str
    waited: int
    cost: float
    lookup: bool


class Shadows:
    """Finds the idle methods whose turn it is, and pays for their scores.

    Args:
        candidates: The methods, by name.
        account: Pays.
        read_at_once: Tokens that a method's own model reads in a step at most.
    """

    def __init__(self, candidates: Mapping[str, Candidate], account: Account, read_at_once: int) -> None:
        self._candidates = candidates
        self._account = account
        self._read_at_once = read_at_once
        self._saved = dict.fromkeys((each.lookup for each in candidates.values()), 0.0)  # of lookups, and of models
        self._begun: dict[int, int] = {}
        self._tried: dict[tuple[int, str], int] = {}
        self._usual: dict[str, float] = {}

    def begin(self, request: int, step: int) -> None:
        """A request begins."""
        self._begun[request] = step

    def finish(self, request: int) -> None:
        """A request has ended."""
        self._begun.pop(request, None)
        for key in [key for key in self._tried if key[0] == request]:
            del self._tried[key]

    def due(
        self, running: Sequence[Running], drafting: Mapping[int, tuple[str, int]], step: int, costs: CostModel
    ) -> list[Shadow]:
        """Idle methods to score in this step, on texts where they were not scored for longest, within their share of the
        time.

        Args:
            running: The texts that decode.
            drafting: Who drafts how much, by request.
            step: Now.
            costs: What reading takes.
        """
        idle = self._idle(running, drafting, step, costs)
        lookups = sorted((each for each in idle if each.lookup), key=_longest_ago)
        models = sorted((each for each in idle if not each.lookup), key=_least_for_its_wait)
        found = self._affordable(lookups, self._saved.get(True, 0.0))
        found += self._affordable(models[:1], self._saved.get(False, 0.0))  # it is saved for the one whose turn it is
        for shadow in found:
            self._tried[shadow.request, shadow.method] = step
        return found

    def observe_seconds(self, method: str, texts: int, seconds: float, costs: CostModel) -> None:
        """Scoring a method on so many texts took so long. It is paid from what was saved, as far as it is believed, since a
        machine may pause for any reason."""
        usual = self._usual.get(method, 0.0)
        each = min(seconds / texts, _MOST_BELIEVED * max(usual, self._cost(method, self._read_at_once, costs)))
        self._saved[self._candidates[method].lookup] -= each * texts
        self._account.spend(each * texts)
        self._usual[method] = usual + (0.2 if each < _MOST_BELIEVED * usual else 1.0) * (each - usual)

    def earn(self, seconds: float, pause: int) -> None:
        """A step took so long, and scores are due in one step of so many."""
        share = _SHADOW_SHARE / min(4, pause)
        for lookup, saved in self._saved.items():
            self._saved[lookup] = min(saved + share * seconds / len(self._saved), _SAVED_STEPS * seconds)

    def _idle(
        self, running: Sequence[Running], drafting: Mapping[int, tuple[str, int]], step: int, costs: CostModel
    ) -> list[Idle]:
        """The methods that do not draft, and that have something to be scored on."""
        found = []
        for each in running:
            chosen = drafting.get(each.request, (None, 0))[0]
            used = () if chosen is None else self._candidates[chosen].members
            for name in each.methods if each.longest > 0 else ():
                if self._candidates[name].composite is not None:
                    continue  # what it is made of is scored
                lookup, lag = self._candidates[name].lookup, each.lags.get(name, 0)
                last = self._tried.get((each.request, name), self._begun[each.request])
                if name not in used and (last < step if lookup else lag >= SHADOW_TOKENS):
                    found.append(Idle(each.request, name, step - last, self._cost(name, lag, costs), lookup=lookup))
        return found

    def _affordable(self, idle: Sequence[Idle], saved: float) -> list[Shadow]:
        found = []
        left = self._account.left
        for each in idle:
            kept = _FOR_DRAFTS * self._account.most if each.lookup else 0.0  # cheap ones would leave nothing for drafts
            if each.cost <= min(saved, left - kept):
                saved, left = saved - each.cost, left - each.cost
                found.append(Shadow(each.request, each.method))
        return found

    def _cost(self, method: str, lag: int, costs: CostModel) -> float:
        if not self._candidates[method].lookup:
            return costs.catch_up_seconds(method, min(lag, self._read_at_once))
        return self._usual.get(method, costs.draft_seconds(method, 1, 1))


def _longest_ago(idle: Idle) -> tuple[int, int]:
    return (-idle.waited, idle.request)


def _least_for_its_wait(idle: Idle) -> tuple[float, int, str]:
    """Texts that are long since scored come first, and of these the ones of which little is to be read."""
    return (idle.cost / (idle.waited + 1), idle.request, idle.method)
