"""Checkpoints of a training: enough to resume to the bit, in safetensors and JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from outrider.errors import InvalidParameterError
from outrider.files import write_tensors, write_text
from outrider.records import JsonRecord

_KEPT = 2


class _UnreadableError(Exception):
    """Why a file of a checkpoint cannot be used."""


class Measurement(JsonRecord):
    """A row of the curves."""

    step: int  # steps done
    tokens: int  # tokens learnt from
    seconds: float  # of training so far, over all runs
    loss: float  # mean since the row before
    lr: float  # learning rate
    acceptance: tuple[float, ...]  # by depth, on held-out texts: the chance that the token rule accepts
    tau: float  # tokens of a pass that follow from it
    engine_tau: float | None = None  # the same as the engine counted it, where it ran
    engine_acceptance: tuple[float, ...] = ()  # by position, of drafts whose earlier tokens stood


class Progress(JsonRecord):
    """Says where a training stands."""

    step: int = 0  # steps done
    tokens: int = 0  # tokens learnt from
    seconds: float = 0.0  # of training so far
    losses: tuple[float, ...] = ()  # of the steps since the last measurement
    measurements: tuple[Measurement, ...] = ()  # so far
    best: int = 0  # the step whose weights were best on held-out texts
    waited: int = Field(0, ge=0)  # measurements since then


class Checkpoints:
    """The checkpoints of one training: the last ones, and the best weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, progress: Progress, module: nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> None:
        """Write a checkpoint. Its last file makes it one; older ones than the last two are removed."""
        place = self.folder / f"step-{progress.step:08d}"
        write_tensors(place / "weights.safetensors", dict(module.named_parameters()))
        tensors, numbers = _apart([optimiser.state_dict()["state"] for optimiser in optimisers])
        write_tensors(place / "optimisers.safetensors", tensors)
        state = {"progress": progress.model_dump(mode="json"), "optimisers": numbers}
        write_text(place / "state.json", json.dumps(state))
        for old in self._whole()[:-_KEPT]:
            (old / "state.json").unlink()  # from now on it is none
            shutil.rmtree(old)

    def restore(self, module: nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> Progress:
        """Go back to the last checkpoint; where there is none, nothing is changed and the training stands at its start."""
        whole = self._whole()
        if not whole:
            return Progress()
        place = whole[-1]
        try:
            state = json.loads((place / "state.json").read_bytes())
            progress = Progress.model_validate_json(json.dumps(state["progress"]))
            tensors = _read(place / "optimisers.safetensors")
            _load(module, place / "weights.safetensors")
            for optimiser, held in zip(optimisers, _together(tensors, state["optimisers"]), strict=True):
                groups = optimiser.state_dict()["param_groups"]
                optimiser.load_state_dict({"state": held, "param_groups": groups})
        except (_UnreadableError, OSError, ValueError, KeyError, IndexError, ValidationError) as error:
            problem = f"the checkpoint cannot be read ({error})"
            raise InvalidParameterError("out", str(place), problem, _remedy(len(whole))) from error
        if progress.measurements:
            self._check_best()
        return progress

    def save_best(self, module: nn.Module) -> None:
        """Keep these weights as the best. Raises StorageError."""
        write_tensors(self._best, dict(module.named_parameters()))

    def _check_best(self) -> None:
        """Raise InvalidParameterError now, and not at the end of the training, where the best weights cannot be read."""
        try:
            _read(self._best)
        except _UnreadableError as error:
            raise self._best_lost(error) from error

    def load_best(self, module: nn.Module) -> None:
        """Take the best weights. Raises InvalidParameterError where they are damaged."""
        try:
            _load(module, self._best)
        except _UnreadableError as error:
            raise self._best_lost(error) from error

    @property
    def _best(self) -> Path:
        return self.folder / "best.safetensors"

    def _best_lost(self, error: _UnreadableError) -> InvalidParameterError:
        problem = f"the best weights so far cannot be read ({error})"
        return InvalidParameterError("out", str(self._best), problem, "They are lost: begin in a new folder.")

    def _whole(self) -> list[Path]:
        return sorted(file.parent for file in self.folder.glob("step-*/state.json"))


def _remedy(num_whole: int) -> str:
    """Returns what helps where the last of so many checkpoints is damaged."""
    if num_whole > 1:
        return "Remove this checkpoint: the same command then goes on from the one before."
    return "Remove this checkpoint: there is none before it, so that the same command then begins anew."


def _load(module: nn.Module, path: Path) -> None:
    """Give a module the weights of a file, of which it must have all and no others. Raises _UnreadableError."""
    found, own = _read(path), dict(module.named_parameters())
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if shapes != {name: parameter.shape for name, parameter in own.items()}:
        raise _UnreadableError(f"{path.name} has weights of another shape")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _UnreadableError(f"{path.name}: {error}") from error


def _apart(states: Sequence[dict[int, dict[str, Any]]]) -> tuple[dict[str, Tensor], list[dict[str, dict[str, Any]]]]:
    """The tensors of optimisers' states by name, and the plain numbers beside them."""
    tensors: dict[str, Tensor] = {}
    numbers = []
    for place, state in enumerate(states):
        plain: dict[str, dict[str, Any]] = {str(index): {} for index in state}
        for index, held in state.items():
            tensors |= {f"{place}.{index}.{key}": value for key, value in held.items() if isinstance(value, Tensor)}
            plain[str(index)] |= {key: value for key, value in held.items() if not isinstance(value, Tensor)}
        numbers.append(plain)
    return tensors, numbers


def _together(tensors: dict[str, Tensor], numbers: list[dict[str, dict[str, Any]]]) -> list[dict[int, dict[str, Any]]]:
    """Returns what `_apart` took apart."""
    states = [{int(index): dict(held) for index, held in state.items()} for state in numbers]
    for name, value in tensors.items():
        place, index, key = name.split(".", 2)
        states[int(place)][int(index)][key] = value
    return states
