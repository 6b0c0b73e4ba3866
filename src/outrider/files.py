"""Writes files atomically."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

#: What the name of a file ends with as long as it is not whole. Nothing of this name is ever read.
UNFINISHED = ".unfinished"


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name, and give it its own when it is whole and on the disk."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(unfinished)
            _flush(unfinished)
            unfinished.replace(path)
            _flush(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text as `write_whole` does."""
    write_whole(path, lambda unfinished: _put(unfinished, text.encode("utf-8")))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write tensors in safetensors' format as `write_whole` does.

    Args:
        tensors: By name. No two may share memory.
    """
    from safetensors.torch import save

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = dict(about) if about else None  # an empty one without tensors gives a file that nobody can read
    write_whole(path, lambda unfinished: _put(unfinished, save(whole, header)))


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Within the block, a failure to write is a StorageError that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        remedy = "Free some space or choose another folder; the same command then goes on from what is there."
        raise StorageError(str(path), getattr(error, "strerror", None) or str(error), remedy) from error


def _put(path: Path, content: bytes) -> None:
    """Write bytes; a file of Python's own raises what the system says, as a full disk, by its name."""
    with path.open("wb") as file:
        file.write(content)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
