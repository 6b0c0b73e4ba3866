"""Chooses the passes of a model that are timed, and summarises their times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from outrider.bench import prefill
from outrider.bench.prefill import Arithmetic
from outrider.bench.results import ModelResult
from outrider.bench.settings import BenchSettings
from outrider.errors import InvalidParameterError
from outrider.measure import machine, row_costs
from outrider.model.pass_timer import PassTimer
from outrider.model.runner import ModelRunner

#: The contexts of a full run.
_FULL_CONTEXTS = (128, 1000, 1900)


@dataclass(frozen=True)
class CostPlan:
    """The passes to time.

    Attributes:
        contexts: The numbers of tokens behind which rows are timed.
        rows: The numbers of rows.
        parts: (tokens before it, rows) of every part of a prompt.
        limit: The most tokens of the text.
        row_repeats, part_repeats: How often a pass is timed.
    """

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    limit: int
    row_repeats: int
    part_repeats: int

    @classmethod
    def of(cls, settings: BenchSettings, limit: int) -> Self:
        """The passes of a run.

        Args:
            settings: What was asked for.
            limit: The context of the model, in tokens.

        Raises:
            InvalidParameterError: What was asked for does not fit into the context.
        """
        for field, asked in (("context", settings.contexts), ("chunk", settings.chunks)):
            for value in asked:
                if value + (field == "context") > limit:
                    raise InvalidParameterError(field, value, f"the context of the model is {limit} tokens", "Lower it.")
        usual = _FULL_CONTEXTS if settings.full else (row_costs.CONTEXT,)
        contexts = settings.contexts or tuple(n for n in usual if n < limit) or (max(1, limit // 2),)
        chunks = settings.chunks or (prefill.ALL if settings.full else prefill.USUAL)
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
        """Whether results hold all these passes."""
        if known is None or known.doubt is not None:
            return False
        parts = {(part.start, part.rows) for part in known.prefill}
        return set(self.contexts) <= known.pass_seconds.keys() and set(self.parts) <= parts

    def measure(self, runner: ModelRunner, positions: int | None, on_round: Callable[[], None]) -> ModelResult:
        """Time all passes.

        Args:
            runner: The runner of the model. Its KV memory is left alone.
            positions: How many positions the rotary range was stretched to. None where it was not.
            on_round: Called after each round.
        """
        model = runner.loaded.model
        ends = [context + n for context in self.contexts for n in self.rows] + [start + n for start, n in self.parts]
        timer = PassTimer(runner, min(self.limit, max(ends)))
        costs = row_costs.row_costs(timer, self.contexts, self.rows, self.limit, self.row_repeats, on_round)
        return ModelResult(
            pass_seconds=costs.seconds,
            doubt=costs.doubt,
            prefill=prefill.prefill(timer, self.parts, Arithmetic.of(model), self.part_repeats, on_round),
            positions=positions,
            weight_bytes=runner.backend.weight_bytes(model) or machine.weight_bytes(model),
            num_parameters=sum(weight.numel() for weight in model.parameters()),
        )
