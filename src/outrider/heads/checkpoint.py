"""Checkpoints of heads: reading, writing, checks that they fit a target, and running them beside it."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.errors import HeadMismatchError, InputError, InvalidParameterError, ModelLoadError
from outrider.files import write_tensors
from outrider.heads.networks import HeadNetwork, HeadsConfig, HeadTarget, RowHeadsConfig, build_network, read_config
from outrider.kernels.formats import FORMATS
from outrider.kernels.library import kernel_library
from outrider.kernels.linear import packed_for, use_packed_linear
from outrider.kernels.row_by_row import RowByRow
from outrider.kernels.weights import quantise_linears, takes_rows
from outrider.model import hf
from outrider.model.runner import upcast_logits
from outrider.model.target import Target

# --- Reads and writes checkpoints of heads: weights, configuration, and a witness of the target's hidden states.
#
# All of it is one file of safetensors, which is put in place when it is whole. So a killed process leaves no checkpoint
# that loads and is half of one.


FILE = "heads.safetensors"
#: Where the file's metadata holds the configuration.
_METADATA = "outrider_heads"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_TOKENS, _FEATURES = "witness.token_ids", "witness.features"
#: Tokens of a witness.
_WITNESS_LEN = 8
_REMEDY = "Give a folder that was written by outrider.heads.checkpoint.save_heads."


class Witness(NamedTuple):
    """The target's hidden states for a fixed text, where the heads were made. Another target, layer or norm
    gives others, and heads that read those would guess no better than by chance."""

    token_ids: Tensor  # [n] a text
    features: Tensor  # [n, hidden_size] of its tokens in float32, as the heads read them


def witness_tokens(vocab_size: int) -> Tensor:
    """The text of a witness: tokens from all parts of the vocabulary."""
    return torch.tensor([(2 * i + 1) * vocab_size // (2 * _WITNESS_LEN) for i in range(_WITNESS_LEN)])


class Heads(NamedTuple):
    """A checkpoint of heads in memory."""

    config: HeadsConfig
    network: HeadNetwork
    witness: Witness


def save_heads(folder: str | os.PathLike[str], network: HeadNetwork, witness: Witness) -> Path:
    """Write heads to a folder, which is made if need be, and return the file; heads that are there already are replaced."""
    _check_witness(witness, network.config)
    path, seen = Path(folder) / FILE, {_TOKENS: witness.token_ids, _FEATURES: witness.features.float()}
    write_tensors(path, network.state_dict() | seen, {_METADATA: json.dumps(network.config.as_mapping())})
    return path


def method_of_heads(folder: str | os.PathLike[str]) -> str | None:
    """The method of the heads in a folder; None where there are none that could be read."""
    from safetensors import safe_open

    try:
        with safe_open(Path(folder) / FILE, "pt") as file:
            return read_config(json.loads((file.metadata() or {})[_METADATA])).method
    except Exception:  # whatever safetensors raises for a file that is corrupt, of which loading tells
        return None


def load_heads(folder: str | os.PathLike[str]) -> Heads:
    """Read heads from a folder, in the dtype in which they were saved."""
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


# --- Checks that heads fit a target.
#
# The target's facts and the hidden states that the heads read are noted where heads are made, and compared where they
# draft.


#: How far the hidden states may lie from the witness, as a share of its length. Rounding of weights and passes in bfloat16
#: or int8 stays far below; other weights, another layer or a forgotten norm lie far above.
TOLERANCE = 0.25


def describe_target(model: Any, name: str) -> HeadTarget:
    """Notes the target that heads are made for, a stock model of transformers, under a name to show."""
    config = model.config.get_text_config(decoder=True)
    return HeadTarget(
        name=name,
        model_type=str(config.model_type),
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
    )


def take_witness(model: Any, config: HeadsConfig) -> Witness:
    """Notes the hidden states of the target that heads are made for, whose weights are in its own modules."""
    tokens = witness_tokens(config.target.vocab_size)
    features = hf.layer_features(model, tokens[None].to(model.device), config.layer, normed=config.normed)
    return Witness(tokens, features[0].float().cpu())


def check_pairing(folder: str, config: HeadsConfig, witness: Witness, target: Target) -> None:
    """Raise HeadMismatchError unless heads were made for this target."""
    meant = config.target
    found = {
        "model_type": target.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
    }
    for field, value in found.items():
        needed = getattr(meant, field)
        if needed != value:
            problem = f"its heads were made for {meant.name!r} with {field}={needed}, and {target.name!r} has {value}"
            raise HeadMismatchError(folder, problem, "Use heads that were trained for this target.", field, needed, value)
    distance = _distance(config, witness, target)
    if not distance <= TOLERANCE:  # NaN is no match either
        problem = (
            f"behind layer {config.layer} the hidden states of {target.name!r} differ from those of {meant.name!r}, which "
            f"its heads were made for, by {distance:.2f} of their length"
        )
        raise HeadMismatchError(
            folder, problem, "Use heads that were trained for these weights.", "features", TOLERANCE, distance
        )


def read_features(config: HeadsConfig, target: Target, hidden: Tensor) -> Tensor:
    """Returns what heads read, from hidden states of the target.

    Args:
        hidden: [n, hidden_size] as the target shows them: rows that came back where the heads read such rows, else what the
            first layers left.

    Returns:
        [n, hidden_size]
    """
    normed_already = isinstance(config, RowHeadsConfig) and config.layer == target.num_layers
    return target.norm(hidden) if config.normed and not normed_already else hidden


def _distance(config: HeadsConfig, witness: Witness, target: Target) -> float:
    tokens = witness.token_ids.tolist()
    if isinstance(config, RowHeadsConfig):
        hidden = target.run_apart(tokens, aux_layers=(config.layer,)).aux_hidden_states[config.layer]
    else:
        target.try_layers(range(config.layer))
        left = target.run_apart(tokens, layers=range(config.layer)).hidden
        assert left is not None, "a pass through chosen layers says what they left"
        hidden = left
    features = read_features(config, target, hidden).double().cpu()
    return float((features - witness.features).norm() / witness.features.double().norm())


# --- Runs heads beside their target, on our kernels where these compute their products.


class RunningHeads:
    """Heads in the target's dtype, on its device.

    Args:
        network: Their layers; taken over.
    """

    def __init__(self, config: HeadsConfig, network: HeadNetwork, target: Target) -> None:
        self.config = config
        self._target = target
        self._network = network.to(target.device, target.dtype)
        round_weights(self._network, target, config.method)
        self._rows_dtype = use_kernels(self._network, target)
        # The kernels' products do not depend on other rows; activations do not either in this mode.
        self._mode: AbstractContextManager[object] = nullcontext()
        if packed_for(self._network) is not None:
            self._mode = RowByRow()  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        """Computes what the first heads hold likely.

        Args:
            hidden: [n, hidden_size] of the target, as it shows them.

        Returns:
            Logits [num_heads, n, vocab_size], float32 at least.
        """
        features = read_features(self.config, self._target, hidden)
        with self._mode:
            logits = self._network(features.to(self._rows_dtype), self._target.head, num_heads)
        return upcast_logits(logits)


def open_heads(folder: str, method: str, target: Target) -> RunningHeads:
    """Heads from a folder beside their target. HeadMismatchError where they are for another method or target."""
    config, network, witness = load_heads(folder)
    if config.method != method:
        problem = f"its heads are for method={config.method!r}, and method={method!r} was asked for"
        raise HeadMismatchError(folder, problem, f"Use method={config.method!r}.", "method", config.method, method)
    check_pairing(folder, config, witness, target)
    return RunningHeads(config, network, target)


def round_weights(network: nn.Module, target: Target, folder: str) -> None:
    """Round the weights of a head to whole numbers of 8 bits, and what enters their products too, where the target's own
    products are such ones: a draft then reads half as many bytes. Drafts are checked by the law that rounded weights give.
    UnsupportedModelError where a weight is not finite."""
    fmt = replace(FORMATS["int8"], rounds_rows=True)
    linears = [module for module in network.modules() if type(module) is nn.Linear]
    if target.rounds_rows and kernel_library() is not None and all(takes_rows(fmt, each.in_features) for each in linears):
        quantise_linears(network, fmt, name=folder)


def use_kernels(network: nn.Module, target: Target) -> torch.dtype:
    """Let our kernels compute the products of a head where they can; returns the dtype in which rows are given."""
    library = kernel_library()
    if library is not None:
        use_packed_linear(network, library)
    if packed_for(network) is None:
        return target.dtype
    real = torch.float64 if target.dtype == torch.float64 else torch.float32  # what the kernels multiply and add in
    for module in network.modules():
        if not isinstance(module, nn.Embedding):
            for left in module.parameters(recurse=False):  # norms and gates of experts
                left.data = left.data.to(real)
    return real
