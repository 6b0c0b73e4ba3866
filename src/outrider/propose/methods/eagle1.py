"""EAGLE: a head with attention of its own continues the target's last hidden states (Li et al. 2024).

EAGLE-2 (Li et al. 2024) drafts trees with the same heads, whose likeliest tokens come first: `tree="best_first"`.
"""

from __future__ import annotations

from typing import ClassVar

from outrider.propose.methods.feature_method import FeatureMethod


class Eagle1(FeatureMethod):
    """A published EAGLE head drafts from the target's last hidden state, with the target's own output layer.

    Attributes:
        model: Local folder of the head, as SafeAILab publishes it.
    """

    name: ClassVar[str] = "eagle1"
