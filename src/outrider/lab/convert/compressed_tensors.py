"""Writes a checkpoint with rounded weights in the format of compressed-tensors, which transformers loads.

Tensors are read, rounded and written one after another. All files are written into a folder beside the wanted one, which
gets its name at the very end. The configuration is the last file, so that nothing half-written can be loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.errors import InvalidParameterError, ModelLoadError, StorageError, UnsupportedModelError
from outrider.kernels.formats import FORMATS, StoredWeight, WeightFormat, unfolded
from outrider.kernels.weights import check_groups
from outrider.loading import hf_modules
from outrider.loading.exclusive import exclusive_transformers
from outrider.loading.fit import weight_files

#: A file of weights holds about so many bytes at most. So many are in memory at a time.
_FILE_BYTES = 2**30


def write_compressed(checkpoint: str, out: Path, fmt: WeightFormat, card: str = "") -> Path:
    """Write a checkpoint with the weights of its linear layers rounded to a folder that does not exist, or is empty, with a
    card as its README.md. The head stays as it is."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidParameterError("out", str(out), "it exists and is not an empty folder", "Give a new folder.")
    layers = rounded_layers(checkpoint)
    check_groups(fmt, layers)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        _write_weights(checkpoint, unfinished, fmt, layers)
        _copy_the_rest(Path(checkpoint), unfinished)
        if card:
            (unfinished / "README.md").write_text(card, "utf-8")
        _write_config(Path(checkpoint), unfinished, fmt)
        if out.exists():
            out.rmdir()
        unfinished.replace(out)
    except OSError as error:
        raise StorageError(str(out), str(error), "Free the space, or give another folder.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return out


def rounded_layers(checkpoint: str) -> dict[str, int]:
    """The names of the weights that are rounded, with the numbers of their inputs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with exclusive_transformers():
            config = AutoConfig.from_pretrained(checkpoint)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ModelLoadError(checkpoint, f"it cannot be read ({error})", "Give the folder of a checkpoint.") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(checkpoint, "its weights are quantised already", "Give the original checkpoint.")
    if hf_modules.expert_stacks(model):
        remedy = "Use LLM(..., quantization=...), which rounds experts at load."
        raise UnsupportedModelError(checkpoint, "its experts cannot be written in this format", remedy)
    head = model.get_output_embeddings()
    linears = {path: m for path, m in model.named_modules() if type(m) is nn.Linear and m is not head}
    return {f"{path}.weight": module.in_features for path, module in linears.items()}


def _write_weights(checkpoint: str, folder: Path, fmt: WeightFormat, layers: dict[str, int]) -> None:
    from safetensors.torch import save_file

    index: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    found, size = set(), 0

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in _tensors(checkpoint):
        parts = _compressed(checkpoint, name, tensor, fmt) if name in layers else {name: tensor}
        found.add(name)
        held |= parts
        size += sum(part.nbytes for part in parts.values())
        if sum(part.nbytes for part in held.values()) >= _FILE_BYTES:
            flush()
    flush()
    missing = sorted(layers.keys() - found)
    if missing:
        problem = f"{missing[0]} is in none of its safetensors files"
        raise ModelLoadError(checkpoint, problem, "Save it again with transformers.")
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
    list_of_files = folder / "model.safetensors.index.json"
    list_of_files.write_text(text, "utf-8")
    for name in set(index.values()):  # which safetensors lets the owner alone read, and a server may run as somebody else
        shutil.copymode(list_of_files, folder / name)


def _tensors(checkpoint: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        for path in weight_files(Path(checkpoint)):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    yield name, file.get_tensor(name)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(checkpoint, f"its weights cannot be read ({error})", "Get the checkpoint again.") from error


def _compressed(checkpoint: str, name: str, weight: Tensor, fmt: WeightFormat) -> dict[str, Tensor]:
    """The tensors that compressed-tensors keeps of a matrix."""
    stored = as_written(fmt, weight.shape[1]).store(weight)
    assert stored.scale is not None, "rounded weights have scales"
    if not stored.scale.isfinite().all():
        problem = f"{name} holds weights that are not finite, and cannot be rounded"
        raise UnsupportedModelError(checkpoint, problem, "Get the checkpoint again.")
    scale = stored.scale.to(weight.dtype)
    return {
        f"{name}_packed": _words(_numbers(stored), fmt.bits),
        f"{name}_scale": scale.contiguous(),
        f"{name}_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _numbers(stored: StoredWeight) -> Tensor:
    """Whole numbers from 0 on [out_features, in_features]."""
    if stored.format.bits == 4:
        return unfolded(stored.data)
    return (stored.data.to(torch.int16) + 128).to(torch.uint8)


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [rows, n] in words of 32 bits [rows, n * bits / 32], the first one in the lowest bits."""
    at_once = 32 // bits
    padded = nn.functional.pad(numbers, (0, -numbers.shape[1] % at_once)).to(torch.int64).unflatten(1, (-1, at_once))  # type: ignore[no-untyped-call]
    words = (padded << (torch.arange(at_once) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _copy_the_rest(checkpoint: Path, folder: Path) -> None:
    """The tokenizer and the generation settings."""
    for path in sorted(checkpoint.iterdir()):
        skipped = path.name in ("config.json", "README.md") or ".safetensors" in path.name or path.suffix in (".bin", ".pt")
        if path.is_file() and not skipped:
            shutil.copyfile(path, folder / path.name)


def _write_config(checkpoint: Path, folder: Path, fmt: WeightFormat) -> None:
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    weights = {
        "num_bits": fmt.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if fmt.group is None else "group",
        "group_size": fmt.group,
        "dynamic": False,
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def as_written(fmt: WeightFormat, in_features: int) -> WeightFormat:
    """The format of a matrix in the file. A scale for an output has the dtype of the weights there, as scales of groups
    have, so it is that of a group of all inputs."""
    return fmt if fmt.group is not None else replace(fmt, group=in_features)


def format_of(bits: int, group_size: int | None) -> WeightFormat:
    """The symmetric format with so many bits and such groups; transformers cannot load zero points in this format. A group
    size of None is a scale for each output."""
    name = f"int{bits}" + (f"-g{group_size}" if group_size is not None else "")
    found = FORMATS.get(name)
    if found is None or found.name != name:
        remedy = "Use 4 or 8 bits with groups of 32, 64 or 128, or 8 bits with a group size of 0 (a scale for each output)."
        raise InvalidParameterError("bits", bits, f"there is no format with groups of {group_size or 'all inputs'}", remedy)
    return found
