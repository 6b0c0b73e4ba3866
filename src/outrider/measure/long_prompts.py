"""Makes long prompts: files to continue, passages to answer a question from, and diffs to apply.

The files are modules of Python's standard library as they are installed. The passages come from a generator with a fixed
seed. So nobody's text is kept in this project, and the same release of Python gives the same prompts.
"""

from __future__ import annotations

import difflib
import inspect
import keyword
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.resources import files
from random import Random
from typing import Any

from outrider.measure.tasks import Task

#: The fewest and the most tokens of a prompt, for the tokenizer of the embedded target.
LEAST, MOST = 1_000, 1_900
#: Modules that are long enough.
_MODULES = (
    "argparse", "configparser", "difflib", "mailbox", "textwrap", "tarfile", "zipfile", "statistics", "shutil", "ast",
    "calendar", "gzip", "heapq", "pprint", "random", "shlex",
)  # fmt: skip
#: The prompts are from this size on and grow by equal steps up to MOST. A few tokens are lost where a text is cut.
_SHORTEST = 1_060
_NUM_EDITS = 4
_NAMES = ("Mara", "Olin", "Teska", "Bram", "Ivo", "Senna", "Karel", "Dunja", "Pell", "Runa", "Aldo", "Nils", "Vera", "Jost")
_SURNAMES = ("Lind", "Harrow", "Voss", "Tamm", "Greel", "Okar", "Brandt", "Sorel", "Quist", "Maas", "Dorn", "Vale")
_PLACES = ("Velmo", "Karsund", "Ostra", "Tilde Bay", "Renholm", "Marrick", "Sandhook", "Uvale", "Brenna", "Coldwater")
_GOODS = ("copper", "dried fish", "salt", "lamp oil", "wool", "roof tiles", "apples", "paper", "rope", "barley", "glass")
_MONTHS = ("March", "April", "May", "June", "July", "August", "September")


def long_tasks(workload: str) -> list[Task]:
    """The prompts of one of the workloads that have long prompts, from LEAST to MOST tokens each.

    Args:
        workload: "long_files", "long_passages" or "long_diffs".
    """
    make = {"long_files": _file, "long_passages": _passage, "long_diffs": _diff}[workload]
    return [Task(f"{workload}-{i + 1}", workload, make(i, _size(i))) for i in range(len(_MODULES))]


def _size(number: int) -> int:
    """The most tokens of a prompt. The sizes come in a mixed order, so that the first few are near the middle together."""
    count = len(_MODULES)
    return _SHORTEST + (MOST - _SHORTEST) * ((7 * number + 8) % count) // (count - 1)


def _file(number: int, size: int) -> str:
    """The beginning of a module."""
    lines = _lines(number)
    return _longest(lambda n: "".join(lines[:n]), len(lines), size)


def _diff(number: int, size: int) -> str:
    """The beginning of a module, a diff for it, and the heading of the file that is to be written."""
    name, lines = f"{_MODULES[number]}.py", _lines(number)

    def prompt(n: int) -> str:
        before = lines[:n]
        diff = "".join(difflib.unified_diff(before, _edited(before), f"a/{name}", f"b/{name}", n=2))
        return f"# {name}\n{''.join(before)}\n\n# A diff for {name}:\n{diff}\n\n# {name} with the diff applied:\n"

    return _longest(prompt, len(lines), size)


def _lines(number: int) -> list[str]:
    return inspect.getsource(import_module(_MODULES[number])).splitlines(keepends=True)


def _edited(lines: list[str]) -> list[str]:
    """The lines with a few names changed, at places that are spread over them."""
    found = list(lines)
    for edit in range(_NUM_EDITS):
        first = len(lines) * (2 * edit + 1) // (2 * _NUM_EDITS)
        for place in range(first, len(lines)):
            names = [name for name in re.findall(r"\b[a-z_]{4,}\b", lines[place]) if not keyword.iskeyword(name)]
            if names:
                found[place] = re.sub(rf"\b{names[0]}\b", f"new_{names[0]}", lines[place])
                break
    return found


def _passage(number: int, size: int) -> str:
    """Entries of a harbour book, and a question about one of them."""
    chance = Random(number)
    entries = [_entry(chance) for _ in range(MOST // 10)]
    asked = chance.random()

    def prompt(n: int) -> str:
        paragraphs = [" ".join(entry["text"] for entry in entries[i : min(n, i + 5)]) for i in range(0, n, 5)]
        about = entries[int(asked * n)]
        question = "Question: On {day}, what did {who} bring to {to}, from where, and what was {who} paid?".format(**about)
        return "\n\n".join(["The harbour book", *paragraphs, f"{question}\nAnswer: On {about['day']}, {about['who']}"])

    return _longest(prompt, len(entries), size)


def _entry(chance: Random) -> dict[str, Any]:
    """One entry: what its question names, and its text."""
    day = f"{chance.randint(1, 30)} {chance.choice(_MONTHS)}"
    who = f"{chance.choice(_NAMES)} {chance.choice(_SURNAMES)}"
    origin, to = chance.sample(_PLACES, 2)
    goods = f"{chance.randint(3, 90)} crates of {chance.choice(_GOODS)}"
    text = f"On {day}, {who} brought {goods} from {origin} to {to} and was paid {chance.randint(12, 400)} crowns."
    return {"day": day, "who": who, "to": to, "text": text}


def _longest(make: Callable[[int], str], most: int, size: int) -> str:
    """The text of as many parts, from 1 to `most`, as have at most `size` tokens."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if num_tokens(make(middle)) <= size else (low, middle - 1)
    return make(low)


def num_tokens(text: str) -> int:
    """The number of tokens for the tokenizer of the embedded target."""
    return len(_tokenizer().encode(text).ids)


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str((files("outrider") / "assets" / "target" / "tokenizer.json").read_text("utf-8"))
