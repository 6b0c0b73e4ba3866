"""What schemas say of the arguments of tools, and arguments that calls write without quotes."""

from __future__ import annotations

import ast
import json
from typing import Any


def member_of(schema: Any, name: str) -> Any:
    """The schema of a member of an object; None where there is none, or where it is malformed."""
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    return properties[name] if isinstance(properties, dict) and name in properties else schema.get("additionalProperties")


def resolved(schema: Any, root: Any) -> Any:
    """A schema that refers to a definition, as that definition."""
    for _ in range(16):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        found: Any = root
        for part in filter(None, schema["$ref"].removeprefix("#").split("/")):
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return schema


def kinds_of(schema: Any, root: Any = None) -> set[str]:
    """The types that a schema allows a value, as far as it says; empty where it does not, or where it is malformed."""
    found, waiting, seen = set[str](), [schema], set[int]()
    while waiting:
        each = resolved(waiting.pop(), root)
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        kind = each.get("type")
        if kind is not None:
            found |= {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
            continue
        values = each.get("enum", [each["const"]] if "const" in each else [])
        found |= {_kind(value) for value in values} if isinstance(values, list) else set()
        for part in (each.get(name) for name in ("anyOf", "oneOf", "allOf")):
            waiting += part if isinstance(part, list) else []
    return found


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def plain_text(value: Any) -> str:
    """A value as calls without quotes write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def typed(text: str, kinds: set[str]) -> Any:
    """A value that is written as it is: a text where it may be one and is nothing else that it may be."""
    if kinds == {"string"}:
        return text
    try:
        found = _finite(json.loads(text))
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text) if "string" not in kinds else text
    kind = _kind(found)
    return text if "string" in kinds and kind not in kinds and not (kind == "integer" and "number" in kinds) else found


def from_python(text: str) -> Any:
    """A value that is written as in Python, or as in JSON."""
    try:
        return _finite(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        return _finite(json.loads(text))
    except RecursionError:
        raise ValueError(text) from None


def _finite(value: Any) -> Any:
    """Returns the same value. Raises ValueError for numbers that JSON does not have, and TypeError for other values."""
    json.dumps(value, allow_nan=False)
    return value
