"""The suffix proposer: what it drafts, how far, from whose texts, and what it forgets."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.draft import Draft, Law
from outrider.engine.sequence import Sequence
from outrider.propose import suffix
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.suffix import SharedTexts, SuffixProposer
from outrider.verify.noise import KeyedNoise
from tests.unit.builders import make_sequence

NOISE = DraftNoise(KeyedNoise())


def begun(proposer: SuffixProposer, tokens: list[int], namespace: str | None = None, **how: Any) -> Sequence:
    seq = make_sequence(tokens, namespace=namespace, **how)
    proposer.begin(seq.view)
    return seq


def draft(
    proposer: SuffixProposer,
    tokens: list[int],
    budget: int = 16,
    depth: int = 1 << 30,
    *,
    path: tuple[int, ...] = (),
    **more: Any,
) -> Draft:
    seq = begun(proposer, tokens, **more)
    (found,) = proposer.propose([ProposeRequest(seq.view, budget, depth, path)], NOISE)
    return found


def test_it_drafts_what_followed() -> None:
    found = draft(SuffixProposer(2, 2.0), [1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert found.token_ids[:3] == (4, 5, 6)
    assert found.is_chain
    assert set(found.laws) == {Law.DETERMINISTIC}


def test_the_draft_grows_with_the_match() -> None:
    line = list(range(100, 140))
    lengths = [len(draft(SuffixProposer(2, 2.0), [*line, 7, *line[:n]], 64)) for n in (2, 4, 8)]
    assert lengths == [4, 8, 16]


def test_budget_and_depth_are_kept() -> None:
    line = list(range(100, 140))
    tokens = [*line, 7, *line[:10]]
    assert len(draft(SuffixProposer(2, 2.0), tokens, 5)) == 5
    assert len(draft(SuffixProposer(2, 2.0), tokens, 16, 3)) == 3
    tree = draft(SuffixProposer(2, 2.0, branches=True), tokens, 16, 3)
    assert tree.depth <= 3


def test_behind_what_another_proposer_drafted_it_goes_on() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    assert draft(SuffixProposer(2, 2.0), tokens, path=(3, 4)).token_ids[:2] == (5, 6)
    assert len(draft(SuffixProposer(2, 2.0), tokens, path=(3, 7))) == 0, "nobody knows what comes behind 3 7"
    shared = SharedTexts(1 << 20)
    shared.add(None, [50, 51, 52, 53, 54])
    found = draft(SuffixProposer(2, 2.0, shared=shared), [8, 50], path=(51, 52))
    assert found.token_ids == (53, 54)
    assert set(found.laws) == {Law.OPAQUE}


def test_references_are_looked_up_beside_the_text() -> None:
    references = ((50, 51, 52, 53, 54), (60, 61, 62, 63))
    found = draft(SuffixProposer(2, 2.0), [8, 60, 61], references=references)
    assert found.token_ids == (62, 63)
    assert set(found.laws) == {Law.OPAQUE}
    assert draft(SuffixProposer(2, 2.0), [8, 50], path=(51, 52), references=references).token_ids == (53, 54)
    assert draft(SuffixProposer(2, 2.0), [8, 54, 60], references=references) == Draft(), "two texts are not one"
    assert draft(SuffixProposer(2, 2.0), [*range(900, 960), 60, 61], references=references).token_ids == (62, 63)


def test_references_are_followed_as_the_text_grows() -> None:
    proposer = SuffixProposer(2, 2.0)
    seq = begun(proposer, [8, 9], references=((50, 51, 52, 53, 54),))
    for token, expected in ((50, ()), (51, (52, 53, 54)), (52, (53, 54)), (7, ()), (52, ()), (53, (54,))):
        seq.token_ids.append(token)
        (found,) = proposer.propose([ProposeRequest(seq.view, 8)], NOISE)
        assert found.token_ids == expected, token


def test_long_texts_are_read_in_parts_and_short_ones_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_READ_AT_ONCE", 6)
    proposer = SuffixProposer(2, 2.0)
    references = ((60, 61, 62, 63, 64, 65, 66, 67, 68, 69), (), (50, 51, 52))
    long = [begun(proposer, [7, 8, 7, 8, 7, 8, 9, 50, 51], references=references) for _ in range(2)]
    short = begun(proposer, [1, 2, 3, 1, 2])
    found = []
    for _ in range(9):
        drafts = proposer.propose([ProposeRequest(seq.view, 1) for seq in (*long, short)], NOISE)
        found.append([each.token_ids for each in drafts])
    assert found[0] == [(), (), (3,)]
    assert found[-1] == [(52,), (52,), (3,)]
    read = [sum(map(bool, each)) for each in found]
    assert read == [1, 1, 1, 1, 2, 3, 3, 3, 3], "18 tokens of two texts, and 13 that both may quote"
    assert len(proposer._references) == 2
    for seq in (*long, short):
        proposer.finish(seq.view)
    assert not proposer._references, "nothing is kept of what nobody quotes"


def test_a_path_that_was_not_taken_leaves_no_trace() -> None:
    proposer, fresh = (SuffixProposer(2, 2.0) for _ in range(2))
    tokens = [1, 2, 3, 4, 5, 9, 1, 2]
    seq, other = begun(proposer, tokens), begun(fresh, tokens)
    proposer.propose([ProposeRequest(seq.view, 8, path=(7, 7, 7))], NOISE)
    for one in (seq, other):
        one.token_ids += [3, 4]
    (found,) = proposer.propose([ProposeRequest(seq.view, 8)], NOISE)
    (expected,) = fresh.propose([ProposeRequest(other.view, 8)], NOISE)
    assert found == expected
    assert found.token_ids[:1] == (5,)


def test_what_followed_more_often_is_drafted() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    assert draft(SuffixProposer(2, 2.0), tokens).token_ids[0] == 4


def test_a_tree_drafts_both_ways_on() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    found = draft(SuffixProposer(2, 2.0, branches=True), tokens)
    assert {t for t, p in zip(found.token_ids, found.parents, strict=True) if p == -1} == {3, 4}
    assert not found.is_chain


def test_nothing_known_is_nothing_drafted() -> None:
    assert len(draft(SuffixProposer(2, 2.0), [1, 2, 3, 4])) == 0
    assert len(draft(SuffixProposer(3, 2.0), [1, 2, 3, 9, 1, 2])) == 0, "a match of two is below three"


def test_earlier_texts_are_found_within_their_namespace_only() -> None:
    shared = SharedTexts(1 << 20)
    proposer = SuffixProposer(2, 2.0, shared=shared)
    first = begun(proposer, [1, 2, 3, 4, 5, 6], "alice")
    proposer.finish(first.view)
    found = draft(proposer, [9, 1, 2, 3], namespace="alice")
    assert found.token_ids[:3] == (4, 5, 6)
    assert set(found.laws) == {Law.OPAQUE}
    assert len(draft(proposer, [9, 1, 2, 3], namespace="bob")) == 0
    assert len(draft(proposer, [9, 1, 2, 3])) == 0


def test_texts_of_running_sequences_are_nobodys_business() -> None:
    proposer = SuffixProposer(2, 2.0, shared=SharedTexts(1 << 20))
    begun(proposer, [1, 2, 3, 4, 5, 6])
    assert len(draft(proposer, [9, 1, 2, 3])) == 0


def test_going_back_forgets_the_texts_learnt_since() -> None:
    proposer = SuffixProposer(2, 2.0, shared=SharedTexts(1 << 20))
    proposer.finish(begun(proposer, [1, 2, 3, 4]).view)
    state = proposer.snapshot()
    proposer.finish(begun(proposer, [5, 6, 7, 8]).view)
    assert draft(proposer, [9, 5, 6]).token_ids[:1] == (7,)
    for _ in range(2):  # one state serves every path that starts there
        proposer.restore(state)
        assert len(draft(proposer, [9, 5, 6])) == 0
        assert draft(proposer, [9, 1, 2]).token_ids[:1] == (3,)
        proposer.finish(begun(proposer, [5, 6, 7, 8]).view)


def test_a_proposer_that_keeps_no_texts_has_nothing_to_go_back_to() -> None:
    assert SuffixProposer(2, 2.0).snapshot() is None


def test_memory_stays_below_its_limit_and_old_texts_go_first() -> None:
    shared = SharedTexts(400_000)
    for text in range(60):
        shared.add(None, [text * 1000 + i for i in range(100)])
        assert shared.num_bytes <= shared.max_bytes

    def finds(text: int) -> bool:
        return any(text * 1000 in volume.followers[0] for volume in shared.of(None))

    assert finds(59)
    assert not finds(0)


def test_the_namespace_longest_unused_is_forgotten_first() -> None:
    shared = SharedTexts(400_000)
    shared.add("idle", list(range(100)))
    shared.add("busy", list(range(100)))
    for text in range(60):
        shared.of("busy")
        shared.add("other", [text * 1000 + i for i in range(100)])
    assert not shared.of("idle")


def test_finishing_forgets_the_sequence() -> None:
    proposer = SuffixProposer(2, 2.0)
    seq = begun(proposer, [1, 2, 3])
    proposer.finish(seq.view)
    proposer.finish(seq.view)
    assert not proposer._lookups
