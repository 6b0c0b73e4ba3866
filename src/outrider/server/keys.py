"""API keys: who asks, and whose caches may be used for it."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from outrider.errors import InvalidParameterError

VARIABLE = "OUTRIDER_API_KEYS"


class ApiKeys:
    """Keys with the tenants that they belong to. Without keys everybody is served, in one namespace.

    Args:
        tenants: By key.
    """

    def __init__(self, tenants: Mapping[str, str] | None = None) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in (tenants or {}).items()]

    @classmethod
    def of(cls, file: Path | None) -> ApiKeys:
        """Keys from a file, a line each, or from the variable OUTRIDER_API_KEYS, with commas between them.

        A key stands behind the name of its tenant and a colon; several keys may have one tenant. A key without a name is a
        tenant of its own.

        Raises:
            InvalidParameterError: The file cannot be read, or it holds no key.
        """
        if file is None:
            return cls(_read(os.environ.get(VARIABLE, "").split(",")))
        try:
            found = _read(file.read_text("utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            problem = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
            raise InvalidParameterError("api_key_file", str(file), problem, "Give a file with a key a line.") from None
        if not found:
            raise InvalidParameterError("api_key_file", str(file), "it holds no key", "Write a key a line into it.")
        return cls(found)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, key: str) -> str | None:
        """Whose key this is; None for nobody's. Every key is compared, and each whole, so that the time tells nothing."""
        digest, found = _digest(key), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(lines: Iterable[str]) -> dict[str, str]:
    found = {}
    for line in (line.strip() for line in lines):
        if line and not line.startswith("#"):
            tenant, colon, key = line.partition(":")
            key = key.strip() if colon else tenant
            found[key] = tenant.strip() if colon else f"key-{_digest(key).hex()[:8]}"
    found.pop("", None)
    return found
