"""`outrider tune`: finds the method, length and tree that suit given traffic, and what they gain."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.flags import with_options
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.lab.cli.progress import shown_progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from outrider.building import Profile
    from outrider.lab.tune.results import Row, TuningResults
    from outrider.lab.tune.traffic import Traffic

_PLOT, _PROFILE = "measured_and_predicted.png", "profile.json"


@with_options()
def tune(
    model: options.Model = None,
    wide: options.Wide = False,
    draft_model: options.DraftModel = None,
    traffic: Annotated[
        Path | None, typer.Option(help='Your prompts, written anew in every way: JSONL of {"prompt": ...}.')
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help='What was served: JSONL of {"prompt": ..., "answer": ...}. Nothing is generated.')
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Held-out prompts of a folder that a server has recorded, or that train data has made."),
    ] = None,
    way: Annotated[
        list[str] | None, typer.Option(help="draft_model:3, suffix-tree:16, auto, ..., as in the benchmark; repeated.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Texts at a time, as you serve them.")] = 1,
    num_texts: Annotated[int, typer.Option("--num-texts", "-n", help="Most texts that are used.")] = 6,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text that is written.")] = 48,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of your traffic; 0 is greedy.")] = 1.0,
    *,
    loading: options.Loading,
    out: Annotated[Path, typer.Option(help="Folder for the profile, the results and the plot.")] = Path("tuning"),
    as_json: Annotated[bool, typer.Option("--json", help="The results as JSON instead of a table.")] = False,
    no_color: options.NoColor = False,
) -> None:
    """Try methods, lengths and trees on your traffic, say which to use, and write a profile that loads it.

    Without --traffic, --log and --data the prompts of the benchmark stand for your traffic. Where other work disturbed the
    figures so that they cannot be true, nothing is recommended and no profile is written.

    Exit code: 0 all right; 1 other work disturbed the measurement; 2 bad input.
    """
    from rich.console import Console

    _check(concurrency, num_texts, max_tokens, temperature, {"traffic": traffic, "log": log, "data": data})
    _open(out)
    if wide:
        model, drafting = options.wide_pair(model, options.Drafting(draft_model=draft_model), loading["dtype"])
        draft_model = drafting.draft_model
    notes = Console(stderr=True, no_color=no_color or None, highlight=False, soft_wrap=True)
    found = _traffic(model, traffic, log, data, max_tokens)
    for line in found.bad:
        notes.print(f"{found.source}, {line}", style="yellow", markup=False)
    plan = {"concurrency": concurrency, "temperature": temperature, "num_texts": num_texts, "generate": log is None}
    results, profile = _tune(notes, model, draft_model, way or [], found, plan, loading)
    _write(results, profile, out)
    if as_json:
        sys.stdout.write(results.model_dump_json() + "\n")
    else:
        width = None if sys.stdout.isatty() else 120
        _show(results, out, Console(no_color=no_color or None, highlight=False, width=width))
    if results.recommendation.disturbed:
        raise typer.Exit(1)


def _check(concurrency: int, num_texts: int, max_tokens: int, temperature: float, sources: dict[str, Path | None]) -> None:
    given = [(name, path) for name, path in sources.items() if path is not None]
    if len(given) > 1:
        name, path = given[1]
        problem = f"--{given[0][0]} says already where the texts come from"
        raise ContradictionError(name, str(path), problem, "Leave one of them out.")
    for name, value, least, most in (
        ("concurrency", concurrency, 1, 64),
        ("num_texts", num_texts, 1, 100_000),
        ("max_tokens", max_tokens, 8, 100_000),
    ):
        if not least <= value <= most:
            raise InvalidParameterError(name, value, "out of range", f"Use {least} to {most}.")
    if not 0.0 <= temperature < float("inf"):
        raise InvalidParameterError("temperature", temperature, "out of range", "Use 0 or more.")


def _open(out: Path) -> None:
    """Make the folder now: that it cannot be written is better known before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"it cannot be made ({error.strerror or error})"
        raise InvalidParameterError("out", str(out), problem, "Give a folder that can be written.") from None


def _traffic(model: str | None, traffic: Path | None, log: Path | None, data: Path | None, max_tokens: int) -> Traffic:
    """The texts, before a model is loaded: its tokenizer and its configuration are enough."""
    from outrider.cli.startup import light_imports

    with light_imports():
        from outrider.config import ModelConfig, default_model
        from outrider.lab.tune.traffic import read_traffic, recorded_traffic, sample_traffic
        from outrider.loading.configuration import read_context
        from outrider.loading.sources import check_sources
        from outrider.loading.tokenizers import read_tokenizer
        from outrider.prompts import PromptEncoder

        check_sources(model=model)
        config = ModelConfig(model=model or default_model("target"))
        encoder, limit = PromptEncoder(read_tokenizer(config), model), read_context(config)
    if data is not None:
        return recorded_traffic(data, limit, max_tokens)
    if traffic is None and log is None:
        return sample_traffic(encoder, limit, max_tokens)
    path = log or traffic
    assert path is not None
    return read_traffic(path, encoder, limit, max_tokens, recorded=log is not None)


def _tune(
    notes: Console,
    model: str | None,
    draft_model: str | None,
    ways: list[str],
    traffic: Traffic,
    given: dict[str, Any],
    how: dict[str, str | None],
) -> tuple[TuningResults, Profile | None]:
    """The results, and the profile that they come to; none where other work disturbed what it would rest on."""
    from outrider.building import Profile
    from outrider.config import default_model
    from outrider.lab.tune.results import whole_paths
    from outrider.lab.tune.tuner import Tuner, TuningPlan, candidates

    plan = TuningPlan(**given)
    draft = draft_model or (default_model("draft") if model is None else None)
    llm = options.load(notes, model, "none", chats=False, prefix_caching=False, max_num_seqs=plan.concurrency, **how)
    with shown_progress(notes) as progress:
        tell = partial(notes.print, style="dim", markup=False)
        results = Tuner(llm, candidates(llm, ways, draft), traffic, plan, progress, tell).run()
    best = results.recommendation
    if best.disturbed:
        return results, None
    profile = Profile(
        identity=llm.identity,
        speculation=whole_paths(best.speculation),
        concurrency=plan.concurrency,
        gain=best.gain,
        measured=best.measured,
    )
    return results, profile


def _write(results: TuningResults, profile: Profile | None, out: Path) -> None:
    """All files, each whole or not at all, once everything is known."""
    from outrider.files import write_text, write_whole
    from outrider.lab.bench import plots
    from outrider.lab.tune.results import draw

    write_text(out / "results.csv", results.as_csv())
    if plots.available():
        write_whole(out / _PLOT, lambda path: draw(results, path))
    else:
        results.remarks.append(f"no plot: matplotlib is not installed ({plots.REMEDY})")
    write_text(out / "results.json", results.model_dump_json(indent=1) + "\n")
    if profile is not None:
        write_text(out / _PROFILE, profile.model_dump_json(indent=1) + "\n")


def _show(results: TuningResults, out: Path, paper: Console) -> None:
    texts = f"{results.num_texts} {'text' if results.num_texts == 1 else 'texts'}"
    shown = f"{texts} ({results.traffic}), {results.concurrency} at a time, {results.dtype}"
    paper.print(shown, style="dim", markup=False)
    paper.print(_table(results))
    for remark in results.remarks:
        paper.print(f"note: {remark}", style="yellow", markup=False)
    paper.print(results.recommendation.said, style="bold", markup=False)
    if not results.recommendation.disturbed:
        paper.print(f"outrider serve --profile {out / _PROFILE}, or LLM(..., profile=...), uses it.", markup=False)
    paper.print(f"Results and plot: {out}", style="dim", markup=False)


def _table(results: TuningResults) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("way")
    for head in ("tokens predicted", "tokens a pass", "predicted", "measured", "range", "tokens/s"):
        table.add_column(head, justify="right", no_wrap=head == "range")
    for row in results.rows:
        spread = row.measured
        cells = (
            _figure(row.predicted_tokens, ""),
            _figure(row.measured_tokens, ""),
            _figure(row.predicted, "x"),
            _measured(row),
            "" if spread is None else f"{spread.low:.2f} to {spread.high:.2f}",
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
        )
        style = "bold green" if row.name == results.recommendation.name else None
        table.add_row(row.name, *cells, style=style)
    return table


def _measured(row: Row) -> str:
    if row.measured is None:
        return "disturbed" if row.disturbed else "-"
    return f"{row.measured.median:.2f}x"


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
