"""Keeps results in a folder from run to run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.bench.results import Results
from outrider.errors import InvalidParameterError


class Store:
    """Results in a folder. They are written after every cell, so that an interrupted run loses at most one cell.

    Args:
        folder: The folder. None keeps nothing.
    """

    NAME = "results.json"

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def open(self, machine: dict[str, Any]) -> Results:
        """The results of earlier runs on the same machine. Results of another machine are renamed and left aside.

        Raises:
            InvalidParameterError: The folder cannot be written, or the file in it does not hold results.
        """
        if self._folder is None:
            return Results(machine=machine)
        file = self._folder / self.NAME
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = Results.model_validate_json(file.read_text("utf-8")) if file.exists() else Results(machine=machine)
        except OSError as error:
            raise InvalidParameterError("out", str(self._folder), f"unusable ({error})", "Give a folder.") from None
        except (ValidationError, UnicodeDecodeError):
            raise InvalidParameterError(
                "out", str(file), "not the results of a run of this version", "Move it away, or give another folder."
            ) from None
        if found.machine == machine:
            found.notes.clear()  # every run adds its own
            return found
        aside = self._aside()
        file.rename(aside)
        fresh = Results(machine=machine)
        fresh.note(f"results of another machine or of other versions were set aside as {aside.name}")
        return fresh

    def _aside(self) -> Path:
        assert self._folder is not None
        names = (self._folder / f"results-{i}.json" for i in range(1, 10_000))
        return next(path for path in names if not path.exists())

    def save(self, results: Results) -> None:
        """Replace the file. An interruption leaves either the old file or the new one. What other work disturbed is left
        out, so that the next run measures it again."""
        if self._folder is not None:
            results = results.believed
            unfinished = self._folder / f"{self.NAME}.{os.getpid()}"
            unfinished.write_text(results.model_dump_json(indent=1) + "\n", "utf-8")
            unfinished.replace(self._folder / self.NAME)
