"""Plans drafts: who drafts for a sequence in which turns, with how many of the rows that a step has left. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.engine.scheduler import Schedule, ScheduledSequence, Turn
from outrider.engine.sequence import Sequence
from outrider.errors import Contained
from outrider.propose.compositions import Composition, Merge, parts_of, turns_of
from outrider.propose.settings import Method, SpeculationConfig

# --- Shares the rows of a step out to those who draft, before anything is drawn.


logger = logging.getLogger(__name__)

#: Tokens of a draft that the structure of the output may force. A longer run takes several steps, so that the masks of one
#: text do not hold up the others.
MOST_FORCED = 32

#: Decides, before anything is drawn, who drafts for a sequence in this step: settings for each turn, the first turn's draft
#: at the end of the text and each further one behind the one before. () decodes plainly. The first one's rule checks all;
#: for a seeded request a ratio test is not among them. Settings are whole: nothing is filled in from the LLM's own.
Planner = Callable[[Sequence], tuple[SpeculationConfig, ...]]


def as_requested(seq: Sequence) -> tuple[SpeculationConfig, ...]:
    """The settings of the request, in every step."""
    speculation = seq.request.speculation
    return (speculation,) if speculation.enabled else ()


def plan_forced(plan: Schedule) -> list[ScheduledSequence]:
    """Plan what structures force, behind the end of a prompt too: these rows are as good as sure to stand, and no proposer
    works for them. Returns those that decode, and may be drafted for."""
    decoding = []
    for item in plan.items:
        if item.completes:
            item.forced = _forced(item.seq, plan.rows_left)
            plan.rows_left -= len(item.forced)
            if item.num_rows == 1:
                decoding.append(item)
                continue
        item.is_prompt_of_drafts = item.seq.useful_depth > 1  # a token less of it is left for the first draft
    return decoding


def plan_turns(plan: Schedule, decoding: Seq[ScheduledSequence], planner: Planner, shares: RowShares) -> None:
    """Give turns to those who draft."""
    for item in decoding:
        if plan.rows_left > 0:
            plan.rows_left -= _plan_turns(item, _asked(item.seq, planner), plan.rows_left, shares)


def _forced(seq: Sequence, rows_left: int) -> tuple[int, ...]:
    """The tokens that the structure of the output forces next, as far as there are rows and memory for it."""
    found = seq.view.processing.forced(min(rows_left, seq.useful_depth, MOST_FORCED))
    while found and not seq.state.reserve(seq.num_missing + len(found)):
        found = found[:-1]
    return found


def _plan_turns(item: ScheduledSequence, asked: tuple[SpeculationConfig, ...], rows_left: int, shares: RowShares) -> int:
    """Share rows out to those who draft for a sequence; returns how many."""
    if not any(config.method for config in asked):
        return 0
    seq = item.seq
    depth, num_rows, before = seq.useful_depth - len(item.forced), 0, seq.num_missing + len(item.forced)
    turns: list[Turn] = []
    for place, config in enumerate(asked):
        if config.method is None or depth <= 0:
            break
        budget = min(config.num_draft_tokens, rows_left - num_rows)
        if not config.tree and not config.method.branches_freely:
            budget = min(budget, depth)
        while budget > 0 and not seq.state.reserve(before + num_rows + budget):
            budget -= 1
        if budget <= 0:
            break
        levels = budget if isinstance(config.tree, str) else len(config.tree) or budget
        share = min(depth, levels)  # what follows must find room behind it
        most = depth if place == len(asked) - 1 else share
        turns += _member_turns(config, shares.of(config, budget), most, len(turns))
        num_rows += budget
        depth -= share
    item.turns = tuple(turns)
    seeded = seq.request.params.seed is not None  # a ratio test would make the text depend on the drafts
    item.rule = "auto" if seeded and asked[0].rule in ("token", "block") else asked[0].rule
    seq.coupled = seq.coupled or (item.coupled and bool(turns))
    return num_rows


def _member_turns(config: SpeculationConfig, rows: Seq[int], max_depth: int, first: int) -> list[Turn]:
    """The turns of settings that draft behind `first` earlier turns: one, or those of the members of a composition."""
    turns, before = [], tuple(range(first))
    for member, budget in zip(turns_of([config]), rows, strict=True):
        method, greedy = member.config.method, member.config.draft_sampling == "greedy"
        assert method is not None
        behind = (*before, *(first + turn for turn in member.behind))
        turns.append(Turn(method, member.config.tree, greedy, budget, max_depth, behind, member.pooled))
    return turns


def _asked(seq: Sequence, planner: Planner) -> tuple[SpeculationConfig, ...]:
    """The answer of the planner; nothing drafts where it raises or answers something else."""

    def report(error: BaseException) -> None:
        logger.warning("the planner failed for request %d: %r", seq.request.request_id, error)
        seq.stats.num_proposer_faults += 1

    with Contained(report):
        asked = tuple(planner(seq))
        for config in asked:
            if not isinstance(config, SpeculationConfig):
                raise TypeError(f"{type(config).__name__} instead of a SpeculationConfig")
        return asked
    return ()


# --- How many rows each member of a merged draft gets, by how often its tokens have stood; no torch.
#
# Shares are fixed before anything is drawn.


#: Share of the past that each further outcome leaves.
_KEPT = 0.98
#: What is believed of a method before it has drafted, and as how many outcomes that counts.
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
#: Methods, and merges of them, that are remembered; methods unused for longest are forgotten.
_MOST = 256


@dataclass
class _Counts:
    tried: float = 0.0
    stood: float = 0.0

    @property
    def rate(self) -> float:
        return (self.stood + _PRIOR * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)


class _RowSplit:
    """Splits a merge's row budget greedily by the acceptance rate of each member's next row. A row stands where all rows of
    its member before it do."""

    def __init__(self, merge: Merge, rates: Seq[float]) -> None:
        self.merge = merge  # held, so that no other one gets its id
        self.members = merge.in_order()
        self._rates, self._chances = rates, list(rates)
        self._dealt = [(0,) * len(rates)]

    def rows(self, budget: int) -> tuple[int, ...]:
        """Rows of each member, where there are so many in all."""
        while len(self._dealt) <= budget and (chance := max(self._chances)) >= 0.0:
            rows, place = list(self._dealt[-1]), self._chances.index(chance)
            rows[place] += 1
            self._chances[place] = (
                chance * self._rates[place] if rows[place] < self.members[place].num_draft_tokens else -1.0
            )
            self._dealt.append(tuple(rows))
        return self._dealt[min(budget, len(self._dealt) - 1)]


class RowShares:
    """Shares rows out among members, and learns from what stood."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Counts] = {}
        self._deals: dict[int, _RowSplit] = {}  # by object: to compare settings takes longer than to deal anew

    def forget(self) -> None:
        """Forget what was learnt; the proofs need the same shares on every path."""
        self._counts.clear()
        self._deals.clear()

    def of(self, config: SpeculationConfig, budget: int) -> list[int]:
        """Rows of each turn of a composition, in the order of `turns_of`; `budget` in all, at most."""
        method = config.method
        if not isinstance(method, Composition):
            return [min(config.num_draft_tokens, budget)]
        if isinstance(method, Merge):
            deal = self._deal(method)
            shares = zip(deal.members, deal.rows(budget), strict=True)
            return [share for member, own in shares for share in self.of(member, own)]
        found = list[int]()
        for member in method.methods:
            own = min(member.num_draft_tokens, budget)
            budget -= own
            found += self.of(member, own)
        return found

    def observe(self, method: Method, tried: int, stood: int) -> None:
        """Count an outcome: of so many places where a method proposed tokens and whose fate was decided, at so many one
        stood."""
        self._deals.clear()
        counts = self._of(method)
        counts.tried, counts.stood = counts.tried * _KEPT**tried + tried, counts.stood * _KEPT**tried + stood

    def _deal(self, merge: Merge) -> _RowSplit:
        """By what is known now; the same until more is learnt."""
        found = self._deals.get(id(merge))
        if found is None:
            members = merge.in_order()
            rates = [max(self._of(part.method).rate for part in parts_of(member) if part.method) for member in members]
            found = _RowSplit(merge, rates)
            if len(self._deals) >= _MOST:
                self._deals.clear()
            self._deals[id(merge)] = found
        return found

    def _of(self, method: Method) -> _Counts:
        try:
            key: Hashable = method
            counts = self._counts.get(key)
        except TypeError:  # its settings cannot be hashed
            key = method.name
            counts = self._counts.get(key)
        self._counts.pop(key, None)
        counts = _Counts() if counts is None else counts
        self._counts[key] = counts  # the most recently used come last
        if len(self._counts) > _MOST:
            del self._counts[next(iter(self._counts))]
        return counts
