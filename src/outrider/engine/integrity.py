"""Checks that the engine's bookkeeping is consistent: running and waiting sequences, blocks and proposers."""

from __future__ import annotations

from outrider.engine.proposing.proposers import ProposerSet
from outrider.engine.scheduling.scheduler import Scheduler
from outrider.engine.sequence import Status
from outrider.model.runner import ModelRunner


def check_integrity(scheduler: Scheduler, runner: ModelRunner, proposers: ProposerSet) -> None:
    """Raise AssertionError where the books disagree; between two steps."""
    running, waiting = scheduler.running, scheduler.waiting
    assert all(seq.status is Status.RUNNING for seq in running), "a finished sequence still runs"
    assert all(seq.status is Status.WAITING for seq in waiting), "a finished sequence still waits"
    assert not any(seq.state.block_table for seq in waiting), "a waiting sequence holds blocks"
    runner.memory.check_integrity([seq.state for seq in running])
    for proposer in proposers:
        proposer.check_integrity()


def check_rest(scheduler: Scheduler, runner: ModelRunner, proposers: ProposerSet) -> None:
    """Raise AssertionError where an engine without work still holds something of a text that has ended."""
    check_integrity(scheduler, runner, proposers)
    blocks, num_users = runner.blocks, sum(proposers.num_users.values())
    assert not scheduler.has_work, "texts are still written or wait"
    assert blocks.num_free == blocks.num_blocks, f"{blocks.num_blocks - blocks.num_free} blocks are still held"
    assert not num_users, f"proposers are still in use by {num_users} texts"
    for proposer in proposers:
        proposer.check_rest()
