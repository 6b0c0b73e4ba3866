"""The interface of another engine that is proved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.prove.running import Proof


class OtherEngine(Protocol):
    """An engine whose speculation is tested.

    Attributes:
        title: Its name and version, as far as the engine tells them.
    """

    title: str

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """The claims by name, each with the function that proves it. They run in order, one at a time."""
        ...
