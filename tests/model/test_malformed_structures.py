"""A malformed structure fails its own prompt, and the others of the list are written."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams, StructuredOutputs
from outrider.errors import InvalidParameterError
from tests.unit.test_grammar import MALFORMED


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculation="none")


@pytest.mark.parametrize("name", MALFORMED)
def test_neighbours_of_a_malformed_structure_are_written(llm: LLM, name: str) -> None:
    bad = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(**MALFORMED[name]))
    good = SamplingParams(max_tokens=4, seed=1)
    first, refused, last = llm.generate(["a = ", "b = ", "c = "], [good, bad, good])
    assert isinstance(refused.error, InvalidParameterError)
    assert refused.error.field == "structured_outputs"
    assert (len(first.token_ids), len(last.token_ids)) == (4, 4)
    assert not llm.engine.has_work
