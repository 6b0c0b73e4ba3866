"""`outrider plan`: predicts what speculation would be worth before there is a model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.errors import ContradictionError, InvalidParameterError

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.lab.economics import Economics

#: A draft pass costs this share of a target pass where neither it nor sizes are given.
_COST_RATIO = 0.05

Acceptance = Annotated[
    list[float], typer.Option("--acceptance", "-a", help="Chance that a draft token stands, 0 to below 1; repeatable.")
]
Batch = Annotated[list[int], typer.Option("--batch", "-b", help="Texts at a time; repeatable.")]
Size = Annotated[float | None, typer.Option(help="Gigabytes of weights.")]


def plan(
    acceptance: Acceptance = [0.5, 0.6, 0.7, 0.8, 0.9],  # noqa: B006 (typer reads the default and nobody changes it)
    batch: Batch = [1],  # noqa: B006
    cost_ratio: Annotated[
        float | None,
        typer.Option("--cost-ratio", "-c", help="A pass of the draft over one of the target; 0.05 unless given."),
    ] = None,
    target_gb: Size = None,
    draft_gb: Size = None,
    bandwidth: Annotated[float | None, typer.Option(help="Gigabytes a second that the memory gives.")] = None,
    teraflops: Annotated[
        float | None, typer.Option(help="Operations a second, in 10**12; without it rows cost nothing.")
    ] = None,
    bytes_per_weight: Annotated[float, typer.Option(help="2 for bfloat16, 4 for float32, 1 for int8.")] = 2.0,
    kv_gb: Annotated[float, typer.Option(help="Gigabytes of KV that the target reads for each text in a pass.")] = 0.0,
    host: Annotated[float, typer.Option(help="Time of a round outside of passes, in passes of plain decoding.")] = 0.0,
    num_draft_tokens: options.NumDraftTokens = None,
    longest: Annotated[int, typer.Option(help="Longest draft that is considered.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Write a plot of speedup by length here, as PNG, SVG or PDF.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    no_color: options.NoColor = False,
) -> None:
    """Say what speculation is worth by calculation: tokens a round, the best length, the speedup. Needs no model.

    Give the cost ratio of a draft pass, or sizes and bandwidth, from which it follows.
    """
    from rich.console import Console

    numbers = {"target_gb": target_gb, "draft_gb": draft_gb, "bandwidth": bandwidth, "teraflops": teraflops}
    _check(acceptance, batch, cost_ratio, longest, num_draft_tokens, {**numbers, "bytes_per_weight": bytes_per_weight})
    _check_not_negative({"kv_gb": kv_gb, "host": host})
    economics = _economics(cost_ratio, numbers, bytes_per_weight, kv_gb, host)
    rows = [_row(economics, size, chance, longest, num_draft_tokens) for size in batch for chance in acceptance]
    if out is not None:
        _plot(economics, acceptance, batch, longest, out)
    if as_json:
        sys.stdout.write(json.dumps({"economics": asdict(economics), "rows": rows}) + "\n")
    else:
        _show(rows, num_draft_tokens, Console(no_color=no_color or None, highlight=False))


def _check(
    acceptance: list[float],
    batch: list[int],
    cost_ratio: float | None,
    longest: int,
    num_draft_tokens: int | None,
    positive: dict[str, float | None],
) -> None:
    for chance in acceptance:
        if not 0.0 <= chance < 1.0:
            raise InvalidParameterError("acceptance", chance, "it is no chance below 1", "Use 0 to 0.99.")
    for size in batch:
        if size < 1:
            raise InvalidParameterError("batch", size, "it holds no text", "Use 1 or more.")
    if cost_ratio is not None:
        _check_not_negative({"cost_ratio": cost_ratio})
    for name, length, least in (("longest", longest, 1), ("num_draft_tokens", num_draft_tokens, 1)):
        if length is not None and not least <= length <= 512:
            raise InvalidParameterError(name, length, "out of range", "Use 1 to 512.")
    for name, value in positive.items():
        if value is not None and not 0.0 < value < float("inf"):
            raise InvalidParameterError(name, value, "it is not above 0", "Use a positive number.")


def _check_not_negative(values: dict[str, float]) -> None:
    for name, value in values.items():
        if not 0.0 <= value < float("inf"):
            raise InvalidParameterError(name, value, "it is negative or no number", "Use 0 or more.")


def _economics(
    cost_ratio: float | None, sizes: dict[str, float | None], bytes_per_weight: float, kv_gb: float, host: float
) -> Economics:
    """From a cost ratio, or from sizes: never from both."""
    from outrider.lab.economics import Economics, PassCost

    given = {name: value for name, value in sizes.items() if value is not None}
    if not given and not kv_gb:
        return Economics.of_ratio(_COST_RATIO if cost_ratio is None else cost_ratio, host)
    if cost_ratio is not None and "draft_gb" in given:
        raise ContradictionError("cost_ratio", cost_ratio, "it follows from draft_gb too", "Leave one of them out.")
    needed = ["target_gb", "bandwidth"] + (["draft_gb"] if cost_ratio is None else [])
    for name in needed:
        if name not in given:
            raise InvalidParameterError(
                name, None, "it is needed where sizes are given", f"Add --{name.replace('_', '-')}."
            )
    bandwidth, teraflops, target_gb = given["bandwidth"], given.get("teraflops"), given["target_gb"]
    target = PassCost.of(target_gb, bandwidth, teraflops=teraflops, bytes_per_weight=bytes_per_weight, kv_gb=kv_gb)
    draft_gb = given["draft_gb"] if cost_ratio is None else cost_ratio * target_gb
    draft = PassCost.of(draft_gb, bandwidth, teraflops=teraflops, bytes_per_weight=bytes_per_weight)
    return Economics(target, draft, host)


def _row(economics: Economics, batch: int, acceptance: float, longest: int, asked: int | None) -> dict[str, Any]:
    best = economics.best(acceptance, longest, batch)
    row = {
        "batch": batch,
        "acceptance": acceptance,
        "cost_ratio": economics.cost_ratio(batch),
        "best_length": best.num_draft_tokens,
        "tokens": best.tokens,
        "passes": best.passes,
        "speedup": best.speedup,
    }
    if asked is not None:
        fixed = economics.round(acceptance, asked, batch)
        row |= {"asked_length": asked, "asked_tokens": fixed.tokens, "asked_speedup": fixed.speedup}
    return row


def _show(rows: list[dict[str, Any]], asked: int | None, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    heads = ["batch", "acceptance", "cost ratio", "best length", "tokens a round", "time of it, passes", "speedup"]
    if asked is not None:
        heads += [f"tokens, length {asked}", f"speedup, length {asked}"]
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        best = str(row["best_length"]) if row["best_length"] else "0 (plain)"
        cells = [str(row["batch"]), f"{row['acceptance']:.0%}", f"{row['cost_ratio']:.3f}", best]
        cells += [f"{row['tokens']:.2f}", f"{row['passes']:.2f}", f"{row['speedup']:.2f}x"]
        if asked is not None:
            cells += [f"{row['asked_tokens']:.2f}", f"{row['asked_speedup']:.2f}x"]
        table.add_row(*cells)
    console.print(table)


def _plot(economics: Economics, acceptance: list[float], batch: list[int], longest: int, out: Path) -> None:
    from outrider.lab.bench import plots

    if not plots.available():
        raise InvalidParameterError("out", str(out), "plots need matplotlib", f"{plots.REMEDY}, or leave it out.")
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidParameterError("out", str(out), "no kind of picture", "Use a name that ends in .png, .svg or .pdf.")
    try:
        plots.draw_economics(economics, acceptance, batch, longest, out)
    except OSError as error:
        raise InvalidParameterError("out", str(out), f"it cannot be written ({error})", "Give another path.") from error
