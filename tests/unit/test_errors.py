"""The exception tree: as drawn, and with what a caller needs to act on it."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import pickle
import pkgutil
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from inspect import signature
from typing import Any

import pytest

import outrider
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
from outrider.structured.grammar import GrammarError


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


class Unspeakable:
    """It has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [Unspeakable(), _nested(100_000)], ids=lambda v: type(v).__name__)
def test_a_value_without_a_text_is_named_by_its_type(value: object) -> None:
    error = InvalidParameterError("stop", value, "no string", "Use a string.")
    assert str(error) == f"stop=<{type(value).__name__}>: no string. Use a string."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


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


# -- errors leave the process ------------------------------------------------------------------------------------------


def _all_kinds() -> list[type[OutriderError]]:
    """OutriderError and everything that derives from it in any module of the package."""
    for module in pkgutil.walk_packages(outrider.__path__, "outrider."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds: list[type[OutriderError]] = []
    waiting: list[type[OutriderError]] = [OutriderError]
    while waiting:
        kind = waiting.pop()
        kinds.append(kind)
        waiting += [below for below in kind.__subclasses__() if below.__module__.startswith("outrider.")]
    return list(dict.fromkeys(kinds))


def _example(kind: type[OutriderError]) -> OutriderError:
    """An error with something in every argument, a cause, notes and an attribute of somebody else."""
    parameters = signature(kind.__init__).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        names.append("message")
    error = kind(*(7 if name == "request_id" else f"some {name}" for name in names))
    error.__cause__ = KeyError("reason")
    error.add_note("first note")
    error.add_note("second note")
    error.noticed_by = ["somebody else"]  # type: ignore[attr-defined]
    return error


def _ways_to_copy() -> dict[str, Callable[[OutriderError], OutriderError]]:
    def through_pickle(protocol: int) -> Callable[[OutriderError], OutriderError]:
        return lambda error: pickle.loads(pickle.dumps(error, protocol))

    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    return {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        **{f"pickle protocol {protocol}": through_pickle(protocol) for protocol in protocols},
    }


WAYS = _ways_to_copy()


@pytest.mark.parametrize("way", WAYS)
def test_every_error_can_be_copied_whole(way: str) -> None:
    kinds = _all_kinds()
    assert {InvalidParameterError, NoiseReuseError, GrammarError} <= set(kinds)
    for kind in kinds:
        error = _example(kind)
        found = WAYS[way](error)
        assert type(found) is kind
        assert found is not error
        assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
        assert found.__notes__ == ["first note", "second note"]
        assert repr(found.__cause__) == repr(error.__cause__)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_without_a_cause_has_none_afterwards(way: str) -> None:
    found = WAYS[way](NoiseReuseError("twice"))
    assert (found.__cause__, found.__suppress_context__) == (None, False)


class Unreadable:
    """It can be written by pickle and cannot be read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()

    def __repr__(self) -> str:
        return "<unreadable>"


def _refuse() -> None:
    raise RuntimeError("nobody can read this")


class StrangeError(Exception):
    """Its __init__ takes other arguments than it keeps, so that pickle writes what it cannot read."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value", [lambda: None, pickle, (n for n in "abc"), Unreadable(), [lambda: None] * 100], ids=lambda v: type(v).__name__
)
def test_a_value_that_cannot_travel_goes_as_its_short_text(value: object, protocol: int) -> None:
    error = InvalidParameterError("stop", value, "no string", "Use a string.")
    found = pickle.loads(pickle.dumps(error, protocol))
    assert found.value == errors._short(value)
    assert len(found.value) <= 80
    assert (str(found), found.field, found.remedy) == (str(error), "stop", "Use a string.")


@pytest.mark.parametrize("value", [lambda: None, pickle, (n for n in "abc"), Unreadable()], ids=lambda v: type(v).__name__)
def test_copies_keep_a_value_that_cannot_travel(value: object) -> None:
    error = InvalidParameterError("stop", value, "no string", "Use a string.")
    assert copy.copy(error).value is value
    assert copy.deepcopy(error).value in (value, errors._short(value))


def test_a_deep_copy_shares_no_value() -> None:
    error = InvalidParameterError("stop", [["a"]], "no string", "Use a string.")
    found = copy.deepcopy(error)
    assert found.value == [["a"]]
    assert found.value[0] is not error.value[0]
    assert copy.copy(error).value is error.value


@pytest.mark.parametrize("cause", [StrangeError("a", "b"), KeyError(lambda: None)], ids=lambda c: type(c).__name__)
def test_a_cause_that_cannot_travel_is_left_behind(cause: Exception) -> None:
    error = ForwardError(3, "raised", "See its cause.")
    error.__cause__ = cause
    assert copy.copy(error).__cause__ is cause
    found = pickle.loads(pickle.dumps(error))
    assert (str(found), found.__cause__) == (str(error), None)


def test_causes_that_run_in_a_circle_end_somewhere() -> None:
    first, second = ForwardError(1, "raised", "Look."), ForwardError(2, "raised", "Look.")
    first.__cause__, second.__cause__ = second, first
    for found in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), copy.copy(first)):
        assert str(found) == str(first)
        assert str(found.__cause__) == str(second)


def test_a_long_chain_of_causes_costs_no_more_than_its_length() -> None:
    error = NoiseReuseError("0")
    for number in range(1, 40):  # a cost that doubled with each cause would never end
        error, cause = NoiseReuseError(str(number)), error
        error.__cause__ = cause
    found = pickle.loads(pickle.dumps(error))
    texts = []
    while found is not None:
        texts.append(str(found))
        found = found.__cause__
    assert texts == [str(number) for number in reversed(range(40))]


def _fails(value: object) -> None:
    """What a worker process runs."""
    raise InvalidParameterError("prompt", pickle if value == "module" else value, "refused", "Use another.")


@pytest.mark.by_change("src/outrider/errors.py")
def test_a_worker_process_hands_its_error_over() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_fails, value) for value in (5, "module")]
        raised = [future.exception(timeout=120) for future in futures]
    for error, value in zip(raised, (5, errors._short(pickle)), strict=True):
        assert isinstance(error, InvalidParameterError), error
        assert (error.field, error.value, error.remedy) == ("prompt", value, "Use another.")
