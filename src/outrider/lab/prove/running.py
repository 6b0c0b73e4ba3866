"""Runs proofs one after another or in several processes, and shows what they found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """The measurement that decides whether a claim holds."""

    measured: float  # the measured number; NaN where there is none
    bound: float  # the largest number with which the claim holds
    detail: str  # how the number was established
    holds: bool | None = None  # whether the claim holds, where that is not simply `measured <= bound`
    informs: bool = False  # the finding is shown for information and decides nothing, since nobody promised the claim
    # The tokens of the joint distribution that was enumerated. None where none was. What is wrong only behind so many
    # tokens is not seen.
    horizon: int | None = None

    @property
    def passed(self) -> bool:
        """Tells whether the claim holds, or decides nothing."""
        return self.informs or (self.measured <= self.bound if self.holds is None else self.holds)

    @property
    def mark(self) -> str:
        """The first column of a table."""
        return "·" if self.informs else "✓" if self.passed else "✗"


@dataclass(frozen=True)
class Check:
    """A claim by its name, what was found about it, and the seconds that this took."""

    name: str
    finding: Finding
    seconds: float

    @property
    def passed(self) -> bool:
        return self.finding.passed

    def as_dict(self) -> dict[str, Any]:
        found = self.finding
        return {
            "name": self.name,
            "passed": found.passed,
            "decides": not found.informs,
            "measured": None if isnan(found.measured) else found.measured,
            "bound": found.bound,
            "detail": found.detail,
            "horizon": found.horizon,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Report:
    """All checks of one run. It passes where there are checks and all of them pass."""

    checks: tuple[Check, ...]  # in order
    unasked: tuple[str, ...] = ()  # what can be asked for, and no check asks; empty where nobody looked

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def horizon(self) -> str:
        """Returns how many tokens the enumerated distributions have; empty where none was enumerated."""
        reach = sorted({check.finding.horizon for check in self.checks if check.finding.horizon is not None})
        if not reach:
            return ""
        return f"joints of {reach[0]} tokens" if len(reach) == 1 else f"joints of {reach[0]} to {reach[-1]} tokens"

    def as_dict(self) -> dict[str, Any]:
        found = {"passed": self.passed, "horizon": self.horizon, "checks": [check.as_dict() for check in self.checks]}
        return {**found, "not_asked": list(self.unasked)} if self.unasked else found


def table(checks: Sequence[Check]) -> Table:
    """The checks as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "claim", "measured", "bound", "how", "s"):
        view.add_column(column, justify="right" if column in ("measured", "bound", "s") else "left")
    for check in checks:
        found = check.finding
        style = "dim" if found.informs else "green" if check.passed else "bold red"
        row = (check.name, _number(found.measured), f"{found.bound:g}", found.detail, f"{check.seconds:.1f}")
        view.add_row(f"[{style}]{found.mark}[/{style}]", *map(escape, row))
    return view


def markdown(checks: Sequence[Check]) -> str:
    """The checks as a Markdown table. It leaves the seconds out, since they differ from run to run."""
    rows = ["| | claim | measured | how |", "|---|---|---|---|"]
    for check in checks:
        found = check.finding
        claim = check.name.replace("|", "\\|")
        rows.append(f"| {found.mark} | {claim} | {_number(found.measured)} | {found.detail} |")
    return "\n".join(rows)


def _number(measured: float) -> str:
    return "-" if isnan(measured) else f"{measured:.3g}"


# --- Runs proofs one after another, or in several processes. A proof that raises has failed, and the others still run.


#: The name of a claim, and the function that proves it.
Proof = tuple[str, Callable[[], Finding]]


def run_proofs(proofs: Iterable[Proof], on_check: Callable[[Check], None] | None = None) -> Report:
    """Run the proofs on one thread. `on_check` is called after each of them."""
    checks = []
    with threads(1):
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
    """Run the proofs of `plan` in processes of one thread each. Every process has a folder and a plan of its own."""
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
def threads(count: int | None) -> Iterator[None]:
    """Let torch compute with this number of threads within the block; None leaves it as it is. One is faster for tiny
    tensors."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _attempt(proof: Callable[[], Finding]) -> Finding:
    try:
        return proof()
    except Exception as error:
        return Finding(float("nan"), 0.0, f"raised {type(error).__name__}: {error}", holds=False)
