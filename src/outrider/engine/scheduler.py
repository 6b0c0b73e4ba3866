"""Plans the next step: which sequences run, their rows and blocks, and who drafts in which turn. No torch."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Hashable, Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from outrider.cache.state import KVView
from outrider.config import SchedulerConfig
from outrider.engine.sequence import Sequence, Status
from outrider.engine.tenants import Tenant, Tenants
from outrider.propose.compositions import Composition, Merge, parts_of, turns_of
from outrider.propose.settings import Method, SpeculationConfig, TreeShape
from outrider.verify.verifier import RuleName

# --- Scheduler: plans the sequences, rows, blocks and drafting turns of the next step. No torch.


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


@dataclass(frozen=True)
class Turn:
    """One method's part in the draft of one sequence; fixed before anything is drawn.

    Attributes:
        method: Who drafts.
        tree: Shape that was asked for, or the name of one that adapts.
        greedy: Whether the most likely tokens were asked for.
        budget: Most rows it may have.
        max_depth: Longest path that may be of use; where rows are pooled, counted from where the first turn begins.
        behind: The turns of this draft behind whose deepest token it goes on; without any it begins at the end of the text,
            or behind what the structure forces there.
        pooled: Whether it shares rows with the other members of a composition: it gets what turns without drawn tokens
            have left over, and so may begin with none of its own.
    """

    method: Method
    tree: TreeShape
    greedy: bool
    budget: int
    max_depth: int
    behind: tuple[int, ...] = ()
    pooled: bool = False


@dataclass
class ScheduledSequence:
    """One sequence's share of a step.

    Attributes:
        seq: The sequence.
        num_rows: Committed tokens to compute: a prefill chunk, or 1 while decoding.
        turns: Who drafts behind them, in order.
        rule: How the draft is checked.
        is_prompt_of_drafts: Whether the rows are a chunk of a prompt, and drafts may follow it.
        forced: Draft tokens that the structure of the output forces; all turns draft behind these.
    """

    seq: Sequence
    num_rows: int
    turns: tuple[Turn, ...] = ()
    rule: RuleName = "auto"
    is_prompt_of_drafts: bool = False
    forced: tuple[int, ...] = ()

    @property
    def completes(self) -> bool:
        """Whether its last row is the last committed token, so that the next token can be chosen."""
        return self.num_rows == self.seq.num_missing

    @property
    def budget(self) -> int:
        """Most rows that all turns together may have."""
        return sum(turn.budget for turn in self.turns)

    @property
    def coupled(self) -> bool:
        """Whether drafts guess with the target's own noise, and are followed while the target agrees: for seeded requests,
        where the rule asks for it, and to the end of a text that was once drafted for so."""
        seeded = self.rule == "auto" and self.seq.request.params.seed is not None
        return self.rule == "coupled" or seeded or self.seq.coupled


@dataclass
class Schedule:
    """The plan of a step.

    Attributes:
        items: Running sequences and their rows.
    """

    items: list[ScheduledSequence] = field(default_factory=list)


class Scheduler:
    """Tenants in turns by what they have had, and each of them first come, first served; prefill in chunks beside decoding;
    preemption by recompute, newest first.

    A tenant that has fewer seats than its share gets one at once: whoever has most gives one up. So the first token of a
    tenant's only text waits for the step that is under way, and never for the texts of others to end.

    Args:
        config: Limits of a step.
        max_model_len: Longest sequence.

    Attributes:
        planner: Who decides who drafts; another one may be put here between two steps.
        tenants: Who has had how much, and what each one's share is.
        shares: How the members of compositions share rows.
    """

    def __init__(self, config: SchedulerConfig, max_model_len: int, tenants: Tenants | None = None) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.planner: Planner = as_requested
        self.shares = RowShares()
        self.tenants = Tenants() if tenants is None else tenants
        self.waiting = WaitingLine(self.tenants)
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.tenants.welcome(seq, self.waiting.tenants | {other.request.options.namespace for other in self.running})
        self.waiting.add(seq)

    def start_fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` run on the state of `parent`, whose prompt is computed but for its last token."""
        child.state = parent.state.fork()
        child.view.kv = KVView(child.state)
        child.status = Status.RUNNING
        self.running.append(child)

    def remove(self, seq: Sequence) -> None:
        """Take a finished or failed sequence out and free its memory."""
        seq.state.free()
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def schedule(self) -> Schedule:
        """Plan a step: one row for whoever decodes, then prefill chunks, then drafts from what is left."""
        plan = Schedule()
        rows_left = self.config.max_num_batched_tokens
        rows_left = self._schedule_running(plan, rows_left)
        rows_left = self._admit(plan, rows_left)
        self._budget_drafts(plan, rows_left)
        return plan

    def _schedule_running(self, plan: Schedule, rows_left: int) -> int:
        # Decoding sequences first: a row each is reserved, so that a long prefill cannot starve them. Nor do the prompts of
        # one tenant starve those of another.
        decoding = [seq for seq in self.running if _prefill_rows(seq) <= 1]
        prefilling = [seq for seq in self.running if _prefill_rows(seq) > 1]
        for seq in decoding:
            rows_left -= self._run(plan, seq, rows_left)
        for seq in sorted(prefilling, key=self.tenants.had):
            rows_left = self._admit(plan, rows_left, before=seq)
            if not any(item.seq is seq for item in plan.items):  # it may have lost its place here, and found another one
                rows_left -= self._run(plan, seq, rows_left)
        return rows_left

    def _run(self, plan: Schedule, seq: Sequence, rows_left: int) -> int:
        """Give a sequence the rows that it can use; returns how many."""
        rows = min(_prefill_rows(seq), rows_left)
        if seq.status is not Status.RUNNING or rows <= 0 or not self._claim(plan, seq, rows):
            return 0
        plan.items.append(ScheduledSequence(seq, rows))
        self.tenants.charge_prompt(seq, seq.state.num_computed + rows)
        return rows + seq.state.num_source_rows  # a source is read whole, and takes the place of so many rows

    def _claim(self, plan: Schedule, seq: Sequence, rows: int) -> bool:
        """Find memory for the next rows of `seq`, preempting newer sequences of whoever has most; False where it was itself
        preempted."""
        while not seq.state.reserve(rows):
            victim = self.tenants.richest(self.running)
            assert victim is not None
            self._preempt(plan, victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, plan: Schedule, victim: Sequence) -> None:
        """Take the victim's memory; its tokens stay and are computed again when it is its turn."""
        for item in plan.items:
            if item.seq is victim:
                plan.items.remove(item)
                break
        self.running.remove(victim)
        victim.state.free()
        victim.status = Status.WAITING
        victim.stats.num_preemptions += 1
        self.waiting.add(victim)

    def _admit(self, plan: Schedule, rows_left: int, before: Sequence | None = None) -> int:
        """Let those who wait run while there is room; with `before` only those whose tenants have had less than its."""
        while self.waiting and rows_left > 0:
            seq = self.waiting.first
            if before is not None and self.tenants.had(seq) >= self.tenants.had(before):
                break
            if not (self._has_seat(seq) and self._opens(seq)):
                victim = self.tenants.who_yields(self.running, seq)
                if victim is None:
                    break
                self._preempt(plan, victim)
                continue
            self.waiting.remove(seq)
            seq.status = Status.RUNNING
            seq.stats.num_cached_tokens = max(seq.stats.num_cached_tokens, seq.state.num_computed)
            self.running.append(seq)
            rows_left -= self._run(plan, seq, rows_left)
        return rows_left

    def _has_seat(self, seq: Sequence) -> bool:
        """Whether it may run now, with the samples it and running sequences have yet to fork."""
        taken = sum(other.num_seats for other in self.running)
        return taken + seq.num_seats <= self.config.max_num_seqs

    def _opens(self, seq: Sequence) -> bool:
        """Take what the cache has of its text. The rest must fit too, so that a newcomer does not preempt or get preempted
        at once."""
        seq.state.open(seq.token_ids, share=_may_share(seq), needs=seq.added_layers)
        if seq.state.fits(seq.num_missing):
            return True
        seq.state.free()
        return False

    def _budget_drafts(self, plan: Schedule, rows_left: int) -> None:
        """What structures force comes first, behind the end of a prompt too: these rows are as good as sure to stand, and
        no proposer works for them."""
        for item in plan.items:
            if item.completes:
                item.forced = self._forced(item.seq, rows_left)
                rows_left -= len(item.forced)
        for item in plan.items:
            if item.completes and item.num_rows == 1:
                rows_left -= self._plan_turns(item, rows_left) if rows_left > 0 else 0
            else:
                item.is_prompt_of_drafts = self.useful_depth(item.seq) > 1  # a token less of it is left for the first draft

    def _forced(self, seq: Sequence, rows_left: int) -> tuple[int, ...]:
        """What the structure of the output forces next, as far as there are rows and memory for it."""
        found = seq.view.processing.forced(min(rows_left, self.useful_depth(seq), MOST_FORCED))
        while found and not seq.state.reserve(seq.num_missing + len(found)):
            found = found[:-1]
        return found

    def _plan_turns(self, item: ScheduledSequence, rows_left: int) -> int:
        """Share rows out to those who draft for a sequence; returns how many."""
        seq, asked = item.seq, self._asked(item.seq)
        if not any(config.method for config in asked):
            return 0
        depth, num_rows, before = self.useful_depth(seq) - len(item.forced), 0, seq.num_missing + len(item.forced)
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
            turns += self._member_turns(config, budget, most, len(turns))
            num_rows += budget
            depth -= share
        item.turns = tuple(turns)
        seeded = seq.request.params.seed is not None  # a ratio test would make the text depend on the drafts
        item.rule = "auto" if seeded and asked[0].rule in ("token", "block") else asked[0].rule
        seq.coupled = seq.coupled or (item.coupled and bool(turns))
        return num_rows

    def _member_turns(self, config: SpeculationConfig, budget: int, max_depth: int, first: int) -> list[Turn]:
        """The turns of settings that draft behind `first` earlier turns: one, or those of the members of a composition."""
        members, before = turns_of([config]), tuple(range(first))
        turns = []
        for member, rows in zip(members, self.shares.of(config, budget), strict=True):
            method, greedy = member.config.method, member.config.draft_sampling == "greedy"
            assert method is not None
            behind = (*before, *(first + turn for turn in member.behind))
            turns.append(Turn(method, member.config.tree, greedy, rows, max_depth, behind, member.pooled))
        return turns

    def _asked(self, seq: Sequence) -> tuple[SpeculationConfig, ...]:
        """What the planner says; nothing drafts where it raises or answers something else."""
        try:
            asked = tuple(self.planner(seq))
            wrong = [type(config).__name__ for config in asked if not isinstance(config, SpeculationConfig)]
            if wrong:
                raise TypeError(f"{wrong[0]} instead of a SpeculationConfig")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.warning("the planner failed for request %d: %r", seq.request.request_id, error)
            seq.stats.num_proposer_faults += 1
            return ()
        return asked

    def useful_depth(self, seq: Sequence) -> int:
        """Longest path of draft tokens that may enter the text, the target's own next token left room for."""
        if not seq.view.processing.follows_drafts:
            return 0
        depth = min(seq.request.params.max_tokens - seq.num_output_tokens, self.max_model_len - len(seq.token_ids)) - 1
        longest = seq.state.longest_draft(len(seq.token_ids))
        return depth if longest is None else min(depth, longest)


def _prefill_rows(seq: Sequence) -> int:
    """Rows it could use now. A sequence about to fork stops one token early, so that every sample has a row to decode."""
    return seq.num_missing if seq.forked else seq.num_prompt_tokens - 1 - seq.state.num_computed


def _may_share(seq: Sequence) -> bool:
    """Whether KV that somebody else computed will do: not where features or logits of every row are needed."""
    return not seq.reads_every_row and seq.request.params.prompt_logprobs is None


# --- The queue of waiting sequences, in the order in which they run. No torch.


class WaitingLine:
    """Sequences that wait. The tenant that has had fewest tokens is next; within a tenant the lower priority number goes
    first, then whoever came first. A sequence that has run before keeps its place by when it came.

    Args:
        tenants: Who has had how much.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._lines: dict[Tenant, list[Sequence]] = {}
        self._arrivals = count()

    @property
    def tenants(self) -> Set[Tenant]:
        """Whose sequences wait."""
        return self._lines.keys()

    @property
    def first(self) -> Sequence:
        """Who is next."""
        return min((line[0] for line in self._lines.values()), key=self._turn)

    def add(self, seq: Sequence) -> None:
        """A sequence comes, or comes back."""
        if seq.request.arrival is None:
            seq.request.arrival = next(self._arrivals)
        insort(self._lines.setdefault(seq.request.options.namespace, []), seq, key=_place)

    def remove(self, seq: Sequence) -> None:
        """A sequence waits no longer."""
        line = self._lines[seq.request.options.namespace]
        line.remove(seq)
        if not line:
            del self._lines[seq.request.options.namespace]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._lines.get(seq.request.options.namespace, ())

    def __iter__(self) -> Iterator[Sequence]:
        """Tenant by tenant, in the order of their turns."""
        for line in sorted(self._lines.values(), key=lambda line: self._turn(line[0])):
            yield from line

    def _turn(self, seq: Sequence) -> tuple[float, int]:
        assert seq.request.arrival is not None
        return self._tenants.had(seq), seq.request.arrival


def _place(seq: Sequence) -> tuple[int, int, int]:
    assert seq.request.arrival is not None
    return seq.request.options.priority, seq.request.arrival, seq.index


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
    """Splits a merge's row budget greedily by the acceptance rate of each member's next row. A row
    stands where all rows of its member before it do.

    Args:
        merge: The merge.
        rates: How often a token of each member stands, in the order of their turns.

    Attributes:
        merge: The same.
        members: In the order of their turns.
    """

    def __init__(self, merge: Merge, rates: Seq[float]) -> None:
        self.merge, self.members = merge, merge.in_order()
        self._rates, self._chances = rates, list(rates)
        self._dealt = [(0,) * len(rates)]

    def rows(self, budget: int) -> tuple[int, ...]:
        """Of each member, where there are so many in all."""
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
        """Of so many places where a method proposed tokens and whose fate was decided, at so many one of them stood."""
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
