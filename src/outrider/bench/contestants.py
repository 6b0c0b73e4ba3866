"""Who writes in a round, and the order of turns: A B A B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.bench.peers.base import Peer, PeerMode, PeerRun
from outrider.bench.run import EncodedTask, Run, write
from outrider.bench.ways import Way
from outrider.errors import OtherEngineError
from outrider.llm import LLM
from outrider.stats import RequestStats


@dataclass(frozen=True)
class Contestant:
    """Somebody who writes.

    Attributes:
        name: As reports show it.
        write: The texts of one round.
        peer: Whose it is; None for ours.
    """

    name: str
    write: Callable[[Sequence[EncodedTask]], Run]
    peer: str | None = None


def ours(llm: LLM, way: Way, temperature: float) -> Contestant:
    """One of our ways."""
    return Contestant(way.name, lambda tasks: write(llm, tasks, way, temperature))


def theirs(peer: Peer, mode: PeerMode, temperature: float) -> Contestant:
    """A peer in one of its modes, one text at a time."""

    def generate(tasks: Sequence[EncodedTask]) -> Run:
        (task,) = tasks
        run = peer.generate(mode, task.prompt_ids, max_tokens=task.max_tokens, temperature=temperature, seed=None)
        return _as_run(run)

    return Contestant(f"{peer.name}: {mode.name}", generate, peer.name)


def _as_run(run: PeerRun) -> Run:
    """A peer's run in our terms. Every pass of the target commits one token and the accepted ones before it.

    A peer that hands out several tokens at first does not say how many: one is taken, in its favour.
    """
    accepted = run.num_accepted_tokens
    num_passes = None if accepted is None else max(1, len(run.token_ids) - accepted)
    drafts = RequestStats(num_draft_tokens=run.num_draft_tokens or 0, num_accepted_tokens=accepted or 0)
    first = () if run.time_to_first_token is None else (run.time_to_first_token,)
    return Run((run.token_ids,), run.seconds, first, len(run.token_ids) - 1, run.decode_seconds, (), num_passes, drafts)


def interleave(
    rounds: Iterable[Sequence[EncodedTask]],
    contestants: Sequence[Contestant],
    on_turn: Callable[[Contestant], None] = lambda _: None,
    on_dropout: Callable[[Contestant, OtherEngineError], None] = lambda *_: None,
) -> dict[str, list[Run]]:
    """Runs by contestant. Each writes the prompts of a round before the next round begins, so that a slow moment of the
    machine hits all alike.

    Args:
        rounds: The prompts of each.
        contestants: In the order of their turns.
        on_turn: Called after every turn.
        on_dropout: Called where a peer fails; it takes no further turns, and those it took do not count.
    """
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for tasks in rounds:
        for contestant in contestants:
            if contestant.name not in runs:
                continue
            try:
                runs[contestant.name].append(contestant.write(tasks))
            except OtherEngineError as error:
                del runs[contestant.name]
                on_dropout(contestant, error)
            on_turn(contestant)
    return runs
