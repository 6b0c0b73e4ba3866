"""What an examination found: facts with a level, in plain words, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How grave a finding is."""

    OK = "ok"
    NOTE = "note"  # worth knowing; speculation works nonetheless
    USELESS = "useless"  # speculation gains nothing
    WRONG = "wrong"  # something is broken or does not fit


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        topic: What it is about, like "vocabulary".
        level: How grave it is.
        text: What was found, as a sentence.
        remedy: What to do about it, as a sentence; empty where nothing is to be done.
    """

    topic: str
    level: Level
    text: str
    remedy: str = ""
