"""Bounded memory of the tokens that the target held likely after given tokens, for many callers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Context = tuple[int, ...]
#: What an entry takes beside its rows of the arrays: its key, the tokens of the key, and its place in the dictionary.
_ENTRY_BYTES = 240
#: What the table of a namespace takes while it is empty.
_TABLE_BYTES = 2048


class Successors:
    """The latest likely successors of each context; the one longest not refreshed goes first.

    Args:
        width: Successors of a context.
        max_bytes: Memory it may take.
    """

    def __init__(self, width: int, max_bytes: int) -> None:
        self._most = max(1, max_bytes // (_ENTRY_BYTES + 8 * width))
        self._slots: dict[Context, int] = {}  # least recently refreshed first
        self._tokens = np.zeros((0, width), np.int32)
        self._shares = np.zeros((0, width), np.float32)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Memory it takes, estimated for what is not in arrays."""
        return len(self._slots) * _ENTRY_BYTES + self._tokens.nbytes + self._shares.nbytes

    def find(self, context: Context) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """Tokens [width] that may follow, most likely first, and their shares [width]; None for an unknown context."""
        slot = self._slots.get(context)
        return None if slot is None else (self._tokens[slot], self._shares[slot])

    def put(self, context: Context, tokens: npt.NDArray[np.int32], shares: npt.NDArray[np.float32]) -> None:
        """Remember successors [width] in the place of earlier ones."""
        slot = self._slots.pop(context, None)
        if slot is None:
            slot = self._free_slot()
        self._slots[context] = slot
        self._tokens[slot], self._shares[slot] = tokens, shares

    def _free_slot(self) -> int:
        size = len(self._slots)
        if size >= self._most:
            return self._slots.pop(next(iter(self._slots)))
        if size == len(self._tokens):
            more = min(self._most, max(64, size + size // 2)) - size
            self._tokens = np.concatenate([self._tokens, np.zeros((more, self._tokens.shape[1]), np.int32)])
            self._shares = np.concatenate([self._shares, np.zeros((more, self._shares.shape[1]), np.float32)])
        return size


class SharedSuccessors:
    """Successors by namespace, within a limit of bytes; the namespace longest unused is dropped first.

    Args:
        width: Successors of a context.
        max_bytes: Of all namespaces together.

    Attributes:
        num_bytes: Memory they take, as far as it was counted: see `count`.
    """

    def __init__(self, width: int, max_bytes: int) -> None:
        self.width, self.max_bytes = width, max_bytes
        self.num_bytes = 0
        self._tables: dict[str | None, Successors] = {}  # least recently used first
        self._counted: dict[str | None, int] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, namespace: str | None) -> Successors:
        """Those of a namespace, and of no other; being used keeps them."""
        table = self._tables.pop(namespace, None)
        known = table is not None
        if table is None:
            table = Successors(self.width, self.max_bytes - _TABLE_BYTES)
        self._tables[namespace] = table
        if not known:
            self.count(namespace)
        return table

    def count(self, namespace: str | None) -> None:
        """Take into account how a namespace that was used just now has grown, and drop others that are over the limit."""
        size = self._tables[namespace].num_bytes + _TABLE_BYTES
        self.num_bytes += size - self._counted.get(namespace, 0)
        self._counted[namespace] = size
        while self.num_bytes > self.max_bytes and len(self._tables) > 1:
            oldest = next(iter(self._tables))
            del self._tables[oldest]
            self.num_bytes -= self._counted.pop(oldest)
