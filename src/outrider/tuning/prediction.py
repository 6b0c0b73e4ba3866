"""Predicts speedups from shadow acceptance and the times of passes."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.govern.costs import CostModel, CostTable
from outrider.tuning.shadow import Shadow


@dataclass(frozen=True)
class Prediction:
    """What drafts are expected to be worth.

    Attributes:
        tokens: Tokens that a text gains in a step.
        rows: Rows of a text in a step.
        speedup: Over plain decoding.
    """

    tokens: float
    rows: float
    speedup: float


def predict(shadow: Shadow, name: str, table: CostTable, batch: int, context: int) -> Prediction:
    """The speedup that follows from what drafts would have been worth, by the governor's own model of costs.

    Args:
        shadow: What the drafts would have been worth.
        name: Of its draft model in the table; not used for a lookup.
        table: What passes cost.
        batch: Texts at a time.
        context: Mean tokens of a text.
    """
    costs = CostModel(table)
    plain = costs.step_seconds(batch, batch * context)
    step = costs.step_seconds(batch * shadow.rows_per_pass, batch * context)
    if shadow.propose_seconds is None:
        levels = shadow.levels / max(shadow.passes, 1e-9)
        step += levels * costs.draft_seconds(name, batch, 1)
    else:
        step += batch * shadow.propose_seconds / max(shadow.passes, 1e-9)
    return Prediction(shadow.tokens_per_pass, shadow.rows_per_pass, shadow.tokens_per_pass * plain / step)
