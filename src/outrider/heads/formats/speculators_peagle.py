"""The format of the speculators package for P-EAGLE heads: that of EAGLE-3, with further layers and `mask_hidden`.

`mask_hidden` [1, 1, n] stands for the target's joined states at a token that is to be drafted, and passes the same norms
and the same `fc`. Embeddings are trained unless the file says otherwise. Rows see the text and the rows of their draft
before them, as the package trains them and as vLLM runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.formats.block import read_mask_token
from outrider.heads.formats.layer import SLIDING, Format, read_layers, refused
from outrider.heads.formats.speculators import fields, read_fields, read_inner
from outrider.heads.parallel_config import ParallelHeadConfig

#: Names of tensors in files, and here.
_PREFIXES = {"layers.0.": "layer.", "layers.": "further."}


def fits(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return mapping.get("speculators_model_type") == "peagle"


def read(folder: str, mapping: Mapping[str, Any]) -> ParallelHeadConfig:
    """The head that a configuration describes.

    Raises:
        ModelLoadError: A field cannot be used, or the file does not settle what it means.
    """
    inner = read_inner(folder, mapping)
    layers = read_layers(folder, inner, inner["model_type"])
    if SLIDING in (getattr(layers, "layer_types", None) or ()):
        raise refused(folder, "layer_types", layers.layer_types, "a window is not computed", "Use another head.")
    return ParallelHeadConfig(
        method="peagle",
        **read_fields(folder, mapping, layers, trains_embedding=True),
        num_layers=int(layers.num_hidden_layers),
        mask_token_id=read_mask_token(folder, mapping.get("mask_token_id"), layers.vocab_size),
    )


def write(config: ParallelHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    return {
        "architectures": ["PEagleSpeculator"],
        **fields(config, num_draft_tokens=5),
        "mask_token_id": config.mask_token_id,
    }


SPECULATORS_PEAGLE = Format("speculators P-EAGLE", "speculators", "peagle", _PREFIXES, fits, read, write)
