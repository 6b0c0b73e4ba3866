"""The draws of all drafts of a step are looked at in one answer of the device, and a faulty one is blamed alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft import EMPTY, Draft, Law
from outrider.propose import host
from outrider.propose.base import ProposeRequest
from outrider.propose.host import draws_hold, inspected
from tests.unit.builders import make_sequence, note_draws
from tests.unit.test_drafting import FAULTS, MALFORMED, VOCAB, Stub, ask, faults, sampled, scheduled

HALVES = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3)
GOOD = sampled((2, 0, 3))


@pytest.fixture(params=[False, True], ids=["on a CPU", "on a device"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts on a device are put together before they are looked at."""
    monkeypatch.setattr(host, "host_waits", lambda device: request.param)


def asked(draft: Any, drawn: Draft | None = None, **how: Any) -> tuple[ProposeRequest, Any]:
    """A request with a draft that answers it, and with what was drawn for it; None for what the draft says."""
    request = ProposeRequest(make_sequence(3).view, 9, **how)
    note_draws(request, draft if drawn is None else drawn)
    return request, draft


def hold(*pairs: tuple[ProposeRequest, Any]) -> list[bool]:
    return draws_hold([request for request, _ in pairs], [draft for _, draft in pairs], VOCAB)


class Raising:
    """Looking at it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not to be looked at")


#: Drafts of which no such word is given, with what was drawn for them.
DOUBTFUL: dict[str, Callable[[], tuple[ProposeRequest, Any]]] = {
    **{what: lambda fault=fault: asked(fault(1), sampled()) for what, fault in FAULTS.items()},  # type: ignore[misc]
    **{what: lambda draft=draft: asked(draft, sampled()) for what, draft in MALFORMED.items()},  # type: ignore[misc]
    "a law that could not draw its token, noted": lambda: asked(sampled((0, 1, 2), HALVES)),
    "no sum, noted": lambda: asked(sampled(probs=torch.full((3, VOCAB), 0.3))),
    "no number, noted": lambda: asked(sampled(probs=torch.full((3, VOCAB), float("nan")))),
    "a negative entry, noted": lambda: asked(sampled((0, 1, 0), torch.tensor([[0.75, 0.75, -0.5, 0.0]] * 3))),
    "a row that was not noted": lambda: asked(sampled((0, 1, 0)), sampled((0, 1, 0), HALVES)),
    "a token behind which nothing was drawn": lambda: asked(sampled((0, 1, 2)), sampled((0, 3, 2))),
    "rows of another type": lambda: asked(sampled(), sampled(probs=torch.full((3, VOCAB), 0.25).double())),
    "one guess among the draws": lambda: asked(
        Draft((0, 1), (-1, 0), (Law.SAMPLED, Law.OPAQUE), torch.full((2, VOCAB), 0.25))
    ),
    "guesses with the target's noise": lambda: asked(sampled(), coupled=True),
    "what raises": lambda: (asked(GOOD)[0], Raising()),
    "what was raised": lambda: (asked(GOOD)[0], RuntimeError("planted")),
}


@pytest.mark.parametrize("what", DOUBTFUL)
def test_one_doubtful_draft_stands_in_no_others_way(what: str) -> None:
    assert hold(asked(GOOD), DOUBTFUL[what](), asked(sampled((1, 1)))) == [True, False, True]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_draw_counts(place: int) -> None:
    lie = torch.full((3, VOCAB), 0.25)
    lie[place, :2] = torch.tensor([0.3, 0.2])
    assert hold(asked(GOOD), asked(sampled((0, 1, 0), lie), sampled((0, 1, 0))), asked(GOOD)) == [True, False, True]


def test_drafts_that_cannot_be_put_together_are_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_memory(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(host, "_numbers", short_of_memory)
    assert hold(asked(GOOD), asked(GOOD)) == [False, False]


def test_drafts_without_draws_are_left_to_the_inspection() -> None:
    assert hold() == []
    assert hold(asked(EMPTY), asked(Draft.chain([1, 2], Law.DETERMINISTIC))) == [False, False]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_the_word_on_trees_changes_nothing(sizes: list[int], data: st.DataObject) -> None:
    """Where it is given, the closer look finds the same, whatever else is wrong with the draft."""
    pairs = []
    for size in sizes:
        tokens = tuple(data.draw(st.integers(0, VOCAB - 1)) for _ in range(size))
        parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(size))
        draft = Draft(tokens, parents, (Law.SAMPLED,) * size, torch.rand(VOCAB).softmax(-1).repeat(size, 1))
        request, _ = asked(draft, path=(3, 1))
        pairs.append((replace(request, budget=data.draw(st.integers(0, 6)), max_depth=data.draw(st.integers(1, 6))), draft))
    assert all(hold(*pairs))
    for request, draft in pairs:
        told, looked = (inspected(request, draft, VOCAB, word) for word in (True, False))
        assert told[1] == looked[1]
        assert (told[0].token_ids, told[0].parents, told[0].laws) == (
            looked[0].token_ids,
            looked[0].parents,
            looked[0].laws,
        )


# -- who is blamed -----------------------------------------------------------------------------------------------------


class Lying(Stub):
    """Its second draft says of one draw that it was made from other probabilities than it was."""

    def propose(self, requests: Sequence[ProposeRequest], noise: Any) -> Any:
        answers = super().propose(requests, noise)
        return [replace(a, draft_probs=HALVES) if place == 1 else a for place, a in enumerate(answers)]


#: A proposer whose second draft is faulty, and what is said of it.
BLAMED: dict[str, tuple[Callable[[], Stub], str]] = {
    "it sums to more": (
        lambda: Stub(lambda requests: [GOOD, sampled(probs=torch.full((3, VOCAB), 0.3125)), GOOD]),
        "node 0: its probabilities sum to 1.25, least entry 0.3125",
    ),
    "it could not draw its token": (
        lambda: Stub(lambda requests: [GOOD, sampled((0, 1, 3), HALVES), GOOD]),
        "node 2: token 3 has probability 0 among those it was drawn from",
    ),
    "it lies": (
        lambda: Lying(lambda requests: [GOOD, sampled((0, 1, 0)), GOOD]),
        "node 0: token 0 was drawn from other probabilities",
    ),
}


@pytest.mark.parametrize("what", BLAMED)
def test_a_bad_draft_among_good_ones_is_blamed_alone(what: str, caplog: pytest.LogCaptureFixture) -> None:
    make, problem = BLAMED[what]
    items = [scheduled(make())]
    items += [scheduled(items[0].drafters[0].proposer) for _ in range(2)]  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING):
        drafts = ask(*items)
    assert [faults(item) for item in items] == [(0, False), (1, True), (0, False)]
    assert problem in caplog.text
    assert [drafts[place].token_ids for place in (0, 2)] == [GOOD.token_ids] * 2
    assert [drafts[place].laws for place in (0, 2)] == [GOOD.laws] * 2
