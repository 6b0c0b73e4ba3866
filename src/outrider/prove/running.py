"""Runs proofs one after another, or in several processes. A proof that raises has failed, and the others still run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import torch

from outrider.prove.findings import Check, Finding, Report

#: The name of a claim, and the function that proves it.
Proof = tuple[str, Callable[[], Finding]]


def run_proofs(proofs: Iterable[Proof], on_check: Callable[[Check], None] | None = None) -> Report:
    """Run the proofs on one thread. `on_check` is called after each of them."""
    checks = []
    with one_thread():
        for proof in proofs:
            checks.append(_check(proof))
            if on_check is not None:
                on_check(checks[-1])
    return Report(tuple(checks))


def run_in_processes(
    plan: Callable[[Path], Iterable[Proof]],
    folder: Path,
    num_processes: int,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Run the proofs of `plan` in processes of one thread each. Every process has a folder and a plan of its own.

    Args:
        plan: Takes a folder and returns the proofs, the same ones each time. It must be picklable.
        folder: The folder in which the processes make theirs.
        num_processes: How many processes to start.
        on_check: Called after each check, in the order in which the checks end.
    """
    count = len(list(plan(folder)))
    checks: dict[int, Check] = {}
    with ProcessPoolExecutor(num_processes, get_context("spawn"), _enter_process, (plan, folder)) as pool:
        pending = {pool.submit(_run_one, place): place for place in range(count)}
        for future in as_completed(pending):
            checks[pending[future]] = future.result()
            if on_check is not None:
                on_check(checks[pending[future]])
    return Report(tuple(checks[place] for place in range(count)))


_plan: list[Proof] = []


def _enter_process(plan: Callable[[Path], Iterable[Proof]], folder: Path) -> None:
    """Prepare a process for its first proof."""
    torch.set_num_threads(1)
    mine = folder / str(os.getpid())
    mine.mkdir()
    _plan.extend(plan(mine))


def _run_one(place: int) -> Check:
    return _check(_plan[place])


def _check(proof: Proof) -> Check:
    name, establish = proof
    start = perf_counter()
    return Check(name, _attempt(establish), perf_counter() - start)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread within the block, which is faster for tiny tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _attempt(proof: Callable[[], Finding]) -> Finding:
    try:
        return proof()
    except Exception as error:
        return Finding(float("nan"), 0.0, f"raised {type(error).__name__}: {error}", holds=False)
