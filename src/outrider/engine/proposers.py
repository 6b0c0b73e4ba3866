"""The proposers that are alive beside one target, built when first asked for and shared by all requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from outrider.config import SpeculationConfig
from outrider.model.runner import ModelRunner
from outrider.propose import registry
from outrider.propose.base import Proposer, TargetFacts


class ProposerSet:
    """Hands out one proposer for every distinct way of asking for it.

    Args:
        target: Facts about the target.
        max_num_batched_tokens: Rows a pass may hold.
        load_runner: Loads another model by path or hub id and dtype.
    """

    def __init__(
        self, target: TargetFacts, max_num_batched_tokens: int, load_runner: Callable[[str, str | None], ModelRunner]
    ) -> None:
        self._target = target
        self._max_num_batched_tokens = max_num_batched_tokens
        self._load_runner = load_runner
        self._alive: dict[str, Proposer] = {}

    def get(self, config: SpeculationConfig) -> Proposer | None:
        """The proposer that `config` names; None for plain decoding.

        Raises:
            InvalidParameterError: No such proposer, or a setting it needs is missing.
            ModelError: Its model cannot be loaded or speaks other tokens.
            ProposerError: Its factory failed.
        """
        if not config.enabled:
            return None
        # Length, shape and rule are the engine's business: requests that differ only there share a proposer.
        shared = {"num_draft_tokens", "tree", "rule", "draft_sampling"}
        identity = json.dumps(config.model_dump(exclude=shared), default=repr)
        if identity not in self._alive:
            self._alive[identity] = registry.build(
                registry.ProposerContext(config, self._target, self._max_num_batched_tokens, self._load_runner)
            )
        return self._alive[identity]

    def __iter__(self) -> Iterator[Proposer]:
        return iter(self._alive.values())
