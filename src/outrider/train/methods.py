"""The heads that can be trained, by the name of their method."""

from __future__ import annotations

from typing import Any

from outrider.train.feature_heads import FeatureHeadSettings
from outrider.train.heads import HeadSettings
from outrider.train.trainee import HeadLearning

_LEARNING: dict[str, Any] = {
    "medusa": HeadSettings,
    "blockwise": HeadSettings,
    "exit": HeadSettings,
    "eagle3": FeatureHeadSettings,
}


def head_learning(method: str, asked: dict[str, Any]) -> HeadLearning:
    """Which heads are trained, and what they learn.

    Args:
        method: Of the heads.
        asked: Its other settings.

    Raises:
        InputError: A setting cannot be.
    """
    found: HeadLearning = _LEARNING[method](method=method, **asked)
    return found
