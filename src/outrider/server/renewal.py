"""Reads the profile of a running server again, so that a new head drafts without a restart."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from outrider.errors import ContradictionError, InvalidParameterError, OutriderError
from outrider.profile import read_profile
from outrider.propose.speculation import SpeculationConfig
from outrider.server.logs import log
from outrider.server.service import Service


class Renewal:
    """What SIGHUP asks for. Several signals take turns.

    Args:
        service: The engine.
        profile: The file that `outrider tune` writes; None where the server was started without one.
    """

    def __init__(self, service: Service, profile: Path | None) -> None:
        self._service, self._profile = service, profile
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Let what the profile says draft from now on. Where it cannot be had, everything stays as it is."""
        async with self._turn:
            try:
                config = await asyncio.to_thread(self._change)
            except OutriderError as error:
                self._service.metrics.read_profile("refused")
                log("the profile cannot be used, and drafts stay as they are", {"problem": str(error)}, logging.ERROR)
            else:
                self._service.metrics.read_profile("used")
                log("the profile was read", {"speculation": config.as_mapping()})

    def _change(self) -> SpeculationConfig:
        llm = self._service.engine.llm
        if self._profile is None:
            remedy = "Start it with --profile FILE."
            raise InvalidParameterError("profile", None, "the server was started without one", remedy)
        profile, config = read_profile(self._profile)
        found = llm.identity
        profile.check_model(str(self._profile), found)
        misfit = profile.misfit(found)
        if misfit:
            problem = f"it was made for other circumstances ({misfit})"
            raise ContradictionError("profile", str(self._profile), problem, "Run outrider tune here.")
        self._service.draft_with(config)
        return self._service.allowed.usual
