"""Proposers that are alive: shared by equal settings, let go when long unused, and never while in use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import Ngram, Suffix
from outrider.engine.drafting.proposers import MAX_IDLE, ProposerSet
from outrider.errors import ProposerError
from outrider.propose.base import Proposer
from outrider.propose.settings import Members, Method, ProposerContext


class Counted(Method):
    """A method of the tests that builds a new proposer each time it is asked to."""

    name: ClassVar[str] = "counted"

    tag: int = 0
    members: Members = ()

    def build(self, context: ProposerContext) -> Proposer:
        if self.tag < 0:
            raise RuntimeError("no luck")
        proposer = Proposer()
        proposer.context = context  # type: ignore[attr-defined]
        return proposer


class Twin(Counted):
    """The same settings by another class."""

    name: ClassVar[str] = "twin"


def no_runner(model: str, **how: Any) -> Any:
    raise AssertionError("no model is needed")


TARGET: Any = SimpleNamespace(vocab_size=4)


def proposers(kept: Method | None = None) -> ProposerSet:
    return ProposerSet(TARGET, 64, no_runner, kept)


def test_it_is_built_when_first_asked_for_with_what_it_may_use() -> None:
    alive = proposers()
    assert list(alive) == []
    proposer = alive.get(Counted())
    assert list(alive) == [proposer]
    assert proposer.context == ProposerContext(TARGET, 64, no_runner)  # type: ignore[attr-defined]


def test_equal_settings_share_a_proposer() -> None:
    alive = proposers()
    assert alive.get(Counted(tag=1)) is alive.get(Counted(tag=1)) is alive.acquire(Counted(tag=1)).proposer
    nested = [Counted(members=[Ngram(max_match=7), {"method": "suffix"}]) for _ in range(2)]
    assert alive.get(nested[0]) is alive.get(nested[1])
    assert alive.get(Suffix()) is alive.get(Suffix(factor=2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Counted(), Counted(tag=1)),
        (Counted(), Twin()),
        (Ngram(), Suffix()),
        (Ngram(), Ngram(max_match=6)),
        (Suffix(), Suffix(shared=True)),
        (Counted(), Counted(members=["ngram"])),
        (Counted(members=["ngram"]), Counted(members=[Ngram(max_match=6)])),
        (Counted(members=["ngram"]), Counted(members=[{"method": "ngram", "rule": "walk"}])),
    ],
)
def test_settings_that_differ_do_not_share(one: Method, other: Method) -> None:
    alive = proposers()
    assert alive.get(one) is not alive.get(other)
    assert len(list(alive)) == 2


def test_what_cannot_be_built_is_not_kept() -> None:
    alive = proposers()
    for _ in range(2):
        with pytest.raises(ProposerError, match="no luck"):
            alive.acquire(Counted(tag=-1))
    assert list(alive) == []


def acquired(alive: ProposerSet, *tags: int) -> dict[int, Proposer]:
    return {tag: alive.acquire(Counted(tag=tag)).proposer for tag in tags}


def tags(alive: ProposerSet, known: dict[int, Proposer]) -> set[int]:
    """Which of the known proposers are alive."""
    return {tag for tag, proposer in known.items() if any(proposer is other for other in alive)}


def test_the_least_recently_used_is_let_go_first() -> None:
    alive = proposers()
    known = acquired(alive, *range(MAX_IDLE + 3))
    assert tags(alive, known) == set(known), "all are in use"
    alive.get(Counted(tag=0))  # looked at last
    for tag in known:
        alive.release(Counted(tag=tag))
    left = tags(alive, known)
    assert 0 in left
    assert MAX_IDLE <= len(left) <= MAX_IDLE + 1
    assert left - {0} == set(range(MAX_IDLE + 3 - (len(left) - 1), MAX_IDLE + 3)), "the newest of the others"


def test_only_so_many_are_kept_that_nobody_uses() -> None:
    alive = proposers()
    for tag in acquired(alive, *range(MAX_IDLE + 3)):
        alive.release(Counted(tag=tag))
    assert len(list(alive)) == MAX_IDLE


def test_one_in_use_is_never_let_go() -> None:
    alive = proposers()
    used = alive.acquire(Counted(tag=100)).proposer
    for tag in range(3 * MAX_IDLE):
        alive.get(Counted(tag=tag))
    assert alive.get(Counted(tag=100)) is used
    alive.release(Counted(tag=100))
    for tag in range(3 * MAX_IDLE):
        alive.get(Counted(tag=tag))
    assert alive.get(Counted(tag=100)) is not used, "it was free to go, and is built anew"


def test_a_sequence_that_ends_leaves_it_to_the_others_that_use_it() -> None:
    alive = proposers()
    used = [alive.acquire(Counted(tag=100)).proposer for _ in range(2)]
    alive.release(Counted(tag=100))
    for tag in range(3 * MAX_IDLE):
        alive.get(Counted(tag=tag))
    assert alive.get(Counted(tag=100)) is used[1]


@pytest.mark.parametrize("kept", [Counted(tag=100), Ngram()])
def test_the_kept_one_is_never_let_go(kept: Method) -> None:
    alive = proposers(kept)
    proposer = alive.get(kept)
    for tag in range(3 * MAX_IDLE):
        alive.acquire(Counted(tag=tag))
        alive.release(Counted(tag=tag))
    assert alive.get(kept) is proposer


def test_another_class_with_the_settings_of_the_kept_one_is_not_kept() -> None:
    alive = proposers(Counted(tag=100))
    twin = alive.get(Twin(tag=100))
    for tag in range(3 * MAX_IDLE):
        alive.get(Counted(tag=tag))
    assert all(proposer is not twin for proposer in alive)


def test_releasing_more_often_than_acquiring_is_a_defect() -> None:
    alive = proposers()
    alive.acquire(Counted())
    alive.release(Counted())
    with pytest.raises(AssertionError, match="more often"):
        alive.release(Counted())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["get", "acquire", "release"]), st.integers(0, 9)), max_size=60))
def test_books_hold_whatever_comes(moves: list[tuple[str, int]]) -> None:
    kept = Counted(tag=0)
    alive, uses, known = proposers(kept), dict.fromkeys(range(10), 0), dict[int, Proposer]()
    for verb, tag in moves:
        if verb == "release":
            if not uses[tag]:
                continue
            alive.release(Counted(tag=tag))
            uses[tag] -= 1
        else:
            found = alive.get(Counted(tag=tag)) if verb == "get" else alive.acquire(Counted(tag=tag)).proposer
            if uses[tag] or (tag == 0 and 0 in known):
                assert found is known[tag], "in use or kept, and yet built anew"
            known[tag] = found
            uses[tag] += verb == "acquire"
            assert tag in tags(alive, known), "what was handed out is alive"
        left = tags(alive, known)
        assert {t for t, count in uses.items() if count} <= left
        assert 0 not in known or 0 in left
        idle = [t for t in left if not uses[t] and t != 0]
        assert len(idle) <= MAX_IDLE + 1, "one more than so many while it is handed out"
        assert len(list(alive)) == len(left)


def test_two_methods_that_build_one_object_are_counted_apart() -> None:
    alive, one = proposers(), Proposer()

    class Same(Method):
        name: ClassVar[str] = "same"
        tag: int = 0

        def build(self, context: ProposerContext) -> Proposer:
            return one

    assert alive.acquire(Same(tag=0)).proposer is alive.acquire(Same(tag=1)).proposer
    alive.release(Same(tag=0))
    alive.release(Same(tag=1))
    with pytest.raises(AssertionError, match="more often"):
        alive.release(Same(tag=0))
