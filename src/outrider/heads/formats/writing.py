"""Writes a head as a folder in a published format. Our own readers read it back to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.files import write_tensors, write_text
from outrider.heads.formats.folder import CONFIG, read_config
from outrider.heads.formats.published import FORMATS, PublishedHead, read_head
from outrider.loading.sources import WHOLE

#: The families of formats into which a head is converted.
FAMILIES = ("speculators", "safeailab")


def convert_head(source: str, form: str, folder: Path, target: str | None = None) -> PublishedHead:
    """Write a head in another format, and return it. All weights keep their bits.

    Args:
        source: Its folder.
        form: One of FAMILIES.
        folder: Where to write it: a new folder or an empty one.
        target: Folder or hub id of the model that it was made for, which it is to name; None keeps what it names.

    Raises:
        InvalidParameterError: There is no such folder, `folder` holds files, or a head of speculators would name no target.
        ModelLoadError: It holds no head of a known format.
        UnsupportedModelError: The format has no such heads.
        StorageError: It cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "the folder holds files" if folder.is_dir() else "it is a file"
        raise InvalidParameterError("out", str(folder), problem, "Use a new folder.")
    head = _named(read_head(source), target)
    if form == "speculators" and not head.config.verifier:
        problem = "the head does not name the model that it was made for, and the speculators package loads none without"
        raise InvalidParameterError("target", None, problem, "Name it.")
    write_head(folder, head, form)
    return head


def _named(head: PublishedHead, target: str | None) -> PublishedHead:
    """A head that names its target, and the classes of a target that lies in a folder."""
    if target is None:
        return head
    file, classes = Path(target) / CONFIG, head.config.architectures
    if file.is_file():
        classes = tuple(map(str, read_config(target).get("architectures") or ()))
    return head._replace(config=replace(head.config, verifier=target, architectures=classes))


def write_head(folder: Path, head: PublishedHead, form: str) -> None:
    """Write a head. The configuration comes last: without it, nothing loads what is there.

    Args:
        folder: Where, which is made if need be.
        head: Its shape, layers and tokens.
        form: The family of its format.

    Raises:
        UnsupportedModelError: The format has no such heads.
        StorageError: It cannot be written.
    """
    method = head.config.method
    found = next((each for each in FORMATS if (each.family, each.method) == (form, method)), None)
    if found is None:
        others = [each.family for each in FORMATS if each.method == method]
        remedy = f"Such heads are written in the format of {' or '.join(others)}."
        raise UnsupportedModelError(head.folder, f"the format of {form} has no heads of {method}", remedy)
    mapping = found.write(head.config)
    prefixes = found.prefixes if found.written is None else found.written
    tensors = {published(name, prefixes): weight for name, weight in head.network.state_dict().items()}
    write_tensors(folder / WHOLE, tensors | _columns(head), {"format": "pt"})
    write_text(folder / CONFIG, json.dumps(mapping, indent=1) + "\n")


def _columns(head: PublishedHead) -> dict[str, Tensor]:
    """What says which of the target's tokens a head drafts: how far each lies behind its number, and which they are."""
    if head.tokens is None:
        return {}
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, head.tokens, True)
    return {"d2t": head.tokens - torch.arange(len(head.tokens)), "t2d": known}


# --- The names under which tensors of heads are published.


def published(name: str, prefixes: Mapping[str, str]) -> str:
    """The name of a tensor in a format.

    Args:
        name: Here.
        prefixes: What names begin with there, and here.
    """
    for there, here in prefixes.items():
        if name.startswith(here):
            return there + name.removeprefix(here)
    return name
