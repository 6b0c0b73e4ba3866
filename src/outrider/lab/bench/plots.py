"""Plots as PNG and SVG: speedup, cost of rows, prefill, acceptance, throughput, and the value of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.lab.bench.results import CellResult, PrefillResult, Results, WayResult
from outrider.lab.economics import Economics
from outrider.lab.measure.figures import Spread

REMEDY = "pip install 'outrider[bench]'"
#: The colours of the pages, which stay apart for colour-blind readers.
PALETTE = ("#0b7a5a", "#a85000", "#5b49c0", "#1464a8", "#95327e", "#6d6100", "#33415c", "#b3261e")
_PLAIN = "#8b8678"
#: A curve ends where fewer drafts than this reached the position.
_LEAST_TRIES = 10


def available() -> bool:
    """Tells whether matplotlib is installed. The extra `bench` installs it."""
    return find_spec("matplotlib") is not None


def draw(results: Results, folder: Path) -> list[str]:
    """Write every plot for which there are results. Returns the names of the PNG files."""
    import matplotlib

    matplotlib.use("Agg")
    plots: dict[str, Callable[[Results], Any | None]] = {
        "speedup": speedup,
        "row_costs": row_costs,
        "prefill": prefill,
        "acceptance": acceptance,
        "throughput": throughput,
    }
    names = []
    for name, plot in plots.items():
        figure = plot(results)
        if figure is None:
            continue
        figure.tight_layout()
        for suffix in ("png", "svg"):
            figure.savefig(folder / f"{name}.{suffix}", dpi=130)
        matplotlib.pyplot.close(figure)
        names.append(f"{name}.png")
    return names


def _series(cells: Iterable[CellResult]) -> dict[str, list[CellResult]]:
    """The cells that one panel shows together, by model, precision and sampling. A replay stands beside sampled text."""
    found: defaultdict[str, list[CellResult]] = defaultdict(list)
    for result in cells:
        cell = result.cell
        found[f"{cell.model}, {cell.dtype}, {'T=1' if cell.replay else cell.sampling}"].append(result)
    return dict(found)


def _panels(count: int, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure with `count` panels. Their height is in inches."""
    import matplotlib.pyplot as plt

    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(10, height * rows), squeeze=False)
    panels = list(axes.flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels[:count]


def _colours(names: Iterable[str]) -> dict[str, Any]:
    """Plain decoding is grey. Others have the colours of the pages, darker each time these are used up."""
    from matplotlib.colors import to_rgb

    found: dict[str, Any] = {"plain": _PLAIN}
    for i, name in enumerate(dict.fromkeys(name for name in names if name != "plain")):
        found[name] = tuple(part * 0.7 ** (i // len(PALETTE)) for part in to_rgb(PALETTE[i % len(PALETTE)]))
    return found


def speedup(results: Results) -> Any | None:
    """Bars of the speedup by workload and way, one text at a time. Bars of greedy text that loops are hatched."""
    groups = _series(result for result in results.cells.values() if result.cell.batch == 1)
    groups = {title: cells for title, cells in groups.items() if any(_bars(result) for result in cells)}
    if not groups:
        return None
    figure, panels = _panels(len(groups), 4.0)
    colours = _colours(way.name for cells in groups.values() for result in cells for way in _bars(result))
    for panel, (title, cells) in zip(panels, groups.items(), strict=True):
        labelled: set[str] = set()
        for place, result in enumerate(cells):
            bars = _bars(result)
            width = 0.8 / max(1, len(bars))
            for i, way in enumerate(bars):
                assert way.whole_speedup is not None
                value = way.speedup or way.whole_speedup
                error = [[value.median - value.low], [value.high - value.median]]
                hatch = "//" if way.loops and result.cell.sampling == "greedy" else None
                label = None if way.name in labelled else way.name
                labelled.add(way.name)
                x = place - 0.4 + width * (i + 0.5)
                several = value.low != value.high
                look = {"color": colours[way.name], "hatch": hatch, "label": label, "ecolor": "#1c2027", "capsize": 2}
                panel.bar(x, value.median, width, yerr=error if several else None, **look)
                top = (x, value.high)
                panel.annotate(f"{value.median:.2f}", top, (0, 2), textcoords="offset points", ha="center", fontsize=6)
        panel.axhline(1, color="black", lw=0.8)
        panel.set_xticks(range(len(cells)), [result.cell.workload.replace("_", "\n") for result in cells], fontsize=8)
        panel.set(
            ylabel="speedup over plain decoding", title=f"{title}, one text at a time (hatched: greedy text that loops)"
        )
        panel.set_ylim(top=panel.get_ylim()[1] * 1.3)  # room for the legend above the bars
        panel.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
    return figure


def _bars(result: CellResult) -> list[WayResult]:
    return [way for way in result.shown if way.whole_speedup is not None]


def row_costs(results: Results) -> Any | None:
    """The cost C(n) of n rows, for every model and context."""
    lines = {
        f"{name}, behind {context}": costs
        for name, model in results.models.items()
        for context in model.pass_seconds
        if len(costs := model.row_costs(context)) > 1
    }
    if not lines:
        return None
    figure, (panel,) = _panels(1, 4.5)
    colours = _colours(lines)
    for name, costs in lines.items():
        panel.plot(list(costs), list(costs.values()), marker="o", color=colours[name], label=name)
        _tell(panel, {n: cost for n, cost in costs.items() if n > 1}, "{:.2f}")
    panel.axhline(1, color="grey", lw=0.8)
    _count_axis(panel, {n for costs in lines.values() for n in costs if n & (n - 1) == 0})
    panel.set(xlabel="rows in a pass", ylabel="C(n) = T(n) / T(1)", title="What checking n rows costs", ylim=(0, None))
    panel.legend(frameon=False)
    return figure


def prefill(results: Results) -> Any | None:
    """Tokens per second by the rows of a part of a prompt, and the arithmetic beside the peak of a product."""
    lines: defaultdict[str, dict[int, PrefillResult]] = defaultdict(dict)
    peaks: dict[str, float] = {}
    for name, model in results.models.items():
        peak = results.product_peak(name.rpartition(", ")[2])
        for part in model.prefill:
            line = f"{name}, at {part.start}"
            lines[line][part.rows] = part
            peaks |= {} if peak is None else {line: peak}
    if not lines:
        return None
    figure, (speed, work) = _panels(2, 4.0, columns=2)
    colours = _colours(lines)
    for line, parts in lines.items():
        counted = {n: part.operations_per_second for n, part in parts.items()}
        look = {"marker": "o", "color": colours[line], "label": line}
        speed.plot(list(parts), [part.tokens_per_second for part in parts.values()], **look)
        _tell(speed, {n: part.tokens_per_second for n, part in list(parts.items())[-1:]}, "{:.0f}")
        work.plot([n for n, done in counted.items() if done], [done / 1e9 for done in counted.values() if done], **look)
    for peak in dict.fromkeys(peaks.values()):
        work.axhline(peak / 1e9, color="black", lw=0.8, ls="--")
    for panel, label in ((speed, "prompt tokens/s"), (work, "GFLOP/s (dashed: torch's product)")):
        _count_axis(panel, {n for parts in lines.values() for n in parts})
        panel.set(xlabel="rows in a pass", ylabel=label, ylim=(0, None))
        panel.legend(frameon=False, fontsize=8)
    return figure


def _tell(panel: Any, points: dict[int, float], form: str) -> None:
    """Write values above points."""
    for place, value in points.items():
        panel.annotate(form.format(value), (place, value), (0, 5), textcoords="offset points", ha="center", fontsize=7)


def _count_axis(panel: Any, ticks: Iterable[int]) -> None:
    """A horizontal axis for numbers that double."""
    found = sorted(ticks)
    panel.set_xscale("log", base=2)
    panel.set_xticks(found, [str(n) for n in found])


def acceptance(results: Results) -> Any | None:
    """Conditional acceptance by position of every way that drafts, one text at a time."""
    groups = _series(result for result in results.cells.values() if result.cell.batch == 1 and _curves(result))
    if not groups:
        return None
    cells = [result for found in groups.values() for result in found]
    figure, panels = _panels(len(cells), 2.8, columns=2)
    colours = _colours(name for result in cells for name in _curves(result))
    for panel, result in zip(panels, cells, strict=True):
        for name, curve in _curves(result).items():
            panel.plot(range(1, len(curve) + 1), curve, marker=".", color=colours[name], label=name)
            _tell(panel, {len(curve): curve[-1]}, "{:.2f}")
        panel.set(ylabel="accepted", xlabel="position", ylim=(0, 1.03))
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_title(result.cell.load.removesuffix(", batch 1"), fontsize=9)
        panel.legend(frameon=False, fontsize=7, ncols=2)
    figure.suptitle("Acceptance by position in the draft, given that those before it stood", fontsize=11)
    return figure


def _curves(result: CellResult) -> dict[str, list[float]]:
    """The curve of each way, up to the last position that enough drafts reached."""
    curves = {}
    for way in result.ways:
        pairs = zip(way.acceptance_by_position, way.tries_by_position, strict=True)
        curve = [a for a, tries in pairs if a is not None and tries >= _LEAST_TRIES]
        if curve:
            curves[way.name] = curve
    return curves


def throughput(results: Results) -> Any | None:
    """Tokens per second against the batch, for workloads that were measured in several batches."""
    lines: defaultdict[str, defaultdict[str, dict[int, Spread]]] = defaultdict(lambda: defaultdict(dict))
    for result in results.cells.values():
        for way in result.shown:
            if way.tokens_per_second is not None and not result.cell.replay:
                cell = result.cell
                title = f"{cell.model}, {cell.dtype}, {cell.workload}, {cell.sampling}"
                lines[title][way.name][cell.batch] = way.tokens_per_second
    lines_shown = {title: ways for title, ways in lines.items() if len(ways["plain"]) > 1}
    if not lines_shown:
        return None
    figure, panels = _panels(len(lines_shown), 3.5, columns=2)
    colours = _colours(name for ways in lines_shown.values() for name in ways)
    for panel, (title, ways) in zip(panels, lines_shown.items(), strict=True):
        for name, points in ways.items():
            batches = sorted(points)
            panel.plot(batches, [points[b].median for b in batches], marker="o", color=colours[name], label=name)
            panel.fill_between(
                batches,
                [points[b].low for b in batches],
                [points[b].high for b in batches],
                color=colours[name],
                alpha=0.18,
                lw=0,
            )
            _tell(panel, {batches[-1]: points[batches[-1]].median}, "{:.0f}")
        _count_axis(panel, ways["plain"])
        panel.set(xlabel="texts at a time", ylabel="tokens/s", ylim=(0, None))
        panel.set_title(title, fontsize=9)
        panel.legend(frameon=False, fontsize=8)
    return figure


# --- Plots the predicted value of drafts of every length, for `outrider plan`.


def draw_economics(
    economics: Economics, acceptance: Sequence[float], batch: Sequence[int], longest: int, path: Path
) -> None:
    """Write a panel for each batch: speedup by length, a line for each acceptance, its best length marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(batch), figsize=(1.5 + 4.5 * len(batch), 4), squeeze=False, sharey=True)
    lengths = range(longest + 1)
    for panel, size in zip(panels[0], batch, strict=True):
        for chance in acceptance:
            speedups = [economics.round(chance, length, size).speedup for length in lengths]
            (line,) = panel.plot(lengths, speedups, label=f"{chance:.0%} accepted")
            best = economics.best(chance, longest, size)
            panel.plot([best.num_draft_tokens], [best.speedup], "o", color=line.get_color())
        panel.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
        panel.set_title(f"batch {size}, a draft pass costs {economics.cost_ratio(size):.3f}")
        panel.set_xlabel("draft tokens a round")
    panels[0][0].set_ylabel("speedup over plain decoding")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
