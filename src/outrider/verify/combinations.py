"""How many combinations of alternatives does a schema ask for? A library that merges schemas tries each by itself."""

from __future__ import annotations

from math import prod

#: Beyond this nobody has to know how many there are.
_MANY = 10**9


def num_combinations(schema: object) -> int:
    """The most combinations that alternatives come to which have to hold together, as five and five in an `allOf` are 25.

    Alternatives of one choice alone are no combinations, however many there are: 1 is returned where there is nothing else.

    Args:
        schema: A JSON schema.
    """
    try:
        return _Combinations(schema).most()
    except RecursionError:
        return _MANY


class _Combinations:
    def __init__(self, root: object) -> None:
        self._root = root
        self._alternatives: dict[int, int] = {}  # of schemas that were counted, or are being counted
        self._most = 1

    def most(self) -> int:
        waiting = [self._root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                self._count(value)
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
        return self._most

    def _count(self, schema: object) -> int:
        """In how many ways a schema may hold, as far as its keywords say it of the same value."""
        if not isinstance(schema, dict):
            return 1
        if id(schema) not in self._alternatives:
            self._alternatives[id(schema)] = 1  # one that refers to itself
            factors = [self._choices(schema.get(name)) for name in ("anyOf", "oneOf")]
            factors += [self._count(part) for part in _list(schema.get("allOf"))]
            factors.append(self._count(self._meant(schema.get("$ref"))))
            found = min(prod(factors), _MANY)
            if sum(factor > 1 for factor in factors) > 1:
                self._most = max(self._most, found)
            self._alternatives[id(schema)] = found
        return self._alternatives[id(schema)]

    def _choices(self, parts: object) -> int:
        return max(1, sum(self._count(part) for part in _list(parts)))

    def _meant(self, reference: object) -> object:
        """The schema that a reference into the same document names."""
        found = self._root
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
