"""Times passes of a model: of few rows, and of many rows as prompts have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from outrider.cache.pool import LayerReach
from outrider.errors import InvalidParameterError
from outrider.lab.bench.results import ModelResult, PrefillResult
from outrider.lab.bench.settings import BenchSettings
from outrider.lab.measure import row_costs
from outrider.loading import hf_modules
from outrider.model import memory
from outrider.model.memory import PassTimer, is_mixture
from outrider.model.runner import ModelRunner

#: The contexts of a full run.
_FULL_CONTEXTS = (128, 1000, 1900)


@dataclass(frozen=True)
class CostPlan:
    """The passes to time."""

    contexts: tuple[int, ...]  # the numbers of tokens behind which rows are timed
    rows: tuple[int, ...]  # the numbers of rows
    parts: tuple[tuple[int, int], ...]  # (tokens before it, rows) of every part of a prompt
    limit: int  # the most tokens of the text
    row_repeats: int  # how often a pass is timed
    part_repeats: int  # how often a pass is timed

    @classmethod
    def of(cls, settings: BenchSettings, limit: int) -> Self:
        """The passes of a run; `limit` is the context of the model in tokens."""
        for field, asked in (("context", settings.contexts), ("chunk", settings.chunks)):
            for value in asked:
                if value + (field == "context") > limit:
                    raise InvalidParameterError(field, value, f"the context of the model is {limit} tokens", "Lower it.")
        usual = _FULL_CONTEXTS if settings.full else (row_costs.CONTEXT,)
        contexts = settings.contexts or tuple(n for n in usual if n < limit) or (max(1, limit // 2),)
        chunks = settings.chunks or (ALL if settings.full else USUAL)
        starts = (0, *contexts) if settings.contexts or settings.full else (0,)
        rows = row_costs.ALL if settings.full else row_costs.USUAL
        return cls(
            contexts=contexts,
            rows=rows,
            parts=tuple((start, n) for start in starts for n in sorted(chunks) if start + n <= limit),
            limit=limit,
            row_repeats=15 if settings.full else 5,
            part_repeats=5 if settings.full else 3,
        )

    @property
    def num_rounds(self) -> int:
        """The rounds of all measurements, with those that do not count."""
        return self.row_repeats + self.part_repeats + 2

    def covered(self, known: ModelResult | None) -> bool:
        """Tells whether results hold all these passes."""
        if known is None or known.doubt is not None:
            return False
        parts = {(part.start, part.rows) for part in known.prefill}
        return set(self.contexts) <= known.pass_seconds.keys() and set(self.parts) <= parts

    def measure(self, runner: ModelRunner, positions: int | None, on_round: Callable[[], None]) -> ModelResult:
        """Time all passes. The rotary range was stretched to so many positions; None where it was not."""
        model = runner.loaded.model
        ends = [context + n for context in self.contexts for n in self.rows] + [start + n for start, n in self.parts]
        timer = PassTimer(runner, min(self.limit, max(ends)))
        costs = row_costs.row_costs(timer, self.contexts, self.rows, self.limit, self.row_repeats, on_round)
        return ModelResult(
            pass_seconds=costs.seconds,
            doubt=costs.doubt,
            prefill=prefill(timer, self.parts, Arithmetic.of(model), self.part_repeats, on_round),
            positions=positions,
            weight_bytes=runner.backend.weight_bytes(model) or memory.weight_bytes(model),
            num_parameters=sum(weight.numel() for weight in model.parameters()),
        )


# --- Measures how fast prompts are read: passes of many rows, with the arithmetic that they need.


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
    """The median seconds of passes over parts of a prompt: places of (tokens before the rows, rows). A round times every
    part once. There is no arithmetic where it cannot be counted."""
    found = row_costs.median_seconds(timer, places, repeats, on_round, logits=False)
    return [
        PrefillResult(
            start=start, rows=rows, seconds=seconds, operations=arithmetic.operations(start, rows) if arithmetic else None
        )
        for (start, rows), seconds in found.items()
    ]


@dataclass(frozen=True)
class Arithmetic:
    """The numbers from which the operations of a pass follow. A multiplication with its addition counts as two."""

    row_weights: int  # the weights of all layers that every row is multiplied with
    head_weights: int  # the weights of the output head, for rows whose logits are wanted
    # The operations of one layer for a row and a key that it sees, over all heads.
    pair_operations: tuple[int, ...]  # by layer
    reaches: tuple[LayerReach, ...]  # how far each layer looks back

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """The arithmetic of a model of transformers. None for mixtures of experts, where it depends on the token."""
        if is_mixture(model):
            return None
        config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings().weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        matrices = [w for w in model.parameters() if w.dim() == 2 and id(w) not in tables and w is not head]
        return cls(
            row_weights=sum(w.numel() for w in matrices),
            head_weights=head.numel(),
            pair_operations=tuple(4 * config.num_attention_heads * heads.width for heads in hf_modules.key_heads(config)),
            reaches=tuple(layer.reach for layer in hf_modules.layer_specs(model.config)),
        )

    def operations(self, start: int, rows: int) -> int:
        """The operations of a pass with `rows` rows behind `start` tokens, which gives the logits of its last row."""
        pairs = (
            each * sum(_keys(reach, place) for place in range(start, start + rows))
            for reach, each in zip(self.reaches, self.pair_operations, strict=True)
        )
        return 2 * (self.row_weights * rows + self.head_weights) + sum(pairs)


def _keys(reach: LayerReach, place: int) -> int:
    """The keys that the row at a position sees."""
    if reach.chunk is not None:
        return place % reach.chunk + 1
    return place + 1 if reach.window is None else min(place + 1, reach.window)
