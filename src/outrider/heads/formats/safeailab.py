"""The format of SafeAILab's EAGLE-3 heads: one `midlayer`, implicit layers of the target, a relative d2t.

The states that are read enter layers 2, n // 2 and n - 3 of the target's n, and are joined in this order; a file may name
others, as vLLM reads them. Attention reads [embedding, feature]. Its residual is the feature before its norm. The next
token reads what the layer left before the norm of the output layer. The first token has no row. The row of token i has
position i - 1 there and i here, which is the same under rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.formats.layer import read_flag, read_layer, read_layer_ids, refused

NAME = "SafeAILab EAGLE-3"
#: Names of tensors in files, and here.
PREFIXES = {"midlayer.": "layer."}
_IDS = "eagle_aux_hidden_state_layer_ids"
#: Flags of other formats that changed what heads with these names compute.
_FOREIGN = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")


def fits(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return "draft_vocab_size" in mapping and "speculators_model_type" not in mapping


def read(folder: str, mapping: Mapping[str, Any]) -> FeatureHeadConfig:
    """The head that a configuration describes.

    Raises:
        ModelLoadError: A field cannot be used, or the file does not settle what it means.
    """
    layer = read_layer(folder, mapping, str(mapping.get("model_type", "llama")))
    for name in _FOREIGN:
        if read_flag(folder, mapping, name):
            problem = "other formats give it different meanings, and this one does not know it"
            raise refused(folder, name, True, problem, "Use this head as it was published for speculators.")
    nested = mapping.get("eagle_config")
    if isinstance(nested, Mapping) and _IDS in nested:
        problem = "engines disagree whether such layers count from 0 or from 1"
        remedy = f"Write {_IDS} beside eagle_config: the layers whose inputs the head reads, counted from 0."
        raise refused(folder, f"eagle_config.{_IDS}", nested[_IDS], problem, remedy)
    ids = mapping.get(_IDS)
    return FeatureHeadConfig(
        method="eagle3",
        layer=layer,
        target_hidden_size=mapping.get("target_hidden_size") or layer.hidden_size,
        vocab_size=layer.vocab_size,
        draft_vocab_size=mapping["draft_vocab_size"],
        aux_layers=None if ids is None else read_layer_ids(folder, ids),
    )
