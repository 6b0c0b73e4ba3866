"""Converted checkpoints, kept from one run to the next."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from outrider.model.gguf import write_gguf


def converted_path(folder: Path, checkpoint: str, kind: str) -> Path:
    """Where `checkpoint`, converted to `kind`, is kept in `folder`: another name when its files change.

    Args:
        folder: Made if it is missing.
        checkpoint: Folder or hub id.
        kind: Becomes part of the name, as "bfloat16.gguf".
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(checkpoint)
    files = sorted(source.iterdir()) if source.is_dir() else []
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = sha256(repr((str(source.resolve()) if files else checkpoint, facts)).encode()).hexdigest()[:12]
    return folder / f"{source.name}-{key}-{kind}"


def gguf_file(folder: Path, checkpoint: str, dtype: str) -> str:
    """The checkpoint as a GGUF file in which no token ends a text; written unless it is there.

    Raises:
        UnsupportedModelError: GGUF cannot say what this model computes.
    """
    path = converted_path(folder, checkpoint, f"{dtype}.gguf")
    return str(path) if path.exists() else write_gguf(checkpoint, path, dtype)
