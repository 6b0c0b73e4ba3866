"""What passes cost on this machine: measured once for each model and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from outrider import __version__
from outrider.govern.costs import CostTable
from outrider.model.row_costs import measure_context, measure_passes
from outrider.model.runner import ModelRunner

logger = logging.getLogger(__name__)

#: Where tables are kept, if set; "off" keeps none and measures nothing: a table is assumed, and steps correct it.
VARIABLE = "OUTRIDER_COSTS"


def calibrate(target: ModelRunner, drafts: Mapping[str, ModelRunner]) -> CostTable:
    """The costs of passes of a target and of draft models: as kept, or measured now and kept.

    A file that cannot be read, or holds something else, is measured anew. It is written whole or not at all.

    Args:
        target: The target.
        drafts: Draft models by the name of their method.
    """
    folder = os.environ.get(VARIABLE) or str(_cache() / "outrider" / "costs")
    if folder == "off":
        return CostTable.assumed()
    facts = {"machine": _machine(), "version": __version__, "target": _facts(target)}
    facts["drafts"] = {name: _facts(runner) for name, runner in sorted(drafts.items())}
    path = Path(folder) / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]}.json"
    known = _read(path)
    if known is None:
        passes = measure_passes(target)
        models = {name: measure_passes(runner) for name, runner in drafts.items()}
        known = CostTable(passes, measure_context(target, passes), models)
        _write(path, facts, known)
    return known


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _machine() -> dict[str, Any]:
    return {"processor": platform.processor(), "host": platform.node(), "threads": torch.get_num_threads()}


def _facts(runner: ModelRunner) -> dict[str, Any]:
    """What the time of a pass depends on."""
    loaded = runner.loaded
    config = loaded.model.config.to_json_string(use_diff=True)
    return {
        "model": loaded.name,
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "dtype": str(loaded.dtype),
        "device": str(loaded.device),
        "backend": runner.backend.name,
        "kernels": runner.backend.instruction_set(loaded.model),
        "bytes": runner.backend.weight_bytes(loaded.model),
    }


def _read(path: Path) -> CostTable | None:
    """The table of a file; None where there is none, or something else."""
    try:
        table = json.loads(path.read_text("utf-8"))["table"]
        models = {name: _points(points) for name, points in table["drafts"].items()}
        found = CostTable(_points(table["passes"]), float(table["context_seconds"]), models)
        if not 0.0 <= found.context_seconds < float("inf"):
            raise ValueError("a context makes no pass shorter")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s: no table of costs (%r); it is measured anew", path, error)
        return None
    return found


def _points(points: Mapping[str, float]) -> dict[int, float]:
    found = {int(rows): float(seconds) for rows, seconds in points.items()}
    if not found or min(found) < 1 or not all(0.0 < seconds < float("inf") for seconds in found.values()):
        raise ValueError("times must be positive")
    return found


def _write(path: Path, facts: Mapping[str, Any], table: CostTable) -> None:
    """Through a file beside it, so that whoever is interrupted leaves nothing half."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"of": facts, "table": asdict(table)}), "utf-8")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("%s: costs cannot be kept (%s)", path, error)
