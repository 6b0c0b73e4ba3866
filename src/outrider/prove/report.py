"""What a proof found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """The number that decides a claim.

    Attributes:
        measured: What came out.
        bound: What it may be at most.
        detail: How it was established.
        holds: The verdict, where it is not simply measured <= bound.
    """

    measured: float
    bound: float
    detail: str
    holds: bool | None = None

    @property
    def passed(self) -> bool:
        return self.measured <= self.bound if self.holds is None else self.holds


@dataclass(frozen=True)
class Check:
    """A claim, what was found, and how long it took in seconds."""

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
            "measured": found.measured,
            "bound": found.bound,
            "detail": found.detail,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Report:
    """All checks of one run."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "checks": [check.as_dict() for check in self.checks]}


def table(checks: Sequence[Check]) -> Table:
    """A table for the terminal."""
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "claim", "measured", "bound", "how", "s"):
        view.add_column(column, justify="right" if column in ("measured", "bound", "s") else "left")
    for check in checks:
        found = check.finding
        mark = "[green]✓[/green]" if check.passed else "[bold red]✗[/bold red]"
        view.add_row(mark, check.name, f"{found.measured:.3g}", f"{found.bound:g}", found.detail, f"{check.seconds:.1f}")
    return view
