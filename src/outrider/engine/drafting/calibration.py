"""What later processes begin with: the costs of passes on this machine, and what methods showed beside a target."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from outrider import __version__
from outrider.govern.acceptance import AcceptanceModel, Experience, Shares
from outrider.govern.costs import CostTable
from outrider.model import keeping
from outrider.model.memory import device_name, measure_context, measure_passes, sizes_of
from outrider.model.runner import ModelRunner
from outrider.propose.base import Proposer
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.settings import SpeculationConfig

# --- Measures the cost of passes on this machine, once for each model, and keeps it on disk.


logger = logging.getLogger(__name__)


def calibrate(target: ModelRunner, drafts: Mapping[str, ModelRunner]) -> CostTable:
    """The costs of passes of a target and of draft models, by the name of their method: as kept, or measured now and kept.

    Where nothing is kept or measuring fails, a table is assumed, and steps correct it.
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
    """The facts on which the time of a pass depends."""
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


# --- Keeps what methods showed beside a target, so that a later process begins with it.


#: Something is kept after so many observations of a method, and later after as many as there were, up to the second number.
_FIRST, _EVERY = 16, 192


class ExperienceFiles:
    """Files with what the methods of one governor showed in earlier processes, one for each method."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._kept = dict.fromkeys(paths, 0)

    @staticmethod
    def of(
        target: ModelRunner, members: Mapping[str, SpeculationConfig], proposers: Mapping[str, Proposer]
    ) -> ExperienceFiles:
        """A file for each method with all its settings, its draft model if it has one, and the target."""
        paths = {name: _path(target, config, proposers[name]) for name, config in members.items()}
        return ExperienceFiles({name: path for name, path in paths.items() if path is not None})

    def read(self) -> dict[str, Experience]:
        """The experience with methods, as far as a file holds some that can be true."""
        found = {name: keeping.read(path, _parsed) for name, path in self._paths.items()}
        return {name: experience for name, experience in found.items() if experience is not None}

    def keep(self, acceptance: AcceptanceModel) -> None:
        """Write the files of the methods of which enough was learnt since they were written."""
        for name, path in self._paths.items():
            version, kept = acceptance.version(name), self._kept[name]
            if version - kept >= min(max(kept, _FIRST), _EVERY):
                keeping.write(path, {"method": name, "learnt": asdict(acceptance.learnt(name))})
                self._kept[name] = version


def _path(target: ModelRunner, config: SpeculationConfig, proposer: Proposer) -> Path | None:
    draft = keeping.identity(proposer.runner) if isinstance(proposer, DraftModelProposer) else None
    try:
        settings = config.as_mapping()
    except Exception:  # a method of somebody else may have settings of any kind
        logger.exception("nothing is kept of what the method %s shows: its settings cannot be written", config.name)
        return None
    return keeping.path_of("acceptance", {"target": keeping.identity(target), "draft": draft, "method": settings})


def _parsed(content: Any) -> Experience:
    learnt = content["learnt"]
    return Experience(_shares(learnt["stands"]), _shares(learnt["exists"]))


def _shares(content: Mapping[str, Any]) -> Shares:
    tried, stood = (tuple(map(keeping.number, content[name])) for name in ("tried", "stood"))
    found = Shares(tried, stood, keeping.number(content["gained"]), keeping.number(content["confidence"]))
    found.check()
    return found
