"""Measures the cost of passes on this machine, once for each model, and keeps it on disk."""

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
from outrider.model.row_costs import measure_context, measure_passes, sizes_of
from outrider.model.runner import ModelRunner

logger = logging.getLogger(__name__)

#: Where tables are kept, if set; "off" keeps none and measures nothing: a table is assumed, and steps correct it.
VARIABLE = "OUTRIDER_COSTS"


def calibrate(target: ModelRunner, drafts: Mapping[str, ModelRunner]) -> CostTable:
    """The costs of passes of a target and of draft models: as kept, or measured now and kept.

    A file that cannot be read, holds something else or says what cannot be is measured anew. It is written whole or not at
    all. Where measuring fails, a table is assumed, and steps correct it.

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
    known = _read(path, target, drafts)
    if known is None:
        try:
            known = _measured(target, drafts)
        except Exception:
            logger.exception("what passes cost could not be measured; it is assumed")
            return CostTable.assumed()
        _write(path, facts, known)
    return known


def _measured(target: ModelRunner, drafts: Mapping[str, ModelRunner]) -> CostTable:
    passes = measure_passes(target)
    models = {name: measure_passes(runner) for name, runner in drafts.items()}
    return CostTable(passes, measure_context(target, passes), models)


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


def _read(path: Path, target: ModelRunner, drafts: Mapping[str, ModelRunner]) -> CostTable | None:
    """The table of a file for these models; None where there is none, or something else."""
    try:
        table = json.loads(path.read_text("utf-8"))["table"]
        if table["drafts"].keys() != drafts.keys():
            raise ValueError(f"it holds the draft models {sorted(table['drafts'])}")
        models = {name: _points(points, drafts[name]) for name, points in table["drafts"].items()}
        found = CostTable(_points(table["passes"], target), _number(table["context_seconds"]), models)
        found.check()
    except FileNotFoundError:
        return None
    except Exception as error:  # a file may hold anything
        logger.warning("%s: no table of costs (%r); it is measured anew", path, error)
        return None
    return found


def _points(points: Mapping[str, Any], runner: ModelRunner) -> dict[int, float]:
    """Seconds by number of rows: of all the numbers that are timed of this model, and of no other."""
    if points.keys() != {str(size) for size in sizes_of(runner)}:
        raise ValueError(f"it holds passes of {', '.join(points)} rows")
    return {int(rows): _number(seconds) for rows, seconds in points.items()}


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _write(path: Path, facts: Mapping[str, Any], table: CostTable) -> None:
    """Through a file beside it, so that whoever is interrupted leaves nothing half."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"of": facts, "table": asdict(table)}), "utf-8")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("%s: costs cannot be kept (%s)", path, error)
