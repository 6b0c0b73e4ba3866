"""Keeps what the steps of a stage found, in a file that is written after each of them."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Record:
    """The results of a stage, or of a part of one.

    Args:
        path: The file.
        seconds: Steps that would begin later than so many seconds after now are left out.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._begin, self._seconds = path, time.perf_counter(), seconds
        self.steps: dict[str, dict[str, Any]] = {}

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Do something, and keep what it returns or how it failed. Returns what it returns; None where it failed."""
        begin = time.perf_counter()
        found = None
        if begin - self._begin > self._seconds:
            self.steps[name] = {"left_out": "no time was left"}
        else:
            try:
                found = work()
                self.steps[name] = {"result": found}
            except Exception as error:  # whatever a GPU says, later steps go on
                self.steps[name] = {
                    "error": f"{type(error).__name__}: {error}"[:3000],
                    "at": traceback.format_exc()[-3000:],
                }
            self.steps[name]["seconds"] = round(time.perf_counter() - begin, 3)
        self.write()
        print(f"{name}: {json.dumps(self.steps[name], default=str)[:1200]}", flush=True)
        return found

    def step_of(self, name: str, work: Callable[[], Any], about: Callable[[Any], Any]) -> Any:
        """As `step`, for work whose result is no JSON: what `about` says of it is kept."""
        made: list[Any] = []

        def both() -> Any:
            made.append(work())
            return about(made[0])

        self.step(name, both)
        return made[0] if made else None

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.steps, indent=1, default=str) + "\n", "utf-8")
