"""Convolution: a short causal convolution of each channel over the rows of a text (depthwise)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from outrider.model.running.function import StateFunction, StateRows


class Convolution(StateFunction):
    """The state is the window of the last inputs, [width - 1, num_channels].

    Products and sums are those of single numbers in one order, so the bits of a row do not depend on the rows that are
    computed with it.

    Args:
        weight: [num_channels, width], the last column for the row itself.
        bias: [num_channels], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._reach = weight.shape[1] - 1

    def start(self, tape: Sequence[Tensor]) -> Tensor:
        (inputs,) = tape
        return inputs.new_zeros(self._reach, inputs.shape[1])

    def replay(self, state: Tensor, tape: Sequence[Tensor]) -> Tensor:
        (inputs,) = tape
        return torch.cat([state, inputs])[len(inputs) :].clone()  # a view would keep the inputs before the window

    def run(self, state: Tensor, rows: StateRows, wanted: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        (inputs,) = rows.tape
        known = torch.cat([state, inputs])  # row i stands at reach + i
        windows = torch.tensor(_windows(rows, self._reach), device=inputs.device)  # [num_rows, width]
        out = known[windows[:, 0]] * self._weight[:, 0]
        for column in range(1, self._reach + 1):
            out = out + known[windows[:, column]] * self._weight[:, column]
        if self._bias is not None:
            out = out + self._bias
        return out, {row: known[windows[row, 1:]] for row in wanted}


def _windows(rows: StateRows, reach: int) -> list[list[int]]:
    """For each row, where its window lies among the inputs before the pass and those of its rows, the row itself last."""
    before = list(range(reach))
    windows: list[list[int]] = []
    for row in range(rows.num_rows):
        parent = rows.parent(row)
        windows.append([*(before if parent < 0 else windows[parent][1:]), reach + row])
    return windows
