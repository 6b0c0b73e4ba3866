"""Prompts for the embedded pair, from the source of Python's standard library: to train on, and to measure with.

    python recipes/prompts.py DIR       # writes train.jsonl, unittest.jsonl, json.jsonl, and held-out ones beside them

A file of the library stands on the side where `train_target.py` put it (`library_files.py`). The target has never seen what
a draft is measured with. Two files hold one narrow kind of text alone: unit tests, of which the library has many, and JSON,
of which it has next to none. The documents of JSON are made here, from a fixed seed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from library_files import library_files

#: Prompts of the files that measure: some of the lines of a text, which a recorded answer follows.
PROMPT_LINES, ANSWER_LINES = 12, 24
HELD_OUT_TEXTS = 64


def is_test(text: str) -> bool:
    """Whether a file holds unit tests."""
    return "import unittest" in text and "def test_" in text


def measured(texts: list[str], rng: random.Random) -> Iterator[dict[str, str]]:
    """Prompts with what followed them, so that they serve for free writing and for replay alike."""
    size = PROMPT_LINES + ANSWER_LINES
    while True:
        lines = rng.choice(texts).splitlines(keepends=True)
        if len(lines) > size:
            start = rng.randrange(len(lines) - size)
            cut = start + PROMPT_LINES
            yield {"prompt": "".join(lines[start:cut]), "answer": "".join(lines[cut : start + size])}


def documents(rng: random.Random, count: int) -> list[str]:
    """Documents of JSON: lists of records as services log, order and answer them."""
    names = ("anna", "bo", "chen", "dara", "emil", "fatima", "goran", "hana")

    def order(number: int) -> dict[str, Any]:
        items = [{"sku": f"{rng.choice('ABC')}-{rng.randrange(1000)}", "count": rng.randrange(1, 9)} for _ in range(2)]
        return {"id": number, "customer": rng.choice(names), "items": items, "paid": rng.random() < 0.5}

    def entry(number: int) -> dict[str, Any]:
        level, path = rng.choice(("info", "warning", "error")), rng.choice(("/", "/login", "/orders", "/search"))
        return {"time": 1_700_000_000 + number, "level": level, "path": path, "ms": round(rng.random() * 90, 1)}

    def user(number: int) -> dict[str, Any]:
        name = rng.choice(names)
        return {
            "id": number,
            "name": name,
            "email": f"{name}@example.org",
            "roles": rng.sample(("read", "write", "admin"), 2),
        }

    found = []
    for _ in range(count):
        make, first = rng.choice((order, entry, user)), rng.randrange(900)
        found.append(json.dumps([make(first + place) for place in range(30)], indent=rng.choice((1, 2, 4))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(library_files())
    tests = [each for each in everything if is_test(each[2])]
    rng = random.Random(1)
    made = [(place % 50 == 0, Path(), text) for place, text in enumerate(documents(rng, 1000))]
    for name, chosen in (("", everything), ("unittest", tests), ("json", made)):
        train = [{"text": text} for held, _, text in chosen if not held]
        chances = measured([text for held, _, text in chosen if held], random.Random(0))
        held = [found for found, _ in zip(chances, range(HELD_OUT_TEXTS), strict=False)]
        kinds = (name or "train", f"{name}_held" if name else "held")
        for file, values in zip(kinds, (train, held), strict=True):
            lines = "".join(json.dumps(value) + "\n" for value in values)
            (folder / f"{file}.jsonl").write_text(lines, "utf-8")
            print(file, len(values))


if __name__ == "__main__":
    main()
