"""Who runs with how many rows in which blocks: budgets, order, admission, preemption, and copies that never collide."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.blocks import BlockManager
from outrider.config import SchedulerConfig
from outrider.engine.scheduler import Schedule, ScheduledSequence, Scheduler
from outrider.engine.sequence import Sequence, Status
from outrider.params import TokenOrigin
from outrider.propose.base import Proposer, Requirements
from tests.unit.builders import DRAFTING, make_request, make_sequence

PROPOSER = Proposer()


def scheduler(
    *, rows: int = 100, seqs: int = 8, blocks: int = 50, block_size: int = 4, caching: bool = True, max_len: int = 1000
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=rows)
    return Scheduler(config, BlockManager(blocks, block_size, prefix_caching=caching), max_len)


def compute(item: ScheduledSequence, accepted: int = 0) -> None:
    """What a pass does to a scheduled sequence: its rows are computed, and tokens come where the text is complete."""
    seq, completes = item.seq, item.completes
    seq.num_computed += item.num_rows
    if completes:
        for _ in range(accepted):
            if seq.status is Status.RUNNING:
                seq.append(500 + len(seq.token_ids), TokenOrigin.ACCEPTED)
                seq.num_computed += 1
        if seq.status is Status.RUNNING:
            seq.append(500 + len(seq.token_ids), TokenOrigin.PLAIN)


def step(s: Scheduler) -> Schedule:
    plan = s.schedule()
    for item in plan.items:
        compute(item)
    return plan


def rows(plan: Schedule) -> dict[int, int]:
    return {item.seq.seq_id: item.num_rows for item in plan.items}


def add(s: Scheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        s.add(seq)


def running(s: Scheduler, prompt: int | list[int], **how: Any) -> Sequence:
    """A sequence that has computed its prompt and written one token."""
    seq = make_sequence(prompt, **how)
    s.add(seq)
    while seq.num_output_tokens == 0:
        step(s)
    return seq


# -- rows --------------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_an_empty_plan() -> None:
    s = scheduler()
    assert not s.has_work
    assert s.schedule() == Schedule()


def test_a_prompt_that_fits_is_computed_at_once() -> None:
    s = scheduler()
    seq = make_sequence(10)
    add(s, seq)
    (item,) = s.schedule().items
    assert (item.seq, item.num_rows, item.completes, item.draft_budget) == (seq, 10, True, 0)
    assert len(seq.block_table) == 3


def test_a_long_prompt_comes_in_chunks_and_only_the_last_completes() -> None:
    s = scheduler(rows=8)
    seq = make_sequence(20)
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
    long = make_sequence(40)
    add(s, long)
    assert rows(step(s)) == {decoding.seq_id: 1, long.seq_id: 7}
    s.running.reverse()  # the one that prefills is now the older
    plan = s.schedule()
    assert [item.seq for item in plan.items] == [decoding, long]
    assert [item.num_rows for item in plan.items] == [1, 7]


def test_several_prompts_share_a_step_in_order_of_arrival() -> None:
    s = scheduler(rows=10)
    first, second, third = (make_sequence(n) for n in (4, 5, 6))
    add(s, first, second, third)
    assert rows(s.schedule()) == {first.seq_id: 4, second.seq_id: 5, third.seq_id: 1}


def test_a_step_without_rows_left_admits_nobody() -> None:
    s = scheduler(rows=4, seqs=4)
    first, second = make_sequence(4), make_sequence(4)
    add(s, first, second)
    assert rows(s.schedule()) == {first.seq_id: 4}
    assert list(s.waiting) == [second]


# -- admission ---------------------------------------------------------------------------------------------------------


def test_no_more_sequences_run_than_allowed() -> None:
    s = scheduler(seqs=2)
    seqs = [make_sequence(3) for _ in range(4)]
    add(s, *seqs)
    assert len(step(s).items) == 2
    s.remove(seqs[0])
    assert set(rows(s.schedule())) == {seqs[1].seq_id, seqs[2].seq_id}


def test_a_request_takes_the_seats_of_all_its_samples() -> None:
    s = scheduler(seqs=4)
    three, two, one = make_request(3, n=3), make_request(3, n=2), make_request(3)
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
    first, big, small = make_sequence(8), make_sequence(12), make_sequence(2)
    add(s, first, big, small)
    assert set(rows(step(s))) == {first.seq_id}
    assert list(s.waiting) == [big, small]
    assert big.block_table == []
    assert big.num_computed == 0
    s.remove(first)
    assert rows(s.schedule()) == {big.seq_id: 12, small.seq_id: 2}


def test_a_known_prefix_is_shared_and_not_computed_again() -> None:
    s = scheduler()
    first = running(s, list(range(10)))
    s.blocks.publish(first.token_ids[: first.num_computed], first.block_table, 0, first.cache_space)
    second = make_sequence([*range(8), 77, 78])
    add(s, second)
    assert rows(s.schedule())[second.seq_id] == 2
    assert second.block_table[:2] == first.block_table[:2]
    assert (second.num_computed, second.num_published, second.stats.num_cached_tokens) == (8, 2, 8)


@pytest.mark.parametrize("requires", [Requirements(aux_layers=(1,)), Requirements(target_top_k=3)])
def test_a_proposer_that_wants_features_gets_no_cached_prefix(requires: Requirements) -> None:
    class Wants(Proposer):
        pass

    Wants.requires = requires
    s = scheduler()
    first = running(s, list(range(10)))
    s.blocks.publish(first.token_ids[: first.num_computed], first.block_table, 0, first.cache_space)
    second = make_sequence(list(range(10)), proposer=Wants())
    add(s, second)
    assert rows(s.schedule())[second.seq_id] == 10
    assert second.stats.num_cached_tokens == 0


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_request_of_several_samples_stops_one_token_short_of_its_prompt() -> None:
    s = scheduler()
    request = make_request(9, n=2)
    parent, _ = request.sequences
    add(s, parent)
    (item,) = s.schedule().items
    assert (item.num_rows, item.completes) == (8, False)
    compute(item)
    assert s.schedule().items == [], "it waits for its fork"


def test_a_prompt_of_one_token_leaves_nothing_to_compute_before_the_fork() -> None:
    s = scheduler()
    request = make_request(1, n=2)
    add(s, request.sequences[0])
    assert s.schedule().items == []
    assert s.running == request.sequences[:1]
    fork(s, request.sequences)
    assert [item.num_rows for item in s.schedule().items] == [1, 1]


def fork(s: Scheduler, samples: list[Sequence]) -> None:
    samples[0].forked = True
    for child in samples[1:]:
        s.start_fork(samples[0], child)


def test_samples_share_the_prompt_and_copy_only_where_they_write() -> None:
    s = scheduler()
    samples = make_request(11, n=3).sequences
    add(s, samples[0])
    step(s)
    fork(s, samples)
    assert [seq.block_table for seq in samples] == [samples[0].block_table] * 3
    shared = list(samples[0].block_table)
    plan = s.schedule()
    assert [item.num_rows for item in plan.items] == [1, 1, 1]
    assert [source for source, _ in plan.copies] == [shared[2]] * 2, "the last of them keeps the original"
    assert len({destination for _, destination in plan.copies}) == 2
    assert [seq.block_table[:2] for seq in samples] == [shared[:2]] * 3
    assert len({seq.block_table[2] for seq in samples}) == 3
    s.blocks.check_integrity([seq.block_table for seq in samples])


def test_samples_that_write_to_a_new_block_copy_nothing() -> None:
    s = scheduler()
    samples = make_request(9, n=2).sequences
    add(s, samples[0])
    step(s)
    fork(s, samples)
    plan = s.schedule()
    assert plan.copies == []
    assert samples[0].block_table[2] != samples[1].block_table[2]


# -- preemption --------------------------------------------------------------------------------------------------------


def test_the_newest_is_preempted_and_recomputed_later() -> None:
    s = scheduler(blocks=4, caching=False)
    old, middle, new = (running(s, 3) for _ in range(3))
    while not any(seq.status is Status.WAITING for seq in (old, middle, new)):
        before = [len(seq.token_ids) for seq in (old, middle, new)]
        plan = step(s)
    assert [seq.status for seq in (old, middle, new)] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    assert new not in [item.seq for item in plan.items]
    assert (new.num_computed, new.num_published, new.block_table, new.stats.num_preemptions) == (0, 0, [], 1)
    assert len(new.token_ids) == before[2], "its tokens stay"
    assert list(s.waiting) == [new]
    s.remove(old)
    written = len(new.token_ids)
    assert rows(step(s))[new.seq_id] == written, "prompt and output are computed again"


def test_a_preempted_sequence_is_first_in_line() -> None:
    s = scheduler(blocks=3, caching=False, seqs=2)
    old, new = running(s, 3), running(s, 3)
    waiting = make_sequence(1)
    add(s, waiting)
    while new.status is Status.RUNNING:
        step(s)
    assert list(s.waiting) == [new, waiting]
    assert old.status is Status.RUNNING


def test_a_sequence_may_have_to_preempt_itself() -> None:
    s = scheduler(blocks=2, caching=False)
    old, new = running(s, 3), running(s, 3)
    new.append(7, TokenOrigin.PLAIN)  # the newest is the first to need another block
    new.num_computed += 1
    plan = s.schedule()
    assert [item.seq for item in plan.items] == [old]
    assert new.status is Status.WAITING


def test_an_already_planned_victim_leaves_the_plan_and_its_copies() -> None:
    s = scheduler(blocks=5, block_size=4, rows=16, seqs=8, caching=False)
    old = make_sequence(4)
    add(s, old)
    samples = make_request(3, n=2).sequences
    add(s, samples[0])
    step(s)
    fork(s, samples)
    for token in range(10):  # a text that was grown elsewhere and must be computed: it prefills, so the samples go first
        old.append(token, TokenOrigin.PLAIN)
    plan = s.schedule()
    assert [item.seq for item in plan.items][-1] is old
    assert samples[1].status is Status.WAITING
    held = set(old.block_table) | set(samples[0].block_table)
    assert all(destination in held for _, destination in plan.copies)
    assert not {destination for _, destination in plan.copies} & set(old.block_table)
    s.blocks.check_integrity([seq.block_table for seq in (old, *samples)])


def test_removing_frees_memory_whether_running_or_waiting() -> None:
    s = scheduler(seqs=1)
    first, second = make_sequence(8), make_sequence(8)
    add(s, first, second)
    step(s)
    s.remove(second)
    s.remove(first)
    assert not s.has_work
    assert s.blocks.num_free == s.blocks.num_blocks
    s.remove(first)  # once more is no error


# -- draft budgets -----------------------------------------------------------------------------------------------------


def budget_of(s: Scheduler, seq: Sequence) -> int:
    (item,) = [item for item in s.schedule().items if item.seq is seq]
    assert len(seq.block_table) * s.blocks.block_size >= len(seq.token_ids) + item.draft_budget
    return item.draft_budget


def test_a_decoding_sequence_may_draft_what_its_settings_say() -> None:
    s = scheduler()
    assert budget_of(s, running(s, 3, proposer=PROPOSER)) == DRAFTING.num_draft_tokens


def test_without_a_proposer_nothing_is_drafted() -> None:
    s = scheduler()
    assert budget_of(s, running(s, 3, speculation=DRAFTING)) == 0


def test_a_prefill_drafts_nothing() -> None:
    s = scheduler(rows=8)
    seq = make_sequence(12, proposer=PROPOSER)
    add(s, seq)
    for _ in range(2):
        plan = step(s)
        assert [item.draft_budget for item in plan.items] == [0]


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, 0), (3, 1), (6, 4), (7, 5), (50, 5)])
def test_drafts_leave_room_for_the_token_behind_them_in_max_tokens(max_tokens: int, expected: int) -> None:
    s = scheduler()
    assert budget_of(s, running(s, 3, proposer=PROPOSER, max_tokens=max_tokens)) == expected


@pytest.mark.parametrize(("max_len", "expected"), [(5, 0), (6, 1), (9, 4), (10, 5), (100, 5)])
def test_drafts_leave_room_for_the_token_behind_them_in_the_context(max_len: int, expected: int) -> None:
    s = scheduler(max_len=max_len)
    assert budget_of(s, running(s, 3, proposer=PROPOSER, max_model_len=max_len)) == expected


@pytest.mark.parametrize(("free_rows", "expected"), [(1, [0, 0]), (3, [2, 0]), (6, [5, 0]), (8, [5, 2]), (99, [5, 5])])
def test_drafts_take_what_rows_are_left_in_order(free_rows: int, expected: list[int]) -> None:
    s = scheduler(rows=100, seqs=2)
    seqs = [running(s, 3, proposer=PROPOSER) for _ in range(2)]
    s.config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=free_rows + 1)
    assert [item.draft_budget for item in s.schedule().items] == expected
    assert all(seq.num_missing == 1 for seq in seqs)


def test_drafts_do_not_take_rows_from_a_prefill() -> None:
    s = scheduler(rows=8, seqs=4)
    seq = running(s, 3, proposer=PROPOSER)
    add(s, make_sequence(7))
    assert budget_of(s, seq) == 0


@pytest.mark.parametrize(("blocks", "expected"), [(1, 0), (2, 4), (3, 5)])
def test_drafts_shrink_to_the_memory_that_is_free(blocks: int, expected: int) -> None:
    s = scheduler(blocks=blocks, block_size=4, caching=False)
    assert budget_of(s, running(s, 3, proposer=PROPOSER)) == expected


def test_drafts_preempt_nobody() -> None:
    s = scheduler(blocks=3, block_size=4, caching=False)
    one, other = running(s, 3, proposer=PROPOSER), running(s, 3, proposer=PROPOSER)
    plan = s.schedule()
    assert {item.seq for item in plan.items} == {one, other}
    assert [item.draft_budget for item in plan.items] == [3, 0], "a third block is all there is"
    assert one.stats.num_preemptions == other.stats.num_preemptions == 0


# -- all together ------------------------------------------------------------------------------------------------------


class Simulation:
    """Random traffic through the scheduler, with a model of what every slot of the pool holds."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.randint(1, 4)
        seqs = rng.randint(1, 5)
        self.max_len = rng.randint(6, 24)
        # A text must fit alone; the engine refuses longer ones.
        blocks = -(-self.max_len // self.size) + rng.randint(0, 6)
        self.s = scheduler(
            rows=seqs + rng.randint(0, 12),
            seqs=seqs,
            blocks=blocks,
            block_size=self.size,
            caching=rng.random() < 0.7,
            max_len=self.max_len,
        )
        self.slots: dict[int, tuple[int, ...]] = {}
        self.alive: list[Sequence] = []

    def arrive(self) -> None:
        rng = self.rng
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, self.max_len - 1))]
        request = make_request(
            prompt,
            proposer=PROPOSER if rng.random() < 0.6 else None,
            max_model_len=self.max_len,
            max_tokens=rng.randint(1, 12),
            n=rng.randint(1, self.s.config.max_num_seqs),
        )
        self.alive += request.sequences
        self.s.add(request.sequences[0])

    def slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.size] * self.size + position % self.size

    def step(self) -> int:
        s = self.s
        for parent in list(s.running):
            if not parent.forked and parent.num_missing == 1:
                fork(s, parent.request.sequences)
        plan = s.schedule()
        self.check(plan)
        held = {d * self.size + i: self.slots.get(c * self.size + i) for c, d in plan.copies for i in range(self.size)}
        self.slots.update({slot: content for slot, content in held.items() if content is not None})
        for item in plan.items:
            self.compute(item)
        for seq in [seq for seq in self.alive if seq.status is Status.FINISHED]:
            s.remove(seq)
            self.alive.remove(seq)
        s.blocks.check_integrity([seq.block_table for seq in self.alive])
        return len(plan.items)

    def check(self, plan: Schedule) -> None:
        s = self.s
        assert sum(i.num_rows + i.draft_budget for i in plan.items) <= s.config.max_num_batched_tokens
        assert sum(1 if seq.forked else seq.request.params.n for seq in s.running) <= s.config.max_num_seqs
        planned = [item.seq for item in plan.items]
        assert len({seq.seq_id for seq in planned}) == len(planned)
        assert all(seq.status is Status.RUNNING and seq in s.running for seq in planned)
        assert all(item.num_rows > 0 for item in plan.items)
        assert all(item.draft_budget == 0 for item in plan.items if not item.completes)
        destinations = [destination for _, destination in plan.copies]
        assert len(set(destinations)) == len(destinations), "two copies share a destination"
        assert not set(destinations) & {source for source, _ in plan.copies}
        for item in plan.items:
            seq, end = item.seq, len(item.seq.token_ids) + item.draft_budget if item.completes else 0
            end = max(end, seq.num_computed + item.num_rows)
            assert s.blocks.shared_from(seq.block_table, seq.num_computed, end) == []
            assert len(seq.block_table) * self.size >= end
            if item.completes:
                assert len(seq.token_ids) + item.draft_budget + 1 <= self.max_len
                assert seq.num_output_tokens + item.draft_budget + 1 <= seq.request.params.max_tokens
        assert set(destinations) <= {block for seq in planned for block in seq.block_table}

    def compute(self, item: ScheduledSequence) -> None:
        seq, start, rng = item.seq, item.seq.num_computed, self.rng
        for position in range(start):
            assert self.slots[self.slot(seq, position)] == tuple(seq.token_ids[: position + 1]), "its past was lost"
        stop = start + item.num_rows
        for position in range(start, stop):
            self.slots[self.slot(seq, position)] = tuple(seq.token_ids[: position + 1])
        drafted = [rng.randint(0, 1) for _ in range(item.draft_budget)]
        if item.completes:
            for offset in range(len(drafted)):
                self.slots[self.slot(seq, stop + offset)] = (*seq.token_ids, *drafted[: offset + 1])
            accepted = rng.randint(0, len(drafted))
            seq.num_computed = stop
            for token in drafted[:accepted]:
                if seq.status is Status.RUNNING:
                    seq.append(token, TokenOrigin.ACCEPTED)
                    seq.num_computed += 1
            if seq.status is Status.RUNNING:
                seq.append(rng.randint(0, 1), TokenOrigin.BONUS)
        else:
            seq.num_computed = stop
        seq.num_published = self.s.blocks.publish(
            seq.token_ids[: seq.num_computed], seq.block_table, seq.num_published, seq.cache_space
        )


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
