"""The engines that can be measured or proved, by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.errors import ContradictionError, InvalidParameterError, MissingExtraError
from outrider.lab.peers.base import OtherEngine, Peer, PeerModels
from outrider.lab.peers.ik_llama import IkLlamaPeer
from outrider.lab.peers.llama_cpp import LlamaCppPeer
from outrider.lab.peers.openvino import OpenVinoPeer
from outrider.lab.peers.transformers import TransformersPeer

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (TransformersPeer, LlamaCppPeer, IkLlamaPeer, OpenVinoPeer)}


def open_peer(name: str, models: PeerModels) -> Peer:
    """The peer called `name`, for use as a context manager. It has not loaded anything yet."""
    if name not in PEERS:
        raise InvalidParameterError("peer", name, "no such peer", f"Known are {', '.join(PEERS)}.")
    reason = PEERS[name].missing()
    if reason is not None:
        problem, _, remedy = reason.partition("; ")
        raise MissingExtraError(name, problem, f"{remedy[:1].upper()}{remedy[1:]}")
    return PEERS[name](models)


# --- Registry of the engines that can be proved, by name.


_NAMES = "transformers, llama.cpp, or the address of an OpenAI-compatible server (http://...)"


@dataclass(frozen=True)
class ServerOptions:
    """Options that only a server needs."""

    model: str | None = None  # the name of the model in requests
    weights: str | None = None  # folder or hub id of the same weights, which become the reference
    plain: str | None = None  # how to ask without speculation: another address, or fields of the request as a JSON object
    body: str | None = None  # fields of every request as a JSON object


@contextmanager
def open_engine(name: str, options: ServerOptions) -> Iterator[OtherEngine]:
    """The engine called `name`. It stops when the block ends."""
    if name.startswith(("http://", "https://")):
        yield _server(name, options)
        return
    with TemporaryDirectory() as folder:
        engine = PEERS[name].proving(Path(folder)) if name in PEERS else None
        if engine is None:
            raise InvalidParameterError("engine", name, "no such engine", f"Known are {_NAMES}.")
        for field, value in vars(options).items():
            if value is not None:
                remedy = "It is for servers: --engine http://..."
                raise ContradictionError(field, value, f"{name} has no use for it", remedy)
        with engine as opened:
            yield opened


def _server(url: str, options: ServerOptions) -> OtherEngine:
    from outrider.lab.peers.server import CompletionsClient, ReferenceModel, ServerProof

    body = _json_object("body", options.body)
    client = CompletionsClient(url, options.model, body)
    plain = None
    if options.plain is not None:
        elsewhere = options.plain.startswith(("http://", "https://"))
        asked = body if elsewhere else {**body, **_json_object("plain", options.plain)}
        plain = CompletionsClient(options.plain if elsewhere else url, options.model, asked)
    proof = ServerProof(client, plain, None if options.weights is None else ReferenceModel(options.weights))
    proof.reach()
    return proof


def _json_object(field: str, text: str | None) -> Mapping[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidParameterError(field, text, "not a JSON object", 'For example \'{"speculation": "none"}\'.')
    return value
