"""The format of the speculators package for DFlash heads.

`aux_hidden_state_layer_ids` name layers whose *inputs* are read, one more than z-lab's ids of the same layers. A reduced
vocabulary comes with an output layer of its own. Layers without a window see the block both ways; those with one see no
later rows, unless `sliding_window_non_causal` is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import UnsupportedModelError
from outrider.heads.block_config import BlockHeadConfig
from outrider.heads.formats.block import read_block_size, read_mask_token, read_reaches
from outrider.heads.formats.layer import Format, read_flag, read_layer_ids, read_layers, refused
from outrider.heads.formats.speculators import described, read_verifier

_IDS = "aux_hidden_state_layer_ids"


def fits(mapping: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this format."""
    return mapping.get("speculators_model_type") == "dflash"


def read(folder: str, mapping: Mapping[str, Any]) -> BlockHeadConfig:
    """The head that a configuration describes.

    Raises:
        ModelLoadError: A field cannot be used, or it is of a kind that computes something else.
    """
    _check_kind(folder, mapping)
    inner = mapping.get("transformer_layer_config")
    if not isinstance(inner, Mapping) or inner.get("model_type") != "qwen3":
        problem = "it describes no layers of Qwen3, which such heads have"
        raise refused(folder, "transformer_layer_config", inner, problem, "Write model_type 'qwen3' and its sizes.")
    layers = read_layers(folder, inner, "qwen3")
    verifier = read_verifier(mapping)
    return BlockHeadConfig(
        method="dflash",
        layer=layers,
        target_hidden_size=mapping.get("target_hidden_size") or layers.hidden_size,
        vocab_size=layers.vocab_size,
        draft_vocab_size=mapping.get("draft_vocab_size", 32000),
        aux_layers=read_layer_ids(folder, mapping.get(_IDS), _IDS),
        verifier=str(verifier.get("name_or_path") or ""),
        architectures=tuple(map(str, verifier.get("architectures") or ())),
        block_size=read_block_size(folder, mapping.get("block_size", 8)),
        mask_token_id=read_mask_token(folder, mapping.get("mask_token_id"), layers.vocab_size),
        reaches=read_reaches(
            folder,
            layers,
            causal=False,
            causal_in_windows=not read_flag(folder, mapping, "sliding_window_non_causal"),
        ),
    )


def _check_kind(folder: str, mapping: Mapping[str, Any]) -> None:
    if mapping.get("projector_type") not in (None, "dflash"):
        problem = "it corrects what a block drafts, which this version does not compute"
        raise refused(folder, "projector_type", mapping["projector_type"], problem, "Use another head.")
    for name in ("sample_from_anchor", "shift_label"):
        if read_flag(folder, mapping, name):
            problem = "it drafts at the last token of the text too, which this version does not compute"
            raise refused(folder, name, True, problem, "Use another head.")


def write(config: BlockHeadConfig) -> dict[str, Any]:
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


SPECULATORS_DFLASH = Format("speculators DFlash", "speculators", "dflash", {}, fits, read, write)
