"""Plans the rows of the next step: which sequences run, with how many rows in which blocks. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import count

from outrider.cache.state import KVView
from outrider.config import SchedulerConfig
from outrider.engine.sequence import Sequence, Status
from outrider.engine.tenants import Tenant, Tenants
from outrider.propose.settings import Method, TreeShape
from outrider.verify.verifier import RuleName

# --- Scheduler: plans the sequences, rows and blocks of the next step. No torch.


@dataclass(frozen=True)
class Turn:
    """One method's part in the draft of one sequence; fixed before anything is drawn."""

    method: Method
    tree: TreeShape  # that was asked for, or the name of one that adapts
    greedy: bool  # whether the most likely tokens were asked for
    budget: int  # most rows it may have
    #: Longest path that may be of use; where rows are pooled, counted from where the first turn begins.
    max_depth: int
    #: The turns of this draft behind whose deepest token it goes on. Without any it begins at the end of the text, or
    #: behind what the structure forces there.
    behind: tuple[int, ...] = ()
    #: Whether it shares rows with the other members of a composition: it gets what turns without drawn tokens have left
    #: over, and so may begin with none of its own.
    pooled: bool = False


@dataclass
class ScheduledSequence:
    """One sequence's share of a step."""

    seq: Sequence
    num_rows: int  # committed tokens to compute: a prefill chunk, or 1 while decoding
    turns: tuple[Turn, ...] = ()  # who drafts behind them, in order
    rule: RuleName = "auto"  # how the draft is checked
    is_prompt_of_drafts: bool = False  # whether the rows are a chunk of a prompt, and drafts may follow it
    forced: tuple[int, ...] = ()  # draft tokens that the structure of the output forces; all turns draft behind these

    @property
    def completes(self) -> bool:
        """True if its last row is the last committed token, so that the next token can be chosen."""
        return self.num_rows == self.seq.num_missing

    @property
    def budget(self) -> int:
        """Most rows that all turns together may have."""
        return sum(turn.budget for turn in self.turns)

    @property
    def coupled(self) -> bool:
        """True if drafts guess with the target's own noise, and are followed while the target agrees: for seeded requests,
        where the rule asks for it, and to the end of a text that was once drafted for so."""
        seeded = self.rule == "auto" and self.seq.request.params.seed is not None
        return self.rule == "coupled" or seeded or self.seq.coupled


@dataclass
class Schedule:
    """The plan of a step: running sequences and their rows, and the rows that are left for drafts."""

    items: list[ScheduledSequence]
    rows_left: int
    prompt_rows_left: int  # of these, rows that prompts may have

    @property
    def room(self) -> int:
        """Rows that one more prompt may have."""
        return min(self.rows_left, self.prompt_rows_left)

    def has(self, seq: Sequence) -> bool:
        """True if a sequence has rows in this step."""
        return any(item.seq is seq for item in self.items)


#: Seconds that the prompts in a pass may take, and where texts are written beside them. Whoever comes, or is cancelled,
#: waits no longer.
MOST_PROMPT_SECONDS, PROMPT_SECONDS_BESIDE_TEXTS = 1.0, 0.5
#: Fewest rows that the prompts of a pass have, however long they take; from so many on, a pass tells what rows cost.
_FEWEST_PROMPT_ROWS = 32
#: Seconds that a row is taken to cost before a pass has told.
_UNKNOWN_ROW_SECONDS = 1 / 128
#: Waiting sequences that are looked at in a step, in search of one with few rows to go.
_LOOKS = 8


class Scheduler:
    """Tenants in turns by what they have had, and each of them first come, first served; prefill in chunks beside decoding;
    preemption by recompute, newest first.

    A tenant that has fewer seats than its share gets one at once: whoever has most gives one up. So the first token of a
    tenant's only text waits for the step that is under way, and never for the texts of others to end.

    A long prompt leaves half of the rows to the prompt of its tenant that has fewest to go. So a short request does not
    wait for it, and it keeps at least half of its pace.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants | None = None) -> None:
        self.config = config
        self.tenants = Tenants() if tenants is None else tenants
        self.waiting = WaitingLine(self.tenants)
        self.running: list[Sequence] = []
        self._row_seconds = _UNKNOWN_ROW_SECONDS

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.tenants.welcome(seq, self.waiting.tenants | set(map(_tenant, self.running)))
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
        """Plan a step: one row for whoever decodes, then prefill chunks. What is left is for drafts."""
        # Decoding sequences first: a row each is reserved, so that a long prefill cannot starve them. Nor do the prompts of
        # one tenant starve those of another.
        decoding = [seq for seq in self.running if _prefill_rows(seq) <= 1]
        prefilling = [seq for seq in self.running if _prefill_rows(seq) > 1]
        seconds = PROMPT_SECONDS_BESIDE_TEXTS if decoding else MOST_PROMPT_SECONDS
        most = self.config.max_num_batched_tokens
        plan = Schedule([], most, min(most, max(int(seconds / self._row_seconds), _FEWEST_PROMPT_ROWS)))
        for seq in decoding:
            self._run(plan, seq)
        for seq in sorted(prefilling, key=self.tenants.had):
            self._admit(plan, before=seq)
            if seq.status is Status.RUNNING and not plan.has(seq):  # it may have lost its place here, and found another one
                self._run_quick(plan, seq)
                self._run(plan, seq)
        self._admit(plan)
        return plan

    def observe(self, plan: Schedule, seconds: float) -> None:
        """A pass of these rows took so long: learn what a row of a prompt costs."""
        if sum(item.num_rows for item in plan.items if item.num_rows > 1) >= _FEWEST_PROMPT_ROWS:
            self._row_seconds = max(seconds, 1e-6) / sum(item.num_rows for item in plan.items)

    def _run(self, plan: Schedule, seq: Sequence, most: int | None = None) -> None:
        """Give a sequence the rows that it can use, and no more than `most`."""
        missing = _prefill_rows(seq)
        rows = min(missing, plan.rows_left if missing <= 1 else plan.room)
        rows = rows if most is None else min(rows, most)
        if seq.status is not Status.RUNNING or rows <= 0 or not self._claim(plan, seq, rows):
            return
        plan.items.append(ScheduledSequence(seq, rows))
        self.tenants.charge_prompt(seq, seq.state.num_computed + rows)
        # A source is read whole, and takes the place of so many rows.
        plan.rows_left -= rows + seq.state.num_source_rows
        plan.prompt_rows_left -= 0 if missing <= 1 else rows

    def _run_quick(self, plan: Schedule, first: Sequence) -> None:
        """Give half of the rows to the prompt of the tenant that has fewest to go, where `first` could use them all."""
        half, fewest = plan.room // 2, _prefill_rows(first)
        if half == 0 or fewest <= 2 * half:
            return
        tenant, quick = _tenant(first), first
        for seq in self.running:
            if _tenant(seq) == tenant and 1 < _prefill_rows(seq) < fewest and not plan.has(seq):
                quick, fewest = seq, _prefill_rows(seq)
        newcomer = next((seq for seq in self.waiting.of(tenant)[:_LOOKS] if self._overtakes(seq, first, fewest)), None)
        if newcomer is not None:
            self._run_newcomer(plan, newcomer, half)
        elif quick is not first:
            self._run(plan, quick, half)

    def _overtakes(self, seq: Sequence, first: Sequence, fewest: int) -> bool:
        """Open a waiting sequence, and leave it open where it may run now and has fewer rows to go than all others.

        Whoever begins like a prompt that is under way waits until that one has computed what both have.
        """
        if seq.request.options.priority > first.request.options.priority or not (self._has_seat(seq) and self._opens(seq)):
            return False
        known = seq.state.num_computed + seq.state.memory.blocks.block_size
        begins_alike = any(
            other.state.num_computed < known and other.token_ids[:known] == seq.token_ids[:known] for other in self.running
        )
        if _prefill_rows(seq) < fewest and not (begins_alike and _may_share(seq)):
            return True
        seq.state.free()
        return False

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

    def _admit(self, plan: Schedule, before: Sequence | None = None) -> None:
        """Let those who wait run while there is room; with `before` only those whose tenants have had less than its."""
        while self.waiting and plan.room > 0:
            seq = self.waiting.first
            if before is not None and self.tenants.had(seq) >= self.tenants.had(before):
                break
            if not (self._has_seat(seq) and self._opens(seq)):
                victim = self.tenants.who_yields(self.running, seq)
                if victim is None:
                    break
                self._preempt(plan, victim)
                continue
            self._run_newcomer(plan, seq)

    def _run_newcomer(self, plan: Schedule, seq: Sequence, most: int | None = None) -> None:
        """Let a waiting sequence run that has a seat and was opened."""
        self.waiting.remove(seq)
        seq.status = Status.RUNNING
        if seq.stats.num_preemptions == 0:  # later the cache may have what the text itself has computed
            seq.stats.num_cached_tokens = seq.state.num_computed
        self.running.append(seq)
        self._run(plan, seq, most)

    def _has_seat(self, seq: Sequence) -> bool:
        """True if it may run now, with the samples it and running sequences have yet to fork."""
        taken = sum(other.num_seats for other in self.running)
        return taken + seq.num_seats <= self.config.max_num_seqs

    def _opens(self, seq: Sequence) -> bool:
        """Take what the cache has of its text. The rest must fit too, beside what its tenant's prompts have yet to compute,
        so that a newcomer does not preempt or get preempted soon."""
        seq.state.open(seq.token_ids, share=_may_share(seq), needs=seq.added_layers)
        beside = [other for other in self.running if _tenant(other) == _tenant(seq)]
        pledged = sum(max(0, len(other.token_ids) - other.state.capacity) for other in beside)
        if seq.state.fits(seq.num_missing + pledged):
            return True
        seq.state.free()
        return False


def _tenant(seq: Sequence) -> Tenant:
    return seq.request.options.namespace


def _prefill_rows(seq: Sequence) -> int:
    """Rows it could use now. A sequence about to fork stops one token early, so that every sample has a row to decode."""
    return seq.num_missing if seq.forked else seq.num_prompt_tokens - 1 - seq.state.num_computed


def _may_share(seq: Sequence) -> bool:
    """True if KV that somebody else computed will do: not where features or logits of every row are needed."""
    return not seq.reads_every_row and seq.request.params.prompt_logprobs is None


# --- The queue of waiting sequences, in the order in which they run. No torch.


class WaitingLine:
    """Sequences that wait. The tenant that has had fewest tokens is next; within a tenant the lower priority number goes
    first, then whoever came first. A sequence that has run before keeps its place by when it came."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._lines: dict[Tenant, list[Sequence]] = {}
        self._arrivals = count()

    @property
    def tenants(self) -> Set[Tenant]:
        """Tenants whose sequences wait."""
        return self._lines.keys()

    @property
    def first(self) -> Sequence:
        """The sequence that is next."""
        return min((line[0] for line in self._lines.values()), key=self._turn)

    def of(self, tenant: Tenant) -> list[Sequence]:
        """The sequences of a tenant, in the order of their turns."""
        return list(self._lines.get(tenant, ()))

    def add(self, seq: Sequence) -> None:
        """A sequence comes, or comes back."""
        if seq.request.arrival is None:
            seq.request.arrival = next(self._arrivals)
        insort(self._lines.setdefault(_tenant(seq), []), seq, key=_place)

    def remove(self, seq: Sequence) -> None:
        """A sequence waits no longer."""
        line = self._lines[_tenant(seq)]
        line.remove(seq)
        if not line:
            del self._lines[_tenant(seq)]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._lines.get(_tenant(seq), ())

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
