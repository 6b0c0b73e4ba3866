"""The format of z-lab's DFlash heads, and what all formats of block drafters share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ModelLoadError
from outrider.heads.block_networks import BlockHeadConfig, BlockHeadNetwork, BlockReach
from outrider.heads.formats.folder import (
    FULL,
    SLIDING,
    Format,
    layer_fields,
    read_flag,
    read_layer_ids,
    read_layers,
    refused,
    widths,
)

# --- The format of z-lab's DFlash heads: a `dflash_config`, layers of Qwen3, and the target's embeddings and output layer.
#
# `target_layer_ids` name layers whose *outputs* are read, counted from 0, and their states are joined in this order.
# The block size stands at the top of older files and in `dflash_config` of newer ones. Layers without a window see the
# block both ways; those with one see no later rows, unless `is_causal` says otherwise for all of them.


_NESTED = "dflash_config"
_READ = frozenset({"block_size", "mask_token_id", "target_layer_ids", "causal"})
#: Other fields, and the value with which each of them changes nothing; so do false, 0 and null.
_IDLE = {"projector_type": "dflash", "input_embedding_scale": 1.0, "output_multiplier": 1.0, "use_aux_hidden_state": True}
#: Those that some files have at the top.
_AT_THE_TOP = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_MASK_FILE = "mask_embedding.pt"


def _read(folder: str, mapping: Mapping[str, Any]) -> BlockHeadConfig:
    nested = mapping[_NESTED]
    _check_rest(folder, {name: mapping.get(name) for name in _AT_THE_TOP} | nested)
    if (Path(folder) / _MASK_FILE).is_file():
        problem = f"{_MASK_FILE} is pickled, and reading such a file may run any code"
        raise ModelLoadError(folder, problem, "Use a head whose mask token has its embedding in the target.")
    layers = read_layers(folder, mapping, str(mapping.get("model_type", "qwen3")))
    if layers.model_type != "qwen3":
        raise refused(folder, "model_type", layers.model_type, "such heads have layers of Qwen3", "Use another head.")
    ids = read_layer_ids(folder, _value(folder, mapping, "target_layer_ids"), "target_layer_ids")
    causal = _causal(folder, mapping, layers)
    return BlockHeadConfig(
        method="dflash",
        **widths(mapping, layers, mapping.get("draft_vocab_size") or layers.vocab_size),
        aux_layers=tuple(i + 1 for i in ids),
        block_size=read_block_size(folder, _value(folder, mapping, "block_size")),
        mask_token_id=read_mask_token(folder, _value(folder, mapping, "mask_token_id"), layers.vocab_size),
        reaches=read_reaches(folder, layers, causal=bool(causal), causal_in_windows=True if causal is None else causal),
    )


def _value(folder: str, mapping: Mapping[str, Any], name: str) -> Any:
    """A field that stands in `dflash_config` or at the top; None where it stands nowhere."""
    found = [each[name] for each in (mapping[_NESTED], mapping) if each.get(name) is not None]
    if len(found) == 2 and found[0] != found[1]:
        problem = f"{_NESTED} says {found[0]!r}"
        raise refused(folder, name, found[1], problem, "Write the one that the head was trained with in both places.")
    return found[0] if found else None


def _causal(folder: str, mapping: Mapping[str, Any], layers: Any) -> bool | None:
    """Tells if rows see no later rows in any layer; None where it goes by the layer."""
    causal = None if mapping.get("is_causal") is None else read_flag(folder, mapping, "is_causal")
    other = mapping[_NESTED].get("causal")
    if other is not None and other != causal and (other or SLIDING in layers.layer_types):
        problem = "vLLM reads it, and the format's own code does not"
        raise refused(folder, f"{_NESTED}.causal", other, problem, "Write is_causal beside it, with the same value.")
    return causal


def _check_rest(folder: str, fields: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a field that changes what the head computes in a way that is not read here."""
    for name, value in fields.items():
        if name not in _READ and value and value != _IDLE.get(name):
            raise refused(folder, name, value, "this version does not compute it", "Use another head.")


def _write(config: BlockHeadConfig) -> dict[str, Any]:
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


ZLAB_DFLASH = Format(
    name="z-lab DFlash",
    family="z-lab",
    method="dflash",
    network=BlockHeadNetwork,
    prefixes={},
    fits=lambda mapping: isinstance(mapping.get(_NESTED), Mapping) and "speculators_model_type" not in mapping,
    read=_read,
    write=_write,
)


# --- Parts of the configuration of a block drafter that all its formats share.


def read_reaches(folder: str, layers: Any, *, causal: bool, causal_in_windows: bool) -> tuple[BlockReach, ...]:
    """Returns how far rows see, by layer: whether they see no later rows in layers without a window, and in those with
    one."""
    found = []
    for kind in layers.layer_types:
        if kind not in (FULL, SLIDING):
            raise refused(folder, "layer_types", layers.layer_types, f"{kind} is not computed", "Use another head.")
        window = layers.sliding_window if kind == SLIDING else None
        if kind == SLIDING and (type(window) is not int or window < 1):
            problem = "a layer has a window, and its size is not named"
            raise refused(folder, "sliding_window", window, problem, "Write the window that the head was trained with.")
        found.append(BlockReach(window, causal_in_windows if kind == SLIDING else causal))
    return tuple(found)


#: Published heads have up to 32 rows, and a block is computed whole.
_LONGEST_BLOCK = 1024


def read_block_size(folder: str, size: Any) -> int:
    """Rows of a block."""
    if type(size) is not int or not 2 <= size <= _LONGEST_BLOCK:
        raise refused(folder, "block_size", size, "no size of a block", "Write the whole number that it was trained with.")
    return size


def read_mask_token(folder: str, token: Any, vocab_size: int) -> int:
    """The token that stands for tokens that are to be drafted."""
    if type(token) is not int or not 0 <= token < vocab_size:
        problem = f"no token of the {vocab_size} of the target"
        raise refused(folder, "mask_token_id", token, problem, "Write the token that the head was trained with.")
    return token
