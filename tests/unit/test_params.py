"""Sampling parameters and results: every range, every refusal, and what the derived numbers mean."""

from __future__ import annotations

import math
import re
from typing import Any

import pydantic
import pytest

from outrider.errors import (
    ContradictionError,
    InputError,
    InvalidParameterError,
    NonFiniteLogitsError,
    UnsupportedParameterError,
)
from outrider.params import CompletionOutput, RequestOutput, SamplingParams, TokenOrigin
from outrider.results import RequestStats


def test_defaults_change_nothing_about_the_models_own_probabilities() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.n, params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (1, None, (), (), False)
    assert not params.greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("temperature", 1),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**9),
        ("top_p", 1e-12),
        ("top_p", 1.0),
        ("top_p", 1),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("max_tokens", 1),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("seed", None),
        ("n", 1),
        ("min_tokens", 128),
    ],
)
def test_both_ends_of_every_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 2**31),
        ("repetition_penalty", 1e-3),
        ("top_k", 1.5),
        ("top_k", "3"),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0000001),
        ("top_p", math.nan),
        ("min_p", -1e-9),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("max_tokens", None),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", b"ab"),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("n", 0),
        ("n", 1.0),
    ],
)
def test_a_value_outside_is_refused_by_field_value_and_remedy(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{field: value})
    error = caught.value
    assert error.field == field
    parts = value if isinstance(value, list | bytes) else [value]
    assert error.value is value or error.value in parts or error.value != error.value
    assert error.remedy.endswith(".")
    assert str(error).startswith(f"{field}=")


@pytest.mark.parametrize(
    ("given", "kept"), [("x", ("x",)), (["x", "y"], ("x", "y")), (("x",), ("x",)), ((), ()), ({"x"}, ("x",))]
)
def test_stop_takes_one_string_or_several(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize(("given", "kept"), [(3, (3,)), ([3, 4], (3, 4)), (frozenset({5}), (5,)), (range(2), (0, 1))])
def test_stop_token_ids_take_one_id_or_several(given: Any, kept: tuple[int, ...]) -> None:
    assert SamplingParams(stop_token_ids=given).stop_token_ids == kept


@pytest.mark.parametrize("name", sorted(SamplingParams.refused))
def test_a_parameter_of_other_engines_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        SamplingParams(**{name: 1.1})
    assert (caught.value.field, caught.value.value, caught.value.problem) == (
        name,
        1.1,
        SamplingParams.refused[name].reason,
    )
    assert caught.value.remedy == SamplingParams.refused[name].remedy


@pytest.mark.parametrize(("name", "ours"), [("regex", "regex"), ("json", "json_schema"), ("guided_choice", "choice")])
def test_a_structure_that_is_given_as_a_parameter_is_spelt_out(name: str, ours: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        SamplingParams(**{name: "a"})
    assert caught.value.remedy == f"Use structured_outputs=StructuredOutputs({ours}=...)."


def test_refusals_and_fields_do_not_overlap() -> None:
    assert not SamplingParams.refused.keys() & SamplingParams.model_fields.keys()


def test_an_unknown_name_is_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(temprature=0.5)
    assert (caught.value.field, caught.value.value, caught.value.problem) == ("temprature", 0.5, "no such setting")
    for name in SamplingParams.model_fields:
        assert re.search(rf"\b{name}\b", caught.value.remedy)


def test_min_tokens_may_reach_max_tokens_and_not_pass_it() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(ContradictionError) as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert (caught.value.field, caught.value.value) == ("min_tokens", 5)
    assert "4 tokens at most" in caught.value.problem


def test_params_are_frozen() -> None:
    params = SamplingParams()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        params.temperature = 0.5  # type: ignore[misc]
    assert params.temperature == 1.0


def test_replace_validates_and_leaves_the_original() -> None:
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    assert params.replace(temperature=0.0) == SamplingParams(temperature=0.0, stop="x", seed=3)
    assert params.temperature == 0.5
    with pytest.raises(InputError):
        params.replace(top_p=0.0)
    with pytest.raises(ContradictionError):
        params.replace(min_tokens=1000)


def test_equal_params_hash_alike() -> None:
    assert len({SamplingParams(stop=["a"]), SamplingParams(stop="a"), SamplingParams()}) == 2


def test_greedy_means_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_rates_are_defined_as_the_field_defines_them() -> None:
    stats = RequestStats(num_target_passes=9, num_drafts=4, num_draft_tokens=20, num_accepted_tokens=10)
    assert stats.acceptance_rate == 0.5  # accepted / drafted, no bonus
    assert stats.mean_acceptance_length == 3.5  # 1 + accepted / drafts, the plain passes left out
    assert (RequestStats().acceptance_rate, RequestStats().mean_acceptance_length) == (0.0, 1.0)


def _completion(index: int) -> CompletionOutput:
    return CompletionOutput(index, f"t{index}", (index,), (TokenOrigin.PLAIN,), "length", None, RequestStats())


def test_a_request_shows_its_first_sample() -> None:
    out = RequestOutput(0, "p", (1,), (_completion(0), _completion(1)))
    assert (out.text, out.token_ids, out.origins, out.finish_reason) == ("t0", (0,), (TokenOrigin.PLAIN,), "length")
    assert out.stats == RequestStats()


@pytest.mark.parametrize("name", ["text", "token_ids", "origins", "finish_reason", "stats", "first"])
def test_a_failed_request_raises_its_own_error_when_read(name: str) -> None:
    error = NonFiniteLogitsError(0, "NaN", "Use float32.")
    with pytest.raises(NonFiniteLogitsError) as caught:
        getattr(RequestOutput(0, "p", (1,), (), error), name)
    assert caught.value is error


def test_origins_read_as_their_names() -> None:
    assert [str(origin) for origin in TokenOrigin] == ["plain", "accepted", "recovered", "bonus"]
