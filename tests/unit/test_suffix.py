"""The suffix proposer: what it drafts, how far, from whose texts, and what it forgets."""

from __future__ import annotations

from typing import Any

from outrider.config import SpeculationConfig
from outrider.engine.detokenizer import TextStream
from outrider.engine.sequence import Request, Sequence
from outrider.params import SamplingParams
from outrider.propose.base import DraftNoise, ProposeRequest
from outrider.propose.draft import Draft, Law
from outrider.propose.suffix import SharedTexts, SuffixProposer
from outrider.verify.noise import KeyedNoise

NOISE = DraftNoise(KeyedNoise())


def sequence(seq_id: int, tokens: list[int], namespace: str | None = None) -> Sequence:
    request = Request(
        seq_id,
        None,
        tuple(tokens),
        SamplingParams(),
        SpeculationConfig(proposer="suffix"),
        None,
        0,
        frozenset(),
        (),
        namespace,
    )
    return Sequence(seq_id, request, 0, TextStream(None, ()), 1 << 20)


def draft(proposer: SuffixProposer, tokens: list[int], budget: int = 16, depth: int = 1 << 30, **more: Any) -> Draft:
    seq = sequence(1, tokens, **more)
    proposer.begin(seq.view)
    (found,) = proposer.propose([ProposeRequest(seq.view, budget, depth)], NOISE)
    return found


def test_it_drafts_what_followed() -> None:
    found = draft(SuffixProposer(2, 2.0), [1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert found.token_ids[:3] == (4, 5, 6)
    assert found.is_chain
    assert found.candidate_laws == {Law.DETERMINISTIC}


def test_the_draft_grows_with_the_match() -> None:
    line = list(range(100, 140))
    lengths = [len(draft(SuffixProposer(2, 2.0), [*line, 7, *line[:n]], 64)) for n in (2, 4, 8)]
    assert lengths == [4, 8, 16]


def test_budget_and_depth_are_kept() -> None:
    line = list(range(100, 140))
    tokens = [*line, 7, *line[:10]]
    assert len(draft(SuffixProposer(2, 2.0), tokens, 5)) == 5
    assert len(draft(SuffixProposer(2, 2.0), tokens, 16, 3)) == 3
    tree = draft(SuffixProposer(2, 2.0, tree=True), tokens, 16, 3)
    assert tree.depth <= 3


def test_what_followed_more_often_is_drafted() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    assert draft(SuffixProposer(2, 2.0), tokens).token_ids[0] == 4


def test_a_tree_drafts_both_ways_on() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    found = draft(SuffixProposer(2, 2.0, tree=True), tokens)
    assert {t for t, p in zip(found.token_ids, found.parents, strict=True) if p == -1} == {3, 4}
    assert not found.is_chain


def test_nothing_known_is_nothing_drafted() -> None:
    assert len(draft(SuffixProposer(2, 2.0), [1, 2, 3, 4])) == 0
    assert len(draft(SuffixProposer(3, 2.0), [1, 2, 3, 9, 1, 2])) == 0, "a match of two is below three"


def test_a_surer_guess_expects_more() -> None:
    sure = draft(SuffixProposer(2, 2.0), [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 2)
    torn = draft(SuffixProposer(2, 2.0), [1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7, 8, 1, 2], 2)
    assert sure.expected_accepted is not None
    assert torn.expected_accepted is not None
    assert 2 >= sure.expected_accepted > torn.expected_accepted > 0


def test_earlier_texts_are_found_within_their_namespace_only() -> None:
    shared = SharedTexts(1 << 20)
    proposer = SuffixProposer(2, 2.0, shared=shared)
    first = sequence(5, [1, 2, 3, 4, 5, 6], "alice")
    proposer.begin(first.view)
    proposer.finish(first.view)
    found = draft(proposer, [9, 1, 2, 3], namespace="alice")
    assert found.token_ids[:3] == (4, 5, 6)
    assert found.candidate_laws == {Law.OPAQUE}
    assert len(draft(proposer, [9, 1, 2, 3], namespace="bob")) == 0
    assert len(draft(proposer, [9, 1, 2, 3])) == 0


def test_texts_of_running_sequences_are_nobodys_business() -> None:
    proposer = SuffixProposer(2, 2.0, shared=SharedTexts(1 << 20))
    first = sequence(5, [1, 2, 3, 4, 5, 6])
    proposer.begin(first.view)
    assert len(draft(proposer, [9, 1, 2, 3])) == 0


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
    seq = sequence(1, [1, 2, 3])
    proposer.begin(seq.view)
    proposer.finish(seq.view)
    proposer.finish(seq.view)
    assert not proposer._lookups
