"""Tells measured figures that cannot be true from those that can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.measure.figures import Spread
from outrider.measure.load import Load
from outrider.measure.run import Run

#: How far beyond its bound chance alone may carry a figure.
SLACK = 1.05
#: How often that which cannot be true is measured again.
AGAIN = 2
#: A single row that takes so many times as long as several ones was disturbed.
_FASTER = 1.1
#: So many rows are noticed by a processor, even where it waits for memory.
_NOTICEABLE = 8


def possible_speedup(speedup: float | None, tokens_per_pass: float | None) -> bool:
    """Whether a way to draft may have been so much faster than plain decoding.

    A pass with drafts takes at least the time of one without. So nothing is faster by more than its tokens a pass.

    Args:
        speedup: Over plain decoding. None where it is not known.
        tokens_per_pass: The tokens that a text gained in a pass. None where they are not known.
    """
    return speedup is None or tokens_per_pass is None or speedup <= SLACK * tokens_per_pass


def possible_run(run: Run, plain: Run) -> bool:
    """Whether a run of our own may have been so much faster than a plain one in the same round."""
    return possible_speedup(speed_ratio(run, plain), run.tokens_per_pass)


def speed_ratio(run: Run, plain: Run) -> float | None:
    """How much faster a run decoded than a plain one. None where one of the two speeds is not known."""
    if run.tokens_per_second is None or plain.tokens_per_second is None:
        return None
    return run.tokens_per_second / plain.tokens_per_second


def believed_rounds(runs: Sequence[Run], plain: Sequence[Run]) -> list[tuple[Run, Run]]:
    """The rounds of a way of our own that may be true, each with its plain run.

    Returns:
        Nothing where more than half of the rounds cannot be true: then the others cannot be trusted either.
    """
    rounds = list(zip(runs, plain, strict=True))
    good = [pair for pair in rounds if possible_run(*pair)]
    return good if 2 * len(good) >= len(rounds) else []


def believed_speedup(runs: Sequence[Run], plain: Sequence[Run]) -> Spread | None:
    """The speedup of a way of our own over plain decoding, in the rounds that may be true."""
    ratios = [speed_ratio(*pair) for pair in believed_rounds(runs, plain)]
    return Spread.of([ratio for ratio in ratios if ratio is not None])


def doubt_about_rows(seconds: Mapping[int, float], load: Load, *, on_processor: bool) -> str | None:
    """Why the times of passes by their rows cannot be believed. None where they can.

    Args:
        seconds: The seconds of a pass by its number of rows.
        load: Of the machine, while they were measured.
        on_processor: Whether the processor computed, and not a GPU beside it.
    """
    one = seconds.get(1)
    if one is None:
        return None
    faster = [rows for rows, time in seconds.items() if one > _FASTER * time]
    if faster:
        return f"a pass of {faster[-1]} rows was faster than one of a single row ({load})"
    free = [rows for rows, time in seconds.items() if rows >= _NOTICEABLE and time < SLACK * one]
    if free and on_processor and load.disturbs:
        return f"{free[-1]} rows seemed to cost no more than one while {load}"
    return None
