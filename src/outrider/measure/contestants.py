"""Contestants: the engines and settings that write the texts of a round, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import OtherEngineError
from outrider.llm import LLM
from outrider.measure.decoding_config import DecodingConfig
from outrider.measure.plausible import AGAIN, possible_run
from outrider.measure.run import EncodedTask, Run, write
from outrider.propose.compositions import parts_of


@dataclass(frozen=True)
class Contestant:
    """One way to write the texts of a round.

    Attributes:
        name: The name in reports.
        write: Writes the texts of one round.
        peer: The name of the peer to which it belongs. None for a way of our own.
        plain: Whether it is our own plain decoding, against which the others are measured.
    """

    name: str
    write: Callable[[Sequence[EncodedTask]], Run]
    peer: str | None = None
    plain: bool = False


def ours(llm: LLM, way: DecodingConfig, temperature: float) -> Contestant:
    """A contestant for one of our own ways. Its proposers stay loaded from now on, with what their trees learn."""
    config = llm.resolve(way.config)
    for member in (part.method for each in config.candidates for part in parts_of(each)):
        if member is not None:
            llm.proposers.acquire(member)  # an engine lets go those of many methods that nobody uses for the moment
    return Contestant(way.name, lambda tasks: write(llm, tasks, way, temperature), plain=way.plain)


def interleave(
    rounds: Iterable[Sequence[EncodedTask]],
    contestants: Sequence[Contestant],
    on_turn: Callable[[Contestant], None] = lambda _: None,
    on_dropout: Callable[[Contestant, OtherEngineError], None] = lambda *_: None,
) -> dict[str, list[Run]]:
    """The runs of each contestant, by its name.

    All contestants write the prompts of a round before the next round begins, so that a slow moment of the machine affects
    all of them. Every other round they write in the opposite order, so that a machine that becomes slower favours nobody. A
    round in which one of our own ways was faster than it can be is measured again, and the last try counts.

    Args:
        rounds: The prompts of each round.
        contestants: The contestants in the order of their turns.
        on_turn: Called after every turn.
        on_dropout: Called when a peer fails. It gets no further turns, and those that it had do not count.
    """
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    turns = 0

    def once(tasks: Sequence[EncodedTask]) -> dict[str, Run]:
        nonlocal turns
        found, turns = {}, turns + 1
        for contestant in contestants if turns % 2 else reversed(contestants):
            if contestant.name not in runs:
                continue
            try:
                found[contestant.name] = contestant.write(tasks)
            except OtherEngineError as error:
                del runs[contestant.name]
                on_dropout(contestant, error)
            on_turn(contestant)
        return found

    for tasks in rounds:
        found = once(tasks)
        for _ in range(AGAIN):
            if _is_possible(found, contestants):
                break
            found = once(tasks)
        for name, run in found.items():
            if name in runs:
                runs[name].append(run)
    return runs


def _is_possible(found: Mapping[str, Run], contestants: Sequence[Contestant]) -> bool:
    """Whether each of our own ways may have been as fast as it was in a round."""
    plain = next((found[c.name] for c in contestants if c.plain and c.name in found), None)
    ours = [found[c.name] for c in contestants if c.peer is None and c.name in found]
    return plain is None or all(possible_run(run, plain) for run in ours)
