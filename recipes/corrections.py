"""Texts for a model that corrects: lines of code from a small generator, and the same lines with faults planted in them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

_NAMES = (
    "account", "address", "balance", "batch", "branch", "buffer", "cache", "column", "count", "counter", "customer",
    "data", "date", "default", "depth", "engine", "entry", "error", "event", "field", "file", "filter", "folder", "group",
    "height", "index", "invoice", "item", "key", "label", "length", "level", "limit", "line", "member", "message",
    "method", "model", "module", "name", "node", "number", "offset", "option", "order", "output", "owner", "packet",
    "parent", "path", "payment", "port", "position", "prefix", "price", "queue", "rate", "reader", "record", "region",
    "request", "result", "row", "sample", "score", "server", "session", "shape", "size", "source", "state", "status",
    "stream", "suffix", "table", "target", "task", "text", "thread", "time", "token", "total", "user", "value", "weight",
)  # fmt: skip
_VERBS = (
    "add", "build", "check", "close", "count", "find", "load", "make", "merge", "open", "read", "save", "send", "write",
)  # fmt: skip
_OPERATORS = ("+", "-", "*", "/", "%", "==", "!=", "<", ">", "<=", ">=")
#: Words that are misspelt, each always in the ways that `_misspelt` knows.
_WORDS = ("return", "import", "while", "print", "range", "raise", "False", "self", "None", "True", "else", "from", "with")


@dataclass(frozen=True)
class Correction:
    """What is read, and what is to be written.

    Attributes:
        source: The text with faults.
        text: The same text without them.
    """

    source: str
    text: str


def corrections(seed: int, faults: float = 0.06, lines: tuple[int, int] = (1, 9)) -> Iterator[Correction]:
    """Texts without an end, always the same ones for a seed.

    Args:
        seed: Of everything that is drawn.
        faults: How many of the places where a fault may be have one. Every text has another share, up to twice this one.
        lines: The fewest and the most lines of a text.
    """
    rng = random.Random(seed)
    while True:
        text = "".join(_function(rng, rng.randint(*lines)))
        yield Correction(_with_faults(rng, text, rng.uniform(0, 2 * faults)), text)


def _name(rng: random.Random) -> str:
    return "_".join(rng.sample(_NAMES, rng.choice((1, 1, 2))))


def _value(rng: random.Random, names: list[str]) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(names)
    if kind < 0.8:
        return str(rng.randrange(rng.choice((10, 100, 1000))))
    return f'"{rng.choice(_NAMES)}"' if kind < 0.92 else rng.choice(("None", "True", "False"))


def _call(rng: random.Random, names: list[str]) -> str:
    values = ", ".join(_value(rng, names) for _ in range(rng.randint(1, 3)))
    return f"{rng.choice(_VERBS)}_{rng.choice(_NAMES)}({values})"


def _expression(rng: random.Random, names: list[str]) -> str:
    kind = rng.random()
    if kind < 0.4:
        return f"{_value(rng, names)} {rng.choice(_OPERATORS)} {_value(rng, names)}"
    return _call(rng, names) if kind < 0.75 else f"self.{rng.choice(names)}"


def _function(rng: random.Random, num_lines: int) -> Iterator[str]:
    """The lines of a function, with their ends."""
    names = [_name(rng) for _ in range(rng.randint(2, 4))]
    yield f"def {rng.choice(_VERBS)}_{_name(rng)}({', '.join(names)}):\n"
    depth = 1
    for _ in range(num_lines):
        kind, indent = rng.random(), "    " * depth
        if kind < 0.4:
            yield f"{indent}{rng.choice(names)} = {_expression(rng, names)}\n"
        elif kind < 0.55:
            yield f"{indent}{_call(rng, names)}\n"
        elif kind < 0.7 and depth < 3:
            opened = rng.choice(("if", "while"))
            yield f"{indent}{opened} {_expression(rng, names)}:\n"
            depth += 1
        elif kind < 0.8 and depth < 3:
            yield f"{indent}for {rng.choice(_NAMES)} in range({_value(rng, names)}):\n"
            depth += 1
        else:
            yield f"{indent}return {_expression(rng, names)}\n"
            depth = max(1, depth - 1)


#: What may be wrong, and how it is made so.
_SPACED = re.compile(r" (==|!=|<=|>=|[-+*/%=<>]) ")
_PLACES = re.compile(rf" (?:==|!=|<=|>=|[-+*/%=<>]) |, |:\n|\"|\b(?:{'|'.join(_WORDS)})\b|\b(?:{'|'.join(_NAMES)})")


def _with_faults(rng: random.Random, text: str, share: float) -> str:
    return _PLACES.sub(lambda found: _fault(rng, found[0]) if rng.random() < share else found[0], text)


def _fault(rng: random.Random, part: str) -> str:
    if _SPACED.fullmatch(part):
        return rng.choice((part.strip(), part[1:], part[:-1], f" {part}"))
    if part == ", ":
        return rng.choice((",", " , "))
    if part == ":\n":
        return rng.choice(("\n", " :\n"))
    return "'" if part == '"' else _misspelt(rng, part)


def _misspelt(rng: random.Random, word: str) -> str:
    """The word with one letter left out, doubled, or behind the next one."""
    at = rng.randrange(len(word) - 1)
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return rng.choice((word[:at] + word[at + 1 :], word[: at + 1] + word[at:], swapped))
