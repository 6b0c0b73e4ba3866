"""Claims of the checks of planted bugs that no other test of the core stands for: they hold for the package as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.mutation import boundary_killers, killers

CLAIMS = (
    boundary_killers.a_turn_goes_on_where_the_last_stopped,
    boundary_killers.ends_inside_drafts,
    boundary_killers.heads_go_on_behind_others,
    boundary_killers.paths_start_alike,
    boundary_killers.states,
    killers.law_guess_behind,
    killers.logprobs,
    killers.verifier_merged,
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_a_claim_holds(claim: Callable[[], None]) -> None:
    claim()
