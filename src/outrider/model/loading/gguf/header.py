"""The header of a GGUF file, read with every number checked before it is used.

The layout is that of version 3 (and 2) of ggml's specification, in little-endian order: magic, version, counts, metadata,
the table of tensors, and their data. A file is mapped, and nothing outside of it is read. What it says of sizes is compared
with its own size before anything is allocated.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ModelLoadError
from outrider.kernels.formats.gguf import GGUF_TYPES

_AGAIN = "Download the file again."
#: The types of values of one size, by their numbers in files.
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: The names of tensors' types, by their numbers in files, as ggml.h lists them.
_TYPES = {
    0: "F32", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 23:
    "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
} | {known.number: name for name, known in GGUF_TYPES.items()}  # fmt: skip
#: Bytes of a number, of types without blocks.
_SINGLE = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
_MOST_DIMENSIONS = 4
_LARGEST_NAME = 65_535
#: The name of a part of a model that lies in several files.
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class _MalformedError(ValueError):
    """A file that is no sound GGUF file. The message is what is wrong."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        name: As llama.cpp names it.
        shape: As PyTorch has it: the inputs come last.
        type: The name of its type.
        data: uint8, all its bytes, mapped.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    data: np.ndarray

    def rows(self) -> Tensor:
        """uint8 [rows, bytes of a row], still in the file."""
        return torch.from_numpy(self.data).reshape(prod(self.shape[:-1]), -1)

    def integers(self) -> Tensor:
        """int64 of its shape, of a tensor of type I64."""
        return torch.from_numpy(self.data.copy()).view(torch.int64).reshape(self.shape)

    def floats(self) -> Tensor:
        """float32 of its shape."""
        if self.type == "F32":
            return torch.from_numpy(self.data.copy()).view(torch.float32).reshape(self.shape)
        if self.type == "I64":
            return self.integers().float()
        stored = GGUF_TYPES[self.type].stored(self.rows().clone(), torch.float32)
        return stored.format.dequantise(stored, torch.float32).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A model in GGUF.

    Attributes:
        path: As the caller named it.
        metadata: Its values by their keys.
        tensors: By their names, those of all its files.
    """

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


def is_gguf(model: str) -> bool:
    """Whether a model is named by a GGUF file."""
    return model.endswith(".gguf") and Path(model).is_file()


def read_gguf(model: str) -> GgufFile:
    """Read the header of a file, and of those that belong to it.

    Raises:
        ModelLoadError: A file is truncated, malformed, or one of several that are not there.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for path in parts_of(model):
        try:
            found, held = _read(path)
            for name in tensors.keys() & held.keys():
                raise _MalformedError(f"another file of it holds the tensor {name}, too")
        except (_MalformedError, OSError, UnicodeDecodeError, MemoryError) as error:
            raise ModelLoadError(str(path), f"it is no sound GGUF file: {error}", _AGAIN) from error
        metadata = metadata or found
        tensors |= held
    return GgufFile(model, metadata, tensors)


def parts_of(model: str) -> list[Path]:
    """The files of a model, of which any one may be named."""
    path, found = Path(model), _PART.search(model)
    if found is None:
        return [path]
    count = int(found[2])
    stem = str(path)[: -len(found[0])]
    names = (f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))
    parts = []
    for name in names:
        if not Path(name).is_file():
            problem = f"it is one of {count} files, and {Path(name).name} is missing"
            raise ModelLoadError(model, problem, "Put all of them into one folder.")
        parts.append(Path(name))
    return parts


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if path.stat().st_size < 24:
        raise _MalformedError("it ends within its first 24 bytes")
    reader = _Reader(np.memmap(path, mode="c", dtype=np.uint8))  # private, and never written to
    if reader.take(4) != b"GGUF":
        raise _MalformedError("it does not begin with GGUF")
    version, num_tensors, num_values = reader.numbers("IQQ")
    if version not in (2, 3):
        raise _MalformedError(f"it has version {version}, and versions 2 and 3 in little-endian order are known")
    reader.check_count(num_tensors, 24, "tensors")
    reader.check_count(num_values, 13, "values")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string(_LARGEST_NAME)
        if key in metadata:
            raise _MalformedError(f"it has two values for {key}")
        metadata[key] = reader.value(key)
    table = [reader.entry() for _ in range(num_tensors)]
    return metadata, _placed(reader, table, metadata.get("general.alignment", 32))


def _placed(
    reader: _Reader, table: list[tuple[str, tuple[int, ...], str, int]], alignment: object
) -> dict[str, GgufTensor]:
    """The tensors with their data."""
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment & (alignment - 1):
        raise _MalformedError(f"general.alignment is {alignment!r}, and no power of two")
    begin = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in table:
        if name in tensors:
            raise _MalformedError(f"it has two tensors {name}")
        size = _nbytes(name, shape, kind)
        if offset % alignment:
            raise _MalformedError(f"the data of {name} begin at {offset}, which {alignment} does not divide")
        if begin + offset + size > len(reader.data):
            raise _MalformedError(f"the data of {name} end at byte {begin + offset + size:,} of {len(reader.data):,}")
        tensors[name] = GgufTensor(name, shape, kind, reader.data[begin + offset : begin + offset + size])
    return tensors


def _nbytes(name: str, shape: tuple[int, ...], kind: str) -> int:
    if kind in _SINGLE:  # vectors may have any length
        return _SINGLE[kind] * prod(shape)
    known = GGUF_TYPES.get(kind)
    if known is None:
        raise _MalformedError(f"{name} has the type {kind}, and F32, {', '.join(GGUF_TYPES)} are known")
    if shape[-1] % known.inputs:
        raise _MalformedError(f"{name} has rows of {shape[-1]} weights, and blocks of {kind} have {known.inputs}")
    return prod(shape) // known.inputs * known.nbytes


class _Reader:
    """Reads a mapped file from its beginning."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0
        self._bytes: memoryview = data.data

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > len(self._bytes) - self.at:
            raise _MalformedError(f"it ends at byte {len(self.data):,}, within its header")
        self.at += count
        return bytes(self._bytes[self.at - count : self.at])

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        """The next numbers, of these kinds."""
        return struct.unpack(f"<{kinds}", self.take(struct.calcsize(f"<{kinds}")))

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse more of something than the rest of the file can hold."""
        if count > (len(self.data) - self.at) // least_bytes:
            raise _MalformedError(f"it announces {count:,} {what}, and has {len(self.data) - self.at:,} bytes left")

    def string(self, most: int | None = None) -> str:
        (length,) = self.numbers("Q")
        if most is not None and length > most:
            raise _MalformedError(f"it has a name of {length:,} bytes")
        return self.take(length).decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        """The next strings. A vocabulary has some hundred thousands, so this is one loop without calls of its own."""
        found, rest, at = [], self._bytes, self.at
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(rest[at:begin], "little")
            if at > len(rest):
                raise _MalformedError(f"it ends at byte {len(rest):,}, within its header")
            found.append(str(rest[begin:at], "utf-8"))
        self.at = at
        return found

    def value(self, key: str) -> Any:
        """A value with its type before it."""
        (kind,) = self.numbers("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._number(key, kind)
        element, count = self.numbers("IQ")
        if element == _STRING:
            self.check_count(count, 8, f"strings in {key}")
            return self._strings(count)
        if element not in _VALUES:
            raise _MalformedError(f"{key} is a list of values of type {element}, which is not known")
        size = struct.calcsize(_VALUES[element])
        self.check_count(count, size, f"values in {key}")
        return list(struct.unpack(f"<{count}{_VALUES[element]}", self.take(count * size)))

    def _number(self, key: str, kind: int) -> Any:
        if kind not in _VALUES:
            raise _MalformedError(f"{key} is a value of type {kind}, which is not known")
        return self.numbers(_VALUES[kind])[0]

    def entry(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape, type and offset of a tensor."""
        name = self.string(_LARGEST_NAME)
        (count,) = self.numbers("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise _MalformedError(f"{name} has {count} dimensions, and 1 to {_MOST_DIMENSIONS} are known")
        shape = tuple(reversed(self.numbers(f"{count}Q")))
        if min(shape) < 1:
            raise _MalformedError(f"{name} has the shape {list(shape)}")
        kind, offset = self.numbers("IQ")
        if kind not in _TYPES:
            raise _MalformedError(f"{name} has a type of number {kind}, which is not known")
        return name, shape, _TYPES[kind], offset
