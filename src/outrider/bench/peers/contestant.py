"""Another engine as a contestant: one of its modes writes the texts of a round."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.bench.peers.base import Peer, PeerMode, PeerRun
from outrider.measure.contestants import Contestant
from outrider.measure.run import EncodedTask, Run
from outrider.stats import RequestStats


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
