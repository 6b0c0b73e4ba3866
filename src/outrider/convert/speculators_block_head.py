"""Block drafters in the format of the speculators package; `heads/formats/speculators_dflash.py` reads it."""

from __future__ import annotations

from typing import Any

from outrider.convert.speculators_head import described
from outrider.errors import UnsupportedModelError
from outrider.heads.block_config import BlockHeadConfig
from outrider.heads.formats.speculators_dflash import PREFIXES as PREFIXES


def mapping(config: BlockHeadConfig) -> dict[str, Any]:
    """The configuration of a head.

    Raises:
        UnsupportedModelError: The format cannot say what its rows see.
    """
    assert config.aux_layers is not None, "a block drafter names the layers that it reads"
    in_windows = {reach.causal for reach in config.reaches if reach.window is not None}
    if len(in_windows) > 1 or any(reach.causal for reach in config.reaches if reach.window is None):
        problem = "rows of its layers without a window see no later rows, which the format of speculators cannot say"
        raise UnsupportedModelError("the head", problem, "Use it in the format that it has.")
    return {
        "architectures": ["DFlashSpeculator"],
        **described(config, num_draft_tokens=config.block_size - 1),
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        **({"sliding_window_non_causal": True} if in_windows == {False} else {}),
    }
