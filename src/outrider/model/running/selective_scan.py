"""SelectiveScan: the state spaces of Mamba (Gu and Dao 2023) and Mamba-2 (Dao and Gu 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.model.running.function import Recurrence


class SelectiveScan(Recurrence):
    """The state is [num_heads, head_dim, state_size]; Mamba has heads of one number.

    A row's inputs are what it adds [num_heads, head_dim], the directions [num_heads or 1, state_size] that it adds it in,
    and the factors by which the state decays, [num_heads, 1] or [num_heads, state_size]. It reads the state in the
    directions [num_heads or 1, state_size].
    """

    def start(self, tape: Sequence[Tensor]) -> Tensor:
        added, directions = tape[0], tape[1]
        return added.new_zeros(*added.shape[1:], directions.shape[-1])

    def step(self, state: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        added, directions, decay = inputs
        return state * decay[:, None] + added[..., None] * directions[:, None]

    def read(self, state: Tensor, queries: tuple[Tensor, ...]) -> Tensor:
        return (state * queries[0][:, None]).sum(-1)
