"""A stage draws exactly what its draft model would draw, however deep its drafter guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.model.core import core
from tests.statistical.nested_laws import prove_stage

from outrider import SamplingParams

_OF_TWO = {"top_k": 2}
_FILTERED = {"temperature": 1.4, "top_k": 2, "frequency_penalty": 0.7}
#: How the drafter, which has the target's weights, guesses; and the parameters of the text.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chains": ({"num_draft_tokens": 3}, {}),
    "chains, filtered": ({"num_draft_tokens": 3}, _FILTERED),
    "chains under the token rule, filtered": ({"num_draft_tokens": 3, "rule": "token"}, _FILTERED),
    "chains that are walked, filtered": ({"num_draft_tokens": 3, "rule": "walk"}, _FILTERED),
    "trees": ({"tree": (2, 1), "num_draft_tokens": 4}, {}),
    "heads": ({"method": "medusa", "num_draft_tokens": 3}, _OF_TWO),
    "first layers": ({"method": "early_exit", "layers": 1, "num_draft_tokens": 3}, _OF_TWO),
    "heads with layers": ({"method": "eagle3", "num_draft_tokens": 2}, _OF_TWO),
    "trees of heads with layers": ({"method": "eagle1", "tree": (2, 1), "num_draft_tokens": 4}, _OF_TWO),
    "a block": ({"method": "dflash", "num_draft_tokens": 2, "rule": "token"}, _OF_TWO),
    "layers of a checkpoint": ({"method": "mtp", "num_draft_tokens": 2}, _OF_TWO),
}


#: Trees are proven of heads, too, and walks in the joint law of the engine, over fewer rows.
REPEATS = ("trees", "chains that are walked, filtered")


@pytest.mark.parametrize("name", core(SETTINGS, SETTINGS.keys() - REPEATS))
def test_a_stage_draws_from_its_draft_model(name: str, tmp_path: Path) -> None:
    guesses, params = SETTINGS[name]
    finding = prove_stage(guesses, SamplingParams(**params), tmp_path)
    assert finding.passed, finding
