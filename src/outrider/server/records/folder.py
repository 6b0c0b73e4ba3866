"""The folder of a server's records: one folder of data for each namespace, and a lock that keeps other servers out."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from outrider.errors import InvalidParameterError
from outrider.files import storing

_LOCK = ".lock"
#: Bytes that the name of a file may have, with room for what stands behind it.
_LONGEST = 200


class RecordFolder:
    """A folder that belongs to this process until it is closed.

    Args:
        path: The folder, which is made if need be.

    Raises:
        InvalidParameterError: Another server writes to it.
        StorageError: It cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storing(path):
            path.mkdir(0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            remedy = "Give each server a folder of its own."
            raise InvalidParameterError("record", str(path), "another server writes to it", remedy) from None

    def of(self, namespace: str) -> Path:
        """The folder of a namespace. Names that differ have folders that differ, also where a system holds capital letters
        and small ones for the same.

        Raises:
            InvalidParameterError: The name is too long for a folder.
        """
        name = re.sub(rb"[^a-z0-9_-]", lambda found: b"%%%02x" % found[0][0], namespace.encode()).decode()
        if len(name) > _LONGEST:
            problem = "its name is too long for a folder of records"
            raise InvalidParameterError("record", namespace, problem, "Give the tenant a shorter name.")
        return self.path / name

    def close(self) -> None:
        """Let other servers have it."""
        os.close(self._lock)
