"""PublishedHead: a head as its file says it, whatever format it came in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.heads.block_networks import BlockHeadConfig, BlockHeadNetwork, ParallelHeadConfig, ParallelNetwork
from outrider.heads.features import Eagle1Network, Eagle3Network, FeatureHeadConfig, PublishedNetwork
from outrider.heads.formats.folder import CONFIG, Format, HeadTensor, list_tensors, read_config, read_tensors, refused
from outrider.heads.formats.gguf import GGUF_DFLASH, GGUF_EAGLE3, ORIGINAL, GgufFormat
from outrider.heads.formats.safeailab import SAFEAILAB_EAGLE1, SAFEAILAB_EAGLE3
from outrider.heads.formats.speculators import SPECULATORS_DFLASH, SPECULATORS_EAGLE3, SPECULATORS_PEAGLE
from outrider.heads.formats.zlab import ZLAB_DFLASH
from outrider.loading.gguf.header import is_gguf, read_gguf
from outrider.loading.gguf.values import Values

#: In the order in which a configuration is tried.
FORMATS = (
    SPECULATORS_DFLASH,
    SPECULATORS_PEAGLE,
    ZLAB_DFLASH,
    SAFEAILAB_EAGLE3,
    SPECULATORS_EAGLE3,
    SAFEAILAB_EAGLE1,
)
#: Those in GGUF files, by the architecture that such a file names.
_GGUF_FORMATS = {each.architecture: each for each in (GGUF_EAGLE3, GGUF_DFLASH)}
_EMBEDDING, _OUTPUT, _FUSION = "embed_tokens.weight", "lm_head.weight", "fc.weight"
#: Copies of the target's own weights, which a target lends anyway.
_COPIES = ("verifier_norm.", "verifier_lm_head.")
_OTHER = "Use the head as it was published, or another one."


class PublishedHead(NamedTuple):
    """A head from a folder.

    Attributes:
        folder: Where it lies.
        config: Its shape.
        network: Its layers.
        tokens: [draft_vocab_size] the target's token for each of its own; None where they are the same.
    """

    folder: str
    config: FeatureHeadConfig
    network: PublishedNetwork
    tokens: Tensor | None


def is_head(folder: str) -> bool:
    """Whether a folder holds a head of a known format.

    Raises:
        ModelLoadError: Its files cannot be read.
    """
    if not (Path(folder) / CONFIG).is_file():
        return False
    mapping = read_config(folder)
    form = next((each for each in FORMATS if each.fits(mapping)), None)
    # The configuration of a first EAGLE is also one of a model of one layer.
    return form is not None and (form is not SAFEAILAB_EAGLE1 or _FUSION in list_tensors(folder))


def read_head_config(folder: str) -> FeatureHeadConfig:
    """What the head in a folder or a GGUF file says of itself, without its tensors.

    Raises:
        InvalidParameterError: No such folder.
        UnsupportedModelError: The GGUF file holds no such head.
        ModelLoadError: It holds no head of a known format, or the file does not settle what a field means.
    """
    return _read_config(folder)[0]


def read_head(folder: str) -> PublishedHead:
    """The head in a folder, or in a GGUF file.

    Raises:
        InvalidParameterError: No such folder.
        UnsupportedModelError: The GGUF file holds no such head.
        ModelLoadError: It holds no head of a known format, its file does not settle what a field means, or a tensor is
            missing, corrupt, pickled or of another shape.
    """
    config, form = _read_config(folder)
    if isinstance(form, GgufFormat):
        read, names = form.read_tensors(folder), form.prefixes(config)
    else:
        read, names = read_tensors(folder), dict(form.prefixes)
    found = {name: tensor for name, tensor in read.items() if not name.startswith(_COPIES)}
    used = [start for start in names if any(name.startswith(start) for name in found)]
    tensors = {_renamed(name, names): tensor for name, tensor in found.items()}
    if len(tensors) < len(found):
        raise ModelLoadError(folder, f"{' and '.join(used)} name one part of it twice", _OTHER)
    prefixes = {start: names[start] for start in sorted(names, key=used.__contains__)}
    tokens = _tokens(folder, config, tensors.pop("d2t", None), tensors.pop("t2d", None))
    with torch.device("meta"):
        network = _network(config, tensors)
    _check_shapes(folder, {name: list(w.shape) for name, w in network.state_dict().items()}, tensors, prefixes)
    network.load_state_dict({name: found.tensor for name, found in tensors.items()}, assign=True)
    return PublishedHead(folder, config, network.eval().requires_grad_(False), tokens)


def _read_config(folder: str) -> tuple[FeatureHeadConfig, Format | GgufFormat]:
    """The head's own configuration, and its format."""
    form: Format | GgufFormat
    if is_gguf(folder):
        in_gguf = _gguf_format_of(folder)
        form, config = in_gguf, in_gguf.read(folder)
    else:
        mapping = read_config(folder)
        in_folder = _format_of(folder, mapping)
        form, config = in_folder, in_folder.read(folder, mapping)
    for name in ("target_hidden_size", "draft_vocab_size"):
        size = getattr(config, name)
        if type(size) is not int or size < 1:
            raise refused(folder, name, size, "no size", "Use a whole number from 1 on.")
    if config.draft_vocab_size > config.vocab_size:
        problem = f"the target has {config.vocab_size} tokens"
        raise refused(folder, "draft_vocab_size", config.draft_vocab_size, problem, _OTHER)
    return config, form


def _format_of(folder: str, mapping: Mapping[str, Any]) -> Format:
    found = next((each for each in FORMATS if each.fits(mapping)), None)
    if found is None:
        known = ", ".join(each.name for each in FORMATS)
        problem = f"{CONFIG} describes no head of a known format ({known})"
        raise ModelLoadError(folder, problem, "Use method='draft_model' for a draft model, and a head's own folder here.")
    return found


def _gguf_format_of(path: str) -> GgufFormat:
    architecture = Values(read_gguf(path)).architecture
    if architecture not in _GGUF_FORMATS:
        problem = f"its architecture is {architecture}, and heads in GGUF files are of {' or '.join(_GGUF_FORMATS)}"
        raise UnsupportedModelError(path, problem, ORIGINAL)
    return _GGUF_FORMATS[architecture]


def _network(config: FeatureHeadConfig, tensors: dict[str, HeadTensor]) -> PublishedNetwork:
    """The layers, without their weights."""
    own = _EMBEDDING in tensors
    if config.method == "eagle1":
        return Eagle1Network(config, own_embedding=own, bias="fc.bias" in tensors)
    own_output = config.draft_vocab_size < config.vocab_size or _OUTPUT in tensors
    if isinstance(config, BlockHeadConfig):
        return BlockHeadNetwork(config, own_embedding=own, own_output=own_output)
    if isinstance(config, ParallelHeadConfig):
        return ParallelNetwork(config, own_embedding=own, own_output=own_output)
    return Eagle3Network(config, own_embedding=own, own_output=own_output)


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    for published, own in prefixes.items():
        if name.startswith(published):
            return own + name.removeprefix(published)
    return name


def _check_shapes(
    folder: str, wanted: dict[str, list[int]], tensors: dict[str, HeadTensor], prefixes: dict[str, str]
) -> None:
    """Raise ModelLoadError unless the tensors are those of the network."""
    back = {own: published for published, own in prefixes.items()}
    for name in wanted.keys() - tensors.keys():
        raise ModelLoadError(folder, f"it has no tensor {_renamed(name, back)}", _OTHER)
    for name, (tensor, file) in tensors.items():
        if name not in wanted:
            problem = f"{_renamed(name, back)} in {file} belongs to no part of such a head"
            raise ModelLoadError(folder, problem, _OTHER)
        if list(tensor.shape) != wanted[name]:
            problem = (
                f"{_renamed(name, back)} in {file} has shape {list(tensor.shape)}, and {CONFIG} asks for {wanted[name]}"
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
