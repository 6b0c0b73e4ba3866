"""PublishedHead: a head as its file says it, whatever format it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.heads.features import FeatureHeadConfig, PublishedNetwork
from outrider.heads.formats.deepspec import DEEPSPEC
from outrider.heads.formats.folder import (
    CONFIG,
    Format,
    HeadTensor,
    check_num_layers,
    list_tensors,
    read_config,
    refused,
    renamed,
)
from outrider.heads.formats.gguf import ARCHITECTURE, GGUF_DFLASH, GGUF_EAGLE3, ORIGINAL
from outrider.heads.formats.safeailab import SAFEAILAB_EAGLE1, SAFEAILAB_EAGLE3
from outrider.heads.formats.speculators import (
    SPECULATORS_DFLASH,
    SPECULATORS_DSPARK,
    SPECULATORS_EAGLE3,
    SPECULATORS_PEAGLE,
)
from outrider.heads.formats.zlab import ZLAB_DFLASH
from outrider.loading.gguf.header import is_gguf, read_gguf
from outrider.loading.gguf.values import Values

#: In the order in which a configuration is tried.
FORMATS = (
    *(SPECULATORS_DFLASH, SPECULATORS_DSPARK, SPECULATORS_PEAGLE, ZLAB_DFLASH, DEEPSPEC),
    *(SAFEAILAB_EAGLE3, SPECULATORS_EAGLE3, SAFEAILAB_EAGLE1),
)
#: Those in GGUF files.
GGUF_FORMATS = (GGUF_EAGLE3, GGUF_DFLASH)
#: Copies of the target's own weights, which a target lends anyway.
_COPIES = ("verifier_norm.", "verifier_lm_head.")
_OTHER = "Use the head as it was published, or another one."


class PublishedHead(NamedTuple):
    """A head from a folder."""

    folder: str  # where it lies
    config: FeatureHeadConfig  # its shape
    network: PublishedNetwork  # its layers
    tokens: Tensor | None  # [draft_vocab_size] the target's token for each of its own; None where they are the same


def is_head(folder: str) -> bool:
    """Tells if a folder holds a head of a known format."""
    if not (Path(folder) / CONFIG).is_file():
        return False
    mapping = read_config(folder)
    form = _format_of(mapping)
    # The configuration of a first EAGLE is also one of a model of one layer.
    return form is not None and (form is not SAFEAILAB_EAGLE1 or "fc.weight" in list_tensors(folder))


def method_at(path: str) -> str | None:
    """The method of the head in a folder or a GGUF file; None where there is none."""
    if is_gguf(path):
        known = _format_of({ARCHITECTURE: Values(read_gguf(path)).architecture}, GGUF_FORMATS) is not None
    else:
        known = is_head(path)
    return read_head_config(path).method if known else None


def read_head_config(folder: str) -> FeatureHeadConfig:
    """Reads what the head in a folder or a GGUF file says of itself, without its tensors."""
    return _read_config(folder)[0]


def read_head(folder: str) -> PublishedHead:
    """The head in a folder, or in a GGUF file."""
    config, form = _read_config(folder)
    names = form.names(config)
    found = {name: tensor for name, tensor in form.tensors(folder).items() if not name.startswith(_COPIES)}
    used = [start for start in names if any(name.startswith(start) for name in found)]
    tensors = {renamed(name, names): tensor for name, tensor in found.items()}
    if len(tensors) < len(found):
        raise ModelLoadError(folder, f"{' and '.join(used)} name one part of it twice", _OTHER)
    back = {names[start]: start for start in sorted(names, key=used.__contains__)}  # those that the file uses come last
    tokens = _tokens(folder, config, tensors.pop("d2t", None), tensors.pop("t2d", None))
    check_num_layers(folder, config.layer, tensors)
    with torch.device("meta"):
        network = form.network.of(config, tensors.keys())
    _check_shapes(folder, {name: list(w.shape) for name, w in network.state_dict().items()}, tensors, back)
    network.load_state_dict({name: found.tensor for name, found in tensors.items()}, assign=True)
    return PublishedHead(folder, config, network.eval().requires_grad_(False), tokens)


def _read_config(folder: str) -> tuple[FeatureHeadConfig, Format]:
    """The head's own configuration, and its format."""
    if is_gguf(folder):
        mapping: Mapping[str, Any] = {ARCHITECTURE: Values(read_gguf(folder)).architecture}
        form = _format_of(mapping, GGUF_FORMATS)
        if form is None:
            known = " or ".join(each.method for each in GGUF_FORMATS)
            problem = f"its architecture is {mapping[ARCHITECTURE]}, and heads in GGUF files are of {known}"
            raise UnsupportedModelError(folder, problem, ORIGINAL)
    else:
        mapping = read_config(folder)
        form = _format_of(mapping)
        if form is None:
            problem = f"{CONFIG} describes no head of a known format ({', '.join(each.name for each in FORMATS)})"
            remedy = "Use method='draft_model' for a draft model, and a head's own folder here."
            raise ModelLoadError(folder, problem, remedy)
    config: FeatureHeadConfig = form.read(folder, mapping)
    for name in ("target_hidden_size", "draft_vocab_size"):
        size = getattr(config, name)
        if type(size) is not int or size < 1:
            raise refused(folder, name, size, "no size", "Use a whole number from 1 on.")
    if config.draft_vocab_size > config.vocab_size:
        problem = f"the target has {config.vocab_size} tokens"
        raise refused(folder, "draft_vocab_size", config.draft_vocab_size, problem, _OTHER)
    return config, form


def _format_of(mapping: Mapping[str, Any], formats: Sequence[Format] = FORMATS) -> Format | None:
    return next((form for form in formats if form.fits(mapping)), None)


def _check_shapes(
    folder: str, wanted: dict[str, list[int]], tensors: dict[str, HeadTensor], back: Mapping[str, str]
) -> None:
    """Raise ModelLoadError unless the tensors are those of the network."""
    for name in wanted.keys() - tensors.keys():
        raise ModelLoadError(folder, f"it has no tensor {renamed(name, back)}", _OTHER)
    for name, (tensor, file) in tensors.items():
        if name not in wanted:
            problem = f"{renamed(name, back)} in {file} belongs to no part of such a head"
            raise ModelLoadError(folder, problem, _OTHER)
        if not tensor.is_floating_point():
            raise ModelLoadError(folder, f"{renamed(name, back)} in {file} holds {tensor.dtype}, and no weights", _OTHER)
        if list(tensor.shape) != wanted[name]:
            problem = (
                f"{renamed(name, back)} in {file} has shape {list(tensor.shape)}, and {CONFIG} asks for {wanted[name]}"
            )
            raise ModelLoadError(folder, problem, _OTHER)


def _tokens(folder: str, config: FeatureHeadConfig, d2t: HeadTensor | None, t2d: HeadTensor | None) -> Tensor | None:
    """The target's token for each token of the head: i + d2t[i]. `t2d` says the same by the target's tokens."""
    size, count = config.vocab_size, config.draft_vocab_size
    if d2t is None:
        if count == size:
            return None
        raise ModelLoadError(folder, f"it has no tensor d2t, and {count} of {size} tokens are drafted", _OTHER)
    _check_column(folder, "d2t", d2t, count)
    tokens = torch.arange(count) + d2t.tensor.long()
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        worst = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise ModelLoadError(folder, f"d2t in {d2t.file} leads to token {worst}, and the target has {size} tokens", _OTHER)
    if len(set(tokens.tolist())) < count:
        raise ModelLoadError(folder, f"d2t in {d2t.file} leads to one token twice", _OTHER)
    if t2d is not None:
        _check_column(folder, "t2d", t2d, size)
        told = t2d.tensor.bool().nonzero()[:, 0]
        if not torch.equal(told, tokens.sort().values):
            raise ModelLoadError(
                folder, f"t2d in {t2d.file} names other tokens than d2t, which adds to a token's number", _OTHER
            )
    return tokens


def _check_column(folder: str, name: str, found: HeadTensor, size: int) -> None:
    tensor, file = found
    if list(tensor.shape) != [size] or tensor.is_floating_point():
        problem = f"{name} in {file} has shape {list(tensor.shape)} of {tensor.dtype}, and {size} whole numbers are needed"
        raise ModelLoadError(folder, problem, _OTHER)
