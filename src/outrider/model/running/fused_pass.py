"""FusedPass: the running states of a pass that the kernels compute as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.mixers import Mixer, MixerRows
from outrider.model.batch import RaggedBatch
from outrider.model.running.convolution import Convolution
from outrider.model.running.function import StateFunction
from outrider.model.running.recurrence import Recurrence
from outrider.model.running.running_pass import RunningPass, TextRows


class FusedPass:
    """Gives the kernels the states of all texts, and leaves to the texts what the kernels have written.

    A layer has the same cells here as under transformers: its convolution, and the matrices behind it.

    Args:
        running: The running states of the pass.
        batch: Its rows.
        mixers: By layer; None for layers without a running state.
        layers: The layers that run.
        real: The dtype that the kernels compute in.

    Attributes:
        rows: For the layers that run, what they read and leave; None for those without a running state.
    """

    def __init__(
        self,
        running: RunningPass,
        batch: RaggedBatch,
        mixers: Sequence[Mixer | None],
        layers: Sequence[int],
        real: torch.dtype,
    ) -> None:
        self._running, self._batch, self._real = running, batch, real
        self._left: list[tuple[TextRows, list[Tensor], dict[int, Tensor]]] = []
        self.rows = [self._opened(layer, mixers[layer]) for layer in layers]

    def leave(self) -> None:
        """The kernels have written all rows."""
        for part, tape, states in self._left:
            part.leave(tape, states)

    def _opened(self, layer: int, mixer: Mixer | None) -> MixerRows | None:
        if mixer is None:
            return None
        rows = MixerRows(mixer, self._batch.num_rows, self._real)
        windows = self._open(layer, 0, Convolution(mixer.taps.t()), (rows.inputs,))
        matrices = self._open(layer, 1, Recurrence(), rows.updates) if rows.updates else [None] * len(windows)
        for window, matrix, (first, _) in zip(windows, matrices, self._batch.row_spans, strict=True):
            rows.read(window.state, None if matrix is None else matrix.state)
            self._keep(window, rows.keep_windows(window.state, first, window.wanted), (rows.inputs,), first)
            if matrix is not None:
                self._keep(matrix, rows.keep_states(matrix.state, first, matrix.wanted), rows.updates, first)
        return rows

    def _open(self, layer: int, place: int, function: StateFunction, tape: tuple[Tensor, ...]) -> list[TextRows]:
        return self._running.open((layer, place), function, tape)

    def _keep(self, part: TextRows, states: dict[int, Tensor], tape: tuple[Tensor, ...], first: int) -> None:
        rows = [each[first : first + part.segment.num_rows] for each in tape]
        self._left.append((part, rows, states))
