"""Runs proofs one after another; one that raises has failed, and the others still run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from outrider.prove.report import Check, Finding, Report

#: A claim, and what establishes it.
Proof = tuple[str, Callable[[], Finding]]


def run_proofs(proofs: Iterable[Proof], on_check: Callable[[Check], None] | None = None) -> Report:
    """Run the proofs on one thread; `on_check` is called after each."""
    checks = []
    with one_thread():
        for name, proof in proofs:
            start = perf_counter()
            checks.append(Check(name, _attempt(proof), perf_counter() - start))
            if on_check is not None:
                on_check(checks[-1])
    return Report(tuple(checks))


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors are faster without a thread pool; the caller's setting comes back."""
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
