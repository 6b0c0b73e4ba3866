"""`outrider prove`: run the losslessness proofs here, on the installed engine and on your own model."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options

if TYPE_CHECKING:
    from outrider.prove.report import Report


def prove(
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, in seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Prove that speculation changes no token's law: rules, engine, random numbers, identity, cache."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    report = _run(model, draft_model, quick=quick, silent=as_json)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
    else:
        _show(report)
    if not report.passed:
        raise typer.Exit(1)


def _run(model: str | None, draft_model: str | None, *, quick: bool, silent: bool) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from outrider.prove.report import Check
    from outrider.prove.suite import num_checks, run_suite

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=silent or not console.is_terminal) as progress:
        task = progress.add_task("proving", total=num_checks(quick=quick))

        def advance(check: Check) -> None:
            progress.update(task, advance=1, description=check.name)

        return run_suite(model, draft_model, quick=quick, on_check=advance)


def _show(report: Report) -> None:
    from rich.console import Console

    from outrider.prove.report import table

    console = Console()
    console.print(table(report.checks))
    failed = sum(not check.passed for check in report.checks)
    if failed:
        console.print(f"[bold red]{failed} of {len(report.checks)} checks failed[/bold red]")
    else:
        console.print(f"[bold green]all {len(report.checks)} checks hold[/bold green]")
