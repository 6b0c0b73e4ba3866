"""What another engine must offer to be measured beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from outrider.errors import InvalidParameterError


@dataclass(frozen=True)
class PeerMode:
    """One setting of a peer.

    Attributes:
        name: As reports show it: "plain", "draft_model k=3".
        kind: "plain", "draft_model" or "ngram".
        num_draft_tokens: Most draft tokens a step; 0 where it does not speculate.
    """

    name: str
    kind: str
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class PeerRun:
    """One text written by a peer; None for what it does not say.

    Attributes:
        token_ids: Output tokens.
        seconds: Wall time, prompt included.
        time_to_first_token: Seconds.
        decode_seconds: Wall time after the first token.
        num_draft_tokens: Drafted.
        num_accepted_tokens: Of these, accepted.
    """

    token_ids: tuple[int, ...]
    seconds: float
    time_to_first_token: float | None
    decode_seconds: float | None
    num_draft_tokens: int | None
    num_accepted_tokens: int | None


@dataclass(frozen=True)
class PeerModels:
    """The same weights for everybody.

    Attributes:
        target, draft: Folders or hub ids; draft is None where there is none.
        dtype: As torch names it, without the "torch.".
        num_threads: Threads that compute.
        folder: Where converted files are kept.
    """

    target: str
    draft: str | None
    dtype: str
    num_threads: int
    folder: Path


class Peer(ABC):
    """An engine under measurement; a context manager, in a process of its own so that thread pools do not spin against
    each other.

    Args:
        models: What it loads.
    """

    name: ClassVar[str]
    version: str

    def __init__(self, models: PeerModels) -> None:
        self.models = models

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """Why it cannot run here, as the package to install; None where it can."""

    @abstractmethod
    def modes(self, *, full: bool) -> Sequence[PeerMode]:
        """Its settings to be tried, "plain" first; more of them where `full`."""

    @abstractmethod
    def generate(
        self, mode: PeerMode, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> PeerRun:
        """Write exactly `max_tokens` tokens; raises OtherEngineError where it cannot."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


@dataclass
class OpenPeers:
    """Peers that run, and why the others do not, by name."""

    running: list[Peer] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


#: By the name a user gives.
PEERS: dict[str, type[Peer]] = {}


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidParameterError unless every name is a peer or "all"."""
    for name in names:
        if name != "all" and name not in PEERS:
            raise InvalidParameterError("peers", name, "no such peer", f"Known: {', '.join(('all', *PEERS))}.")


@contextmanager
def open_peers(names: Sequence[str], models: PeerModels) -> Iterator[OpenPeers]:
    """The named peers, or "all", until the block ends.

    Raises:
        InvalidParameterError: No such peer.
    """
    check_names(names)
    opened = OpenPeers()
    with ExitStack() as stack:
        for name in PEERS if "all" in names else dict.fromkeys(names):
            reason = PEERS[name].missing()
            if reason is None:
                opened.running.append(stack.enter_context(PEERS[name](models)))
            else:
                opened.missing[name] = reason
        yield opened
