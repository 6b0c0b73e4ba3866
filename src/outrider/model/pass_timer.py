"""Times passes of a model at any place of a long text."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import torch

from outrider.cache.running import RunningText
from outrider.model.batch import Segment
from outrider.model.runner import ModelRunner

#: The rows of a pass that computes context which is not timed.
_FILLING_ROWS = 512


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock that is read afterwards counts all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PassTimer:
    """A text of arbitrary tokens in a KV memory of its own, whose parts may be computed again and again.

    A token depends on its position alone. So a pass that is timed leaves the keys and values that were there before, and
    the places may be timed in any order. Running states take the same time whatever their numbers are, and are those that
    the pass before has left.

    Args:
        runner: The runner of the model. Its own KV memory is left alone.
        num_tokens: The length of the text, at most the context of the model.
    """

    def __init__(self, runner: ModelRunner, num_tokens: int) -> None:
        self._runner = runner.with_own_memory(num_tokens)
        self._state = self._runner.memory.room_for(num_tokens)
        self._running = RunningText(is_arbitrary=True)

    @property
    def device(self) -> torch.device:
        """Where the passes are computed."""
        return self._runner.loaded.device

    def compute(self, num_tokens: int) -> None:
        """Compute so many tokens from the beginning of the text, as far as they are not there yet."""
        while self._state.num_computed < num_tokens:
            start = self._state.num_computed
            size = min(_FILLING_ROWS, num_tokens - start)
            self._runner.forward([self._segment(start, size, size)])
            self._state.commit(start, range(size))

    def seconds(self, start: int, num_rows: int, *, logits: bool) -> float:
        """The time of one pass.

        Args:
            start: The tokens that stand before its rows. They are computed already.
            num_rows: Its rows.
            logits: Whether the logits of every row are wanted, as for a draft; otherwise those of the last one, as for the
                last part of a prompt.
        """
        segment = self._segment(start, num_rows, 0 if logits else num_rows - 1)
        synchronise(self._runner.loaded.device)
        began = perf_counter()
        self._runner.forward([segment])
        synchronise(self._runner.loaded.device)
        return perf_counter() - began

    def _segment(self, start: int, num_rows: int, logits_from: int) -> Segment:
        vocab_size = self._runner.loaded.vocab_size
        tokens = [(7919 * position + 1) % vocab_size for position in range(start, start + num_rows)]
        segment = Segment.of(self._state, tokens, start, logits_from=logits_from)
        self._running = self._running.moved_to(start)
        return replace(segment, running=self._running)
