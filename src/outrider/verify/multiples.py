"""Which steps do the numbers of a schema go in? An automaton for `multipleOf` has a state for every remainder."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from math import lcm

#: What lets several schemas hold for one number, so that its remainders are those of their common multiple.
_COMBINING = frozenset(("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"))


def num_remainders(schema: object) -> int:
    """The most remainders that a number in a schema may leave; 1 where none has to be a multiple.

    Args:
        schema: A JSON schema.
    """
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
