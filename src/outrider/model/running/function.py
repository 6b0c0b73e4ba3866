"""StateFunction: the interface of what reads and changes a running state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StateRows:
    """The rows of one text in a pass.

    Attributes:
        tape: [num_rows, ...] each, the inputs that change the state.
        queries: [num_rows, ...] each, what else a row needs to read the state.
        parents: Index of each row's parent, -1 for a row that continues the text; None for a chain.
    """

    tape: tuple[Tensor, ...]
    queries: tuple[Tensor, ...] = ()
    parents: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tape[0])

    def parent(self, row: int) -> int:
        """The row that a row follows; -1 for the text before the pass."""
        return row - 1 if self.parents is None else self.parents[row]


class StateFunction(ABC):
    """Rows of one text over one state."""

    @abstractmethod
    def start(self, tape: Sequence[Tensor]) -> Tensor:
        """The state of a text without tokens, for inputs [n, ...] such as these."""

    @abstractmethod
    def replay(self, state: Tensor, tape: Sequence[Tensor]) -> Tensor:
        """The state behind the inputs [n, ...] of a chain. What is given is not changed."""

    @abstractmethod
    def run(self, state: Tensor, rows: StateRows, wanted: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute the rows of a text.

        Args:
            state: Before the first row; it is not changed.
            rows: The rows.
            wanted: Rows behind which the state is asked for.

        Returns:
            The outputs [num_rows, ...], and the states by row.
        """
