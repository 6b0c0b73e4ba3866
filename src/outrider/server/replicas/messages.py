"""Messages between the ingress and the engines."""

from __future__ import annotations

from dataclasses import dataclass

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Parcel:
    """A request, read and parsed as far as routing needs it.

    Attributes:
        method: Of HTTP.
        path: Without the query.
        query: As it came.
        headers: As they came.
        body: All of it.
        beginnings: The beginnings of its prompt, as `prefixes.beginnings` tells them.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    beginnings: tuple[bytes, ...]


@dataclass(frozen=True)
class Opening:
    """How an answer begins.

    Attributes:
        status: Of HTTP.
        headers: Of the answer.
        part: The first bytes of its body.
    """

    status: int
    headers: Headers
    part: bytes
