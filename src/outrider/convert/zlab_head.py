"""Block drafters in the format of z-lab; `heads/formats/zlab.py` reads it."""

from __future__ import annotations

from typing import Any

from outrider.convert.head_layer import layer_fields
from outrider.heads.block_config import BlockHeadConfig
from outrider.heads.formats.zlab import PREFIXES as PREFIXES


def mapping(config: BlockHeadConfig) -> dict[str, Any]:
    """The configuration of a head."""
    assert config.aux_layers is not None, "a block drafter names the layers that it reads"
    return {
        "architectures": ["DFlashDraftModel"],
        **layer_fields(config.layer),
        "target_hidden_size": config.target_hidden_size,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.aux_layers],  # it counts what layers leave
        },
    }
