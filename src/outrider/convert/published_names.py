"""The names under which tensors of heads are published."""

from __future__ import annotations

from collections.abc import Mapping


def published(name: str, prefixes: Mapping[str, str]) -> str:
    """The name of a tensor in a format.

    Args:
        name: Here.
        prefixes: What names begin with there, and here.
    """
    for there, here in prefixes.items():
        if name.startswith(here):
            return there + name.removeprefix(here)
    return name
