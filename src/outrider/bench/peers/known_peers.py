"""Registry of the engines that can be measured, by name."""

from __future__ import annotations

from outrider.bench.peers.base import Peer, PeerModels
from outrider.bench.peers.ik_llama import IkLlamaPeer
from outrider.bench.peers.llama_cpp import LlamaCppPeer
from outrider.bench.peers.openvino import OpenVinoPeer
from outrider.bench.peers.transformers import TransformersPeer
from outrider.errors import InvalidParameterError, MissingExtraError

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (TransformersPeer, LlamaCppPeer, IkLlamaPeer, OpenVinoPeer)}


def open_peer(name: str, models: PeerModels) -> Peer:
    """The peer called `name`, for use as a context manager. It has not loaded anything yet.

    Args:
        name: One of `PEERS`.
        models: What it will load.

    Raises:
        InvalidParameterError: The peer is unknown, or it cannot use weights of this type.
        MissingExtraError: A package is not installed.
    """
    if name not in PEERS:
        raise InvalidParameterError("peer", name, "no such peer", f"Known are {', '.join(PEERS)}.")
    reason = PEERS[name].missing()
    if reason is not None:
        problem, _, remedy = reason.partition("; ")
        raise MissingExtraError(name, problem, f"{remedy[:1].upper()}{remedy[1:]}")
    return PEERS[name](models)
