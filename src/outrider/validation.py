"""Frozen, validated value types whose errors name the field, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from outrider.errors import InputError, InvalidParameterError, UnsupportedParameterError


class Frozen(BaseModel):
    """An immutable record; unknown names and values out of range raise an InputError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    #: Names other engines accept that are refused here, each with the reason.
    refused: ClassVar[dict[str, str]] = {}
    #: What to use instead of a refused name, where there is something.
    remedies: ClassVar[dict[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        for name in sorted(values.keys() & self.refused.keys()):
            raise UnsupportedParameterError(
                name, values[name], self.refused[name], self.remedies.get(name, "Leave it out.")
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _first_problem(type(self), error) from None

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self)(**{**dict(self), **changes})


def unknown_setting(owner: str, name: str, value: object, known: Iterable[str]) -> InvalidParameterError:
    """The error for a name that `owner` does not know: the nearest one that it does, and all of them."""
    names = sorted(known)
    return InvalidParameterError(
        name, value, "no such setting", f"{nearest(name, names)}{owner} knows: {', '.join(names)}."
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the known name that is most like this one, with a blank behind it; empty where none is like it."""
    return "".join(f"Did you mean {near}? " for near in get_close_matches(name, sorted(known), n=1))


def _first_problem(kind: type[Frozen], error: ValidationError) -> InputError:
    detail = min(
        error.errors(), key=lambda each: each["type"] == "missing"
    )  # what is missing may be there under a wrong name
    raised = detail.get("ctx", {}).get("error")
    if isinstance(raised, InputError):
        return raised
    field = ".".join(str(part) for part in detail["loc"][:1]) or kind.__name__
    if detail["type"] == "extra_forbidden":
        return unknown_setting(kind.__name__, field, detail["input"], kind.model_fields)
    problem = detail["msg"][0].lower() + detail["msg"][1:]
    described = kind.model_fields.get(field)
    remedy = (described.description if described else None) or f"See {kind.__name__}."
    return InvalidParameterError(field, detail["input"], problem, remedy)
