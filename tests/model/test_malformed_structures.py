"""A malformed structure fails its own prompt, and the others of the list are written."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams, StructuredOutputs
from outrider.errors import InvalidParameterError, ProcessingError
from outrider.propose.settings import PLAIN
from tests.unit.test_grammar import MALFORMED, TOO_MUCH


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


def test_a_structure_that_becomes_too_much_ends_its_own_text_only(llm: LLM) -> None:
    later = SamplingParams(
        max_tokens=20, seed=1, structured_outputs=StructuredOutputs(regex="[ab]((((a{100}){100}){100}){100})")
    )
    good = SamplingParams(max_tokens=8, seed=1)
    (alone,) = llm.generate(["a = "], good)
    first, ended, last = llm.generate(["a = ", "b = ", "a = "], [good, later, good])
    assert isinstance(ended.error, ProcessingError)
    assert "the structure became too much for its automaton" in str(ended.error)
    assert "GrammarError(" not in str(ended.error)
    assert first.token_ids == last.token_ids == alone.token_ids
    assert not llm.engine.has_work


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_explodes_is_refused_before_a_step(llm: LLM, name: str) -> None:
    params = SamplingParams(max_tokens=4, n=2, structured_outputs=StructuredOutputs(**TOO_MUCH[name]))
    with pytest.raises(InvalidParameterError, match="too much for an automaton"):
        llm.engine.prepare((1, 2, 3), params, PLAIN)
    assert not llm.engine.has_work
