"""Lookahead: its window of scratch rows, the n-grams that come of it, and what it drafts from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import SpeculationConfig
from outrider.draft import Draft, Law
from outrider.engine.sequence import Sequence
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.propose.base import DraftNoise, ObservedRows, ProposeRequest, RowStatus, TopK
from outrider.propose.lookahead import Lookahead, LookaheadProposer, NgramPool
from outrider.verify.noise import KeyedNoise
from tests.unit.builders import make_sequence

NOISE = DraftNoise(KeyedNoise())
PROMPT = [11, 12, 13, 14]


def begun(it: LookaheadProposer, tokens: list[int] | None = None, **how: Any) -> Sequence:
    seq = make_sequence(PROMPT if tokens is None else tokens, **how)
    it.begin(seq.view)
    return seq


def ask(it: LookaheadProposer, seq: Sequence, budget: int = 32, depth: int = 1 << 30, path: tuple[int, ...] = ()) -> Draft:
    (found,) = it.propose([ProposeRequest(seq.view, budget, depth, path)], NOISE)
    assert found.num_rows <= budget
    assert set(found.laws) <= {Law.OPAQUE}
    rows = [0 if parent < 0 else parent for parent in found.row_parents]
    assert all(parent < row for row, parent in enumerate(rows, 1))
    return found


def answer(row: int) -> int:
    """What the target of these tests holds likeliest behind the scratch row with this number."""
    return 100 + row


def tell(it: LookaheadProposer, seq: Sequence, found: Draft, rows: int | None = None, base: int = 0) -> None:
    """Show what the pass computed: the last token, rejected nodes and `rows` scratch rows."""
    scratch = found.scratch.token_ids[:rows]
    size = 1 + len(found) + len(scratch)
    statuses = (RowStatus.TEXT, *[RowStatus.REJECTED] * len(found), *[RowStatus.SCRATCH] * len(scratch))
    likeliest = [0] * (1 + len(found)) + [base + answer(row) for row in range(len(scratch))]
    top = TopK(tuple(range(size)), torch.tensor(likeliest)[:, None], torch.zeros(size, 1))
    tokens = (seq.token_ids[-1], *found.token_ids, *scratch)
    parents = (-1, *(parent + 1 for parent in found.row_parents[: size - 1]))
    it.observe([ObservedRows(seq.view, tokens, tuple(range(size)), parents, statuses, {}, top)])


def columns(it: LookaheadProposer, seq: Sequence) -> list[list[int]]:
    return it._looks[seq.seq_id].columns


# -- the window --------------------------------------------------------------------------------------------------------


def test_the_window_fills_level_by_level_and_then_writes_ngrams() -> None:
    it = LookaheadProposer(2, 3, 4)
    seq = begun(it)
    first = ask(it, seq)
    assert (first.scratch.token_ids, first.scratch.parents) == ((11, 13), (-1, 0)), "from the prompt, a chain"
    tell(it, seq, first)
    assert columns(it, seq) == [[11, 100], [13, 101]]
    second = ask(it, seq)
    assert second.scratch.token_ids == (11, 100, 13, 101)
    assert second.scratch.parents == (-1, 0, 0, 2), "a column follows the first level of the one to its left"
    tell(it, seq, second, base=100)
    assert columns(it, seq) == [[100, 201], [101, 203]]
    pool = it._looks[seq.seq_id].pool
    assert pool.after(11) == [(11, 100, 201), (11, 12, 13)]
    assert pool.after(13) == [(13, 101, 203)]


def test_rows_of_the_window_stand_behind_the_nodes() -> None:
    it = LookaheadProposer(2, 3, 4)
    seq = begun(it, [7, 8, 9, 7])
    tell(it, seq, ask(it, seq))
    found = ask(it, seq)
    assert found.token_ids == (8, 9), "what followed 7 in the prompt"
    assert found.scratch.parents == (-1, 2, 2, 4)


@pytest.mark.parametrize(("budget", "kept"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (50, 3)])
def test_whole_columns_are_left_out_where_rows_are_few_and_come_back(budget: int, kept: int) -> None:
    it = LookaheadProposer(3, 3, 1)
    seq = begun(it)
    tell(it, seq, ask(it, seq))
    before = [list(column) for column in columns(it, seq)]
    found = ask(it, seq, budget)
    assert len(found.scratch) == 2 * kept
    tell(it, seq, found)
    assert [a == b for a, b in zip(columns(it, seq), before, strict=True)] == [place >= kept for place in range(3)]
    assert len(ask(it, seq).scratch) == 6, "one step cut, the next one whole"


@pytest.mark.parametrize(("depth", "kept"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3)])
def test_no_row_is_deeper_than_is_of_use(depth: int, kept: int) -> None:
    it = LookaheadProposer(3, 3, 1)
    seq = begun(it)
    tell(it, seq, ask(it, seq))
    assert len(ask(it, seq, depth=depth).scratch) == 2 * kept


def test_guesses_come_before_the_window() -> None:
    it = LookaheadProposer(2, 3, 1)
    seq = begun(it, [7, 8, 9, 7])
    assert len(ask(it, seq, 2)) == 2
    tell(it, seq, ask(it, seq, 2))
    found = ask(it, seq, 3)
    assert (len(found), len(found.scratch)) == (2, 1)


@pytest.mark.parametrize("rows", range(5))
def test_a_window_that_the_engine_cuts_moves_on_as_far_as_it_was_computed(rows: int) -> None:
    it = LookaheadProposer(2, 3, 1)
    seq = begun(it)
    tell(it, seq, ask(it, seq))
    before = [list(column) for column in columns(it, seq)]
    tell(it, seq, ask(it, seq), rows)
    assert [a == b for a, b in zip(columns(it, seq), before, strict=True)] == [rows < 2, rows < 4]
    assert [len(column) for column in columns(it, seq)] == [2, 2]


def test_rows_that_it_did_not_ask_for_change_nothing() -> None:
    """A pass without its rows, as after a preemption, or with others than it asked for."""
    it = LookaheadProposer(2, 3, 1)
    seq = begun(it)
    before = [list(column) for column in columns(it, seq)]
    tell(it, seq, ask(it, seq), 0)
    assert columns(it, seq) == before
    tell(it, seq, Draft())
    found = ask(it, seq)
    tell(it, seq, Draft(scratch=type(found.scratch)((55, 56), (-1, 0))))
    assert columns(it, seq) == before
    tell(it, seq, ask(it, seq))
    assert columns(it, seq) != before


def test_a_second_turn_in_one_step_asks_for_no_window() -> None:
    it = LookaheadProposer(2, 3, 1)
    seq = begun(it)
    first = ask(it, seq)
    assert len(ask(it, seq, path=(13, 14)).scratch) == 0
    tell(it, seq, first)
    assert len(ask(it, seq).scratch) == 4


def test_samples_go_on_from_one_window_each_on_its_own() -> None:
    it = LookaheadProposer(2, 3, 1)
    seq, child = begun(it), make_sequence(PROMPT)
    tell(it, seq, ask(it, seq))
    it.fork(seq.view, child.view)
    assert columns(it, child) == columns(it, seq)
    tell(it, child, ask(it, child))
    assert columns(it, child) != columns(it, seq)
    it.finish(seq.view)
    it.finish(seq.view)
    assert list(it._looks) == [child.seq_id]


# -- the pool and the drafts -------------------------------------------------------------------------------------------


def test_ngrams_that_begin_with_the_last_token_are_drafted_as_a_tree() -> None:
    it = LookaheadProposer(1, 3, 3)
    seq = begun(it, [7, 1, 2, 7, 1, 3, 7, 4, 5, 7])
    found = ask(it, seq)
    assert found.paths == [(4,), (4, 5), (1,), (1, 3), (1, 2)], "latest first, common beginnings once"
    cut = ask(it, seq, 3)
    assert cut.paths == found.paths[:3]
    assert ask(it, seq, depth=1).paths == [(4,), (1,)]


def test_the_text_that_was_written_is_in_the_pool_too() -> None:
    it = LookaheadProposer(1, 3, 2)
    seq = begun(it)
    tell(it, seq, ask(it, seq))
    seq.token_ids += [20, 21, 22, 20]
    assert ask(it, seq).token_ids == (21, 22)


def test_behind_what_another_proposer_drafted_it_goes_on() -> None:
    it = LookaheadProposer(1, 3, 2)
    seq = begun(it)
    assert ask(it, seq, path=(12,)).token_ids == (13, 14)


def test_no_sequence_reads_what_another_wrote() -> None:
    it = LookaheadProposer(2, 3, 4)
    alice = begun(it, [5, 6, 7, 8], namespace="alice")
    for _ in range(4):
        tell(it, alice, ask(it, alice))
    for namespace in ("bob", "alice", None):
        other = begun(it, [21, 22, 5], namespace=namespace)
        found = ask(it, other)
        assert len(found) == 0
        assert set(found.scratch.token_ids) <= {21, 22, 5}


def test_the_pool_keeps_the_latest_within_its_limits() -> None:
    pool = NgramPool(2, 3, 5)
    for token in range(100):
        pool.add((1, token))
        pool.add((token + 2, 0))
        assert len(pool) <= 3 * 5
    assert pool.after(1) == [(1, 99), (1, 98), (1, 97)]
    pool.add((1, 97))
    assert pool.after(1)[0] == (1, 97)
    assert pool.after(2) == []
    assert pool.after(101) == [(101, 0)]


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_draft_is_as_long_as_the_settings_need() -> None:
    config = SpeculationConfig(method=Lookahead(window=4, ngram=3, guesses=2))
    assert config.num_draft_tokens == 12
    assert SpeculationConfig.of(config.as_mapping()) == config


def test_a_window_wider_than_any_draft_is_refused() -> None:
    assert Lookahead(window=256, ngram=3).least_length() == 512
    with pytest.raises(ContradictionError, match="window"):
        Lookahead(window=257, ngram=3)


def test_a_window_that_a_draft_has_no_rows_for_is_refused() -> None:
    assert SpeculationConfig(method=Lookahead(window=4, ngram=3), num_draft_tokens=8).num_draft_tokens == 8
    with pytest.raises(ContradictionError, match="needs 8 rows"):
        SpeculationConfig(method=Lookahead(window=4, ngram=3), num_draft_tokens=7)


@pytest.mark.parametrize(
    ("field", "value"), [("window", 0), ("window", 513), ("ngram", 1), ("ngram", 17), ("guesses", 0), ("guesses", 65)]
)
def test_settings_out_of_range_are_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidParameterError, match=field):
        SpeculationConfig.of({"method": "lookahead", field: value})


def test_it_takes_no_shape() -> None:
    with pytest.raises(ContradictionError, match="guesses"):
        SpeculationConfig(method=Lookahead(), tree=(2, 1))
