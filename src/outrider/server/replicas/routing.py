"""Routing between replicas: messages, the beginnings of prompts that each has read, and joined metrics."""

from __future__ import annotations

import json
import random
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# --- Messages between the ingress and the engines.


Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Parcel:
    """A request, read and parsed as far as routing needs it."""

    method: str  # of HTTP
    path: str  # without the query
    query: bytes  # as it came
    headers: Headers  # as they came
    body: bytes  # all of it
    beginnings: tuple[bytes, ...]  # the beginnings of its prompt, as `prefixes.beginnings` tells them


@dataclass(frozen=True)
class Opening:
    """Says how an answer begins."""

    status: int  # of HTTP
    headers: Headers  # of the answer
    part: bytes  # the first bytes of its body


# --- Routes requests to the replica that has read the beginning of their prompt.


#: Bytes of a piece: 16 token ids, which is a block of the KV memory, or as many letters of a text.
PIECE_BYTES = 64
#: Pieces of a prompt that are looked at: 64 KiB.
_MOST_PIECES = 1024
#: Pieces that are remembered of a replica: 4 MiB of text. What was used longest ago is forgotten first.
_MEMORY = 2**16

Replica = TypeVar("Replica", bound=Hashable)


def beginnings(body: bytes, namespace: str | None) -> tuple[bytes, ...]:
    """Digests of the beginnings of a request's first prompt, each a piece longer than the one before."""
    try:
        text = _first_prompt(json.loads(body.decode("utf-8-sig")))
    except (ValueError, RecursionError, OverflowError, TypeError):
        return ()
    state, found = blake2b(repr(namespace).encode(), digest_size=8), []
    for start in range(0, min(len(text), _MOST_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        state.update(text[start : start + PIECE_BYTES])
        found.append(state.digest())
    return tuple(found)


def _first_prompt(body: Any) -> bytes:
    if not isinstance(body, dict):
        return b""
    if "messages" in body:  # tools stand before the conversation in the usual templates
        return json.dumps([body.get("tools"), body.get("system"), body["messages"]]).encode()
    if "input" in body:  # of the Responses API
        return json.dumps([body.get("tools"), body.get("instructions"), body["input"]]).encode()
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else array("I", prompt).tobytes()


class PrefixIndex(Generic[Replica]):
    """The beginnings that each replica was given."""

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._known: dict[Replica, OrderedDict[bytes, None]] = {}

    def choose(self, pieces: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        """All replicas, the best one for a request first, the others by their load."""
        ranked = sorted(loads, key=lambda replica: (loads[replica], random.random()))
        best = max(ranked, key=lambda replica: self._matched(replica, pieces))  # the least loaded one of the equal ones
        if loads[best] - loads[ranked[0]] < self._slack:
            ranked.remove(best)
            ranked.insert(0, best)
        return ranked

    def add(self, replica: Replica, pieces: Sequence[bytes]) -> None:
        """A replica reads these beginnings."""
        known = self._known.setdefault(replica, OrderedDict())
        for piece in reversed(pieces):  # so that a beginning is never forgotten before what goes on from it
            known[piece] = None
            known.move_to_end(piece)
        while len(known) > _MEMORY:
            known.popitem(last=False)

    def keep(self, replicas: Sequence[Replica]) -> None:
        """Forget all other replicas."""
        self._known = {replica: known for replica, known in self._known.items() if replica in replicas}

    def _matched(self, replica: Replica, pieces: Sequence[bytes]) -> int:
        known = self._known.get(replica, OrderedDict())
        return next((number for number, piece in enumerate(pieces) if piece not in known), len(pieces))


# --- Joins the metrics of all replicas into one text.


def merged(texts: Sequence[tuple[str, str]]) -> bytes:
    """The metrics of all replicas, each series with a label `replica` more."""
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            family.samples += [sample._replace(labels={"replica": replica, **sample.labels}) for sample in found.samples]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Found(families))
    return generate_latest(registry)


class _Found(Collector):
    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())
