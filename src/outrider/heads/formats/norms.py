"""Flags of norms that the formats of EAGLE-3 share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.feature_config import FeatureNorm
from outrider.heads.formats.layer import read_flag, refused


def read_feature_norm(folder: str, mapping: Mapping[str, Any]) -> FeatureNorm:
    """How features are normed before they are fused.

    Raises:
        ModelLoadError: The flags say two things, or one of them is no flag.
    """
    each, together = read_flag(folder, mapping, "fc_norm"), read_flag(folder, mapping, "norm_before_fc")
    if each and together:
        raise refused(
            folder, "fc_norm", True, "norm_before_fc is true too, and only one of them can be", "Use another head."
        )
    return FeatureNorm.EACH if each else FeatureNorm.ALL if together else FeatureNorm.NONE
