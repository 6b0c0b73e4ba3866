"""Heads of P-EAGLE in the format of the speculators package; `heads/formats/speculators_peagle.py` reads it."""

from __future__ import annotations

from typing import Any

from outrider.convert.speculators_head import fields
from outrider.heads.formats.speculators_peagle import PREFIXES as PREFIXES
from outrider.heads.parallel_config import ParallelHeadConfig


def mapping(config: ParallelHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    return {
        "architectures": ["PEagleSpeculator"],
        **fields(config, num_draft_tokens=5),
        "mask_token_id": config.mask_token_id,
    }
