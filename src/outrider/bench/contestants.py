"""Those who write texts in a round, and the order of their turns: A B A B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.bench.peers.base import Peer, PeerMode, PeerRun
from outrider.bench.run import EncodedTask, Run, write
from outrider.bench.ways import Way
from outrider.errors import OtherEngineError
from outrider.llm import LLM
from outrider.propose.auto import Auto
from outrider.stats import RequestStats


@dataclass(frozen=True)
class Contestant:
    """One way to write the texts of a round.

    Attributes:
        name: The name in reports.
        write: Writes the texts of one round.
        peer: The name of the peer to which it belongs. None for a way of our own.
    """

    name: str
    write: Callable[[Sequence[EncodedTask]], Run]
    peer: str | None = None


def ours(llm: LLM, way: Way, temperature: float) -> Contestant:
    """A contestant for one of our own ways. Its proposers stay loaded from now on, with what their trees learn."""
    method = llm.resolve(way.config).method
    for member in [each.method for each in method.methods] if isinstance(method, Auto) else [method]:
        if member is not None:
            llm.proposers.acquire(member)  # an engine lets go those of many methods that nobody uses for the moment
    return Contestant(way.name, lambda tasks: write(llm, tasks, way, temperature))


def theirs(peer: Peer, mode: PeerMode, temperature: float) -> Contestant:
    """A contestant for one mode of a peer."""

    def generate(tasks: Sequence[EncodedTask]) -> Run:
        (max_tokens,) = {task.max_tokens for task in tasks}  # the same for all but replays, which peers do not write
        prompts = [task.prompt_ids for task in tasks]
        return _as_run(peer.generate(mode, prompts, max_tokens=max_tokens, temperature=temperature, seed=None))

    return Contestant(f"{peer.name}: {mode.name}", generate, peer.name)


def _as_run(run: PeerRun) -> Run:
    """The run of a peer as a Run. Every pass of its target commits the accepted tokens and one more for each text.

    A peer may hand out several tokens at first without saying how many. Then one is assumed, which is in its favour.
    """
    accepted = run.num_accepted_tokens
    return Run(
        token_ids=run.texts,
        seconds=run.seconds,
        first_token_seconds=run.first_token_seconds,
        decode_tokens=run.decode_tokens,
        decode_seconds=run.decode_seconds,
        num_passes=None if accepted is None else max(1, run.num_tokens - accepted),
        drafts=RequestStats(num_draft_tokens=run.num_draft_tokens or 0, num_accepted_tokens=accepted or 0),
    )


def interleave(
    rounds: Iterable[Sequence[EncodedTask]],
    contestants: Sequence[Contestant],
    on_turn: Callable[[Contestant], None] = lambda _: None,
    on_dropout: Callable[[Contestant, OtherEngineError], None] = lambda *_: None,
) -> dict[str, list[Run]]:
    """The runs of each contestant, by its name.

    All contestants write the prompts of a round before the next round begins, so that a slow moment of the machine affects
    all of them.

    Args:
        rounds: The prompts of each round.
        contestants: The contestants in the order of their turns.
        on_turn: Called after every turn.
        on_dropout: Called when a peer fails. It gets no further turns, and those that it had do not count.
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
