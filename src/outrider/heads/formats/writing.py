"""Writes a head as a folder in a published format. Our own readers read it back to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.files import write_tensors, write_text
from outrider.heads.formats.folder import CONFIG, Format, read_config, renamed
from outrider.heads.formats.published import FORMATS, PublishedHead, read_head
from outrider.loading.sources import WHOLE

#: The families of formats into which a head is converted.
FAMILIES = ("speculators", "safeailab")


def convert_head(source: str, form: str, folder: Path, target: str | None = None) -> PublishedHead:
    """Write a head in another format, one of `FAMILIES`, and return it. All weights keep their bits. It names the target
    that is given, by folder or hub id."""
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
    """Write a head. The configuration comes last: without it, nothing loads what is there."""
    found, mapping = written_as(head, form)
    names = found.published(head.config)
    tensors = {renamed(name, names): weight for name, weight in head.network.state_dict().items()}
    write_tensors(folder / WHOLE, tensors | _columns(head), {"format": "pt"})
    write_text(folder / CONFIG, json.dumps(mapping, indent=1) + "\n")


def written_as(head: PublishedHead, form: str) -> tuple[Format, dict[str, Any]]:
    """The format of a family in which a head is written, and the configuration there. UnsupportedModelError where the
    family has none that can hold the head."""
    method = head.config.method
    found = next((each for each in FORMATS if (each.family, each.method) == (form, method)), None)
    if found is None or found.write is None:
        others = [each.family for each in FORMATS if each.method == method and each.family in FAMILIES]
        remedy = f"Such heads are written in the format of {' or '.join(others)}." if others else "Use it as it is."
        raise UnsupportedModelError(head.folder, f"the format of {form} has no heads of {method}", remedy)
    if getattr(head.config, "gemma", None) is not None:
        problem = f"the format of {form} has no layers of Gemma 4"
        raise UnsupportedModelError(head.folder, problem, "Use the head as it was published.")
    return found, found.write(head.config)


def _columns(head: PublishedHead) -> dict[str, Tensor]:
    """The tensors that name the target's tokens that a head drafts: how far each lies behind its number, and which they
    are."""
    if head.tokens is None:
        return {}
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, head.tokens, True)
    return {"d2t": head.tokens - torch.arange(len(head.tokens)), "t2d": known}
