"""The header of a GGUF file, with every number checked before it is used, and its tensors in their blocks."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ModelLoadError
from outrider.kernels.formats import StoredWeight
from outrider.kernels.gguf_blocks import GGUF_TYPES, NARROWED_TYPES, in_order
from outrider.kernels.packed import release
from outrider.kernels.rounding import parts

# --- The header of a GGUF file, read with every number checked before it is used.
#
# The layout is that of version 3 (and 2) of ggml's specification, in little-endian order: magic, version, counts,
# metadata, the table of tensors, and their data. A file is mapped, and nothing outside of it is read. What it says of
# sizes is compared with its own size before anything is allocated.


#: What to do with a file that cannot be loaded.
ORIGINAL = 'Give the original checkpoint in safetensors; quantization="int4" rounds it while it is loaded.'
AGAIN = "Download the file again."
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
#: Bytes behind the data of a file in which another one may begin.
_MOST_PADDING = 64
#: The name of a part of a model that lies in several files.
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)
_MAGIC = b"GGUF"


class _MalformedError(ValueError):
    """A file that is no sound GGUF file. The message is what is wrong."""


#: The types that have no blocks.
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file."""

    name: str  # as llama.cpp names it
    shape: tuple[int, ...]  # as PyTorch has it: the inputs come last
    type: str  # the name of its type
    data: np.ndarray  # uint8, all its bytes, mapped

    def rows(self) -> Tensor:
        """uint8 [rows, bytes of a row], still in the file."""
        return torch.from_numpy(self.data).reshape(prod(self.shape[:-1]), -1)

    def integers(self) -> Tensor:
        """int64 of its shape, of a tensor of type I64."""
        return torch.from_numpy(self.data.copy()).view(torch.int64).reshape(self.shape)

    def floats(self) -> Tensor:
        """float32 of its shape."""
        if self.type in _FLOATS:
            return torch.from_numpy(self.data.copy()).view(_FLOATS[self.type]).float().reshape(self.shape)
        if self.type == "I64":
            return self.integers().float()
        stored = GGUF_TYPES[self.type].stored(self.rows().clone(), torch.float32)
        return stored.format.dequantise(stored, torch.float32).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A model in GGUF."""

    path: str  # as the caller named it
    metadata: dict[str, Any]  # its values by their keys
    tensors: dict[str, GgufTensor]  # by their names, those of all its files

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


def is_gguf(model: str) -> bool:
    """Tells whether a model is named by a GGUF file: by its ending, or by its first bytes: blobs of Ollama have no
    ending."""
    path = Path(model)
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:  # who needs it says so
        return False


def read_gguf(model: str) -> GgufFile:
    """Read the header of a file, and of those that belong to it. It is kept until `forget_headers`, since several ask for
    it while a model is loaded, and a large vocabulary takes a tenth of a second."""
    paths = parts_of(model)
    return _read_parts(model, tuple((path, *_changed(path)) for path in paths))


def forget_headers() -> None:
    """Let go of the headers that were read: their lists of strings, and the mapped files."""
    _read_parts.cache_clear()


def _changed(path: Path) -> tuple[int, int]:
    """When a file was changed, in ns, and its bytes; both 0 where there is none, which reading it tells."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=2)  # a model, and what drafts for it
def _read_parts(model: str, parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    paths = [path for path, _, _ in parts]
    for place, path in enumerate(paths):
        try:
            found, held, is_joined = _read(path)
            _check_part(path, found, place, len(paths), is_joined=is_joined)
            for name in tensors.keys() & held.keys():
                raise _MalformedError(f"another file of it holds the tensor {name}, too")
        except (_MalformedError, OSError, UnicodeDecodeError, MemoryError) as error:
            raise ModelLoadError(str(path), f"it is no sound GGUF file: {error}", AGAIN) from error
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
    names = (f"{stem}-{number:05d}-of-{count:05d}{found[3]}" for number in range(1, count + 1))
    parts = []
    for name in names:
        if not Path(name).is_file():
            problem = f"it is one of {count} files, and {Path(name).name} is missing"
            raise ModelLoadError(model, problem, "Put all of them into one folder.")
        parts.append(Path(name))
    return parts


def _check_part(path: Path, metadata: dict[str, Any], place: int, count: int, *, is_joined: bool) -> None:
    """Refuse a part of a model whose name is not that of this part, and parts that were joined to one file."""
    said, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if not isinstance(said, int) or not isinstance(number, int) or said < 2 or (said, number) == (count, place):
        return
    name = f"NAME-{number + 1:05d}-of-{said:05d}.gguf"
    if is_joined:
        problem = f"it is part {number + 1} of {said} of a model, with other parts written behind it"
        remedy = f"Parts cannot be joined like that. Put all into one folder, this one as {name}."
    else:
        problem = f"it is part {number + 1} of {said} of a model, and its name does not say so: it was renamed"
        remedy = f"Call it {name}, beside the others; or join them with llama-gguf-split --merge."
    raise ModelLoadError(str(path), problem, remedy)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor], bool]:
    """Returns what a file holds, and whether another one is written behind it."""
    if path.stat().st_size < 24:
        raise _MalformedError("it ends within its first 24 bytes")
    with path.open("rb") as file:
        reader = _HeaderReader(mmap(file.fileno(), 0, access=ACCESS_COPY))  # private, and never written to
    if reader.take(4) != _MAGIC:
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
    tensors, end = _placed(reader, table, metadata.get("general.alignment", 32))
    return metadata, tensors, _MAGIC in bytes(reader.data[end : end + _MOST_PADDING])


def _placed(
    reader: _HeaderReader, table: list[tuple[str, tuple[int, ...], str, int]], alignment: object
) -> tuple[dict[str, GgufTensor], int]:
    """The tensors with their data, and where the last of these end."""
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment & (alignment - 1):
        raise _MalformedError(f"general.alignment is {alignment!r}, and no power of two")
    begin = end = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    places = list[tuple[int, int, str]]()
    for name, shape, kind, offset in table:
        if name in tensors:
            raise _MalformedError(f"it has two tensors {name}")
        size = _nbytes(name, shape, kind)
        if offset % alignment:
            raise _MalformedError(f"the data of {name} begin at {offset}, which {alignment} does not divide")
        if begin + offset + size > len(reader.data):
            raise _MalformedError(f"the data of {name} end at byte {begin + offset + size:,} of {len(reader.data):,}")
        places.append((offset, offset + size, name))
        tensors[name] = GgufTensor(name, shape, kind, reader.data[begin + offset : begin + offset + size])
        end = max(end, begin + offset + size)
    for (_, stop, name), (start, _, other) in pairwise(sorted(places)):
        if start < stop:  # so a small file cannot be a large model
            raise _MalformedError(f"{name} and {other} have the same bytes")
    return tensors, end


def _nbytes(name: str, shape: tuple[int, ...], kind: str) -> int:
    if kind in _SINGLE:  # vectors may have any length
        return _SINGLE[kind] * prod(shape)
    known = GGUF_TYPES.get(kind)
    if known is None:
        raise _MalformedError(f"{name} has the type {kind}, and F32, {', '.join(GGUF_TYPES)} are known")
    if shape[-1] % known.inputs:
        raise _MalformedError(f"{name} has rows of {shape[-1]} weights, and blocks of {kind} have {known.inputs}")
    return prod(shape) // known.inputs * known.nbytes


#: The length of a string, at a place in a file.
_length = struct.Struct("<Q").unpack_from


class _HeaderReader:
    """Reads a mapped file from its beginning."""

    def __init__(self, mapped: mmap) -> None:
        self.data, self.at = np.frombuffer(mapped, np.uint8), 0
        self._bytes = mapped

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > len(self._bytes) - self.at:
            raise self._ends()
        self.at += count
        return self._bytes[self.at - count : self.at]

    def _ends(self) -> _MalformedError:
        return _MalformedError(f"it ends at byte {len(self.data):,}, within its header")

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
        found, rest, at, end = list[str](), self._bytes, self.at, len(self._bytes)
        for _ in range(count):
            begin = at + 8
            at = begin + _length(rest, at)[0] if begin <= end else begin
            if at > end:
                raise self._ends()
            found.append(rest[begin:at].decode())
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


# --- Tensors of GGUF files as weights that stay in their blocks.


def is_packed(tensor: GgufTensor) -> bool:
    """Tells whether a matrix, or one for each expert, stays in blocks. The kernels take units of 32 inputs, and routers are
    floats."""
    known = tensor.type in GGUF_TYPES and ".ffn_gate_inp." not in tensor.name
    return known and len(tensor.shape) in (2, 3) and tensor.shape[-1] % 32 == 0


def rows_may_be_rounded(file: GgufFile) -> bool:
    """Tells whether there are matrices of a file that rows of 8 bits can be multiplied with."""
    return any(takes_rounded_rows(tensor) for tensor in file.tensors.values())


def may_be_narrowed(file: GgufFile) -> bool:
    """Tells whether there are matrices of a file, experts aside, in blocks of 5 or 8 bits that may be rounded to blocks of
    4."""
    found = (tensor for tensor in file.tensors.values() if tensor.type in NARROWED_TYPES)
    return any(is_packed(tensor) and len(tensor.shape) == 2 for tensor in found)


#: Matrices that the kernels multiply the same rows with, in one form.
_TOGETHER = (
    ("attn_q", "attn_k", "attn_v"),
    ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_ba"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)
#: How the names of tensors of a layer begin.
_LAYER = re.compile(r"(enc\.|dec\.)?blk\.\d+\.")


def mixes_rows(file: GgufFile) -> bool:
    """Tells whether matrices that are multiplied with the same rows are blocks of codes and floats."""
    layers = {found[0] for found in map(_LAYER.match, file.tensors) if found is not None}
    groups = ([f"{layer}{name}.weight" for name in names] for layer in layers for names in _TOGETHER)
    found = ({takes_rounded_rows(file.tensors[name]) for name in names if name in file.tensors} for names in groups)
    return any(len(kinds) > 1 for kinds in found)


def takes_rounded_rows(tensor: GgufTensor) -> bool:
    """Tells whether a matrix is in blocks of codes, which rows of 8 bits can be multiplied with."""
    return is_packed(tensor) and GGUF_TYPES[tensor.type].format.may_round_rows


def stored_tensor(
    path: str,
    tensor: GgufTensor,
    dtype: torch.dtype,
    order: Tensor | None = None,
    columns: Tensor | None = None,
    *,
    narrow: bool = False,
) -> StoredWeight:
    """The weights of a tensor for which `is_packed` holds, which stand for `dtype`: [out_features, in_features], or with
    [num_experts] before it. `order` and `columns` are the rows and the columns of the file in the order that is wanted.
    Blocks hold columns of their file, and so keep their order, which products then follow. With `narrow`, blocks of Q5_0
    and Q8_0 are rounded to Q4_0."""
    rows = tensor.rows()
    known = (NARROWED_TYPES if narrow else GGUF_TYPES).get(tensor.type, GGUF_TYPES[tensor.type])
    wanted = rows if order is None else rows[order]
    if columns is None:
        stored = known.stored(wanted, dtype)
    elif known.format.code_bits == 16:
        stored = known.stored(wanted.view(torch.int16)[:, columns].view(torch.uint8), dtype)
    else:
        stored = in_order(known.stored(wanted, dtype), torch.argsort(columns))
    release(rows)
    halves = torch.bfloat16 if tensor.type == "BF16" else torch.float16
    numbers = stored.data.view(halves) if stored.scale is None else stored.scale  # no copy in float32
    if not all(_are_finite(numbers[some]) for some in parts(numbers)):
        raise ModelLoadError(path, f"the tensor {tensor.name} holds numbers that are not finite", AGAIN)
    if len(tensor.shape) == 2:
        return stored
    return stored.each(lambda column: column.reshape(*tensor.shape[:2], *column.shape[1:]))


def _are_finite(halves: Tensor) -> bool:
    """Tells by their bits whether all numbers of 16 bits are finite, in a tenth of the time that PyTorch takes."""
    exponent = 0x7F80 if halves.dtype == torch.bfloat16 else 0x7C00
    return bool((halves.view(torch.int16).numpy() & exponent != exponent).all())


# --- How much of a model's files has been read, for whoever shows it.


#: Called with the name of a file, the bytes of it that were read so far, and all bytes. It may be called in any thread.
ShowReading = Callable[[str, int, int], None]

_watchers: list[ShowReading] = []


@contextmanager
def watched_reading(show: ShowReading) -> Iterator[None]:
    """Within the block, whatever is read of a GGUF file in this process is told to `show`."""
    _watchers.append(show)
    try:
        yield
    finally:
        _watchers.remove(show)


class FileProgress:
    """Holds what has been read of a file of `total` bytes."""

    def __init__(self, path: str, total: int) -> None:
        self._name, self._done, self._total = Path(path).name, 0, total

    def advance(self, count: int) -> None:
        """`count` more bytes have been read."""
        self._done += count
        for show in _watchers:
            show(self._name, self._done, self._total)
