"""The base of requests' objects: how a body is read, and how its first fault is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, cast, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, PrivateAttr, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails

from outrider.config import Refusal, unknown_setting
from outrider.errors import InputError, InvalidParameterError, UnsupportedParameterError
from outrider.params import SamplingParams
from outrider.server.errors import ApiError


def _fail_fast(schema: Any) -> None:
    """Change a schema of pydantic so that all lists in it end at their first fault."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Shape(BaseModel):
    """An object of a request. A field that is null counts as not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    refused: ClassVar[dict[str, Refusal]] = {}
    passed_over: ClassVar[frozenset[str]] = frozenset()
    _ignored: tuple[str, ...] = PrivateAttr(())
    _names: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The object that a body holds."""
        values = _object(body)
        ignored = sorted(name for name in values.keys() & cls.passed_over if values.pop(name) is not None)
        for name in [name for name in values if name in cls.refused]:
            refusal, value = cls.refused[name], values.pop(name)
            if value is not None and value not in refusal.neutral:
                raise UnsupportedParameterError(name, value, refusal.reason, refusal.remedy)
        return cls.said_again(values, ignored)

    @classmethod
    def said_again(
        cls, values: Mapping[str, Any], ignored: Iterable[str] = (), names: Mapping[str, str] | None = None
    ) -> Self:
        """The object with these fields.

        Args:
            values: The fields. One that is None counts as not given.
        """
        given = {name: value for name, value in values.items() if value is not None}
        try:
            found = cls.model_validate(given)
        except (ValueError, RecursionError) as error:
            raise _first_problem(cls, error) from None
        found._ignored, found._names = tuple(ignored), dict(names or {})
        return found

    @property
    def ignored(self) -> tuple[str, ...]:
        """The fields that were passed over."""
        return self._ignored

    @property
    def names(self) -> Mapping[str, str]:
        """What the request calls fields that have other names here."""
        return self._names

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A list is read up to its first fault. A million faults would take seconds, and one is told."""
        found = handler(source)
        _fail_fast(found)
        return found


def _whole_number(written: str) -> int:
    """A number of a request. Python writes none of more than 4,300 digits, and a product of shorter ones may have more."""
    if len(written) > _MOST_DIGITS:
        raise ApiError(
            400, f"a whole number of {len(written):,} digits is too long. Use up to {_MOST_DIGITS}", code="invalid_value"
        )
    return int(written)


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body.decode("utf-8-sig"), parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON ({reason})", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is JSON, but no object", code="invalid_json")
    if _HALF_WRITTEN.search(body):
        _check_characters(values)
    return values


#: Half of a pair that stands for one character in UTF-16: JSON can write it alone, and then it is no character.
_HALF_WRITTEN, _HALF = re.compile(rb"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")


def _check_characters(values: dict[str, Any]) -> None:
    """Raise InvalidParameterError where a text of a request, or the name of a field, is not valid Unicode."""
    left: list[tuple[tuple[str, ...], Any]] = [((), values)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [((*path, name), part) for name, part in value.items()]
        elif isinstance(value, list):
            left += [((*path, str(place)), part) for place, part in enumerate(value)]
        for text in (value, path[-1] if path else ""):
            if isinstance(text, str) and _HALF.search(text):
                where = ".".join(path).encode("ascii", "backslashreplace").decode()
                raise InvalidParameterError(where, text, "it is not valid Unicode", "Give text in UTF-8.")


#: Digits of a whole number, far beyond any that means something.
_MOST_DIGITS = 100
#: What pydantic writes into the path of an error where a field may have values of several kinds, or has a check of its own.
_KINDS = ("list", "dict", "str", "int", "float", "function-before")


def _first_problem(kind: type[Shape], error: Exception) -> Exception:
    if not isinstance(error, ValidationError):
        return ApiError(400, f"the body cannot be read ({error})", code="invalid_json")
    details = _in_json(error)
    detail = max(
        (each for each in details if each["loc"][:1] == details[0]["loc"][:1]), key=lambda each: len(_path(each["loc"]))
    )
    path = _path(detail["loc"])
    raised = detail.get("ctx", {}).get("error")
    if isinstance(raised, InputError) and raised.value is None:  # null counts as not given
        return _missing([*path, raised.field], f"{raised.problem[0].upper()}{raised.problem[1:]}. {raised.remedy}")
    if isinstance(raised, InputError):
        return type(raised)(".".join((*path, raised.field)), raised.value, raised.problem, raised.remedy)
    if detail["type"] == "extra_forbidden":
        *places, name = detail["loc"]
        return _unknown(kind, _path(places), str(name), detail["input"])
    if detail["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON ({detail['msg']})", code="invalid_json")
    if detail["type"] == "missing":
        return _missing(path, _remedy(kind, path, detail["type"]))
    problem = _joined([each["msg"] for each in details if _path(each["loc"]) == path])
    return InvalidParameterError(".".join(path), detail["input"], problem, _remedy(kind, path, detail["type"]))


def _missing(path: list[str], what: str) -> ApiError:
    """The error for a field that an object has to have."""
    where = ".".join(path)
    return ApiError(400, f"{where}: the field is missing. {what}", param=where, code="missing_field")


#: What may stand where pydantic found something else, by the type of its error.
_KINDS_OF_VALUE = {
    "int_type": "Use a whole number.",
    "int_from_float": "Use a whole number.",
    "float_type": "Use a number.",
    "bool_type": "Use true or false.",
    "string_type": "Use a text.",
    "list_type": "Use a list.",
    "dict_type": "Use an object.",
}


def _remedy(kind: type[Shape], path: list[str], problem: str) -> str:
    """What a field may be: in its own words, in those of the engine's parameter of this name, or by its type."""
    for owner in (kind, SamplingParams):
        described = owner.model_fields.get(path[0]) if path else None
        if described is not None and described.description:
            return described.description
    return _KINDS_OF_VALUE.get(problem, "See docs/reference/server.md for what it may be.")


def _unknown(kind: type[Shape], places: list[str], name: str, value: object) -> InvalidParameterError:
    """The error for a name that the object it stands in does not know."""
    for place in places:
        kind = next(_shapes(kind.model_fields[place].annotation), kind) if place in kind.model_fields else kind
    owner = next((place for place in reversed(places) if not place.isdigit()), "A request")
    found = unknown_setting(owner, name, value, (field.alias or each for each, field in kind.model_fields.items()))
    return InvalidParameterError(".".join((*places, name)), value, found.problem, found.remedy)


def _shapes(annotation: Any) -> Iterator[type[Shape]]:
    """The objects in a type, wherever they stand in it."""
    if isinstance(annotation, type) and issubclass(annotation, Shape):
        yield annotation
    for part in get_args(annotation):
        yield from _shapes(part)


def _in_json(error: ValidationError) -> list[ErrorDetails]:
    """What is wrong, in the words of JSON: objects and arrays, where Python has dictionaries and lists."""
    details = [cast(InitErrorDetails, each) for each in error.errors(include_url=False)]
    return ValidationError.from_exception_data(error.title, details, input_type="json").errors()


def _path(places: Iterable[int | str]) -> list[str]:
    """Where an error is, without the kinds of value that a field may have."""
    return [str(part) for part in places if str(part).partition("[")[0] not in _KINDS]


def _joined(messages: list[str]) -> str:
    """What is wrong with one value, where a field may have several kinds of it."""
    begin = "Input should be "
    if all(message.startswith(begin) for message in messages):
        return "input should be " + " or ".join(dict.fromkeys(message.removeprefix(begin) for message in messages))
    return messages[0][0].lower() + messages[0][1:]
