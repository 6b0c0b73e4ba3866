"""Measures the cost of passes on this machine, once for each model, and keeps it on disk."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from outrider import __version__
from outrider.govern.costs import CostTable
from outrider.model import keeping
from outrider.model.pass_costs import measure_context, measure_passes, sizes_of
from outrider.model.processor import device_name
from outrider.model.runner import ModelRunner

logger = logging.getLogger(__name__)


def calibrate(target: ModelRunner, drafts: Mapping[str, ModelRunner]) -> CostTable:
    """The costs of passes of a target and of draft models: as kept, or measured now and kept.

    Where nothing is kept or measuring fails, a table is assumed, and steps correct it.

    Args:
        target: The target.
        drafts: Draft models by the name of their method.
    """
    facts = {"machine": _machine(), "version": __version__, "target": _facts(target)}
    facts["drafts"] = {name: _facts(runner) for name, runner in sorted(drafts.items())}
    path = keeping.path_of("costs", facts)
    if path is None:
        return CostTable.assumed()
    known = keeping.read(path, lambda content: _table(content["table"], target, drafts))
    if known is None:
        try:
            known = _measured(target, drafts)
        except Exception:
            logger.exception("what passes cost could not be measured; it is assumed")
            return CostTable.assumed()
        keeping.write(path, {"of": facts, "table": asdict(known)})
    return known


def _measured(target: ModelRunner, drafts: Mapping[str, ModelRunner]) -> CostTable:
    passes = measure_passes(target)
    models = {name: measure_passes(runner) for name, runner in drafts.items()}
    return CostTable(passes, measure_context(target, passes), models)


def _machine() -> dict[str, Any]:
    return {"processor": platform.processor(), "host": platform.node(), "threads": torch.get_num_threads()}


def _facts(runner: ModelRunner) -> dict[str, Any]:
    """What the time of a pass depends on."""
    loaded = runner.loaded
    return keeping.identity(runner) | {
        "dtype": str(loaded.dtype),
        "device": [str(loaded.device), device_name(loaded.device)],
        "backend": runner.backend.name,
        "kernels": runner.backend.instruction_set(loaded.model),
        "bytes": runner.backend.weight_bytes(loaded.model),
    }


def _table(content: Mapping[str, Any], target: ModelRunner, drafts: Mapping[str, ModelRunner]) -> CostTable:
    """The table of a file for these models. Raises whatever it likes where the file holds something else."""
    if content["drafts"].keys() != drafts.keys():
        raise ValueError(f"it holds the draft models {sorted(content['drafts'])}")
    models = {name: _points(points, drafts[name]) for name, points in content["drafts"].items()}
    found = CostTable(_points(content["passes"], target), keeping.number(content["context_seconds"]), models)
    found.check()
    return found


def _points(points: Mapping[str, Any], runner: ModelRunner) -> dict[int, float]:
    """Seconds by number of rows: of all the numbers that are timed of this model, and of no other."""
    if points.keys() != {str(size) for size in sizes_of(runner)}:
        raise ValueError(f"it holds passes of {', '.join(points)} rows")
    return {int(rows): keeping.number(seconds) for rows, seconds in points.items()}
