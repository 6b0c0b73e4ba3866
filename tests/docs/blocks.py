"""The code blocks of the README and of the documentation site."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The file, relative to the repository.
        number: Counts the blocks of its page.
        language: What stands behind the fence.
    """

    page: str
    number: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}, {self.number}"


@dataclass(frozen=True)
class Command:
    """One command line of a console block, without its prompt and its comment."""

    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"

    @property
    def words(self) -> list[str]:
        """Its words, without variables before it and without where input comes from."""
        words = shlex.split(self.line.partition(" < ")[0])
        while re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words


def blocks(language: str) -> list[Block]:
    """All blocks of a language."""
    return [block for page in PAGES for block in _of(page) if block.language == language]


def commands() -> list[Command]:
    """All command lines."""
    return [Command(block.page, line) for block in blocks("console") for line in _lines(block.code)]


def _of(page: Path) -> Iterator[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for number, (language, code) in enumerate(found):
        yield Block(page.relative_to(ROOT).as_posix(), number, language, code)


def _lines(code: str) -> Iterator[str]:
    for line in code.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield re.sub(r"\s+# .*", "", line[2:]).rstrip()
