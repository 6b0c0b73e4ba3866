"""Compares what is kept of a text after every commit with what a fresh prefill of the same tokens leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.state import SequenceState
from outrider.engine.engine import Engine
from outrider.engine.sequence import Sequence
from outrider.model.batch import Segment, slots_of
from outrider.model.runner import ModelRunner


@dataclass
class CacheAudit:
    """The largest difference that was seen, and the number of comparisons.

    Attributes:
        engine: The engine whose target memory is audited.
        worst: The largest difference, relative to the largest entry of its tensor.
        num_checked: How many times a sequence was compared.
    """

    engine: Engine
    worst: float = 0.0
    num_checked: int = 0

    def run(self) -> None:
        """Step the engine until it is idle, and audit every running sequence after every step."""
        while self.engine.has_work:
            self.engine.step()
            for seq in self.engine.scheduler.running:
                if seq.state.num_computed:
                    self.worst = max(self.worst, self.difference(seq))
                    self.num_checked += 1

    def difference(self, seq: Sequence) -> float:
        """The largest relative difference between what `seq` holds and what a fresh prefill computes: keys and values in
        the target's layers and in those that proposers have added, and running states."""
        runner = self.engine.runner
        held = [*_kept(runner, seq.state, seq.state.num_computed)]
        fresh, hidden = _fresh(runner, seq)
        for added in runner.memory.added:
            count = added.num_filled(seq.view.kv)
            if count:
                held += [rows for layer in range(added.shape.num_layers) for rows in added.read(seq.view.kv, layer, count)]
                anew = added.recompute(seq.token_ids[:count], {layer: hidden[layer][:count] for layer in added.aux_layers})
                fresh += [rows for pair in anew for rows in pair]
        pairs = zip(held, fresh, strict=True)
        return max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-9)) for one, other in pairs)


def _kept(runner: ModelRunner, state: SequenceState, num_tokens: int) -> Iterator[Tensor]:
    """Keys and values of the first tokens of a text and of its source, layer by layer, and then the running states behind
    the tokens."""
    size = runner.blocks.block_size
    found = [slots_of(state.block_table, num_tokens, size)]
    if state.source is not None:
        found.append(slots_of(state.source.block_table, len(state.source.token_ids), size))
    for slots in found:
        for layer in runner.pool.layers:
            yield from runner.pool.read(layer, torch.from_numpy(slots).to(runner.loaded.device))
    for _, record in sorted(state.running.records.items()):
        yield record.state_at(num_tokens)


def _fresh(runner: ModelRunner, seq: Sequence) -> tuple[list[Tensor], Mapping[int, Tensor]]:
    """The same as a fresh prefill leaves it, and the hidden states that added layers read."""
    size, source = seq.state.num_computed, seq.request.source_token_ids
    other = runner.with_own_memory(size + len(source or ()))
    state = other.memory.state(source=source)
    state.open(seq.token_ids, share=False)
    reserved = state.reserve(size)
    assert reserved, "the memory was made for these tokens"
    wanted = sorted({layer for added in runner.memory.added for layer in added.aux_layers})
    out = other.forward([Segment.of(state, seq.token_ids[:size], 0)], wanted)
    return [*_kept(other, state, size)], out.aux_hidden_states
