"""Estimates how many tokens of a method's next draft will stand: counts of each request, with those of others as a prior.

It knows methods and positions, and is asked before anything is drawn, so that the governor can choose. Which rows a growing
tree gets is another question: `propose/tree.py` answers it from the confidence of each row.

A position counts only drafts whose earlier tokens stood, so chances multiply along a draft. Counts fade, so that a change
of text is followed; where outcomes are too unlikely under the present estimate, most of the past is forgotten at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, prod, sqrt

# --- Counts how many draft tokens were tried and how many stood, by position; older ones fade.


#: Positions that are counted apart; deeper ones count as the last of these.
POSITIONS = 12
#: Drafts that the share of a position weighs as a prior for the next one. Shows in "later tokens stand less often".
_BEFORE_WEIGHT = 8.0
#: Log odds of a target's most likely token in a text of which nothing was seen. By the regression of `_SLOPE`, draft tokens
#: stand there as often as is believed of a method before anything was seen.
USUAL_CONFIDENCE = 0.4
#: What a file may say at most: drafts of one position, tokens that the text gained with one draft, and log odds.
_MOST_TRIED, _MOST_GAINED, _MOST_CONFIDENCE = 1e6, 1e4, 10.0


@dataclass(frozen=True)
class Shares:
    """Counts at one moment."""

    tried: tuple[float, ...]  # by position, how many were tried
    stood: tuple[float, ...]  # by position, how many of them stood
    gained: float  # tokens that the text gained with the drafts whose first token stood
    confidence: float = USUAL_CONFIDENCE  # of the target in the texts: the mean of `Confidence.log_odds` over these drafts

    def check(self) -> None:
        """Raise ValueError where no drafts could have been counted so."""
        if not len(self.tried) == len(self.stood) == POSITIONS:
            raise ValueError(f"{len(self.tried)} and {len(self.stood)} positions are no {POSITIONS}")
        for tried, stood in zip(self.tried, self.stood, strict=True):
            if not 0.0 <= stood <= tried <= _MOST_TRIED:
                raise ValueError(f"{stood} of {tried} draft tokens cannot have stood")
        if not 0.999 * self.stood[0] <= self.gained <= _MOST_GAINED * self.stood[0]:
            raise ValueError(f"{self.stood[0]} good drafts cannot have brought {self.gained} tokens")
        if not abs(self.confidence) <= _MOST_CONFIDENCE:
            raise ValueError(f"the target's most likely tokens cannot have had log odds of {self.confidence}")


class Counts:
    """Counts how many were tried and how many stood, by position. So many drafts are remembered; older ones fade."""

    def __init__(self, memory: float) -> None:
        self._growth = memory / (memory - 1.0)
        self._weight = 1.0
        self._tried = [0.0] * POSITIONS
        self._stood = [0.0] * POSITIONS
        self._gained = 0.0
        self._confidence = 0.0
        self.version = 0  # grows with everything that is learnt

    @property
    def shares(self) -> Shares:
        """Returns the shares as they are now."""
        scale = 1.0 / self._weight
        tried, stood = ([scale * each for each in counted] for counted in (self._tried, self._stood))
        return Shares(tuple(tried), tuple(stood), scale * self._gained, self.confidence(USUAL_CONFIDENCE, 0.0))

    def begin(self, shares: Shares, most: float) -> None:
        """Go on from counts of earlier texts, as if they were of so many drafts at most."""
        scale = self._weight * min(1.0, most / max(shares.tried[0], 1e-9))
        self._tried, self._stood = [scale * each for each in shares.tried], [scale * each for each in shares.stood]
        self._gained = scale * shares.gained
        self._confidence = self._tried[0] * shares.confidence
        self.version += 1

    def add(self, scores: Sequence[float], tokens: float = 1.0, confidence: float = 0.0) -> None:
        """One draft: for each position that was tried, in order, whether it stood (or with which chance); tokens that the
        text gained with it; and the target's confidence in the text."""
        self.version += 1
        self._weight *= self._growth
        for place, score in enumerate(scores):
            position = min(place, POSITIONS - 1)
            self._tried[position] += self._weight
            self._stood[position] += self._weight * score
        self._gained += self._weight * scores[0] * tokens
        self._confidence += self._weight * confidence
        if self._weight > 1e12:
            self.fade(1.0 / self._weight)
            self._weight = 1.0

    def fade(self, share: float) -> None:
        """Keep only this share of all counts."""
        self.version += 1
        self._tried = [each * share for each in self._tried]
        self._stood = [each * share for each in self._stood]
        self._gained *= share
        self._confidence *= share

    @property
    def num_drafts(self) -> float:
        """Drafts that are remembered."""
        return self._tried[0] / self._weight

    @property
    def tokens_of_good_drafts(self) -> float:
        """Tokens that the text gained on average with a draft whose first token stood."""
        return self._gained / self._stood[0] if self._stood[0] > 0.0 else 1.0

    def along(self, guess: float, weight: float) -> list[float]:
        """Share that stood, by position. `guess` is the prior of the first position, and each further one has the share of
        the one before it: deep positions are seldom tried, and stand about as often."""
        scale, shares = self._weight, list[float]()
        for tried, stood in zip(self._tried, self._stood, strict=True):
            guess = (stood / scale + weight * guess) / (tried / scale + weight)
            shares.append(guess)
            weight = _BEFORE_WEIGHT
        return shares

    def confidence(self, prior: float, weight: float) -> float:
        """The target's mean confidence over these drafts, and over a prior that weighs as much as `weight` drafts."""
        tried = self._tried[0] / self._weight + weight
        return (self._confidence / self._weight + weight * prior) / tried if tried > 0.0 else prior

    def chances(self, prior: Sequence[float], weight: float) -> list[float]:
        """Share that stood, by position. The prior of the first position weighs as much as `weight` drafts; behind it
        `prior` says how much less or more often than the one before it a position stands."""
        scale, shares, guess = self._weight, list[float](), prior[0]
        for place, (tried, stood) in enumerate(zip(self._tried, self._stood, strict=True)):
            if place:
                guess = min(shares[-1] * prior[place] / max(prior[place - 1], 1e-6), 1.0)
                weight = _BEFORE_WEIGHT
            shares.append((stood / scale + weight * guess) / (tried / scale + weight))
        return shares


# --- The estimate for a request, from its own counts and from those of others.


#: Drafts that are remembered: of one request, of one tenant, of all, and of one request where changes come and go. Shows in
#: benchmarks.governor_rivals, the change.
_OWN, _TENANT, _WHOLE, _STEADY = 120.0, 96.0, 192.0, 600.0
#: Drafts for which it is remembered whether a method had anything to say, of one request: nothing is lost where it has not.
#: Shows in "a lookup with little to say".
_OFFERS = 240.0
#: Drafts that a guess weighs as a prior, and that other texts weigh for a text where their drafts are many. Shows in
#: test_texts_that_end_and_begin_in_a_batch.
_PRIOR_WEIGHT, _TEXTS_WEIGHT = 3.0, 12.0
#: Standard deviations between outcomes and expectation beyond which the text is taken to have changed. Shows in "changes at
#: random".
_SURPRISE = 3.5
#: Outcomes that surprise looks back on, and the last drafts that are believed after one, instead of all before them. Shows
#: in test_it_is_off_within_20_steps_of_a_method_going_bad.
_SURPRISE_MEMORY, _BELIEVED = 10.0, 4
#: Added to the variance, since few outcomes are not normally distributed. Shows in "changes at random".
_SLACK = 0.25
#: Drafts that what earlier processes learnt weighs at most. Shows in
#: test_what_holds_no_more_is_forgotten_within_three_seconds.
KEPT = 12.0
#: Tenants and methods that are remembered; those unused for longest are forgotten.
_MOST_SCOPES = 1024
#: A text of which so many changes were seen within so many drafts goes to and fro, and is taken for one for so many more.
#: Shows in "to and fro, 60 tokens".
_CHANGES, _CHANGE_WINDOW, _TO_AND_FRO = 4, 160, 640
#: Nothing is so sure that it could not surprise.
_LEAST, _MOST = 0.03, 0.97
#: By how much the log odds of a draft token grow with the target's confidence. A logistic regression over 72 answers to
#: Spec-Bench (1.5B with 0.5B, greedy and at temperature 1) gave 0.80 and 0.79. Shows in the real pair at temperature 1.
_SLOPE = 0.8
#: Tokens that confidence looks back on, and as how many it weighs that the text is a usual one. Shows there, too.
_CONFIDENCE_MEMORY, _USUAL_WEIGHT = 16.0, 2.0
#: The mean over a usual text before any of a tenant has ended, and as how many texts that weighs; then the texts of a
#: tenant that are remembered. Shows in test_a_text_begins_with_what_those_before_it_were_like.
_USUAL, _TEXTS_MEMORY = (1.0 / (1.0 + exp(-USUAL_CONFIDENCE)), 1.0), 12.0
#: Means between which confidence says something: real targets were that sure of the answers that were measured.
_LEAST_SURE, _MOST_SURE = 0.25, 0.995


@dataclass
class _ScopeCounts:
    """Counts of one method in one scope."""

    stands: Counts  # whether draft tokens stood
    exists: Counts  # whether the method had anything to say at a position for which it was asked

    @staticmethod
    def of(memory: float) -> _ScopeCounts:
        return _ScopeCounts(Counts(memory), Counts(memory))

    @property
    def version(self) -> int:
        """Grows with everything that is learnt."""
        return self.stands.version + self.exists.version


@dataclass(frozen=True)
class Experience:
    """Shares of a method in earlier texts."""

    stands: Shares  # whether draft tokens stood
    exists: Shares  # whether the method had anything to say at a position for which it was asked


class _Surprise:
    """Notices outcomes that are too unlikely under what was expected of them."""

    def __init__(self) -> None:
        self._sum = self._spread = 0.0

    def add(self, expected: float, score: float) -> None:
        """One more outcome."""
        keep, chance = 1.0 - 1.0 / _SURPRISE_MEMORY, min(max(expected, _LEAST), _MOST)
        self._sum = keep * self._sum + score - chance
        self._spread = keep * keep * self._spread + chance * (1.0 - chance)

    def taken(self) -> bool:
        """True if the latest outcomes are a surprise; one that was taken is over."""
        if abs(self._sum) < _SURPRISE * sqrt(self._spread + _SLACK):
            return False
        self._sum = self._spread = 0.0
        return True


class Confidence:
    """Knows how sure the target is of one text: how likely its most likely token was, on average over the latest tokens.

    A draft model agrees with the target where the target is sure. So before anything was drafted for a text, its confidence
    says how the text differs from those that were drafted for, and it costs no pass.

    Args:
        usual: The mean over a usual text, with which it begins.
    """

    def __init__(self, usual: float = _USUAL[0]) -> None:
        self._weight = _USUAL_WEIGHT
        self._sum = _USUAL_WEIGHT * usual
        self.was_seen = False

    def add(self, chances: Sequence[float]) -> None:
        """The most likely tokens at further places of the text had these probabilities."""
        keep = 1.0 - 1.0 / _CONFIDENCE_MEMORY
        for chance in chances:
            self._sum, self._weight = keep * self._sum + chance, keep * self._weight + 1.0
            self.was_seen = True

    @property
    def mean(self) -> float:
        """The mean, between the bounds of what real targets show."""
        return min(max(self._sum / self._weight, _LEAST_SURE), _MOST_SURE)

    @property
    def log_odds(self) -> float:
        """Log odds of the mean, in steps of a tenth, since what is computed from them is kept."""
        return round(log(self.mean / (1.0 - self.mean)), 1)


@dataclass
class _Own:
    """The outcomes of one method for one request."""

    #: With a short memory, and with a long one.
    recent: _ScopeCounts = field(default_factory=lambda: _ScopeCounts(Counts(_OWN), Counts(_OFFERS)))
    steady: _ScopeCounts = field(default_factory=lambda: _ScopeCounts.of(_STEADY))
    fates: _Surprise = field(default_factory=_Surprise)  # whether tokens stood
    offers: _Surprise = field(default_factory=_Surprise)  # whether there were any
    changed_weight: float = _TEXTS_WEIGHT  # drafts that others' experience weighs at most, where the text seemed to change
    num_drafts: int = 0
    #: The latest drafts, and at which drafts the text seemed to change.
    last: deque[tuple[Sequence[float], float, float]] = field(default_factory=lambda: deque(maxlen=_BELIEVED))
    changes: deque[int] = field(default_factory=lambda: deque(maxlen=_CHANGES))
    steady_until: int = 0  # the draft up to which the text is taken to go to and fro
    outlook: tuple[object, Outlook] | None = None  # what was last expected, and by the versions of which counts

    @property
    def goes_to_and_fro(self) -> bool:
        return self.num_drafts < self.steady_until

    def note_change(self) -> None:
        self.changes.append(self.num_drafts)
        if len(self.changes) == _CHANGES and self.num_drafts - self.changes[0] <= _CHANGE_WINDOW:
            self.steady_until = self.num_drafts + _TO_AND_FRO


@dataclass(frozen=True)
class Outlook:
    """The chances that a method is expected to have with a request."""

    stands: list[float]  # by position, the chance that a draft token stands where all before it stand
    exists: list[float]  # by position, the chance that the method has a token to offer there
    confidence: float = USUAL_CONFIDENCE  # of the target, in texts where the chances hold

    def exists_at(self, place: int) -> float:
        """Chance that there is a token at this position."""
        return self.exists[min(place, len(self.exists) - 1)]

    def reach(self, place: int) -> float:
        """Chance that the text comes through the token at this position, where there is one."""
        last = len(self.stands) - 1
        return prod(self.stands[: place + 1]) * self.stands[last] ** max(0, place - last)

    def tokens(self, rows: int) -> float:
        """Draft tokens that are expected to stand where there are so many rows."""
        found, reach, last = 0.0, 1.0, len(self.stands) - 1
        for place in range(rows):
            reach *= self.stands[min(place, last)]
            found += self.exists_at(place) * reach
        return found


class AcceptanceModel:
    """Learns what methods are worth to requests, from the chances that are taken before anything was seen and from what
    earlier processes learnt. That is believed as little as a few drafts are. The target's confidence says something of
    models alone: `lookups` find what was written before, however sure the target is."""

    def __init__(
        self,
        priors: dict[str, float],
        known: Mapping[str, Experience] | None = None,
        lookups: Collection[str] = (),
    ) -> None:
        self._priors = priors
        self._lookups = frozenset(lookups)
        self._known = dict(known or {})
        self._shared: dict[tuple[Hashable, str], _ScopeCounts] = {}
        self._own: dict[int, dict[str, _Own]] = {}
        self._tenants: dict[int, Hashable] = {}
        self._priors_of: dict[tuple[Hashable, str], tuple[object, Outlook]] = {}
        self._confidence: dict[int, Confidence] = {}
        self._usual: dict[Hashable, tuple[float, float]] = {}  # by tenant, a mean over texts, and as how many it weighs

    def begin(self, request: int, tenant: Hashable) -> None:
        """A request of a tenant will be drafted for."""
        self._own[request], self._tenants[request] = {}, tenant
        self._confidence[request] = Confidence(self._usual.get(tenant, _USUAL)[0])

    def observe_target(self, request: int, chances: Sequence[float]) -> None:
        """The target's most likely tokens at further places of a text had these probabilities."""
        self._confidence[request].add(chances)

    def finish(self, request: int) -> None:
        """A request has ended; what its tenant and all learnt from it stays."""
        self._own.pop(request, None)
        tenant, confidence = self._tenants.pop(request, None), self._confidence.pop(request, None)
        if confidence is not None and confidence.was_seen:
            usual, weight = self._usual.pop(tenant, _USUAL)
            weight = min(weight + 1.0, _TEXTS_MEMORY)
            self._usual[tenant] = usual + (confidence.mean - usual) / weight, weight
            if len(self._usual) > _MOST_SCOPES:
                del self._usual[next(iter(self._usual))]

    def outlook(self, request: int, method: str, *, steady: bool = False) -> Outlook:
        """The outlook of a method; with `steady` from a long memory, which a change of text hardly moves."""
        by, prior = self._prior_of(self._tenants[request], method)
        own = self._own_of(request, method)
        steady = steady or own.goes_to_and_fro
        weight = self._weight_of_others(request, method, own)
        known, weight = (own.steady, weight) if steady else (own.recent, min(weight, own.changed_weight))
        now = self._confidence[request].log_odds
        by = (by, steady, known.version, weight, now)
        if own.outlook is None or own.outlook[0] != by:
            slope = 0.0 if method in self._lookups else _SLOPE
            more = slope * (now - known.stands.confidence(prior.confidence, weight))
            stands = [_shifted(chance, more) for chance in known.stands.chances(prior.stands, weight)]
            exists = known.exists.chances(prior.exists, weight)
            own.outlook = by, Outlook(_by_length(stands, known.stands.tokens_of_good_drafts), exists)
        return own.outlook[1]

    def _weight_of_others(self, request: int, method: str, own: _Own) -> float:
        """Drafts that other texts weigh: their mean is as unsure as their drafts are few, and a text differs from it."""
        of_all = self._shared_by(("tenant", self._tenants[request]), method).stands.num_drafts
        others = max(of_all - own.steady.stands.num_drafts, 0.0)
        return 1.0 / (1.0 / _TEXTS_WEIGHT + 1.0 / (_PRIOR_WEIGHT + others))

    def _prior_of(self, tenant: Hashable, method: str) -> tuple[object, Outlook]:
        """The outlook of a text of a tenant of which nothing was seen, and by the versions of which counts. It is
        computed once for all texts of a step: planning waits for it."""
        whole, own = self._shared_by(None, method), self._shared_by(("tenant", tenant), method)
        by, known = (whole.version, own.version), self._priors_of.get((tenant, method))
        if known is None or known[0] != by:
            stands = own.stands.chances(whole.stands.along(self._priors[method], _PRIOR_WEIGHT), _PRIOR_WEIGHT)
            exists = own.exists.chances(whole.exists.along(1.0, _PRIOR_WEIGHT), _PRIOR_WEIGHT)
            confidence = own.stands.confidence(whole.stands.confidence(USUAL_CONFIDENCE, _PRIOR_WEIGHT), _PRIOR_WEIGHT)
            if len(self._priors_of) >= _MOST_SCOPES:
                self._priors_of.clear()
            known = self._priors_of[tenant, method] = by, Outlook(stands, exists, confidence)
        return known

    def observe(
        self,
        request: int,
        method: str,
        scores: Sequence[float],
        tokens: float = 1.0,
        *,
        asked: int = 0,
        offered: int = 0,
    ) -> bool:
        """Count the outcome of a draft, or of a shadow of one, by which the text gained so many tokens. The scores are 1 or
        0 for each position that was tried, in order, or the chance with which it would have stood. The method was asked for
        so many tokens and offered so many; for none where that says nothing of it. Returns whether the text seems to have
        changed."""
        if not (scores or asked) or request not in self._own:
            return False
        expected = self.outlook(request, method)  # once for both, since each count makes it another
        own, confidence = self._own_of(request, method), self._confidence[request].log_odds
        scopes = self._all_of(request, method)
        if asked:
            own.offers.add(expected.exists[0], 1.0 if offered else 0.0)
            if own.offers.taken():
                own.recent.exists.fade(0.02)
            for known in scopes:
                known.exists.add([1.0 if place < offered else 0.0 for place in range(asked)])
        if not scores:
            return False
        for known in scopes:
            known.stands.add(scores, tokens, confidence)
        own.last.append((scores, tokens, confidence))
        return self._is_surprised(own, expected.stands, scores)

    def learnt(self, method: str) -> Experience:
        """The experience of all requests with a method, and that of earlier processes."""
        whole = self._shared_by(None, method)
        return Experience(whole.stands.shares, whole.exists.shares)

    def version(self, method: str) -> int:
        """Grows with everything that is learnt of a method."""
        return self._shared_by(None, method).version

    def _all_of(self, request: int, method: str) -> list[_ScopeCounts]:
        own = self._own_of(request, method)
        tenant = self._shared_by(("tenant", self._tenants[request]), method)
        return [own.recent, own.steady, tenant, self._shared_by(None, method)]

    def _is_surprised(self, own: _Own, expected: Sequence[float], scores: Sequence[float]) -> bool:
        own.num_drafts += 1
        own.changed_weight = min(own.changed_weight + 0.01, _TEXTS_WEIGHT)
        for place, score in enumerate(scores):
            own.fates.add(expected[min(place, POSITIONS - 1)], score)
        if not own.fates.taken():
            return False
        own.note_change()
        own.recent.stands.fade(0.0)
        for each in own.last:
            own.recent.stands.add(*each)
        own.changed_weight = 0.5
        return True

    def _own_of(self, request: int, method: str) -> _Own:
        known = self._own[request]
        if method not in known:
            known[method] = _Own()
        return known[method]

    def _shared_by(self, scope: Hashable, method: str) -> _ScopeCounts:
        key = (scope, method)
        known = self._shared.pop(key, None) or self._new(scope, method)
        self._shared[key] = known  # the most recently used come last
        if len(self._shared) > _MOST_SCOPES:
            del self._shared[next(iter(self._shared))]
        return known

    def _new(self, scope: Hashable, method: str) -> _ScopeCounts:
        if scope is not None:
            return _ScopeCounts.of(_TENANT)
        known, earlier = _ScopeCounts.of(_WHOLE), self._known.get(method)
        if earlier is not None:
            known.stands.begin(earlier.stands, KEPT)
            known.exists.begin(earlier.exists, KEPT)
        return known


def _shifted(chance: float, more: float) -> float:
    """A chance whose log odds are by so much larger."""
    odds = exp(more) * chance / max(1.0 - chance, 1e-6)
    return odds / (1.0 + odds)


def _by_length(stands: Sequence[float], tokens_of_good_drafts: float) -> list[float]:
    """Chances as drafts of each length would meet them, where the drafts that were seen had other lengths.

    Text is now easy and now hard. Behind a token that stood it is easy: the chance there says how easy, and with the chance
    of the first position it says in which share of the rounds. A longer draft runs through the easy parts in fewer rounds,
    so that more of its rounds fall on the hard ones: its rounds bring the harmonic mean over the text. For the length that
    was seen these are the chances that were seen.
    """
    easy = max((2.0 * stands[1] + stands[2]) / 3.0, stands[0], 1e-6)
    rounds = min(stands[0] / easy, 1.0)
    tokens = 1.0 + easy * max(tokens_of_good_drafts - 1.0, 0.0)
    share = rounds * tokens / (rounds * tokens + 1.0 - rounds)  # of the text that is easy
    chances, gain, before, reach, there = list[float](), 1.0, 1.0, 1.0, 1.0
    for place, stood in enumerate(stands):
        reach *= stood if place else easy
        there += reach
        mean = 1.0 / (share / there + 1.0 - share)
        chances.append(min((mean - before) / gain, 1.0))
        gain, before = max(mean - before, 1e-12), mean
    return chances
