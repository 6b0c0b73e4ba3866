"""Parts of the configuration of a block drafter that all its formats share."""

from __future__ import annotations

from typing import Any

from outrider.heads.block_config import BlockReach
from outrider.heads.formats.layer import FULL, SLIDING, refused


def read_reaches(folder: str, layers: Any, *, causal: bool, causal_in_windows: bool) -> tuple[BlockReach, ...]:
    """What rows see, by layer.

    Args:
        folder: Of the head, to name.
        layers: transformers' configuration of the layers.
        causal: Whether rows see no later rows in layers without a window.
        causal_in_windows: The same in layers with one.

    Raises:
        ModelLoadError: A layer is of another kind, or its window is not named.
    """
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


def read_block_size(folder: str, size: Any) -> int:
    """Rows of a block.

    Raises:
        ModelLoadError: It is no number from 2 on: one row drafts nothing.
    """
    if type(size) is not int or size < 2:
        raise refused(folder, "block_size", size, "no size of a block", "Write the whole number that it was trained with.")
    return size


def read_mask_token(folder: str, token: Any, vocab_size: int) -> int:
    """The token that stands for tokens that are to be drafted.

    Raises:
        ModelLoadError: It is not named, or is no token of the target.
    """
    if type(token) is not int or not 0 <= token < vocab_size:
        problem = f"no token of the {vocab_size} of the target"
        raise refused(folder, "mask_token_id", token, problem, "Write the token that the head was trained with.")
    return token
