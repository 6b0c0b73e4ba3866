"""Who runs in the next step, with how many rows, in which blocks; no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.cache.blocks import BlockManager
from outrider.config import SchedulerConfig
from outrider.engine.sequence import Sequence, Status


@dataclass
class ScheduledSequence:
    """One sequence's share of a step.

    Attributes:
        seq: The sequence.
        num_rows: Committed tokens to compute: a prefill chunk, or 1 while decoding.
        draft_budget: Most draft rows behind them; fixed before anything is drawn.
        draft_depth: Longest path among them that may be of use.
    """

    seq: Sequence
    num_rows: int
    draft_budget: int = 0
    draft_depth: int = 0

    @property
    def completes(self) -> bool:
        """Whether its last row is the last committed token, so that the next token can be chosen."""
        return self.num_rows == self.seq.num_missing


@dataclass
class Schedule:
    """The plan of a step.

    Attributes:
        items: Running sequences and their rows.
        copies: (source, destination) blocks to copy before the pass, for sequences that write to shared blocks.
    """

    items: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """First come, first served; prefill in chunks beside decoding; preemption by recompute, newest first.

    Args:
        config: Limits of a step.
        blocks: The target's memory.
        max_model_len: Longest sequence.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, max_model_len: int) -> None:
        self.config = config
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def start_fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` run on the blocks of `parent`, whose prompt is computed but for its last token."""
        child.block_table = self.blocks.fork(parent.block_table)
        child.num_computed, child.num_published = parent.num_computed, parent.num_published
        child.status = Status.RUNNING
        self.running.append(child)

    def recompute(self, seq: Sequence) -> None:
        """Give up the KV of a running sequence, whose tokens will be computed again in the steps to come."""
        self.blocks.free(seq.block_table)
        seq.num_computed = seq.num_published = 0

    def remove(self, seq: Sequence) -> None:
        """Take a finished or failed sequence out and free its memory."""
        self.blocks.free(seq.block_table)
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
        # Decoding sequences first: a row each is reserved, so that a long prefill cannot starve them.
        order = sorted(self.running, key=lambda seq: _prefill_rows(seq) > 1)
        for seq in order:
            rows = min(_prefill_rows(seq), rows_left)
            if seq.status is not Status.RUNNING or rows == 0:
                continue
            if self._claim(plan, seq, rows):
                plan.items.append(ScheduledSequence(seq, rows))
                rows_left -= rows
        return rows_left

    def _claim(self, plan: Schedule, seq: Sequence, rows: int) -> bool:
        """Find memory for the next rows of `seq`, preempting newer sequences; False where it was itself preempted."""
        stop = seq.num_computed + rows
        while self._blocks_needed(seq, stop) > self.blocks.num_free:
            victim = self.running[-1]
            self._preempt(plan, victim)
            if victim is seq:
                return False
        plan.copies += self.blocks.make_writable(seq.block_table, seq.num_computed, stop)
        grown = self.blocks.grow(seq.block_table, stop)
        assert grown
        return True

    def _blocks_needed(self, seq: Sequence, stop: int) -> int:
        shared = len(self.blocks.shared_from(seq.block_table, seq.num_computed, stop))
        return max(0, self.blocks.blocks_for(stop) - len(seq.block_table)) + shared

    def _preempt(self, plan: Schedule, victim: Sequence) -> None:
        """Take the victim's memory; its tokens stay and are computed again when it is its turn."""
        for item in plan.items:
            if item.seq is victim:
                plan.items.remove(item)
                break
        given_back = set(victim.block_table)  # may be handed out again in this very step, as the target of another copy
        plan.copies = [(source, destination) for source, destination in plan.copies if destination not in given_back]
        self.running.remove(victim)
        self.blocks.free(victim.block_table)
        victim.num_computed = victim.num_published = 0
        victim.status = Status.WAITING
        victim.stats.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _admit(self, plan: Schedule, rows_left: int) -> int:
        while self.waiting and rows_left > 0 and self._has_seat(self.waiting[0]):
            seq = self.waiting[0]
            seq.block_table = self._cached_prefix(seq)
            seq.num_published = len(seq.block_table)
            seq.num_computed = seq.num_published * self.blocks.block_size
            rows = min(_prefill_rows(seq), rows_left)
            # Admit only where the whole text fits, so that a newcomer does not preempt or get preempted at once.
            if self._blocks_needed(seq, len(seq.token_ids)) > self.blocks.num_free:
                self.blocks.free(seq.block_table)
                seq.num_computed = seq.num_published = 0
                break
            self.waiting.popleft()
            seq.status = Status.RUNNING
            seq.stats.num_cached_tokens = max(seq.stats.num_cached_tokens, seq.num_computed)
            self.running.append(seq)
            if rows > 0:
                claimed = self._claim(plan, seq, rows)
                assert claimed
                plan.items.append(ScheduledSequence(seq, rows))
                rows_left -= rows
        return rows_left

    def _has_seat(self, seq: Sequence) -> bool:
        """Whether it may run now, with the samples it and running sequences have yet to fork."""
        taken = sum(_seats(other) for other in self.running)
        return taken + _seats(seq) <= self.config.max_num_seqs

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        proposer = seq.request.proposer
        if proposer is not None and proposer.requires.any:
            return []  # its features exist only for rows that are computed
        if seq.request.params.prompt_logprobs is not None:
            return []  # and so do logits
        return self.blocks.match(seq.token_ids, seq.cache_space)

    def _budget_drafts(self, plan: Schedule, rows_left: int) -> None:
        for item in self._drafting(plan):
            seq = item.seq
            depth = min(
                seq.request.params.max_tokens - seq.num_output_tokens - 1, self.max_model_len - len(seq.token_ids) - 1
            )
            if seq.long_rope_after is not None and not seq.long_rope:
                depth = min(depth, seq.long_rope_after - len(seq.token_ids))  # no draft spans two sets of rotary factors
            asked = seq.request.speculation
            budget = min(asked.num_draft_tokens, rows_left) if depth > 0 else 0
            if not asked.tree:
                budget = min(budget, depth)
            while budget > 0 and not self.blocks.grow(seq.block_table, len(seq.token_ids) + budget):
                budget -= 1
            item.draft_budget, item.draft_depth = max(budget, 0), depth
            rows_left -= item.draft_budget

    def _drafting(self, plan: Schedule) -> Iterator[ScheduledSequence]:
        return (i for i in plan.items if i.completes and i.num_rows == 1 and i.seq.request.proposer is not None)


def _prefill_rows(seq: Sequence) -> int:
    """Rows it could use now. A sequence about to fork stops one token early, so that every sample has a row to decode."""
    return seq.num_missing if seq.forked else seq.num_prompt_tokens - 1 - seq.num_computed


def _seats(seq: Sequence) -> int:
    return 1 if seq.forked else seq.request.params.n
