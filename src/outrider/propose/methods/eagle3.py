"""EAGLE-3: a head with attention of its own drafts from features of several of the target's layers (Li et al. 2025)."""

from __future__ import annotations

from typing import ClassVar

from outrider.propose.methods.feature_method import FeatureMethod


class Eagle3(FeatureMethod):
    """A published EAGLE-3 head drafts from what entered three of the target's layers.

    Attributes:
        model: Local folder of the head, as SafeAILab, SpecForge, NVIDIA or the speculators package publish it; or a GGUF
            file.
    """

    name: ClassVar[str] = "eagle3"
