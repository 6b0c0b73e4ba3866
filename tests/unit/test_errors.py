"""The exception tree: as drawn, and with what a caller needs to act on it."""

from __future__ import annotations

import re

import pytest

from outrider import errors
from outrider.errors import (
    ContradictionError,
    ForwardError,
    InputError,
    InvalidParameterError,
    ModelError,
    ModelLoadError,
    NoiseReuseError,
    NonFiniteLogitsError,
    OutriderError,
    RequestError,
)


def _drawn() -> dict[str, str]:
    """Class name to parent name, read off the tree in the module's docstring."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    trail: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"^([│├└─ ]*)(\w+Error)\b", line)
        if found is None:
            continue
        depth, name = len(found[1]), found[2]
        trail = [(d, n) for d, n in trail if d < depth]
        parents[name] = trail[-1][1] if trail else "Exception"
        trail.append((depth, name))
    return parents


def _defined() -> dict[str, str]:
    classes = (c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception))
    return {c.__name__: c.__bases__[0].__name__ for c in classes}


def test_the_docstring_draws_the_tree_that_is() -> None:
    assert _drawn() == _defined()
    assert len(_drawn()) > 10


def test_input_errors_are_value_errors_too() -> None:
    assert issubclass(InputError, ValueError)
    assert re.search(r"InputError \(ValueError\)", errors.__doc__ or "")


@pytest.mark.parametrize("kind", [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, InputError)])
def test_input_errors_say_field_value_problem_and_remedy(kind: type[InputError]) -> None:
    error = kind("top_p", 2.0, "above 1", "Use at most 1.")
    assert (error.field, error.value, error.problem, error.remedy) == ("top_p", 2.0, "above 1", "Use at most 1.")
    assert str(error) == "top_p=2.0: above 1. Use at most 1."


@pytest.mark.parametrize("kind", [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ModelError)])
def test_model_errors_name_the_model(kind: type[ModelError]) -> None:
    error = kind("some/model", "no weights", "Download it.")
    assert (error.model, error.problem, error.remedy) == ("some/model", "no weights", "Download it.")
    assert str(error) == "model 'some/model': no weights. Download it."


@pytest.mark.parametrize("kind", [RequestError, NonFiniteLogitsError, ForwardError])
def test_request_errors_name_the_request(kind: type[RequestError]) -> None:
    error = kind(7, "NaN", "Use float32.")
    assert (error.request_id, str(error)) == (7, "request 7: NaN. Use float32.")


def test_a_long_value_is_shown_short_and_kept_whole() -> None:
    value = list(range(10_000))
    error = InvalidParameterError("stop", value, "too many", "Use fewer.")
    assert error.value is value
    assert len(str(error)) < 150
    assert "…" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        ContradictionError("min_tokens", 3, "more than max_tokens=2", "Lower it."),
        ModelLoadError("m", "gone", "Look."),
        ForwardError(3, "raised", "See its cause."),
        NoiseReuseError("twice"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_one_clause_catches_everything_raised_on_purpose(error: OutriderError) -> None:
    with pytest.raises(OutriderError):
        raise error
