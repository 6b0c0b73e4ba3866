"""Compares the KV memory after every commit with a fresh prefill of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
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
                if seq.kv.num_computed:
                    self.worst = max(self.worst, self.difference(seq))
                    self.num_checked += 1

    def difference(self, seq: Sequence) -> float:
        """The largest relative difference between the KV that `seq` holds and the KV that a fresh prefill computes."""
        pairs = zip(_held(self.engine.runner, seq), _fresh(self.engine.runner, seq), strict=True)
        return max(float((held - fresh).abs().max() / fresh.abs().max().clamp(min=1e-9)) for held, fresh in pairs)


def _held(runner: ModelRunner, seq: Sequence) -> Iterator[Tensor]:
    slots = torch.from_numpy(slots_of(seq.kv.block_table, seq.kv.num_computed, runner.blocks.block_size))
    for layer in runner.pool.layers:
        yield from runner.pool.read(layer, slots.to(runner.loaded.device))


def _fresh(runner: ModelRunner, seq: Sequence) -> Iterator[Tensor]:
    size = runner.blocks.block_size
    blocks = BlockManager(-(-seq.kv.num_computed // size), size)
    other = ModelRunner(runner.loaded, runner.backend, blocks)
    table = blocks.allocate(blocks.num_blocks)
    other.forward([Segment(seq.token_ids[: seq.kv.num_computed], 0, table, long_rope=seq.kv.long_rope)])
    for layer in other.pool.layers:
        yield from other.pool.read(layer, slice(0, seq.kv.num_computed))
