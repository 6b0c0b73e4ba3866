"""API keys: the tenant, its cache namespace and its limits."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from outrider.errors import InputError, InvalidParameterError
from outrider.server.tenancy.limits import UNLIMITED, TenantLimits
from outrider.validation import unknown_setting

VARIABLE = "OUTRIDER_API_KEYS"


class ApiKeys:
    """Keys with the tenants that they belong to. Without keys everybody is served, in one namespace.

    Args:
        tenants: By key.
        limits: By tenant, where it has some.
    """

    def __init__(self, tenants: Mapping[str, str] | None = None, limits: Mapping[str, TenantLimits] | None = None) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in (tenants or {}).items()]
        self._limits = dict(limits or {})

    @classmethod
    def of(cls, file: Path | None) -> ApiKeys:
        """Keys from a file, a line each, or from the variable OUTRIDER_API_KEYS, with commas between them.

        A key stands behind the name of its tenant and a colon; several keys may have one tenant. A key without a name is a
        tenant of its own. Settings of TenantLimits may follow: `ann: secret max_concurrent=4 tokens_per_minute=60000`.

        Raises:
            InvalidParameterError: The file cannot be read, it holds no key, or a line of it is wrong.
        """
        if file is None:
            return _read(os.environ.get(VARIABLE, "").split(","), VARIABLE, "entry {}")
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problem = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
            raise InvalidParameterError("api_key_file", str(file), problem, "Give a file with a key a line.") from None
        found = _read(lines, "api_key_file", f"{file}, line {{}}")
        if not found:
            raise InvalidParameterError("api_key_file", str(file), "it holds no key", "Write a key a line into it.")
        return found

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def weights(self) -> dict[str | None, float]:
        """Of tenants whose share is not the usual one."""
        return {tenant: limits.weight for tenant, limits in self._limits.items() if limits.weight != 1.0}

    @property
    def record_budgets(self) -> dict[str, int]:
        """Bytes that may be kept of each tenant's prompts and answers."""
        return {tenant: self.limits(tenant).record_mib * 2**20 for _, tenant in self._tenants}

    def tenant(self, key: str) -> str | None:
        """Whose key this is; None for nobody's. Every key is compared, and each whole, so that the time tells nothing."""
        digest, found = _digest(key), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def limits(self, tenant: str | None) -> TenantLimits:
        """What a tenant may have."""
        return UNLIMITED if tenant is None else self._limits.get(tenant, UNLIMITED)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(lines: Sequence[str], field: str, place: str) -> ApiKeys:
    """Keys, a line each.

    Args:
        lines: Empty ones, and those that begin with #, hold nothing.
        field: Where they come from, for errors.
        place: The place of a line, for errors; {} stands for its number. Errors never show a key.
    """
    tenants: dict[str, str] = {}
    limits: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, colon, rest = line.partition(":")
        key, *settings = (rest if colon else line).split() or [""]
        if not key:
            raise InvalidParameterError(field, place.format(number), "there is no key", "Write tenant: key.")
        tenant = name.strip() if colon else f"key-{_digest(key).hex()[:8]}"
        if tenants.setdefault(key, tenant) != tenant:
            problem = f"another line gives this key to {tenants[key]}"
            raise InvalidParameterError(field, place.format(number), problem, "Give every tenant a key of its own.")
        try:
            _add(limits.setdefault(tenant, {}), settings)
        except InputError as error:
            problem = f"{error.field}={error.value!r}: {error.problem}"
            raise InvalidParameterError(field, place.format(number), problem, error.remedy) from None
    return ApiKeys(tenants, {tenant: TenantLimits(**found) for tenant, found in limits.items() if found})


def _add(known: dict[str, Any], settings: Sequence[str]) -> None:
    """Add settings, each written name=value, to those of a tenant.

    Raises:
        InputError: One of them is unknown, out of range, or said otherwise before.
    """
    for setting in settings:
        name, equals, written = setting.partition("=")
        if not equals or name not in TenantLimits.model_fields:
            raise unknown_setting("A key", name, written, TenantLimits.model_fields)
        try:
            value = json.loads(written)
        except ValueError:
            raise InvalidParameterError(name, written, "no number", "Use a number.") from None
        TenantLimits(**{name: value})
        if known.setdefault(name, value) != value:
            problem = f"another line of this tenant says {known[name]}"
            raise InvalidParameterError(name, value, problem, "Say it once for a tenant.")
