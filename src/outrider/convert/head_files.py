"""Writes a head as a folder in a published format. Our own readers read it back to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.convert import safeailab1_head, speculators_head, zlab_head
from outrider.files import write_tensors, write_text
from outrider.heads.formats.folder import CONFIG
from outrider.heads.formats.published import PublishedHead
from outrider.model.loading.files import WHOLE

#: What writes a format, by its name.
_WRITERS: dict[str, Any] = {
    "speculators": speculators_head,
    "safeailab1": safeailab1_head,
    "z-lab": zlab_head,
}


def write_head(folder: Path, head: PublishedHead, form: str) -> None:
    """Write a head. The configuration comes last: without it, nothing loads what is there.

    Args:
        folder: Where, which is made if need be.
        head: Its shape, layers and tokens.
        form: Name of the format.

    Raises:
        UnsupportedModelError: The format has no such heads.
        StorageError: It cannot be written.
    """
    writer = _WRITERS[form]
    mapping = writer.mapping(head.config)
    prefixes = writer.PREFIXES
    tensors = {_published(name, prefixes): weight for name, weight in head.network.state_dict().items()}
    write_tensors(folder / WHOLE, tensors | _columns(head), {"format": "pt"})
    write_text(folder / CONFIG, json.dumps(mapping, indent=1) + "\n")


def _published(name: str, prefixes: dict[str, str]) -> str:
    for published, own in prefixes.items():
        if name.startswith(own):
            return published + name.removeprefix(own)
    return name


def _columns(head: PublishedHead) -> dict[str, Tensor]:
    """What says which of the target's tokens a head drafts: how far each lies behind its number, and which they are."""
    if head.tokens is None:
        return {}
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, head.tokens, True)
    return {"d2t": head.tokens - torch.arange(len(head.tokens)), "t2d": known}
