"""Measures how long a pass of n rows takes on this machine, and how much longer behind a context."""

from __future__ import annotations

from time import perf_counter

from outrider.model.pass_timer import PassTimer
from outrider.model.runner import ModelRunner

#: Numbers of rows that are timed.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
#: Rounds over all sizes; the fastest pass of each counts, since whatever disturbs one makes it longer.
_ROUNDS = 5
#: Seconds after which no further round begins.
_PATIENCE = 5.0
#: Tokens of the context behind which a row is timed, and seconds that reading it may take.
_CONTEXT, _READING = 1024, 3.0


def sizes_of(runner: ModelRunner) -> list[int]:
    """The numbers of rows that are timed of a model: those that fit its context."""
    longest = _longest(runner)
    return [size for size in SIZES if size <= longest] or [1]


def measure_passes(runner: ModelRunner) -> dict[int, float]:
    """Seconds of a pass of one short text by its number of rows, in a memory apart from that of the texts."""
    sizes = sizes_of(runner)
    timer, begun = PassTimer(runner, sizes[-1]), perf_counter()
    timer.seconds(0, sizes[-1], logits=True)  # the first pass also makes what later ones find made
    found = dict.fromkeys(sizes, float("inf"))
    for turn in range(_ROUNDS):
        if turn and perf_counter() - begun > _PATIENCE:
            break
        for size in sizes:
            found[size] = min(found[size], timer.seconds(0, size, logits=True))
    return found


def measure_context(runner: ModelRunner, passes: dict[int, float]) -> float:
    """Seconds that a pass takes longer for each token before its rows; 0 where finding out would take too long.

    Args:
        runner: The model.
        passes: What its passes take, by rows.
    """
    context = min(_CONTEXT, _longest(runner) - 1)
    if not context or passes[max(passes)] * context / max(passes) > _READING:
        return 0.0
    timer = PassTimer(runner, context + 1)
    timer.compute(context)
    pairs = [[timer.seconds(start, 1, logits=True) for start in (context, 0)] for _ in range(_ROUNDS)]
    return max(0.0, min(far for far, _ in pairs) - min(near for _, near in pairs)) / context


def _longest(runner: ModelRunner) -> int:
    return min(runner.loaded.max_model_len, runner.loaded.long_rope_after or runner.loaded.max_model_len)
