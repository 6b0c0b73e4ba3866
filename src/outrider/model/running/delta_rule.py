"""DeltaRule: linear attention with a decaying state that corrects what it says of a key (Yang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.model.running.function import Recurrence


class DeltaRule(Recurrence):
    """The state is a matrix for each head, [num_heads, key_dim, value_dim].

    A row's inputs are a key [num_heads, key_dim], a value [num_heads, value_dim], the factor [num_heads, 1] by which the
    state decays, or [num_heads, key_dim] as in Kimi Delta Attention, and the share [num_heads, 1] of the correction that is
    made. Its query is [num_heads, key_dim].
    """

    def start(self, tape: Sequence[Tensor]) -> Tensor:
        keys, values = tape[0], tape[1]
        return keys.new_zeros(*keys.shape[1:], values.shape[-1])

    def step(self, state: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        key, value, decay, share = inputs
        state = state * decay[..., None]
        correction = (value - _said(state, key)) * share
        return state + key[..., None] * correction[:, None]

    def read(self, state: Tensor, queries: tuple[Tensor, ...]) -> Tensor:
        return _said(state, queries[0])


def _said(state: Tensor, key: Tensor) -> Tensor:
    """What a state says of a key: [num_heads, value_dim]."""
    return (state * key[..., None]).sum(-2)
