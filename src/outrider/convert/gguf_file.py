"""Puts a GGUF file in place when it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.files import write_whole


def write_file(writer: Any, path: Path) -> None:
    """Write what a writer of the gguf package, which was made without a path, has been told.

    Raises:
        StorageError: The file cannot be written. Nothing is left of it.
    """

    def put(unfinished: Path) -> None:
        try:
            writer.write_header_to_file(unfinished)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()

    write_whole(path, put)
