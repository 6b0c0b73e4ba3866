"""Which steps do the numbers of a schema go in? An automaton for `multipleOf` has a state for every remainder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from math import lcm

#: What lets several schemas hold for one number, so that its remainders are those of their common multiple.
_COMBINING = frozenset(("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"))


def num_remainders(written: str) -> int:
    """The most remainders that a number in a schema may leave; 1 where none has to be a multiple.

    Args:
        written: A JSON schema, or a grammar that has schemas in it, behind `%json`.
    """
    return max((_of(schema) for schema in _schemas(written)), default=1)


def _schemas(written: str) -> Iterator[object]:
    """The JSON values of a text, where they can be read; the library that reads the rest says what is wrong."""
    starts = [place + len("%json") for place in _places(written, "%json")] or [0]
    decoder = json.JSONDecoder()
    for start in starts:
        text = written[start:].lstrip()
        try:
            yield decoder.raw_decode(text)[0]
        except (ValueError, RecursionError):
            continue


def _places(text: str, part: str) -> Iterator[int]:
    place = text.find(part)
    while place >= 0:
        yield place
        place = text.find(part, place + 1)


def _of(schema: object) -> int:
    steps, combined, waiting = list[Decimal](), False, [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            combined = combined or bool(value.keys() & _COMBINING)
            steps += _step(value.get("multipleOf"))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    if not steps:
        return 1
    scale = min(0, *(int(step.as_tuple().exponent) for step in steps))
    numbers = [int(step.scaleb(-scale)) for step in steps]
    return lcm(*numbers) if combined else max(numbers)


def _step(value: object) -> list[Decimal]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    try:
        step = Decimal(repr(value)).normalize()
    except InvalidOperation:
        return []
    return [step] if step.is_finite() and step > 0 else []
