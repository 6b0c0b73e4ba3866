"""Token recycling: what it learns from rows, what it drafts from that, for whom, and what it forgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider import SpeculationConfig
from outrider.draft import Draft, Law
from outrider.engine.sequence import Sequence as EngineSequence
from outrider.errors import InvalidParameterError
from outrider.propose.base import DraftNoise, ObservedRows, ProposeRequest, RowStatus, TopK
from outrider.propose.host import largest
from outrider.propose.recycling import SharedSuccessors, Successors, TokenRecyclingProposer
from outrider.propose.tree import StaticTree
from outrider.verify.noise import KeyedNoise
from tests.unit.builders import make_sequence

NOISE = DraftNoise(KeyedNoise())
MIB = 2**20
#: One row: its token, what it follows among the rows shown, what became of it, and the target's most likely tokens.
Row = tuple[int, int, RowStatus, list[int]]
TEXT, ACCEPTED, REJECTED = RowStatus.TEXT, RowStatus.ACCEPTED, RowStatus.REJECTED


def proposer(top_k: int = 2, longest: int = 1, max_bytes: int = MIB) -> TokenRecyclingProposer:
    return TokenRecyclingProposer(top_k, longest, max_bytes)


def shown(seq: EngineSequence, start: int, rows: Sequence[Row], logits: Sequence[float] = (3.0, 1.0)) -> ObservedRows:
    """Rows of a sequence from position `start` on; those with an empty list have no logits."""
    depths: list[int] = []
    for _, parent, _, _ in rows:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    known = [place for place, row in enumerate(rows) if row[3]]
    top = TopK(tuple(known), torch.tensor([rows[place][3] for place in known]), torch.tensor([list(logits)] * len(known)))
    tokens, parents, statuses = (tuple(row[part] for row in rows) for part in range(3))
    return ObservedRows(seq.view, tokens, tuple(start + d for d in depths), parents, statuses, {}, top)  # type: ignore[arg-type]


def learn(to: TokenRecyclingProposer, followers: dict[int, list[int]], namespace: str | None = None) -> None:
    """Show one row for each token, with what may follow it."""
    for token, after in followers.items():
        seq = make_sequence([token], namespace=namespace)
        to.observe([shown(seq, 0, [(token, -1, TEXT, after)])])


def draft(to: TokenRecyclingProposer, tokens: list[int], budget: int = 8, depth: int = 1 << 30, **more: Any) -> Draft:
    seq = make_sequence(tokens, namespace=more.pop("namespace", None))
    (found,) = to.propose([ProposeRequest(seq.view, budget, depth, **more)], NOISE)
    return found


def nodes(found: Draft) -> set[tuple[int, ...]]:
    return set(found.paths)


def test_successors_of_successors_are_drafted() -> None:
    it = proposer()
    learn(it, {5: [6, 7], 6: [8, 9], 8: [4, 3]})
    found = draft(it, [1, 5], 6)
    assert found.token_ids[0] == 6, "the likeliest comes first"
    assert {(6,), (7,), (6, 8), (6, 9), (6, 8, 4)} <= nodes(found)
    assert set(found.laws) == {Law.OPAQUE}


def test_an_unknown_token_is_followed_by_nothing() -> None:
    it = proposer()
    learn(it, {5: [6, 7]})
    assert len(draft(it, [1, 9])) == 0
    assert draft(it, [1, 5]).depth == 1


@pytest.mark.parametrize("budget", range(1, 8))
def test_budget_and_depth_are_kept_and_what_is_likely_goes_first(budget: int) -> None:
    it = proposer()
    learn(it, {token: [token + 1, token + 20] for token in range(5, 15)})
    found = draft(it, [5], budget)
    assert len(found) == budget
    assert nodes(found) == nodes(draft(it, [5], 7).first(budget)), "more rows add nodes, and change none"
    flat = draft(it, [5], budget, 1)
    assert flat.depth == 1
    assert len(flat) == min(budget, 2)
    assert len(draft(it, [5], budget, 0)) == 0


def test_behind_what_another_proposer_drafted_it_goes_on() -> None:
    it = proposer(longest=2)
    learn(it, {5: [6, 7], 6: [8, 9]})
    assert draft(it, [1, 5], path=(6,)).token_ids[0] == 8
    assert len(draft(it, [1, 5], path=(3,))) == 0


def test_a_shape_is_followed() -> None:
    it = proposer()
    learn(it, {5: [6, 7], 6: [8, 9], 7: [4, 3]})
    found = draft(it, [5], 6, builder=StaticTree.of_widths((2, 1)))
    assert found.token_ids == (6, 7, 8, 4)
    assert found.parents == (-1, -1, 0, 1)
    assert draft(it, [5], 3, builder=StaticTree.of_widths((2, 1))).token_ids == (6, 7, 8), "cut from its end"
    assert draft(it, [5], 6, 1, builder=StaticTree.of_widths((2, 1))).token_ids == (6, 7)


def test_rows_of_every_kind_teach_along_their_own_path() -> None:
    it = proposer(longest=2)
    seq = make_sequence([1, 2, 5, 6, 9])
    rows: list[Row] = [
        (2, -1, TEXT, []),  # of the prompt: it has no logits, and none are computed for it
        (5, 0, TEXT, [6, 7]),
        (6, 1, ACCEPTED, [9, 3]),
        (7, 1, REJECTED, [4, 3]),
        (8, 3, REJECTED, [2, 1]),
    ]
    it.observe([shown(seq, 1, rows)])
    table = it.shared.of(None)
    for context, after in {(5,): 6, (2, 5): 6, (5, 6): 9, (5, 7): 4, (7, 8): 2, (8,): 2}.items():
        found = table.find(context)
        assert found is not None
        assert found[0][0] == after
    assert table.find((2,)) is None
    assert table.find((6, 7)) is None, "these two never stood one behind the other"


def test_the_first_row_of_a_pass_knows_what_stands_before_it() -> None:
    it = proposer(longest=3)
    it.observe([shown(make_sequence([1, 2, 5, 6]), 2, [(5, -1, TEXT, [6, 7])])])
    assert it.shared.of(None).find((1, 2, 5)) is not None


def test_the_longest_known_context_decides_and_a_shorter_one_serves() -> None:
    it = proposer(longest=2)
    it.observe([shown(make_sequence([1, 5]), 1, [(5, -1, TEXT, [6, 7])])])
    it.observe([shown(make_sequence([2, 5]), 1, [(5, -1, TEXT, [8, 9])])])
    assert draft(it, [1, 5]).token_ids[0] == 6
    assert draft(it, [2, 5]).token_ids[0] == 8
    assert draft(it, [3, 5]).token_ids[0] == 8, "the latest of the token itself"


@pytest.mark.parametrize("right", [6, 7])
def test_what_came_true_more_often_is_drafted_first(right: int) -> None:
    it = proposer()
    for _ in range(200):
        it.observe([shown(make_sequence([5, right]), 0, [(5, -1, TEXT, [6, 7])], logits=(0.1, 0.0))])
    assert draft(it, [5], 1).token_ids == (right,)


def test_rejected_rows_tell_nothing_of_what_comes_true() -> None:
    it = proposer()
    rows: list[Row] = [(5, -1, TEXT, []), (5, 0, REJECTED, [6, 7])]
    for _ in range(50):
        it.observe([shown(make_sequence([5, 3, 6]), 0, rows)])
    assert it.chances._seen.sum() == 0


def test_nobody_reads_what_another_namespace_wrote() -> None:
    it = proposer()
    learn(it, {5: [6, 7]}, "alice")
    assert len(draft(it, [5], namespace="bob")) == 0
    assert len(draft(it, [5])) == 0
    learn(it, {5: [8, 9]}, "bob")
    assert nodes(draft(it, [5], namespace="alice")) == {(6,), (7,)}
    assert nodes(draft(it, [5], namespace="bob")) == {(8,), (9,)}


def test_going_back_forgets_what_was_learnt_since() -> None:
    it = proposer()
    learn(it, {5: [6, 7]})
    state = it.snapshot()
    before = draft(it, [5])
    for _ in range(2):  # one state serves every path that starts there
        for _ in range(30):
            it.observe([shown(make_sequence([5, 7]), 0, [(5, -1, TEXT, [6, 7])])])
        learn(it, {5: [8, 9], 6: [1, 2]})
        assert nodes(draft(it, [5])) != nodes(before)
        it.restore(state)
        assert draft(it, [5]) == before


def test_memory_stays_below_its_limit_and_old_contexts_go_first() -> None:
    it = proposer(top_k=4, longest=2, max_bytes=60_000)
    for token in range(2000):
        seq = make_sequence([token, token + 1])
        it.observe([shown(seq, 1, [(token + 1, -1, TEXT, [1, 2, 3, 4])], logits=(4.0, 3.0, 2.0, 1.0))])
        assert it.shared.num_bytes <= 60_000
    table = it.shared.of(None)
    assert len(table) > 100
    assert table.find((2000,)) is not None
    assert table.find((1,)) is None


def test_what_is_refreshed_stays() -> None:
    table = Successors(2, 20_000)
    tokens, shares = np.array([1, 2], np.int32), np.array([0.5, 0.5], np.float32)
    for token in range(1000):
        if token % 20 == 0:
            table.put((7777,), tokens, shares)
        table.put((token,), tokens + token, shares)
        assert table.find((7777,)) is not None
        assert table.num_bytes <= 20_000
    found = table.find((999,))
    assert found is not None
    assert found[0].tolist() == [1000, 1001]
    assert table.find((1,)) is None


def test_the_namespace_longest_unused_is_dropped_first() -> None:
    it = proposer(max_bytes=60_000)
    for name in ("idle", "busy"):
        learn(it, {token: [1, 2] for token in range(40)}, name)
    for token in range(1000):
        known = set(it.shared._tables)
        learn(it, {token: [1, 2]}, "other")
        assert it.shared.num_bytes <= it.shared.max_bytes
        assert sum(table.num_bytes for table in it.shared._tables.values()) <= it.shared.num_bytes
        if "idle" in known:
            assert len(draft(it, [1], namespace="busy")) > 0, "being asked keeps it"
    assert set(it.shared._tables) == {"other"}, "it needs all the memory there is"
    assert len(draft(it, [999], namespace="other")) > 0


def test_namespaces_that_only_ask_take_no_memory_for_ever() -> None:
    shared = SharedSuccessors(2, 100_000)
    for caller in range(1000):
        shared.of(f"caller {caller}")
    assert 0 < len(shared) < 60


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", 0), ("top_k", 65), ("context", 0), ("context", 9), ("cache_mib", 0)]
)
def test_settings_out_of_range_are_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidParameterError, match=field):
        SpeculationConfig.of({"method": "token_recycling", field: value})


@pytest.mark.parametrize("size", [7, 511, 1 << 16, (1 << 16) + 77])
def test_the_largest_of_a_long_row_are_those_of_a_sort(size: int) -> None:
    rows = torch.randperm(4 * size).view(4, size).float() - size  # no two entries are equal
    rows[0, -3:] = 9.0 * size + torch.arange(3)  # behind all whole parts, where there are entries behind them
    rows[1, :5] = 9.0 * size + torch.arange(5)  # all in one part
    rows[2, 1:] = float("-inf")
    for count in (1, 5):
        values, places = largest(rows, count)
        expected = rows.sort(-1, descending=True)
        assert torch.equal(values, expected.values[:, :count])
        assert torch.equal(rows.gather(-1, places), values)
        assert torch.equal(places[[0, 1, 3]], expected.indices[[0, 1, 3], :count])
        assert all(len(set(row)) == count for row in places.tolist())
