"""The heads that can be trained, by the name of their method."""

from __future__ import annotations

from typing import Any

from outrider.train.block_heads import DflashSettings
from outrider.train.eagle_heads import Eagle1Settings, Eagle3Settings
from outrider.train.heads import HeadSettings
from outrider.train.mtp_layers import MtpSettings
from outrider.train.trainee import HeadLearning

_LEARNING: dict[str, Any] = {
    "medusa": HeadSettings,
    "blockwise": HeadSettings,
    "exit": HeadSettings,
    "eagle1": Eagle1Settings,
    "eagle3": Eagle3Settings,
    "dflash": DflashSettings,
    "mtp": MtpSettings,
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
