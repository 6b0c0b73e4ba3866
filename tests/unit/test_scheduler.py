"""Who runs with how many rows in which blocks: budgets, order, admission, preemption, and copies that never collide."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.blocks import BlockManager
from outrider.config import SchedulerConfig
from outrider.engine.drafting.planning import Planner, RowShares, as_requested, plan_forced, plan_turns
from outrider.engine.scheduler import (
    MOST_PROMPT_SECONDS,
    PROMPT_SECONDS_BESIDE_TEXTS,
    Schedule,
    ScheduledSequence,
    Scheduler,
    Turn,
)
from outrider.engine.sequence import Request, Sequence, Status
from outrider.params import TokenOrigin
from outrider.propose.settings import PLAIN, SpeculationConfig
from tests.unit import builders
from tests.unit.builders import DRAFTING, Planted, PlantedTree


class MemoryScheduler(Scheduler):
    """A scheduler with all that follows it in the planning of a step, and the blocks that all its sequences share."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        super().__init__(config)
        self.blocks = blocks
        self.planner: Planner = as_requested

    def schedule(self) -> Schedule:
        plan = super().schedule()
        plan_turns(plan, plan_forced(plan), self.planner, RowShares())
        return plan


def scheduler(
    *, rows: int = 100, seqs: int = 8, blocks: int = 50, block_size: int = 4, caching: bool = True
) -> MemoryScheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=rows)
    return MemoryScheduler(config, BlockManager(blocks, block_size, prefix_caching=caching))


def make_request(s: MemoryScheduler, prompt: int | list[int], **how: Any) -> Request:
    """A request whose KV lies in the scheduler's memory."""
    return builders.make_request(prompt, blocks=s.blocks, **how)


def make_sequence(s: MemoryScheduler, prompt: int | list[int], **how: Any) -> Sequence:
    return builders.make_sequence(prompt, blocks=s.blocks, **how)


def drafted(item: ScheduledSequence) -> int:
    """Rows of all turns together."""
    return sum(turn.budget for turn in item.turns)


def compute(item: ScheduledSequence, accepted: int = 0) -> None:
    """What a pass does to a scheduled sequence: its rows are computed, and tokens come where the text is complete."""
    seq, completes = item.seq, item.completes
    start, num_rows = seq.state.num_computed, item.num_rows
    if completes:
        for _ in range(accepted):
            if seq.status is Status.RUNNING:
                seq.append(500 + len(seq.token_ids), TokenOrigin.ACCEPTED)
                num_rows += 1
    seq.state.commit(start, range(num_rows))
    if completes and seq.status is Status.RUNNING:
        seq.append(500 + len(seq.token_ids), TokenOrigin.PLAIN)


def copies(plan: Schedule) -> list[tuple[int, int]]:
    """The blocks that the sequences of a step want copied."""
    return [pair for item in plan.items for pair in item.seq.state.copies]


def make_copies(plan: Schedule) -> None:
    """What the engine does before the pass; there are no tensors here."""
    for item in plan.items:
        item.seq.state.memory.make_copies([item.seq.state])


def step(s: MemoryScheduler) -> Schedule:
    plan = s.schedule()
    make_copies(plan)
    for item in plan.items:
        compute(item)
    return plan


def rows(plan: Schedule) -> dict[int, int]:
    return {item.seq.seq_id: item.num_rows for item in plan.items}


def add(s: MemoryScheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        s.add(seq)


def running(s: MemoryScheduler, prompt: int | list[int], **how: Any) -> Sequence:
    """A sequence that has computed its prompt and written one token."""
    seq = make_sequence(s, prompt, **how)
    s.add(seq)
    while seq.num_output_tokens == 0:
        step(s)
    return seq


# -- rows --------------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_an_empty_plan() -> None:
    s = scheduler()
    assert not s.has_work
    assert not s.schedule().items


def test_a_prompt_that_fits_is_computed_at_once() -> None:
    s = scheduler()
    seq = make_sequence(s, 10)
    add(s, seq)
    (item,) = s.schedule().items
    assert (item.seq, item.num_rows, item.completes, drafted(item)) == (seq, 10, True, 0)
    assert len(seq.state.block_table) == 3


def test_a_long_prompt_comes_in_chunks_and_only_the_last_completes() -> None:
    s = scheduler(rows=8)
    seq = make_sequence(s, 20)
    add(s, seq)
    chunks = []
    for _ in range(3):
        (item,) = s.schedule().items
        chunks.append((item.num_rows, item.completes))
        compute(item)
    assert chunks == [(8, False), (8, False), (4, True)]
    assert seq.num_output_tokens == 1


def test_decoding_goes_before_an_older_prefill() -> None:
    s = scheduler(rows=8, seqs=4)
    decoding = running(s, 3)
    long = make_sequence(s, 40)
    add(s, long)
    assert rows(step(s)) == {decoding.seq_id: 1, long.seq_id: 7}
    s.running.reverse()  # the one that prefills is now the older
    plan = s.schedule()
    assert [item.seq for item in plan.items] == [decoding, long]
    assert [item.num_rows for item in plan.items] == [1, 7]


def test_several_prompts_share_a_step_in_order_of_arrival() -> None:
    s = scheduler(rows=10)
    first, second, third = (make_sequence(s, n) for n in (4, 5, 6))
    add(s, first, second, third)
    assert rows(s.schedule()) == {first.seq_id: 4, second.seq_id: 5, third.seq_id: 1}


def test_a_step_without_rows_left_admits_nobody() -> None:
    s = scheduler(rows=4, seqs=4)
    first, second = make_sequence(s, 4), make_sequence(s, 4)
    add(s, first, second)
    assert rows(s.schedule()) == {first.seq_id: 4}
    assert list(s.waiting) == [second]


# -- long prompts beside short ones ------------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_a_long_one_of_its_tenant() -> None:
    s = scheduler(rows=20, blocks=100, caching=False)
    long = make_sequence(s, 200)
    add(s, long)
    assert rows(step(s)) == {long.seq_id: 20}
    short = make_sequence(s, 25)
    add(s, short)
    assert rows(step(s)) == {short.seq_id: 10, long.seq_id: 10}
    shorter = make_sequence(s, 4)
    add(s, shorter)
    assert rows(step(s)) == {shorter.seq_id: 4, long.seq_id: 16}, "whoever has fewest to go is first"
    assert shorter.num_output_tokens == 1
    assert rows(step(s)) == {shorter.seq_id: 1, short.seq_id: 9, long.seq_id: 10}
    assert rows(step(s)) == {shorter.seq_id: 1, short.seq_id: 6, long.seq_id: 13}
    assert short.num_output_tokens == 1


def test_prompts_that_are_no_shorter_come_one_after_another() -> None:
    s = scheduler(rows=20, blocks=100, caching=False)
    first, second = make_sequence(s, 60), make_sequence(s, 60)
    add(s, first, second)
    chunks = [rows(step(s)) for _ in range(4)]
    assert chunks[:3] == [{first.seq_id: 20}] * 3
    assert chunks[3] == {first.seq_id: 1, second.seq_id: 19}


def test_a_short_prompt_that_begins_like_a_long_one_waits_for_what_both_have() -> None:
    s = scheduler(rows=20, blocks=100)
    text = list(range(200))
    long, short = make_sequence(s, text), make_sequence(s, [*text[:60], 900, 901])
    add(s, long, short)
    for _ in range(3):
        assert rows(step(s)) == {long.seq_id: 20}
        long.state.publish(long.token_ids)
    assert rows(step(s)) == {short.seq_id: 2, long.seq_id: 18}
    assert short.stats.num_cached_tokens == 60


def test_a_short_prompt_takes_no_memory_that_a_long_one_will_need() -> None:
    s = scheduler(rows=20, blocks=50, caching=False)  # for 200 tokens
    long, short = make_sequence(s, 190), make_sequence(s, 30)
    add(s, long, short)
    while not long.num_output_tokens:
        assert set(rows(step(s))) == {long.seq_id}
    assert long.stats.num_preemptions == 0


def test_less_urgent_requests_and_those_without_a_seat_do_not_overtake() -> None:
    s = scheduler(rows=20, blocks=100, seqs=2, caching=False)
    long = make_sequence(s, 200)
    add(s, long)
    step(s)
    add(s, make_sequence(s, 4, priority=1))
    assert set(rows(step(s))) == {long.seq_id}
    seated, other = make_sequence(s, 30), make_sequence(s, 4)
    add(s, seated, other)
    assert set(rows(step(s))) == {seated.seq_id, long.seq_id}
    assert set(rows(step(s))) == {seated.seq_id, long.seq_id}


def test_prompts_of_a_pass_take_no_longer_than_is_said() -> None:
    s = scheduler(rows=1000, blocks=1000, caching=False)
    long = make_sequence(s, 3000)
    add(s, long)
    plan = step(s)
    assert rows(plan) == {long.seq_id: 128}, "nothing is known of rows yet"
    s.observe(plan, MOST_PROMPT_SECONDS * 2)
    plan = step(s)
    assert rows(plan) == {long.seq_id: 64}
    s.observe(plan, MOST_PROMPT_SECONDS * 100)
    plan = step(s)
    assert rows(plan) == {long.seq_id: 32}, "and never fewer than is worth a pass"
    s.observe(plan, 1e-9)
    assert rows(step(s))[long.seq_id] == 1000


def test_prompts_beside_texts_that_are_written_take_less_time() -> None:
    s = scheduler(rows=1000, blocks=1000, caching=False)
    decoding, long = running(s, 3), make_sequence(s, 3000)
    add(s, long)
    plan = step(s)
    s.observe(plan, PROMPT_SECONDS_BESIDE_TEXTS * 2 * 65 / 64)
    assert rows(plan) == {decoding.seq_id: 1, long.seq_id: 64}, "nothing is known of rows yet"
    assert rows(step(s)) == {decoding.seq_id: 1, long.seq_id: 32}


def test_passes_without_long_prompts_say_nothing_of_them() -> None:
    s = scheduler(rows=1000, blocks=1000, caching=False)
    running(s, 3)
    s.observe(step(s), 100.0)
    long = make_sequence(s, 3000)
    add(s, long)
    assert rows(step(s))[long.seq_id] == 64


# -- admission ---------------------------------------------------------------------------------------------------------


def test_no_more_sequences_run_than_allowed() -> None:
    s = scheduler(seqs=2)
    seqs = [make_sequence(s, 3) for _ in range(4)]
    add(s, *seqs)
    assert len(step(s).items) == 2
    s.remove(seqs[0])
    assert set(rows(s.schedule())) == {seqs[1].seq_id, seqs[2].seq_id}


def test_a_request_takes_the_seats_of_all_its_samples() -> None:
    s = scheduler(seqs=4)
    three, two, one = make_request(s, 3, n=3), make_request(s, 3, n=2), make_request(s, 3)
    add(s, *(request.sequences[0] for request in (three, two, one)))
    step(s)
    assert s.running == [three.sequences[0]], "2 more seats are not there, and nobody overtakes"
    parent = three.sequences[0]
    parent.forked = True
    for child in three.sequences[1:]:
        s.start_fork(parent, child)
    assert s.schedule()
    assert s.running == three.sequences
    s.remove(three.sequences[2])
    s.schedule()
    assert s.running == [*three.sequences[:2], two.sequences[0]]
    assert list(s.waiting) == [one.sequences[0]]


def test_a_text_waits_until_all_of_it_fits_and_nobody_overtakes() -> None:
    s = scheduler(blocks=4, caching=False)
    first, big, small = make_sequence(s, 8), make_sequence(s, 12), make_sequence(s, 2)
    add(s, first, big, small)
    assert set(rows(step(s))) == {first.seq_id}
    assert list(s.waiting) == [big, small]
    assert big.state.block_table == []
    assert big.state.num_computed == 0
    s.remove(first)
    assert rows(s.schedule()) == {big.seq_id: 12, small.seq_id: 2}


def test_a_known_prefix_is_shared_and_not_computed_again() -> None:
    s = scheduler()
    first = running(s, list(range(10)))
    first.state.publish(first.token_ids)
    second = make_sequence(s, [*range(8), 77, 78])
    add(s, second)
    assert rows(s.schedule())[second.seq_id] == 2
    assert second.state.block_table[:2] == first.state.block_table[:2]
    assert (second.state.num_computed, second.state.num_published, second.stats.num_cached_tokens) == (8, 2, 8)


def test_a_proposer_that_must_see_every_row_gets_no_cached_prefix() -> None:
    s = scheduler()
    first = running(s, list(range(10)))
    first.state.publish(first.token_ids)
    second = make_sequence(s, list(range(10)))
    second.reads_every_row = True
    add(s, second)
    assert rows(s.schedule())[second.seq_id] == 10
    assert second.stats.num_cached_tokens == 0


def test_a_prompt_whose_probabilities_are_asked_for_gets_no_cached_prefix() -> None:
    s = scheduler()
    first = running(s, list(range(10)))
    first.state.publish(first.token_ids)
    second = make_sequence(s, list(range(10)), prompt_logprobs=1)
    add(s, second)
    assert rows(s.schedule())[second.seq_id] == 10


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_request_of_several_samples_stops_one_token_short_of_its_prompt() -> None:
    s = scheduler()
    request = make_request(s, 9, n=2)
    parent, _ = request.sequences
    add(s, parent)
    (item,) = s.schedule().items
    assert (item.num_rows, item.completes) == (8, False)
    compute(item)
    assert s.schedule().items == [], "it waits for its fork"


def test_a_prompt_of_one_token_leaves_nothing_to_compute_before_the_fork() -> None:
    s = scheduler()
    request = make_request(s, 1, n=2)
    add(s, request.sequences[0])
    assert s.schedule().items == []
    assert s.running == request.sequences[:1]
    fork(s, request.sequences)
    assert [item.num_rows for item in s.schedule().items] == [1, 1]


def fork(s: MemoryScheduler, samples: list[Sequence]) -> None:
    samples[0].forked = True
    for child in samples[1:]:
        s.start_fork(samples[0], child)


def test_samples_share_the_prompt_and_copy_only_where_they_write() -> None:
    s = scheduler()
    samples = make_request(s, 11, n=3).sequences
    add(s, samples[0])
    step(s)
    fork(s, samples)
    assert [seq.state.block_table for seq in samples] == [samples[0].state.block_table] * 3
    shared = list(samples[0].state.block_table)
    plan = s.schedule()
    assert [item.num_rows for item in plan.items] == [1, 1, 1]
    assert [source for source, _ in copies(plan)] == [shared[2]] * 2, "the last of them keeps the original"
    assert len({destination for _, destination in copies(plan)}) == 2
    assert [seq.state.block_table[:2] for seq in samples] == [shared[:2]] * 3
    assert len({seq.state.block_table[2] for seq in samples}) == 3
    s.blocks.check_integrity([seq.state.block_table for seq in samples])


def test_samples_that_write_to_a_new_block_copy_nothing() -> None:
    s = scheduler()
    samples = make_request(s, 9, n=2).sequences
    add(s, samples[0])
    step(s)
    fork(s, samples)
    plan = s.schedule()
    assert copies(plan) == []
    assert samples[0].state.block_table[2] != samples[1].state.block_table[2]


# -- preemption --------------------------------------------------------------------------------------------------------


def test_the_newest_is_preempted_and_recomputed_later() -> None:
    s = scheduler(blocks=4, caching=False)
    old, middle, new = (running(s, 3) for _ in range(3))
    while not any(seq.status is Status.WAITING for seq in (old, middle, new)):
        before = [len(seq.token_ids) for seq in (old, middle, new)]
        plan = step(s)
    assert [seq.status for seq in (old, middle, new)] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    assert new not in [item.seq for item in plan.items]
    assert (new.state.num_computed, new.state.num_published, new.state.block_table, new.stats.num_preemptions) == (
        0,
        0,
        [],
        1,
    )
    assert len(new.token_ids) == before[2], "its tokens stay"
    assert list(s.waiting) == [new]
    s.remove(old)
    written = len(new.token_ids)
    assert rows(step(s))[new.seq_id] == written, "prompt and output are computed again"


def test_what_a_preempted_sequence_finds_of_itself_is_no_prompt_from_the_cache() -> None:
    s = scheduler(blocks=8)
    old, new = running(s, 3), running(s, 20)
    new.state.publish(new.token_ids)
    while new.status is Status.RUNNING:
        step(s)
    s.remove(old)
    assert rows(step(s))[new.seq_id] < 20, "the cache has some of it"
    assert (new.stats.num_preemptions, new.stats.num_cached_tokens) == (1, 0)


def test_a_preempted_sequence_is_first_in_line() -> None:
    s = scheduler(blocks=3, caching=False, seqs=2)
    old, new = running(s, 3), running(s, 3)
    waiting = make_sequence(s, 1)
    add(s, waiting)
    while new.status is Status.RUNNING:
        step(s)
    assert list(s.waiting) == [new, waiting]
    assert old.status is Status.RUNNING


def test_a_sequence_may_have_to_preempt_itself() -> None:
    s = scheduler(blocks=2, caching=False)
    old, new = running(s, 3), running(s, 3)
    new.append(7, TokenOrigin.PLAIN)  # the newest is the first to need another block
    new.state.num_computed += 1
    plan = s.schedule()
    assert [item.seq for item in plan.items] == [old]
    assert new.status is Status.WAITING


def test_an_already_planned_victim_leaves_the_plan_and_its_copies() -> None:
    s = scheduler(blocks=5, block_size=4, rows=16, seqs=8, caching=False)
    old = make_sequence(s, 4)
    add(s, old)
    samples = make_request(s, 3, n=2).sequences
    add(s, samples[0])
    step(s)
    fork(s, samples)
    for token in range(10):  # a text that was grown elsewhere and must be computed: it prefills, so the samples go first
        old.append(token, TokenOrigin.PLAIN)
    plan = s.schedule()
    assert [item.seq for item in plan.items][-1] is old
    assert samples[1].status is Status.WAITING
    held = set(old.state.block_table) | set(samples[0].state.block_table)
    assert all(destination in held for _, destination in copies(plan))
    assert not {destination for _, destination in copies(plan)} & set(old.state.block_table)
    s.blocks.check_integrity([seq.state.block_table for seq in (old, *samples)])


def test_removing_frees_memory_whether_running_or_waiting() -> None:
    s = scheduler(seqs=1)
    first, second = make_sequence(s, 8), make_sequence(s, 8)
    add(s, first, second)
    step(s)
    s.remove(second)
    s.remove(first)
    assert not s.has_work
    assert s.blocks.num_free == s.blocks.num_blocks
    s.remove(first)  # once more is no error


# -- draft budgets -----------------------------------------------------------------------------------------------------


def budget_of(s: MemoryScheduler, seq: Sequence) -> int:
    (item,) = [item for item in s.schedule().items if item.seq is seq]
    assert len(seq.state.block_table) * s.blocks.block_size >= len(seq.token_ids) + drafted(item)
    return drafted(item)


def test_a_decoding_sequence_may_draft_what_its_settings_say() -> None:
    s = scheduler()
    assert budget_of(s, running(s, 3, speculation=DRAFTING)) == DRAFTING.num_draft_tokens


def test_without_a_method_nothing_is_drafted() -> None:
    s = scheduler()
    seq = running(s, 3, speculation=PLAIN)
    (item,) = s.schedule().items
    assert (item.seq, item.turns, item.rule) == (seq, (), "auto")


def test_a_prefill_drafts_nothing() -> None:
    s = scheduler(rows=8)
    seq = make_sequence(s, 12, speculation=DRAFTING)
    add(s, seq)
    for _ in range(2):
        plan = step(s)
        assert [drafted(item) for item in plan.items] == [0]


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, 0), (3, 1), (6, 4), (7, 5), (50, 5)])
def test_drafts_leave_room_for_the_token_behind_them_in_max_tokens(max_tokens: int, expected: int) -> None:
    s = scheduler()
    assert budget_of(s, running(s, 3, speculation=DRAFTING, max_tokens=max_tokens)) == expected


@pytest.mark.parametrize(("max_len", "expected"), [(5, 0), (6, 1), (9, 4), (10, 5), (100, 5)])
def test_drafts_leave_room_for_the_token_behind_them_in_the_context(max_len: int, expected: int) -> None:
    s = scheduler()
    assert budget_of(s, running(s, 3, speculation=DRAFTING, max_model_len=max_len)) == expected


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, (0, 0)), (3, (5, 1)), (6, (5, 4)), (50, (5, 48))])
def test_a_draft_that_may_branch_has_its_rows_up_to_the_last_token(max_tokens: int, expected: tuple[int, int]) -> None:
    s = scheduler()
    branching = SpeculationConfig(method=PlantedTree(), num_draft_tokens=5)
    seq = running(s, 3, speculation=branching, max_tokens=max_tokens)
    (item,) = s.schedule().items
    assert item.seq is seq
    assert [(turn.budget, turn.max_depth) for turn in item.turns] == [expected] * (expected != (0, 0))


@pytest.mark.parametrize(("free_rows", "expected"), [(1, [0, 0]), (3, [2, 0]), (6, [5, 0]), (8, [5, 2]), (99, [5, 5])])
def test_drafts_take_what_rows_are_left_in_order(free_rows: int, expected: list[int]) -> None:
    s = scheduler(rows=100, seqs=2)
    seqs = [running(s, 3, speculation=DRAFTING) for _ in range(2)]
    s.config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=free_rows + 1)
    assert [drafted(item) for item in s.schedule().items] == expected
    assert all(seq.num_missing == 1 for seq in seqs)


def test_drafts_do_not_take_rows_from_a_prefill() -> None:
    s = scheduler(rows=8, seqs=4)
    seq = running(s, 3, speculation=DRAFTING)
    add(s, make_sequence(s, 7))
    assert budget_of(s, seq) == 0


@pytest.mark.parametrize(("blocks", "expected"), [(1, 0), (2, 4), (3, 5)])
def test_drafts_shrink_to_the_memory_that_is_free(blocks: int, expected: int) -> None:
    s = scheduler(blocks=blocks, block_size=4, caching=False)
    assert budget_of(s, running(s, 3, speculation=DRAFTING)) == expected


def test_drafts_preempt_nobody() -> None:
    s = scheduler(blocks=3, block_size=4, caching=False)
    one, other = running(s, 3, speculation=DRAFTING), running(s, 3, speculation=DRAFTING)
    plan = s.schedule()
    assert {item.seq for item in plan.items} == {one, other}
    assert [drafted(item) for item in plan.items] == [3, 0], "a third block is all there is"
    assert one.stats.num_preemptions == other.stats.num_preemptions == 0


# -- several turns, and a planner that changes its mind ------------------------------------------------------------------


def chain(tag: int, length: int, **how: Any) -> SpeculationConfig:
    return SpeculationConfig(method=Planted(tag=tag), num_draft_tokens=length, **how)


def shaped(tag: int, *widths: int, **how: Any) -> SpeculationConfig:
    return SpeculationConfig(method=Planted(tag=tag), tree=widths, **how)


def turns_of(s: MemoryScheduler, seq: Sequence) -> tuple[Turn, ...]:
    (item,) = [item for item in s.schedule().items if item.seq is seq]
    assert seq.state.capacity >= len(seq.token_ids) + drafted(item)
    return item.turns


def planned(s: MemoryScheduler, *plan: SpeculationConfig) -> None:
    s.planner = lambda seq: plan


def test_turns_say_what_their_settings_say() -> None:
    s = scheduler()
    seq = running(s, 3)
    planned(s, chain(1, 4, draft_sampling="greedy"), shaped(2, 2, 1), chain(3, 2))
    assert turns_of(s, seq) == (
        Turn(Planted(tag=1), (), True, 4, 4),
        Turn(Planted(tag=2), (2, 1), False, 4, 2, (0,)),
        Turn(Planted(tag=3), (), False, 2, 126 - 4 - 2, (0, 1)),
    )


def test_the_request_decides_unless_a_planner_does() -> None:
    s = scheduler()
    drafting, plain = running(s, 3, speculation=DRAFTING), running(s, 3)
    assert [turn.method for turn in turns_of(s, drafting)] == [Planted()]
    assert turns_of(s, plain) == ()
    planned(s, chain(7, 2))
    for seq in (drafting, plain):
        assert [turn.method for turn in turns_of(s, seq)] == [Planted(tag=7)]
    planned(s)
    assert turns_of(s, drafting) == turns_of(s, plain) == ()


def test_a_planner_may_change_its_mind_in_every_step() -> None:
    s = scheduler()
    seq = running(s, 3, speculation=DRAFTING)
    mind: list[tuple[SpeculationConfig, ...]] = [
        (chain(1, 3, rule="token"), chain(2, 2, rule="walk")),
        (),
        (chain(2, 4, rule="walk"),),
        (PLAIN,),
        (chain(1, 6),),
    ]
    asked: list[tuple[int, int]] = []

    def planner(of: Sequence) -> tuple[SpeculationConfig, ...]:
        asked.append((of.seq_id, len(of.token_ids)))
        return mind[len(asked) - 1]

    s.planner = planner
    found = []
    for _ in mind:
        (item,) = s.schedule().items
        found.append(([turn.method.tag for turn in item.turns], [turn.budget for turn in item.turns], item.rule))  # type: ignore[attr-defined]
        compute(item, accepted=min(1, drafted(item)))
    assert found == [
        ([1, 2], [3, 2], "token"),
        ([], [], "auto"),
        ([2], [4], "walk"),
        ([], [], "auto"),
        ([1], [6], "auto"),
    ]
    assert asked == [(seq.seq_id, length) for length in (4, 6, 7, 9, 10)], "once a step, with the text as it stands"


def test_the_planner_is_asked_for_those_that_decode_alone() -> None:
    s = scheduler(rows=8)
    decoding = running(s, 3, speculation=DRAFTING)
    add(s, make_sequence(s, 20, speculation=DRAFTING))
    asked: list[Sequence] = []

    def planner(seq: Sequence) -> tuple[SpeculationConfig, ...]:
        asked.append(seq)
        return (DRAFTING,)

    s.planner = planner
    s.config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100)
    plan = s.schedule()
    assert len(plan.items) == 2
    assert asked == [decoding]


@pytest.mark.parametrize(
    ("free_rows", "expected"), [(1, [1]), (3, [3]), (4, [3, 1]), (7, [3, 4]), (8, [3, 4, 1]), (99, [3, 4, 5])]
)
def test_turns_share_the_rows_that_are_left_first_come_first_served(free_rows: int, expected: list[int]) -> None:
    s = scheduler()
    seq = running(s, 3)
    planned(s, chain(1, 3), chain(2, 4), chain(3, 5))
    s.config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=free_rows + 1)
    assert [turn.budget for turn in turns_of(s, seq)] == expected


def test_the_turns_of_the_first_leave_the_rest_to_the_second() -> None:
    s = scheduler(seqs=2)
    one, other = running(s, 3), running(s, 3)
    planned(s, chain(1, 3), chain(2, 4))
    s.config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=2 + 7 + 5)
    found = {item.seq.seq_id: [turn.budget for turn in item.turns] for item in s.schedule().items}
    assert found == {one.seq_id: [3, 4], other.seq_id: [3, 2]}


@pytest.mark.parametrize(
    ("max_tokens", "budgets", "depths"),
    [(2, [], []), (3, [1], [1]), (5, [3], [3]), (6, [3, 1], [3, 1]), (9, [3, 4], [3, 4]), (10, [3, 4, 1], [3, 4, 1])],
)
def test_turns_together_leave_room_for_the_token_behind_them(
    max_tokens: int, budgets: list[int], depths: list[int]
) -> None:
    s = scheduler()
    seq = running(s, 3, max_tokens=max_tokens)
    planned(s, chain(1, 3), chain(2, 4), chain(3, 5))
    turns = turns_of(s, seq)
    assert [turn.budget for turn in turns] == budgets
    assert [turn.max_depth for turn in turns] == depths


@pytest.mark.parametrize(("max_len", "budgets"), [(5, []), (6, [1]), (9, [3, 1]), (13, [3, 4, 1]), (100, [3, 4, 5])])
def test_turns_together_leave_room_in_the_context(max_len: int, budgets: list[int]) -> None:
    s = scheduler()
    seq = running(s, 3, max_model_len=max_len)
    planned(s, chain(1, 3), chain(2, 4), chain(3, 5))
    assert [turn.budget for turn in turns_of(s, seq)] == budgets


def test_a_tree_takes_its_rows_from_the_budget_and_its_levels_from_the_depth() -> None:
    s = scheduler()
    seq = running(s, 3, max_tokens=6)
    planned(s, shaped(1, 3, 2), chain(2, 5))
    first, second = turns_of(s, seq)
    assert (first.budget, first.max_depth) == (9, 2)
    assert (second.budget, second.max_depth) == (2, 2)


@pytest.mark.parametrize(("blocks", "expected"), [(1, []), (2, [3, 1]), (3, [3, 4, 1]), (4, [3, 4, 5])])
def test_turns_shrink_to_the_memory_that_is_free(blocks: int, expected: list[int]) -> None:
    s = scheduler(blocks=blocks, block_size=4, caching=False)
    seq = running(s, 3)
    planned(s, chain(1, 3), chain(2, 4), chain(3, 5))
    assert [turn.budget for turn in turns_of(s, seq)] == expected
    s.blocks.check_integrity([seq.state.block_table])


def test_nobody_drafts_behind_one_that_does_not() -> None:
    s = scheduler()
    seq = running(s, 3)
    planned(s, chain(1, 3), PLAIN, chain(2, 4))
    assert [turn.method for turn in turns_of(s, seq)] == [Planted(tag=1)]


@pytest.mark.parametrize(("written", "expected"), [(3, 2), (4, 1), (5, 0), (6, 5)])
def test_no_draft_spans_two_sets_of_rotary_factors(written: int, expected: int) -> None:
    s = scheduler()
    seq = running(s, written - 1, long_rope_after=5)
    if written > 5:
        assert seq.state.enter_regime(written)
        assert [item.num_rows for item in s.schedule().items] == [written], "all of it is computed anew"
        seq.state.commit(0, range(written - 1))
    planned(s, chain(1, 3), chain(2, 2))
    assert sum(turn.budget for turn in turns_of(s, seq)) == expected


@pytest.mark.parametrize(
    ("rule", "seed", "coupled"),
    [
        ("auto", None, False),
        ("auto", 7, True),
        ("coupled", None, True),
        ("coupled", 7, True),
        ("block", None, False),
        ("walk", 7, False),
        ("token", None, False),
    ],
)
def test_seeded_requests_couple_unless_another_rule_is_asked_for(rule: Any, seed: int | None, coupled: bool) -> None:
    s = scheduler()
    running(s, 3, seed=seed)
    planned(s, chain(1, 3, rule=rule))
    (item,) = s.schedule().items
    assert (item.rule, item.coupled) == (rule, coupled)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_seed_is_stronger_than_a_ratio_test(rule: Any) -> None:
    """Its text does not depend on drafts, and under these rules it would."""
    s = scheduler()
    running(s, 3, seed=7)
    planned(s, chain(1, 3, rule=rule))
    (item,) = s.schedule().items
    assert (item.rule, item.coupled) == ("auto", True)


# -- all together ------------------------------------------------------------------------------------------------------

PLANS = (chain(1, 5), chain(2, 2, rule="walk"), shaped(3, 2, 2), shaped(4, 1, 3, 1), PLAIN)


def reach(item: ScheduledSequence) -> int:
    """Longest path that its turns may draft together."""
    return sum(min(len(turn.tree) or turn.budget, turn.budget, turn.max_depth) for turn in item.turns)


class Simulation:
    """Random traffic through the scheduler, with a model of what every slot of the pool holds."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.randint(1, 4)
        seqs = rng.randint(1, 5)
        self.max_len = rng.randint(6, 24)
        self.long_rope_after = rng.choice([None, rng.randint(1, self.max_len)])
        # A text must fit alone; the engine refuses longer ones.
        blocks = -(-self.max_len // self.size) + rng.randint(0, 6)
        self.s = scheduler(
            rows=seqs + rng.randint(0, 12),
            seqs=seqs,
            blocks=blocks,
            block_size=self.size,
            caching=rng.random() < 0.7,
        )
        if rng.random() < 0.5:
            self.s.planner = lambda seq: tuple(rng.choice(PLANS) for _ in range(rng.randint(0, 3)))
        self.slots: dict[int, tuple[object, ...]] = {}
        self.alive: list[Sequence] = []

    def arrive(self) -> None:
        rng = self.rng
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, self.max_len - 1))]
        request = make_request(
            self.s,
            prompt,
            speculation=rng.choice(PLANS),
            max_model_len=self.max_len,
            long_rope_after=self.long_rope_after,
            namespace=rng.choice([None, "tenant"]),
            max_tokens=rng.randint(1, 12),
            n=rng.randint(1, self.s.config.max_num_seqs),
        )
        self.alive += request.sequences
        self.s.add(request.sequences[0])

    def slot(self, seq: Sequence, position: int) -> int:
        return seq.state.block_table[position // self.size] * self.size + position % self.size

    def content(self, seq: Sequence, tokens: list[int]) -> tuple[object, ...]:
        return (seq.request.options.namespace, seq.state.long_rope, *tokens)

    def step(self) -> int:
        s = self.s
        for parent in list(s.running):
            if not parent.forked and parent.num_missing == 1:
                fork(s, parent.request.sequences)
        plan = s.schedule()
        self.check(plan)
        held = {d * self.size + i: self.slots.get(c * self.size + i) for c, d in copies(plan) for i in range(self.size)}
        self.slots.update({slot: content for slot, content in held.items() if content is not None})
        make_copies(plan)
        for item in plan.items:
            self.compute(item)
        for seq in [seq for seq in self.alive if seq.status is Status.FINISHED]:
            s.remove(seq)
            self.alive.remove(seq)
        s.blocks.check_integrity([seq.state.block_table for seq in self.alive])
        return len(plan.items)

    def check(self, plan: Schedule) -> None:
        s = self.s
        assert sum(i.num_rows + drafted(i) for i in plan.items) <= s.config.max_num_batched_tokens
        assert sum(1 if seq.forked else seq.request.params.n for seq in s.running) <= s.config.max_num_seqs
        planned = [item.seq for item in plan.items]
        assert len({seq.seq_id for seq in planned}) == len(planned)
        assert all(seq.status is Status.RUNNING and seq in s.running for seq in planned)
        assert all(item.num_rows > 0 for item in plan.items)
        assert all(item.turns == () for item in plan.items if not item.completes)
        assert all(turn.budget > 0 and turn.max_depth > 0 for item in plan.items for turn in item.turns)
        assert all(turn.tree or turn.budget <= turn.max_depth for item in plan.items for turn in item.turns)
        destinations = [destination for _, destination in copies(plan)]
        assert len(set(destinations)) == len(destinations), "two copies share a destination"
        # A source may be the destination of another copy: the block of a twin that was preempted in this very step. All
        # sources are read first (see KVPool.move), as `step` does here; `compute` then finds every past where it was.
        for item in plan.items:
            seq, end = item.seq, len(item.seq.token_ids) + drafted(item) if item.completes else 0
            end = max(end, seq.state.num_computed + item.num_rows)
            assert s.blocks.shared_from(seq.state.block_table, seq.state.num_computed, end) == []
            assert seq.state.capacity == len(seq.state.block_table) * self.size >= end
            if item.completes:
                assert len(seq.token_ids) + reach(item) + 1 <= self.max_len
                assert seq.num_output_tokens + reach(item) + 1 <= seq.request.params.max_tokens
            if item.turns and not seq.state.long_rope and self.long_rope_after is not None:
                assert len(seq.token_ids) + reach(item) <= self.long_rope_after
        assert set(destinations) <= {block for seq in planned for block in seq.state.block_table}

    def compute(self, item: ScheduledSequence) -> None:
        seq, start, completes, rng = item.seq, item.seq.state.num_computed, item.completes, self.rng
        for position in range(start):
            known = self.content(seq, seq.token_ids[: position + 1])
            assert self.slots[self.slot(seq, position)] == known, "its past was lost"
        stop = start + item.num_rows
        for position in range(start, stop):
            self.slots[self.slot(seq, position)] = self.content(seq, seq.token_ids[: position + 1])
        if completes:
            for row in range(drafted(item)):
                self.slots[self.slot(seq, stop + row)] = ("draft", seq.seq_id, row)
            stop += self.write(item, stop, [rng.randint(0, 1) for _ in range(rng.randint(0, reach(item)))])
        seq.state.commit(start, range(stop - start))
        seq.state.publish(seq.token_ids)
        if seq.status is Status.RUNNING:
            seq.state.enter_regime(len(seq.token_ids))

    def write(self, item: ScheduledSequence, start: int, accepted: list[int]) -> int:
        """The accepted path, moved together from `start` on, and one more token; returns the length of the path."""
        seq, stop = item.seq, start
        for token in accepted:
            if seq.status is Status.RUNNING:
                seq.append(token, TokenOrigin.ACCEPTED)
                self.slots[self.slot(seq, stop)] = self.content(seq, list(seq.token_ids))
                stop += 1
        if seq.status is Status.RUNNING:
            seq.append(self.rng.randint(0, 1), TokenOrigin.BONUS)
        return stop - start


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_random_traffic_is_served_to_its_end_and_no_text_reads_anothers_memory(seed: int) -> None:
    world = Simulation(seed)
    for _ in range(25):
        if world.rng.random() < 0.35:
            world.arrive()
        world.step()
        if world.alive and world.rng.random() < 0.03:  # a caller goes away
            seq = world.rng.choice(world.alive)
            for sample in seq.request.sequences:
                if sample in world.alive:
                    sample.finish("cancelled")
                    world.s.remove(sample)
                    world.alive.remove(sample)
    idle = 0
    for _ in range(2000):
        if not world.s.has_work:
            break
        idle = 0 if world.step() else idle + 1
        assert idle < 3, "work is waiting and nobody moves"
    assert not world.alive
    assert world.s.blocks.num_free == world.s.blocks.num_blocks


# -- forced tokens -----------------------------------------------------------------------------------------------------


def forcing(s: MemoryScheduler, count: int, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Sequence:
    """A sequence that decodes, and whose structure forces so many tokens."""
    seq = make_sequence(s, 3, **how)
    monkeypatch.setattr(seq.view.processing, "forced", lambda most: tuple(range(900, 900 + max(0, min(count, most)))))
    return seq


def test_forced_tokens_have_their_rows_before_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(rows=12)
    add(s, make_sequence(s, 3, speculation=DRAFTING), forcing(s, 4, monkeypatch), forcing(s, 3, monkeypatch))
    step(s)
    plan = s.schedule()
    assert [len(item.forced) for item in plan.items] == [0, 4, 3]
    assert [drafted(item) for item in plan.items] == [2, 0, 0], "12 rows, less one of each text, less 7 that are forced"


def test_drafts_go_on_behind_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(block_size=4)
    seq = forcing(s, 6, monkeypatch, speculation=DRAFTING)
    add(s, seq)
    step(s)
    (item,) = s.schedule().items
    assert (len(item.forced), drafted(item)) == (6, 5)
    assert 4 * len(seq.state.block_table) >= len(seq.token_ids) + 11, "all of them have memory"


@pytest.mark.parametrize(("max_tokens", "forced", "turns"), [(1, 0, 0), (4, 2, 0), (7, 4, 1), (20, 4, 5)])
def test_no_forced_token_is_drafted_that_could_not_be_used(
    max_tokens: int, forced: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = scheduler()
    add(s, forcing(s, 4, monkeypatch, speculation=DRAFTING, max_tokens=max_tokens))
    step(s)
    for item in s.schedule().items:
        assert (len(item.forced), drafted(item)) == (forced, turns)


def test_forced_tokens_preempt_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(blocks=4, block_size=4)
    add(s, forcing(s, 9, monkeypatch), make_sequence(s, 3))
    step(s)
    plan = s.schedule()
    assert len(plan.items) == 2
    assert len(plan.items[0].forced) == 8, "two blocks more; the other text keeps its own"
