"""`outrider doctor`: whether speculation fits a model, what it is worth here, and what limits it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.flags import with_options
from outrider.errors import InvalidParameterError
from outrider.lab.cli.progress import shown_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from outrider.lab.doctor.examination import MethodReport, ModelFacts, Report, Sample
    from outrider.lab.doctor.verdict import Finding
    from outrider.llm import LLM

#: Workloads whose prompts make the sample, unless a file is given.
_WORKLOADS = ("code_completion", "json", "free_text", "copy_editing")
#: How findings look, by level.
_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]"}
_MARKS |= {"useless": "[bold red]no gain[/bold red]", "wrong": "[bold red]wrong[/bold red]"}

#: What becomes of greedy and seeded requests under `auto`.
_SPED_UP = "auto speeds them up, since a token's bits do not depend on the other rows of its pass"
_PLAIN = "auto decodes them plainly, since a token's bits depend on the other rows of its pass; name a method{}"
_OR_INVARIANT = ", or load the model with batch_invariant=True (--batch-invariant)"  # which a GPU refuses
#: What computes where our kernels for GPUs do.
_ON_GPU = "attention, probabilities and draws in our Triton kernels, the rest by stock operators of PyTorch"


@with_options()
def doctor(
    model: options.Model = None,
    wide: options.Wide = False,
    *,
    drafting: options.TreeDrafting,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Texts at a time.")] = 1,
    prompts: Annotated[Path | None, typer.Option(help='Your own texts: JSONL of {"prompt": ...}.')] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", "-n", help="Rounds of texts that are written.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 48,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 1.0,
    loading: options.Loading,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    no_color: options.NoColor = False,
) -> None:
    """Examine a model and a method: whether they fit, what speculation is worth here, what limits it, and what to do.

    Exit code: 0 all right; 1 speculation gains nothing, something is wrong, or other work disturbed it; 2 bad input.
    """
    from rich.console import Console

    _check(batch, num_prompts, max_tokens)
    if wide:
        model, drafting = options.wide_pair(model, drafting, loading["dtype"])
    asked = drafting.config()
    notes = Console(stderr=True, no_color=no_color or None, highlight=False)
    how = {**loading, "max_num_seqs": max(batch, 32)}
    with _progress(notes) as progress:
        llm = options.load(notes, model, "none", chats=False, prefix_caching=False, **how)
        sample = _sample(llm, prompts, batch, num_prompts, max_tokens, temperature)
        quantization, activations = loading["quantization"], loading["activations"]
        rounded = quantization is not None or llm.engine.runner.loaded.rounds_rows
        rows = {"quantization": quantization, "tries_rows": activations is None and _may_round_rows(llm, quantization)}
        report = _examine(llm, asked, sample, progress, rounded=rounded, **rows)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        width = None if sys.stdout.isatty() else 120
        _show(report, Console(no_color=no_color or None, highlight=False, width=width))
    if not report.healthy:
        raise typer.Exit(1)


def _check(batch: int, num_prompts: int, max_tokens: int) -> None:
    for name, value, least, most in (
        ("batch", batch, 1, 64),
        ("num_prompts", num_prompts, 1, 10_000),
        ("max_tokens", max_tokens, 8, 100_000),
    ):
        if not least <= value <= most:
            raise InvalidParameterError(name, value, "out of range", f"Use {least} to {most}.")


def _may_round_rows(llm: LLM, quantization: str | None) -> bool:
    """Tells whether a model that rounds no rows could do so."""
    from outrider.config import ModelConfig
    from outrider.loading.configuration import has_rounded_weights

    loaded = llm.engine.runner.loaded
    takes = loaded.device.type == "cpu" and str(loaded.dtype) in ("torch.float32", "torch.bfloat16")
    if loaded.rounds_rows or not takes:
        return False
    given: Any = quantization
    return has_rounded_weights(ModelConfig(model=loaded.name, quantization=given))


def _examine(llm: LLM, asked: Any, sample: Sample, progress: Callable[[str], None], **rounding: Any) -> Report:
    """Examine what was asked for. Where only a length or the like was, it changes what is chosen otherwise: all methods
    that the engine would choose from."""
    from outrider.lab.doctor.examination import Examination

    changes = asked if isinstance(asked, dict) else {}
    config = llm.resolve(_usual(llm) if asked is None or changes else asked)
    if changes and config.method is not None and config.engine_chooses:
        members = tuple(each.replace(**changes) for each in config.candidates)
        config = config.replace(method=config.method.replace(methods=members))
    return Examination(llm, config, sample, progress, **rounding).run()


def _usual(llm: LLM) -> Any:
    """The choice of an engine to which nobody says who drafts: layers that predict several tokens are among it where the
    target carries some."""
    from outrider.building import num_prediction_layers
    from outrider.propose.compositions import Auto
    from outrider.propose.defaults import usual_methods
    from outrider.propose.settings import SpeculationConfig

    carried = num_prediction_layers(llm.engine.runner.loaded)
    return Auto(methods=usual_methods(SpeculationConfig.of("mtp").method)) if carried else "auto"


def _sample(llm: LLM, prompts: Path | None, batch: int, num_rounds: int, max_tokens: int, temperature: float) -> Sample:
    """The texts of the rounds, each as many as the batch; they begin again from the first where there are too few."""
    from outrider.lab.doctor.examination import Sample
    from outrider.lab.measure.tasks import built_in, read_prompts
    from outrider.lab.measure.writing import encoded_tasks

    loaded = llm.engine.runner.loaded
    if loaded.tokenizer is None:
        raise InvalidParameterError("model", loaded.name, "it has no tokenizer", "Use a checkpoint that brings one.")
    together = zip(*(built_in(name) for name in _WORKLOADS), strict=False)
    tasks = read_prompts(prompts) if prompts is not None else [task for each in together for task in each]
    (encoded,) = encoded_tasks(loaded.name, loaded.max_model_len, {"sample": tasks}, max_tokens).values()
    rounds = [[encoded[(turn * batch + place) % len(encoded)] for place in range(batch)] for turn in range(num_rounds)]
    return Sample(rounds, "\n".join(task.prompt for task in tasks), temperature)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Says what is being examined: in one line of a terminal, from the first thing on, so that loading has its own before;
    elsewhere in a line for each thing, loading included, and one every half minute."""
    if not console.is_terminal:
        with shown_progress(console) as heartbeat:

            def say(what: str) -> None:
                heartbeat.what = what
                console.print(what, markup=False, soft_wrap=True)

            say("loading the model")
            yield lambda what: say(f"examining: {what}")
        return
    status = console.status("")

    def show(what: str) -> None:
        status.update(f"examining: {what}")
        status.start()  # of no effect where it has begun

    try:
        yield show
    finally:
        status.stop()


def _show(report: Report, paper: Console) -> None:
    paper.print(_facts("target", report.target))
    paper.print(f"[bold]load[/bold]               {report.load}")
    if report.target_is_rounded:
        unknown = "what it costs was not measured: the model as it was cannot be loaded beside the rounded one"
        paper.print(f"[bold]rounding[/bold]           {report.rounding or unknown}", soft_wrap=True)
    if report.rounded_rows is not None:
        paper.print(f'[bold]activations="int8"[/bold] would round rows: {report.rounded_rows}', soft_wrap=True)
    paper.print()
    paper.print(_costs(report))
    for doubt in report.doubts:
        paper.print(f"{doubt} Measure again when the machine is at rest.", style="bold yellow", markup=False)
    if not report.methods:
        paper.print("\nNo method drafts. Name one with --method or --draft-model.")
    for method in report.methods:
        paper.print()
        paper.rule(f"[bold]{method.name}[/bold], up to {method.num_draft_tokens} draft tokens", align="left")
        if method.draft is not None:
            paper.print(_facts("draft model", method.draft))
        if method.terms is not None:
            paper.print(_numbers(report, method))
        paper.print(_findings(method.findings))


def _facts(what: str, facts: ModelFacts) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    from outrider.kernels.triton.devices import TRITON

    computes = f"our kernels ({facts.kernels})" if facts.kernels else "stock operators of PyTorch"
    computes = _ON_GPU if facts.kernels == TRITON else computes
    size = "weights of unknown size" if facts.weight_bytes is None else f"{facts.weight_bytes / 1e6:,.0f} MB of weights"
    free = "" if facts.free_bytes is None else f"; {facts.free_bytes / 1e9:.1f} GB of memory are free"
    fit = ", ".join(f"{count:,} of {length:,} tokens" for length, count in facts.requests.items())
    rows = [
        (what, facts.name),
        ("passes", f"{facts.arithmetic} on {facts.device}, {computes}, backend {facts.backend}, {size}"),
        ("context", f"{facts.context:,} tokens"),
        ("KV memory", f"{facts.kv_tokens:,} tokens{free}"),
        ("requests that fit", fit),
    ]
    if facts.text_bytes:
        rows.append(("running states", f"{facts.text_bytes / 1e6:,.2f} MB a text at most, beside the KV memory"))
    if facts.prediction_layers:
        rows.append(("prediction layers", f"{facts.prediction_layers} in its own files: method mtp"))
    rows += [("lies beside it", f"{path}: draft with it by --draft-model {path}") for path in facts.beside]
    if what == "target":
        plain = _PLAIN.format("" if "cuda" in facts.device else _OR_INVARIANT)
        rows.append(("greedy and seeded", _SPED_UP if facts.invariant else plain))
    if facts.kernels_problem is not None:
        rows.append(("compiled kernels", f"not used. {facts.kernels_problem}"))
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    return table


def _costs(report: Report) -> RenderableType:
    from rich.table import Table

    from outrider.lab.doctor.examination import cost_ratios

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("rows of a pass")
    for rows in report.pass_seconds:
        table.add_column(str(rows), justify="right")
    table.add_row("milliseconds", *(f"{seconds * 1e3:.1f}" for seconds in report.pass_seconds.values()))
    ratios = cost_ratios(report.pass_seconds).values()
    table.add_row("C(n) = T(n) / T(1)", *("?" if report.passes_doubted else f"{ratio:.2f}" for ratio in ratios))
    return table


def _numbers(report: Report, method: MethodReport) -> RenderableType:
    from rich.table import Table

    terms, acceptance = method.terms, method.acceptance
    assert terms is not None
    assert acceptance is not None
    measured = "disturbed" if method.measured is None else f"[bold]{method.measured:.2f}x[/bold]"
    by_position = "/".join(f"{share:.0%}".rstrip("%") for share in acceptance.by_position[:8])
    range_ = f"{min(method.rounds):.2f} to {max(method.rounds):.2f}" if len(method.rounds) > 1 else "one round"
    range_ = range_ if method.rounds else ""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("tokens a step", "accepted, %", "pass", "draft", "host", "predicted", "measured", "range"):
        table.add_column(head, justify="right")
    table.add_row(
        f"{terms.tokens:.2f}",
        by_position or "-",
        *(f"{part:.2f}" for part in (terms.verify, terms.propose, terms.host)),
        f"{terms.speedup:.2f}x",
        measured,
        range_,
    )
    table.caption = f"times in plain steps of {report.batch / report.plain_tokens_per_second * 1e3:.1f} ms"
    table.caption_justify = "left"
    return table


def _findings(findings: tuple[Finding, ...]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for found in findings:
        remedy = f"\n[dim]{escape(found.remedy)}[/dim]" if found.remedy else ""
        table.add_row(_MARKS[str(found.level)], f"[bold]{found.topic}[/bold]", escape(found.text) + remedy)
    return table
