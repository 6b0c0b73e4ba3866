"""`outrider bench`: what speculation is worth on this machine, way by way, in interleaved rounds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.flags import option
from outrider.lab.cli.progress import shown_progress

if TYPE_CHECKING:
    from outrider.lab.bench.client import ClientSession
    from outrider.lab.bench.results import Results
    from outrider.lab.bench.session import Session
    from outrider.lab.bench.settings import BenchSettings

Names = list[str] | None

#: Options that may be repeated, and the settings that they make.
_LISTS = {
    "workload": "workloads",
    "way": "ways",
    "batch": "batches",
    "sampling": "samplings",
    "dtype": "dtypes",
    "peers": "peers",
    "context": "contexts",
    "chunk": "chunks",
}


def bench(
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    wide: Annotated[bool, typer.Option("--wide", help="The embedded target tiled to 0.36 B parameters.")] = False,
    workload: Annotated[
        Names, typer.Option("--workload", "-w", help="A built-in one, or long: prompts of 1,000 to 1,900 tokens; repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSONL of prompts or messages, or questions of Spec-Bench, MT-bench or SPEED-Bench (JSONL, Parquet)."
        ),
    ] = None,
    replay: Annotated[str | None, typer.Option(help='"copy", or JSONL of {"prompt": ..., "answer": ...}, forced.')] = None,
    way: Annotated[
        Names,
        typer.Option("--way", help="plain, draft_model:3, layer_skip:2,1, medusa=FOLDER:best_first:12, ...; repeated."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", "-b", help="Texts at a time, 1 to 64; repeated.")] = None,
    sampling: Annotated[Names, typer.Option(help="greedy or T=1; repeated.")] = None,
    dtype: Annotated[
        Names, typer.Option(help="auto, bfloat16, float32, int8, int4+a8 (rows of 8 bits), ...; repeated.")
    ] = None,
    device: Annotated[str | None, option("outrider.config:ModelConfig", "device")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads that compute.")] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", "-n", help="Prompts of each workload.")] = None,
    max_tokens: Annotated[int | None, option("outrider.params:SamplingParams", "max_tokens")] = None,
    peers: Annotated[Names, typer.Option(help="Other engines beside this one: all, or a name; repeated.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens before the passes that are timed; --wide is stretched where it is too short; repeated."),
    ] = None,
    chunk: Annotated[list[int] | None, typer.Option(help="Prompt rows in a pass that is timed; repeated.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One workload, sampled, two short texts, where nothing else is asked for.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Everything, for hours; a rerun goes on where it stopped.")] = False,
    bench_client: Annotated[
        str | None, typer.Option(help="Address of a server to measure instead; MODEL is then the name that it serves.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, results.md and plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as JSON instead of tables.")] = False,
    no_color: options.NoColor = False,
) -> None:
    """Measure speculation here: speed, latency, acceptance, what a pass costs, and how far it all is from its limits."""
    settings = _settings(locals())
    from rich.console import Console

    # takes seconds, and the settings are known to be possible by now
    from outrider.lab.bench.client import ClientSession
    from outrider.lab.bench.session import Session

    notes = Console(stderr=True, no_color=no_color or None, highlight=False)
    notes.print(_duration(settings), markup=False, soft_wrap=True)
    with shown_progress(notes) as progress:
        session = (Session if settings.bench_client is None else ClientSession)(settings, progress)
        results = session.run()
    _write(results, out)
    if as_json:
        sys.stdout.write(_this_run(session, results).model_dump_json() + "\n")
    else:
        width = None if sys.stdout.isatty() else 120  # a file has no width of its own
        _show(session, results, Console(no_color=no_color or None, highlight=False, width=width))


def _settings(given: dict[str, Any]) -> BenchSettings:
    """The settings that the options of the command come to; each thing of a list counts once."""
    from outrider.lab.bench.settings import BenchSettings

    values: dict[str, Any] = {name: given[name] for name in BenchSettings.model_fields.keys() & given.keys()}
    values |= {name: tuple(dict.fromkeys(given[option] or ())) for option, name in _LISTS.items()}
    return BenchSettings(**values, num_threads=given["threads"])


def _duration(settings: BenchSettings) -> str:
    """Returns how long such a run takes."""
    if settings.bench_client is not None:
        return "the server writes every text with each way"
    if settings.full:
        return "a full run takes hours; started again, it goes on where it stopped"
    if settings.quick:
        return "a quick run takes about a minute with the embedded pair on two cores, and some more with --peers"
    usual = "ten minutes" if settings.peers else "five minutes"
    return f"a usual run takes some {usual} with the embedded pair on two cores; --quick takes less"


def _this_run(session: Session | ClientSession, results: Results) -> Results:
    """Without what earlier runs left in the folder."""
    from outrider.lab.bench.report import advise

    cells = {found.cell.key: found for found in session.measured}
    return results.model_copy(update={"cells": cells, "advice": advise(cells.values())})


def _write(results: Results, out: Path | None) -> None:
    """Page and plots of everything in the folder; the numbers are there already."""
    if out is None:
        return
    from outrider.lab.bench import plots, report

    names: list[str] = []
    if plots.available():
        names = plots.draw(results, out)
    else:
        results.note(f"no plots: matplotlib is not installed ({plots.REMEDY})")
    command = shlex.join(["outrider", *sys.argv[1:]])
    page = report.markdown(results, list(results.cells.values()), command, names)
    (out / "results.md").write_text(page, "utf-8")


def _show(session: Session | ClientSession, results: Results, paper: Any) -> None:
    from outrider.lab.bench import report

    shown = _this_run(session, results)
    paper.print(report.machine_line(shown), style="dim", markup=False)
    for view in report.tables(shown, session.measured, paper.width):
        paper.print()
        paper.print(view)
    paper.print()
    for note in shown.remarks:
        paper.print(f"note: {note}", style="bold", markup=False)
    if shown.remarks:
        paper.print()
    paper.print(report.conclusion(shown.advice), soft_wrap=True)  # lines to paste are whole
