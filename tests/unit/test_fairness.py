"""One tenant's flood does not starve another: the order of admission, a bound on waiting, shares, and priorities."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.scheduler import Scheduler, WaitingLine
from outrider.engine.sequence import Sequence, Status
from outrider.engine.tenants import Tenants
from tests.unit.builders import make_sequence as build
from tests.unit.test_scheduler import compute, scheduler


class Traffic:
    """A scheduler, and who was admitted in which order."""

    def __init__(self, **limits: Any) -> None:
        self.s: Scheduler = scheduler(**limits)
        self.order: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.seats: Counter[str | None] = Counter()  # in the latest step

    def ask(self, tenant: str | None, prompt: int = 4, count: int = 1, **how: Any) -> list[Sequence]:
        found = [build(prompt, blocks=self.s.blocks, namespace=tenant, **how) for _ in range(count)]
        for seq in found:
            self.s.add(seq)
        return found

    def step(self) -> None:
        before = list(self.s.running)
        plan = self.s.schedule()
        self.seats = Counter(seq.request.options.namespace for seq in self.s.running)
        self.order += [seq for seq in self.s.running if seq not in before and not seq.stats.num_preemptions]
        for item in plan.items:
            length = item.seq.num_output_tokens
            compute(item)
            self.s.tenants.charge(item.seq, item.seq.num_output_tokens - length)
        for seq in [seq for seq in self.s.running if seq.status is Status.FINISHED]:
            self.s.remove(seq)  # and what it had computed is forgotten
            self.ended.append(seq)

    def steps_until(self, seq: Sequence) -> int:
        """Steps until its first token."""
        for number in range(1, 1000):
            self.step()
            if seq.num_output_tokens:
                return number
        raise AssertionError("it is starved")

    def tenants(self) -> str:
        return "".join(str(seq.request.options.namespace) for seq in self.order)


def test_with_one_seat_tenants_take_turns() -> None:
    traffic = Traffic(seqs=1, caching=False)
    traffic.ask("a", count=6, max_tokens=2)
    traffic.step()
    traffic.ask("b", count=2, max_tokens=2)
    while traffic.s.has_work:
        traffic.step()
    assert traffic.tenants() == "ababaaaa"


def test_one_tenant_is_served_as_it_comes() -> None:
    traffic = Traffic(seqs=1, caching=False)
    asked = [traffic.ask(None, prompt, max_tokens=prompt)[0] for prompt in (9, 1, 5)]
    while traffic.s.has_work:
        traffic.step()
    assert traffic.order == asked


@pytest.mark.parametrize("prompt", [4, 90])
def test_a_flood_does_not_keep_a_quiet_tenant_waiting(prompt: int) -> None:
    """All seats are taken by texts that are far from their end, and prompts take all rows of a pass."""
    traffic = Traffic(seqs=4, rows=20, blocks=400, caching=False)
    traffic.ask("flood", prompt, count=50, max_tokens=500)
    for _ in range(10):
        traffic.step()
    for _ in range(5):
        (quiet,) = traffic.ask("quiet", 6, max_tokens=5)
        assert traffic.steps_until(quiet) <= 2
        while quiet.status is not Status.FINISHED:
            traffic.step()


def test_the_flood_goes_on_from_where_it_was() -> None:
    traffic = Traffic(seqs=2, caching=False)
    first, second = traffic.ask("flood", count=2, max_tokens=30)
    traffic.ask("flood", count=3, max_tokens=30)
    for _ in range(5):
        traffic.step()
    written = len(second.token_ids)
    (quiet,) = traffic.ask("quiet", max_tokens=3)
    assert traffic.steps_until(quiet) <= 2
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
    while quiet.status is not Status.FINISHED:
        traffic.step()
    traffic.step()
    assert second.status is Status.RUNNING, "it goes before those that have not run yet"
    assert len(second.token_ids) > written
    assert second.stats.num_preemptions == 1


def test_seats_are_shared_and_no_two_tenants_take_them_from_each_other() -> None:
    traffic = Traffic(seqs=4, blocks=400, caching=False)
    for tenant in "abc":
        traffic.ask(tenant, count=10, max_tokens=40)
        for _ in range(6):
            traffic.step()
    for _ in range(30):
        traffic.step()
        assert sum(traffic.seats.values()) == 4
        assert max(traffic.seats.values()) <= 2
    assert sum(seq.stats.num_preemptions for seq in traffic.order) <= 4


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tokens_are_shared_by_weight(weight: float) -> None:
    traffic = Traffic(seqs=4, blocks=500, caching=False)
    traffic.s.tenants.weights["a"] = weight
    for _ in range(200):
        traffic.ask("a", max_tokens=5)
        traffic.ask("b", max_tokens=23)
    for _ in range(150):
        traffic.step()
    assert traffic.s.waiting.tenants == {"a", "b"}, "both want more than they get"
    computed = {
        tenant: sum(seq.state.num_computed for seq in traffic.order if seq.request.options.namespace == tenant)
        for tenant in "ab"
    }
    ended = {
        tenant: sum(len(seq.token_ids) for seq in traffic.ended if seq.request.options.namespace == tenant)
        for tenant in "ab"
    }
    had = {tenant: computed[tenant] + ended[tenant] for tenant in "ab"}
    assert abs(had["a"] / weight - had["b"]) <= 4 * (23 + 4), "what all seats can bring until their texts end"


def test_nobody_saves_up_turns_while_he_is_away() -> None:
    tenants, line = Tenants(), []
    first, second = (build(1, namespace=name) for name in "ab")
    for seq in (first, second):
        tenants.welcome(seq, {other.request.options.namespace for other in line})
        line.append(seq)
    tenants.charge(first, 100)
    tenants.charge(second, 30)
    late = build(1, namespace="late")
    tenants.welcome(late, {"a", "b"})
    assert tenants.had(late) == 30
    tenants.charge(late, 500)
    tenants.welcome(build(1, namespace="late"), {"a", "b"})
    assert tenants.had(late) == 530, "nor does he lose his debts by a moment's absence"
    tenants.welcome(build(1, namespace="late"), set())
    assert tenants.had(late) == 0, "where nobody waits for anybody all begin anew"


def test_a_tenant_is_forgotten_once_others_have_had_as_much() -> None:
    tenants = Tenants()
    for number in range(1000):
        passing = build(1, namespace=f"tenant {number}")
        tenants.welcome(passing, {"always"})
        tenants.charge(passing, 1)
        tenants.charge(build(1, namespace="always"), 5)
    assert len(tenants._turns._had) <= 3


def test_lower_numbers_go_first_within_a_tenant_and_not_before_others() -> None:
    line = WaitingLine(Tenants())
    numbers = [("a", 5), ("a", 0), ("a", -3), ("b", 9), ("a", 0)]
    seqs = [build(1, namespace=name, priority=priority) for name, priority in numbers]
    for seq in seqs:
        line.add(seq)
    assert list(line)[-1:] == [seqs[3]] or list(line)[:1] == [seqs[3]]
    assert [seq for seq in line if seq.request.options.namespace == "a"] == [seqs[2], seqs[1], seqs[4], seqs[0]]
    assert len(line) == 5
    line._tenants.charge(seqs[0], 1)
    assert line.first is seqs[3], "his own numbers bring a tenant no turn"


def test_short_memory_is_taken_from_whoever_has_most() -> None:
    traffic = Traffic(seqs=4, blocks=8, caching=False)
    flood = traffic.ask("flood", 3, count=3, max_tokens=20)
    traffic.step()
    (quiet,) = traffic.ask("quiet", 3, max_tokens=12)
    while quiet.status is not Status.FINISHED:
        traffic.step()
    assert quiet.stats.num_preemptions == 0
    assert sum(seq.stats.num_preemptions for seq in flood) > 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_whatever_others_ask_for_the_first_token_comes_soon(data: st.DataObject) -> None:
    seats = data.draw(st.integers(2, 6))
    traffic = Traffic(seqs=seats, rows=data.draw(st.integers(seats + 4, 30)), blocks=600, caching=False)
    for tenant in data.draw(st.lists(st.sampled_from("xyz"), min_size=1, max_size=40)):
        size, length = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
        traffic.ask(tenant, size, max_tokens=length)
        if data.draw(st.booleans()):
            traffic.step()
    present = len(traffic.s.waiting.tenants | {seq.request.options.namespace for seq in traffic.s.running})
    (quiet,) = traffic.ask("quiet", 3, max_tokens=3)
    if present < seats:
        assert traffic.steps_until(quiet) <= 2 + present
    while traffic.s.has_work:
        traffic.step()
