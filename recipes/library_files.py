"""The files of Python's standard library that the embedded pair learns from, and those that it is measured with."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def library_files() -> Iterator[tuple[bool, Path, str]]:
    """(held out, path, text) of every file. One in fifty is held out, by the hash of its path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "encodings", "pydoc_data"} & set(path.parts) or "lib2to3/tests/data" in str(path):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if 400 <= len(text) <= 400_000:
            digest = hashlib.md5(str(path.relative_to(root)).encode()).hexdigest()
            yield int(digest, 16) % 50 == 0, path, text
