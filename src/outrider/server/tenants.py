"""Tenants: their API keys, and how much each may ask for and uses."""

from __future__ import annotations

import hmac
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import Field

from outrider.config import Frozen, unknown_setting
from outrider.errors import InputError, InvalidParameterError
from outrider.server.errors import ApiError

# --- API keys: the tenant, its cache namespace and its limits.


VARIABLE = "OUTRIDER_API_KEYS"


class ApiKeys:
    """Keys with the tenants that they belong to. Without keys everybody is served, in one namespace."""

    def __init__(self, tenants: Mapping[str, str] | None = None, limits: Mapping[str, TenantLimits] | None = None) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in (tenants or {}).items()]
        self._limits = dict(limits or {})

    @classmethod
    def of(cls, file: Path | None) -> ApiKeys:
        """Keys from a file, a line each, or from the variable OUTRIDER_API_KEYS, with commas between them.

        A key stands behind the name of its tenant and a colon; several keys may have one tenant. A key without a name is a
        tenant of its own. Settings of TenantLimits may follow: `ann: secret max_concurrent=4 tokens_per_minute=60000`.
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
        """Returns the weights of tenants whose share is not the usual one."""
        return {tenant: limits.weight for tenant, limits in self._limits.items() if limits.weight != 1.0}

    @property
    def record_budgets(self) -> dict[str, int]:
        """Bytes that may be kept of each tenant's prompts and answers."""
        return {tenant: self.limits(tenant).record_mib * 2**20 for _, tenant in self._tenants}

    def tenant(self, key: str) -> str | None:
        """Tells whose key this is; None for nobody's. Every key is compared, and each whole, so that the time tells
        nothing."""
        digest, found = _digest(key), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def limits(self, tenant: str | None) -> TenantLimits:
        """Returns what a tenant may have."""
        return UNLIMITED if tenant is None else self._limits.get(tenant, UNLIMITED)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(lines: Sequence[str], field: str, place: str) -> ApiKeys:
    """Keys, a line each."""
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
        if not tenant:
            raise InvalidParameterError(field, place.format(number), "the tenant has no name", "Write tenant: key.")
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
    """Add settings, each written name=value, to those of a tenant."""
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


# --- Limits of tenants: how much each may ask for, how much it uses, and when it may ask again.


#: Ends of texts from which it is told how soon others will end.
_MEMORY = 32
#: Longest time, in seconds, after which a client is told to come back to a full queue.
_LONGEST_WAIT = 60


class TenantLimits(Frozen):
    """Holds what one tenant may have. All keys of a tenant share it."""

    # Texts at a time, those that wait included; None for no limit of its own.
    max_concurrent: int | None = Field(None, ge=1, description="Use 1 or more.")
    # Tokens of prompts and of texts; None for no limit. A tenant that has used less may use as much as for one minute at
    # once.
    tokens_per_minute: int | None = Field(None, ge=1, description="Use 1 or more.")
    # Its share of the engine where tenants compete: one of weight 2 gets twice the tokens of one of weight 1.
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="Use a number above 0.")
    # How much of its prompts and answers a server with a folder for records keeps, in MiB; 0 keeps nothing.
    record_mib: int = Field(0, ge=0, le=2**30, description="Use 0 or more.")


UNLIMITED = TenantLimits()


class Meter:
    """Holds what a tenant uses.

    Args:
        clock: Tells the time in seconds.

    Attributes:
        num_texts: Texts that are written or wait.
        num_tokens: Tokens that it was charged for since the start.
    """

    def __init__(self, limits: TenantLimits, max_texts: int, clock: Callable[[], float] = monotonic) -> None:
        self._limits, self._max_texts, self._clock = limits, max_texts, clock
        self.num_texts = self.num_tokens = 0
        self._ends: deque[tuple[float, float]] = deque(maxlen=_MEMORY)  # when a text ended, and how long it had its place
        self._balance = float(limits.tokens_per_minute or 0)
        self._balance_at = clock()

    @contextmanager
    def place(self, num_texts: int) -> Iterator[None]:
        """A place for some texts, for as long as the block runs."""
        self._check(num_texts, self._limits.max_concurrent, "concurrency_limit", "this key may have {} at a time")
        self._check(num_texts, self._max_texts, "queue_full", "this server takes {} by --max-num-seqs and --max-queue")
        self.num_texts += num_texts
        begun = self._clock()
        try:
            yield
        finally:
            self.num_texts -= num_texts
            end = self._clock()
            self._ends.extend([(end, end - begun)] * num_texts)

    def check_tokens(self) -> None:
        """Raise ApiError where the tenant has used more tokens than it may."""
        rate = self._limits.tokens_per_minute
        if rate is None:
            return
        balance = self._balance_now()
        if balance <= 0:
            wait = ceil((1 - balance) * 60 / rate)
            problem = f"this key may use {rate:,} tokens a minute, and it has used {-balance:,.0f} more"
            raise ApiError(429, problem, code="token_rate_limit", headers={"Retry-After": str(wait)})

    def use(self, num_tokens: int) -> None:
        """So many tokens were read or written for the tenant. What goes over the limit is paid off by waiting."""
        self.num_tokens += num_tokens
        if self._limits.tokens_per_minute is not None:
            self._balance = self._balance_now() - num_tokens

    def _balance_now(self) -> float:
        rate, now = self._limits.tokens_per_minute or 0, self._clock()
        self._balance = min(float(rate), self._balance + (now - self._balance_at) * rate / 60)
        self._balance_at = now
        return self._balance

    def _check(self, num_texts: int, most: int | None, code: str, rule: str) -> None:
        if most is None or self.num_texts + num_texts <= most:
            return
        if num_texts > most:
            raise ApiError(400, f"n: {num_texts} texts, and {rule.format(most)}", param="n", code=code)
        problem = f"{self.num_texts} texts are written or wait already, and {rule.format(most)}"
        headers = {"Retry-After": str(self._seconds_until_ended(self.num_texts + num_texts - most))}
        raise ApiError(429, problem, code=code, headers=headers)

    def _seconds_until_ended(self, num_texts: int) -> int:
        """Returns how long so many of the tenant's texts take to end, if they end as fast as the latest ones; at least a
        second.

        They take no longer than the longest of these had its place, so that a time in which the tenant asked for nothing
        does not count.
        """
        if not self._ends:
            return 1
        passed = self._clock() - self._ends[0][0]
        longest = max(seconds for _, seconds in self._ends)
        return min(max(1, ceil(min(num_texts * passed / len(self._ends), longest))), _LONGEST_WAIT)
