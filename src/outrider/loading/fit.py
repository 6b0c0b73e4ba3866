"""Checks whether a checkpoint fits into memory, from the headers of its files, before weights are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
from typing import Any

import torch

from outrider.cache.pool import StateKind
from outrider.config import ModelConfig
from outrider.errors import ModelTooLargeError
from outrider.kernels.formats import FORMATS, WeightFormat
from outrider.loading import hf_modules
from outrider.loading.sources import WHOLE, indexed_files

_INDEX = "model.safetensors.index.json"
#: Floating dtypes in the headers, which loading converts. Others stay as they are.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FLOATS |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
_LONGEST_HEADER = 100_000_000  # what the format allows


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the header of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def nbytes(self, dtype: torch.dtype | None, rounded: WeightFormat | None = None) -> int:
        """Returns what it takes, loaded in `dtype`, or as it is stored for None; matrices but for embeddings in the format
        to which they are rounded."""
        is_matrix = len(self.shape) == 2 and not any(part in self.name for part in ("embed", "wte", "wpe"))
        if rounded is not None and is_matrix:
            return rounded.nbytes(*self.shape)
        stored = _FLOATS.get(self.dtype)
        size = _BYTES.get(self.dtype, 1) if stored is None else (dtype or stored).itemsize
        return prod(self.shape) * size


@dataclass(frozen=True)
class Needs:
    """Holds what a model takes of memory."""

    weight_bytes: int  # for its weights, as they are loaded
    kv_token_bytes: int  # for keys and values of a token; 0 where that is not known


def needs(config: ModelConfig, hf_config: Any, file_bytes: int | None = None) -> Needs | None:
    """Returns what a checkpoint takes; None where its model is no folder with safetensors files. `file_bytes` are those of
    tensors that stay as a file has them."""
    tensors = stored_tensors(Path(config.model))
    if not tensors and file_bytes is None:
        return None
    dtype = _asked_dtype(config, hf_config)
    weights = _weight_bytes(tensors, hf_config, dtype, _rounded(config)) if file_bytes is None else file_bytes
    return Needs(weights, _kv_bytes_per_token(hf_config, dtype or torch.float32))


def check_fit(
    config: ModelConfig, hf_config: Any, device: torch.device, kv_tokens: int | None, file_bytes: int | None = None
) -> None:
    """Refuse a checkpoint that does not fit, with the numbers.

    Args:
        kv_tokens: How many tokens of keys and values are asked for; None for as many as there is room for.
        file_bytes: The bytes of tensors that stay as a file has them; None where they are loaded in a dtype.
    """
    available = available_bytes(device)
    found = needs(config, hf_config, file_bytes)
    if available is None or found is None:
        return
    weights, kv = found.weight_bytes, (kv_tokens or 0) * found.kv_token_bytes
    if weights + kv > available:
        dtype = _asked_dtype(config, hf_config)
        remedy = "Use a smaller kv_cache_tokens, a smaller file, or a machine with more memory."
        if file_bytes is None:
            remedy = _remedy(config, hf_config, stored_tensors(Path(config.model)), dtype, available, kv_tokens)
        name = str(dtype).removeprefix("torch.") if dtype is not None else "the dtypes of its files"
        keys = f" and {kv / 1e9:.1f} GB for keys and values" if kv else ""
        need = f"it needs {weights / 1e9:.1f} GB for its weights in {config.quantization or name}{keys}"
        problem = f"{need}, and {available / 1e9:.1f} GB of memory are available"
        raise ModelTooLargeError(config.model, problem, remedy, weights, kv, available)


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """The tensors of a checkpoint by the headers of its safetensors files; none where there are no such files.

    What is malformed is left to loading, which says what is wrong.
    """
    try:
        return [tensor for _, tensors in file_headers(folder) for tensor in tensors]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def file_headers(folder: Path) -> Iterator[tuple[Path, list[StoredTensor]]]:
    """The safetensors files of a checkpoint, each with its tensors. Raises what a malformed file makes its reader raise."""
    for path in weight_files(folder):
        yield path, _header(path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if (folder / WHOLE).is_file():  # transformers reads no index beside it
        return [folder / WHOLE]
    names = indexed_files(str(folder), folder / _INDEX) if (folder / _INDEX).is_file() else []
    return [folder / name for name in names]


def _header(path: Path) -> list[StoredTensor]:
    if not path.is_file():
        raise ValueError("no file")  # and opening a pipe would wait for whoever writes into it
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _LONGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        entries = json.loads(file.read(size))
    return [
        StoredTensor(name, str(entry["dtype"]), tuple(index(size) for size in entry["shape"]))
        for name, entry in entries.items()
        if name != "__metadata__"
    ]


def _asked_dtype(config: ModelConfig, hf_config: Any) -> torch.dtype | None:
    """The dtype that weights are loaded in; None for that of the files."""
    if config.dtype != "auto":
        asked: torch.dtype = getattr(torch, config.dtype)
        return asked
    written = getattr(hf_config, "dtype", None)
    return written if isinstance(written, torch.dtype) else None


def _rounded(config: ModelConfig) -> WeightFormat | None:
    """The format of the rounded weights that are asked for."""
    return None if config.quantization is None else FORMATS[config.quantization]


def _weight_bytes(
    tensors: list[StoredTensor], hf_config: Any, dtype: torch.dtype | None, rounded: WeightFormat | None
) -> int:
    size = sum(tensor.nbytes(dtype, rounded) for tensor in tensors)
    if (
        rounded is not None and hf_modules.decoder_config(hf_config).tie_word_embeddings
    ):  # the rounded head is a matrix of its own
        text = hf_modules.decoder_config(hf_config)
        size += rounded.nbytes(text.vocab_size, text.hidden_size)
    return size


def _kv_bytes_per_token(hf_config: Any, dtype: torch.dtype) -> int:
    """Keys and values of a token in all layers that keep some of their own, as usual attention does; 0 where the
    configuration does not say."""
    try:
        pairs = zip(hf_modules.layer_specs(hf_config), hf_modules.key_heads(hf_config), strict=True)
        own = [pair for layer, pair in enumerate(pairs) if layer not in hf_modules.owners_of_keys(hf_config)]
        kept = [heads.num * heads.width for layer, heads in own if StateKind.KEYS_AND_VALUES in layer.keeps]
        return int(2 * sum(kept) * dtype.itemsize)
    except (AttributeError, TypeError):
        return 0


def _remedy(
    config: ModelConfig,
    hf_config: Any,
    tensors: list[StoredTensor],
    dtype: torch.dtype | None,
    available: int,
    kv_tokens: int | None,
) -> str:
    """Returns what would fit."""
    ways = []
    tokens = kv_tokens or 0
    per_token = _kv_bytes_per_token(hf_config, dtype or torch.float32)
    weights = _weight_bytes(tensors, hf_config, dtype, _rounded(config))
    if tokens and per_token and weights + per_token <= available:
        ways.append(f"kv_cache_tokens={(available - weights) // per_token} or less")
    if dtype not in (torch.bfloat16, torch.float16):
        narrow = torch.bfloat16
        size = _weight_bytes(tensors, hf_config, narrow, _rounded(config))
        if size + tokens * _kv_bytes_per_token(hf_config, narrow) <= available:
            ways.append(f"dtype='bfloat16' ({size / 1e9:.1f} GB of weights)")
    if config.quantization is None:
        for name in ("int8", "int4"):
            size = _weight_bytes(tensors, hf_config, dtype, FORMATS[name])
            if size + tokens * per_token <= available:
                ways.append(f"quantization={name!r} ({size / 1e9:.1f} GB of weights)")
                break
    return f"Use {', or '.join(ways)}." if ways else "Use a smaller model, or a machine with more memory."


# --- Determines how many bytes of memory this process may still take.


#: The files of a control group, of version 2 and of version 1: limit, use, and what of the use can be taken back.
_VERSIONS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """The memory of a device that is free, or can be freed at once, within the limits of this process.

    Returns:
        Bytes; None where the system does not say.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    found = [_of_system(root), *(_of_group(root, version) for version in _VERSIONS)]
    return min((size for size in found if size is not None), default=None)


def leaves_room(size: int, device: torch.device) -> bool:
    """Tells whether half of the memory that is left holds so many bytes. Other models, and what is kept of texts, need the
    rest."""
    available = available_bytes(device)
    return available is None or size <= available / 2


def _of_system(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _of_group(root: Path, version: tuple[str, str, str, str]) -> int | None:
    """Returns what the control group of this process leaves, or one that holds it. None where there is no limit."""
    mount, limit_name, use_name, cache_name = version
    mounted = root / mount
    own = mounted / _own_group(root, version is _VERSIONS[1]).lstrip("/")
    left = []
    for group in (own, *own.parents):
        if not group.is_relative_to(mounted):
            break
        try:
            limit = int((group / limit_name).read_text("ascii"))
            use = int((group / use_name).read_text("ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        left.append(max(0, limit - use + int(stat.get(cache_name, 0))))
    return min(left, default=None)


def _own_group(root: Path, is_first_version: bool) -> str:
    """The path of this process's group, as the system tells it."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if ("memory" in controllers.split(",")) if is_first_version else not controllers:
            return path
    return ""
