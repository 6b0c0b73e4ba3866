"""`outrider prove`: run the losslessness proofs here, on your own model, or on another engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.flags import option
from outrider.errors import ContradictionError
from outrider.lab.cli.progress import shown_progress

if TYPE_CHECKING:
    from outrider.lab.peers.known import ServerOptions
    from outrider.lab.prove.running import Report

#: How long all proofs take, of this engine or of another one.
_LONG = ": some ten minutes on two cores (--quick takes less than one)"


def prove(
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    method: Annotated[
        str | None,
        typer.Option(help="Prove one method alone: its name, module:Class of your own, or its settings as JSON."),
    ] = None,
    activations: Annotated[str | None, option("outrider.config:ModelConfig", "activations")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, in less than a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table for a document.")] = False,
    engine: Annotated[str | None, typer.Option(help="Prove another one: transformers, llama.cpp, http://server.")] = None,
    served: Annotated[str | None, typer.Option("--model", help="With a server: the model's name in requests.")] = None,
    weights: Annotated[str | None, typer.Option(help="With a server: the same weights here, as reference.")] = None,
    plain: Annotated[str | None, typer.Option(help="With a server: address or JSON fields without speculation.")] = None,
    body: Annotated[str | None, typer.Option(help="With a server: JSON fields of every request.")] = None,
) -> None:
    """Prove that speculation changes no token's distribution: rules, engine, random numbers, identity, cache.

    It takes some ten minutes on two cores, and with --quick less than one. The result says how many tokens the enumerated
    joint distributions have: what a proposer does wrong only further behind is not seen.
    """
    from outrider.lab.peers.known import ServerOptions

    server = ServerOptions(served, weights, plain, body)
    _refuse_mixtures(engine, model or draft_model or method or activations, server)
    if engine is None:
        title, report = "", _run(method, quick=quick, model=model, draft_model=draft_model, activations=activations)
    else:
        title, report = _run_other(engine, server, quick=quick)
    if as_json:
        sys.stdout.write(json.dumps({**({"engine": title} if title else {}), **report.as_dict()}) + "\n")
    else:
        _show(report, title, markdown=markdown)
    if not report.passed:
        raise typer.Exit(1)


def _refuse_mixtures(engine: str | None, own: str | None, server: ServerOptions) -> None:
    if engine is not None and own is not None:
        raise ContradictionError(
            "engine",
            engine,
            "a model of yours is for this engine",
            "Leave out MODEL, --draft-model, --method and --activations.",
        )
    if engine is None:
        for field, value in vars(server).items():
            if value is not None:
                raise ContradictionError(field, value, "only a server has a use for it", "Add --engine http://...")


def _run(method: str | None, *, quick: bool, **own: Any) -> Report:
    from outrider.lab.prove.suite import num_checks, num_method_checks, run_method_suite, run_suite

    if method is None:
        return _with_progress(partial(run_suite, **own, quick=quick), num_checks(quick=quick), "" if quick else _LONG)
    settings = options.method_settings(method)
    total = num_method_checks(settings, quick=quick)
    return _with_progress(partial(run_method_suite, settings, **own, quick=quick), total, "")


def _run_other(name: str, server: ServerOptions, *, quick: bool) -> tuple[str, Report]:
    from outrider.lab.peers.known import open_engine
    from outrider.lab.prove.running import run_proofs

    with open_engine(name, server) as engine:
        proofs = engine.proofs(quick=quick)
        return engine.title, _with_progress(partial(run_proofs, proofs), len(proofs), "" if quick else _LONG)


def _with_progress(run: Callable[..., Report], total: int, said: str) -> Report:
    """Run the checks, and show on the error stream how many there are, how long they take, and how far they are."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print(f"{total} checks{said}", markup=False, soft_wrap=True)
    with shown_progress(console) as progress:
        progress.expect("checks", total)
        return run(on_check=lambda _: progress.advance())


def _show(report: Report, title: str, *, markdown: bool) -> None:
    from rich.console import Console

    from outrider.lab.prove import running

    console = Console()
    if title:
        console.print(f"**{title}**\n" if markdown else f"[bold]{title}[/bold]", highlight=False)
    if markdown:
        sys.stdout.write(running.markdown(report.checks) + "\n")
        return
    console.print(running.table(report.checks))
    if report.unasked:
        console.print(f"not asked: {', '.join(report.unasked)}", style="dim", markup=False, highlight=False)
    horizon = f" ({report.horizon})" if report.horizon else ""
    failed = sum(not check.passed for check in report.checks)
    if failed:
        console.print(f"[bold red]failed: {failed} of {len(report.checks)} checks do not hold{horizon}[/bold red]")
    else:
        console.print(f"[bold green]passed: all {len(report.checks)} checks hold{horizon}[/bold green]")
