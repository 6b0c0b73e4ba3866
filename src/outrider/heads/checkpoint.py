"""Reads and writes checkpoints of heads: weights, configuration, and a witness of the target's hidden states.

All of it is one file of safetensors, which is put in place when it is whole. So a killed process leaves no checkpoint that
loads and is half of one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import InputError, InvalidParameterError, ModelLoadError
from outrider.heads.config import HeadsConfig, read_config
from outrider.heads.networks import HeadNetwork, build_network

FILE = "heads.safetensors"
#: Where the file's metadata holds the configuration.
_METADATA = "outrider_heads"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_TOKENS, _FEATURES = "witness.token_ids", "witness.features"
#: Tokens of a witness.
_WITNESS_LEN = 8
_REMEDY = "Give a folder that was written by outrider.heads.checkpoint.save_heads."


class Witness(NamedTuple):
    """What the target's hidden states were for a fixed text, where the heads were made. Another target, layer or norm
    gives others, and heads that read those would guess no better than by chance.

    Attributes:
        token_ids: [n] a text.
        features: [n, hidden_size] of its tokens in float32, as the heads read them.
    """

    token_ids: Tensor
    features: Tensor


def witness_tokens(vocab_size: int) -> Tensor:
    """The text of a witness: tokens from all parts of the vocabulary."""
    return torch.tensor([(2 * i + 1) * vocab_size // (2 * _WITNESS_LEN) for i in range(_WITNESS_LEN)])


class Heads(NamedTuple):
    """What a checkpoint holds."""

    config: HeadsConfig
    network: HeadNetwork
    witness: Witness


def save_heads(folder: str | os.PathLike[str], network: HeadNetwork, witness: Witness) -> Path:
    """Write heads to a folder, which is made if need be; heads that are there already are replaced.

    Args:
        folder: Where.
        network: Their layers, and in these their configuration.
        witness: The target's hidden states for `witness_tokens`, as the heads read them.

    Returns:
        The file.

    Raises:
        InvalidParameterError: The witness is of another shape.
        OSError: The disk is full, or the folder cannot be written.
    """
    from safetensors.torch import save

    _check_witness(witness, network.config)
    tensors = {name: w.detach().cpu().contiguous() for name, w in network.state_dict().items()}
    tensors |= {_TOKENS: witness.token_ids.cpu().contiguous(), _FEATURES: witness.features.float().cpu().contiguous()}
    data = save(tensors, {_METADATA: json.dumps(network.config.as_mapping())})
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load_heads(folder: str | os.PathLike[str]) -> Heads:
    """Read heads from a folder, in the dtype in which they were saved.

    Raises:
        InvalidParameterError: No such folder.
        ModelLoadError: It holds no heads, or heads that are corrupt, of another form, or pickled.
    """
    path = Path(folder) / FILE
    if not path.parent.is_dir():
        raise InvalidParameterError("model", str(folder), "no such folder", f"Give the folder that holds {FILE}.")
    if not path.is_file():
        raise _no_heads(path.parent)
    try:
        return _read(path)
    except InputError as error:
        raise ModelLoadError(str(folder), f"the configuration in {FILE} cannot be used ({error})", _REMEDY) from error
    except Exception as error:  # whatever safetensors and PyTorch raise for a file that is corrupt
        raise ModelLoadError(str(folder), f"{FILE} cannot be read ({error})", _REMEDY) from error


def _read(path: Path) -> Heads:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    if _METADATA not in metadata:
        raise ValueError(f"its metadata has no {_METADATA}")
    config = read_config(json.loads(metadata[_METADATA]))
    witness = Witness(tensors.pop(_TOKENS), tensors.pop(_FEATURES))
    _check_witness(witness, config)
    with torch.device("meta"):
        network = build_network(config)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity")
    network.load_state_dict(tensors, assign=True)
    return Heads(config, network.eval().requires_grad_(False), witness)


def _check_witness(witness: Witness, config: HeadsConfig) -> None:
    target, count = config.target, len(witness.token_ids)
    if list(witness.features.shape) != [count, target.hidden_size] or not count:
        shape = list(witness.features.shape)
        problem = f"not the hidden states of {count} tokens of a target of width {target.hidden_size}"
        raise InvalidParameterError("witness", shape, problem, f"Use [{count}, {target.hidden_size}].")


def _no_heads(folder: Path) -> ModelLoadError:
    """Why a folder without the file of heads is refused."""
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled:
        problem = f"{pickled[0]} is pickled, and reading such a file may run any code"
        return ModelLoadError(str(folder), problem, "Load it yourself with weights_only=True, and save it with save_heads.")
    if (folder / "config.json").is_file():
        return ModelLoadError(str(folder), "it holds a model and no heads", "Use method='draft_model' for a draft model.")
    return ModelLoadError(str(folder), f"it has no {FILE}", _REMEDY)
