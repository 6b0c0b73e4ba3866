"""Compares what is kept of a text after every commit with what a fresh prefill of the same tokens leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.state import KVView, SequenceState
from outrider.engine.engine import Engine
from outrider.engine.sequence import Sequence as EngineSequence
from outrider.model.batch import Segment, slots_of
from outrider.model.runner import ModelRunner


@dataclass
class CacheAudit:
    """The largest difference that was seen, and the number of comparisons.

    Attributes:
        engine: The engine whose target memory is audited.
        drafts: Draft models with the target's tokens whose memory is audited too, with what they have computed ahead.
        worst: The largest difference, relative to the largest entry of its tensor.
        num_checked: How many times a sequence was compared.
        num_ahead: How many tokens ahead of their texts were compared in added layers of draft models.
    """

    engine: Engine
    drafts: Sequence[ModelRunner] = ()
    worst: float = 0.0
    num_checked: int = 0
    num_ahead: int = 0

    def run(self) -> None:
        """Step the engine until it is idle, and audit every running sequence after every step."""
        while self.engine.has_work:
            self.engine.step()
            for seq in self.engine.scheduler.running:
                if seq.state.num_computed:
                    self.worst = max(self.worst, self.difference(seq))
                    self.num_checked += 1
                for runner in self.drafts:
                    self._audit_draft(runner, seq)

    def difference(self, seq: EngineSequence) -> float:
        """The largest relative difference between what `seq` holds and what a fresh prefill computes: keys and values in
        the target's layers and in those that proposers have added, and running states."""
        return _difference(self.engine.runner, seq.state, seq.token_ids[: seq.state.num_computed], seq.token_ids)

    def _audit_draft(self, runner: ModelRunner, seq: EngineSequence) -> None:
        state = runner.states.get(seq.view.seq_id)
        if state is None or not state.end:
            return
        tokens = [*seq.token_ids[: state.num_computed], *state.ahead]
        self.worst = max(self.worst, _difference(runner, state, tokens, seq.token_ids))
        self.num_ahead += sum(max(filled - state.num_computed, 0) for filled in state.num_filled.values())


def _difference(runner: ModelRunner, state: SequenceState, tokens: Sequence[int], text: Sequence[int]) -> float:
    """The largest relative difference between what a model keeps of tokens and what a fresh prefill of them leaves. The
    whole text decides which rotary factors they have."""
    held, kv = [*_kept(runner, state, len(tokens))], KVView(state)
    fresh, hidden = _fresh(runner, tokens, text, None if state.source is None else state.source.token_ids)
    for added in runner.memory.added:
        count = added.num_filled(kv)
        if count:
            held += [rows for layer in range(added.shape.num_layers) for rows in added.read(kv, layer, count)]
            anew = added.recompute(tokens[:count], {layer: hidden[layer][:count] for layer in added.aux_layers})
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


def _fresh(
    runner: ModelRunner, tokens: Sequence[int], text: Sequence[int], source: tuple[int, ...] | None
) -> tuple[list[Tensor], Mapping[int, Tensor]]:
    """The same as a fresh prefill leaves it, and the hidden states that added layers read."""
    other = runner.with_own_memory(len(tokens) + len(source or ()))
    state = other.memory.state(source=source)
    state.open(text, share=False)
    reserved = state.reserve(len(tokens))
    assert reserved, "the memory was made for these tokens"
    wanted = sorted({layer for added in runner.memory.added for layer in added.aux_layers})
    out = other.forward([Segment.of(state, tokens, 0)], wanted)
    return [*_kept(other, state, len(tokens))], out.aux_hidden_states
