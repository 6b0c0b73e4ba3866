"""Keeps what was measured and learnt in files, for later processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from outrider.model.runner import ModelRunner

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

#: Names the folder of the files, if set; "off" keeps nothing.
VARIABLE = "OUTRIDER_COSTS"


def path_of(kind: str, facts: Mapping[str, Any]) -> Path | None:
    """Where something is kept that holds for these facts alone; None where nothing is kept."""
    folder = os.environ.get(VARIABLE) or str(_cache() / "outrider" / "costs")
    if folder == "off":
        return None
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    return Path(folder) / f"{kind}-{digest}.json"


def read(path: Path, parse: Callable[[Any], _T]) -> _T | None:
    """What a file holds; None where there is none, or something else.

    Args:
        path: Of the file.
        parse: Makes a checked value of what the file says, and may raise anything.
    """
    try:
        return parse(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except Exception as error:  # a file may hold anything
        logger.warning("%s: it is ignored (%r)", path, error)
        return None


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Through a file beside it, so that whoever is interrupted leaves nothing half. A folder that cannot be written does no
    harm."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content), "utf-8")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("%s: it cannot be kept (%s)", path, error)


def number(value: Any) -> float:
    """A number of a file; raises ValueError where it is none."""
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def identity(runner: ModelRunner) -> dict[str, Any]:
    """Which model it is, and whether its rows are rounded: its products then take another time, and its texts differ."""
    loaded = runner.loaded
    config = loaded.model.config.to_json_string(use_diff=True)
    digest = hashlib.sha256(config.encode()).hexdigest()
    return {"model": loaded.name, "config": digest, "rounds_rows": loaded.rounds_rows}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
