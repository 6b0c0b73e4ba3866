"""A method that drafts nothing and keeps what the target computes: hidden states, and likely next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.propose.base import DraftNoise, ObservedRows, Proposer, ProposeRequest, Requirements
from outrider.propose.method import Method, ProposerContext
from outrider.train.records import TOP_LOGITS, TOP_TOKENS, hidden_name


class Recording(Method):
    """Keeps rows of the target's passes.

    Attributes:
        hidden_states: Layers whose hidden states are kept.
        target_top_k: How many likely next tokens are kept.
    """

    name: ClassVar[str] = "recording"
    takes_tree: ClassVar[bool] = False

    hidden_states: tuple[int, ...] = ()
    target_top_k: int = 0

    def build(self, context: ProposerContext) -> Proposer:
        requires = Requirements(self.hidden_states, self.target_top_k, needs_uncached_prompt=True)
        return Recorder(requires, context.target.dtype)


class Recorder(Proposer):
    """Holds the rows of every text until somebody takes them.

    Args:
        requires: What is kept.
        dtype: Of the hidden states that are kept.
    """

    def __init__(self, requires: Requirements, dtype: torch.dtype) -> None:
        self.requires = requires
        self._dtype = dtype
        self._parts: dict[int, list[tuple[int, dict[str, Tensor]]]] = {}

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [Draft() for _ in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            self._parts.setdefault(seen.sequence.seed, []).append((seen.positions[0], self._kept(seen)))

    def take(self, seed: int, num_rows: int) -> dict[str, Tensor]:
        """The rows of the text with this seed, by name, [num_rows, ...], and forget them. What was computed twice, as after
        a preemption, counts once."""
        taken: dict[str, Tensor] = {}
        end = 0
        for start, part in self._parts.pop(seed):
            assert start <= end, f"rows {end} to {start} were never shown"
            end = max(end, start + len(next(iter(part.values()))))
            for name, values in part.items():
                if name not in taken:
                    taken[name] = values.new_empty((num_rows, *values.shape[1:]))
                count = min(len(values), num_rows - start)
                taken[name][start : start + max(0, count)] = values[: max(0, count)]
        assert end >= num_rows, f"rows {end} to {num_rows} were never shown"
        return taken

    def _kept(self, seen: ObservedRows) -> dict[str, Tensor]:
        found = {
            hidden_name(layer): states.to(self._dtype, copy=True).cpu() for layer, states in seen.aux_hidden_states.items()
        }
        if seen.target_top_k is not None:
            assert len(seen.target_top_k.rows) == len(seen), "every row of the text has logits"
            found[TOP_TOKENS] = seen.target_top_k.token_ids.to(torch.int32).cpu()
            found[TOP_LOGITS] = seen.target_top_k.logits.float().cpu()
        return found
