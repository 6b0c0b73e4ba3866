"""Keeps what methods showed beside a target, so that a later process begins with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.govern.acceptance import AcceptanceModel, Experience
from outrider.govern.counts import Shares
from outrider.model import keeping
from outrider.model.runner import ModelRunner
from outrider.propose.base import Proposer
from outrider.propose.methods.draft_model import DraftModelProposer
from outrider.propose.speculation import SpeculationConfig

logger = logging.getLogger(__name__)

#: Something is kept after so many observations of a method, and later after as many as there were, up to the second number.
_FIRST, _EVERY = 16, 192


class ExperienceFiles:
    """What the methods of one governor showed in earlier processes, and what is kept of them for later ones.

    Args:
        paths: The file of each method.
    """

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
        """What methods showed, as far as a file says so that can be true."""
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
    found = Shares(tried, stood, keeping.number(content["gained"]))
    found.check()
    return found
