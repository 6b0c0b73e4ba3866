"""Measures how fast prompts are read: passes of many rows, with the arithmetic that they need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from torch import nn

from outrider.bench.results import PrefillResult
from outrider.cache.layer_spec import LayerReach
from outrider.measure.machine import is_mixture
from outrider.model import hf
from outrider.model.pass_timer import PassTimer

#: The rows of the passes that a usual run times, and those of a full run.
USUAL = (32, 128, 512)
ALL = (32, 64, 128, 256, 512, 1024, 2048)


def prefill(
    timer: PassTimer,
    places: Sequence[tuple[int, int]],
    arithmetic: Arithmetic | None,
    repeats: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[PrefillResult]:
    """The median seconds of passes over parts of a prompt. A round times every part once.

    Args:
        timer: The text whose passes are timed.
        places: (tokens before the rows, rows) of each pass.
        arithmetic: What a pass computes. None where it cannot be counted.
        repeats: The number of rounds, after one that does not count.
        on_round: Called after each round.
    """
    times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for turn in range(repeats + 1):
        for start, rows in places:
            timer.compute(start)
            seconds = timer.seconds(start, rows, logits=False)
            if turn:
                times[start, rows].append(seconds)
        on_round()
    return [
        PrefillResult(
            start=start,
            rows=rows,
            seconds=median(times[start, rows]),
            operations=arithmetic.operations(start, rows) if arithmetic else None,
        )
        for start, rows in places
    ]


@dataclass(frozen=True)
class Arithmetic:
    """The numbers from which the operations of a pass follow. A multiplication with its addition counts as two.

    Attributes:
        row_weights: The weights of all layers that every row is multiplied with.
        head_weights: The weights of the output head, for rows whose logits are wanted.
        pair_operations: The operations of one layer for a row and a key that it sees, over all heads.
        reaches: How far each layer looks back.
    """

    row_weights: int
    head_weights: int
    pair_operations: int
    reaches: tuple[LayerReach, ...]

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """The arithmetic of a model of transformers. None for mixtures of experts, where it depends on the token."""
        if is_mixture(model):
            return None
        config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings().weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        matrices = [w for w in model.parameters() if w.dim() == 2 and id(w) not in tables and w is not head]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            row_weights=sum(w.numel() for w in matrices),
            head_weights=head.numel(),
            pair_operations=4 * config.num_attention_heads * head_dim,
            reaches=tuple(layer.reach for layer in hf.layer_specs(model.config)),
        )

    def operations(self, start: int, rows: int) -> int:
        """The operations of a pass with `rows` rows behind `start` tokens, which gives the logits of its last row."""
        pairs = sum(_keys(reach, place) for reach in self.reaches for place in range(start, start + rows))
        return 2 * (self.row_weights * rows + self.head_weights) + self.pair_operations * pairs


def _keys(reach: LayerReach, place: int) -> int:
    """The keys that the row at a position sees."""
    if reach.chunk is not None:
        return place % reach.chunk + 1
    return place + 1 if reach.window is None else min(place + 1, reach.window)
