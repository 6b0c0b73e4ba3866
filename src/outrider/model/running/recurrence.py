"""Recurrence: a running state of matrices, as delta rules (Yang et al. 2024) and state spaces (Gu and Dao 2023) keep it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from outrider.kernels import recurrence
from outrider.kernels.library import kernel_library
from outrider.kernels.recurrence import MatrixRows
from outrider.model.running.function import StateFunction, StateRows


class Recurrence(StateFunction):
    """The state is a matrix for each head, [num_heads, key_dim, value_dim].

    A tape holds the fields of `MatrixRows` in their order, without shares where nothing is corrected. A row's query is
    [num_key_heads, key_dim]. The selective scan of Mamba is one head whose numbers all decay by factors of their own.

    Where there is no kernel, rows are computed one after another by operators whose shapes are those of one row. Either way
    the bits of a row do not depend on the rows that are computed with it.
    """

    def start(self, tape: Sequence[Tensor]) -> Tensor:
        keys, values = tape[0], tape[1]
        return values.new_zeros(values.shape[1], keys.shape[-1], values.shape[-1])

    def replay(self, state: Tensor, tape: Sequence[Tensor]) -> Tensor:
        last = len(tape[0]) - 1
        if last < 0:
            return state
        return self.run(state, StateRows(tuple(tape), (tape[0],)), (last,))[1][last]

    def run(self, state: Tensor, rows: StateRows, wanted: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        library = kernel_library()
        if library is not None and recurrence.usable(state):
            return recurrence.advance(library, state, MatrixRows(*rows.tape), rows.queries[0], rows.parents, wanted)
        return self.run_stock(state, rows, wanted)

    def run_stock(self, state: Tensor, rows: StateRows, wanted: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """The same by operators of PyTorch."""
        last_child = {rows.parent(row): row for row in range(rows.num_rows)}
        states, outputs = {-1: state}, []
        for row in range(rows.num_rows):
            parent = rows.parent(row)
            states[row] = _step(states[parent], *(each[row] for each in rows.tape))
            outputs.append(_said(states[row], rows.queries[0][row]))
            if last_child[parent] == row and parent not in wanted:
                del states[parent]  # a long chain keeps no more than it needs
        return torch.stack(outputs), {row: states[row] for row in wanted}


def _step(state: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor | None = None) -> Tensor:
    """The state behind one more row."""
    state = state * (decay if decay.dim() == state.dim() else decay[..., None])
    added = value if share is None else (value - _said(state, key)) * share
    return state + _by_head(key, state)[..., None] * added[:, None]


def _said(state: Tensor, key: Tensor) -> Tensor:
    """What a state says of a key: [num_heads, value_dim]."""
    return (state * _by_head(key, state)[..., None]).sum(-2)


def _by_head(keys: Tensor, state: Tensor) -> Tensor:
    """Keys [num_key_heads, key_dim] for each head."""
    return keys.repeat_interleave(len(state) // len(keys), 0)
