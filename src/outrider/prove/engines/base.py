"""What the prover needs of another engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.prove.runner import Proof


class OtherEngine(Protocol):
    """An engine whose speculation is put to the test.

    Attributes:
        title: Name and version, as far as the engine tells.
    """

    title: str

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """Named claims and what establishes them; they run in order, one at a time."""
        ...
