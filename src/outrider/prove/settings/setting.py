"""A request that is proven: its method, its parameters and who drafts in which round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One way to ask the engine for text.

    Attributes:
        name: A short name for reports.
        speculation: The settings in the form of one mapping. The path of the draft model is filled in later.
        params: Fields of SamplingParams.
        turns: The methods that draft in each round; within a round each one drafts behind the one before. Round r takes the
            entry at r modulo the number of entries. Empty where the request's own method drafts in every round.
        by_drafts: Whether the entry of `turns` is taken at the number of tokens drafted so far instead of the round, as a
            planner does that goes by what came of earlier drafts.
        language: Every text that the requested structure admits. It needs a pair of models with a tokenizer.
        prediction: The tokens that the caller predicts.
        namespace: Whose prompts and texts these are.
        fails_behind: A token behind which no further draw of a draft succeeds, so that the proposer raises; None plants no
            such fault.
    """

    name: str
    speculation: dict[str, Any] = field(default_factory=lambda: {"method": "none"})
    params: dict[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[dict[str, Any], ...], ...] = ()
    by_drafts: bool = False
    language: tuple[str, ...] = ()
    prediction: tuple[int, ...] = ()
    namespace: str | None = None
    fails_behind: int | None = None
