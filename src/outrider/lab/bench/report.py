"""Tells results: advice for each load, and tables for the terminal and as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from outrider.lab.bench.results import Advice, CellResult, ModelResult, Outcome, Results, WayResult
from outrider.lab.measure.figures import LOOPS_ABOVE, Spread
from outrider.lab.measure.machine import PRODUCT_SIZE

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

HEADING = "What pays here"
SPEED = ("way", "tokens/s", "speedup", "first ms", "whole tokens/s", "whole", "gaps ms", "GiB", "8-grams")
PREFILL = ("model", "position", "rows", "ms", "tokens/s", "GFLOP/s", "of the peak")
DRAFTS = ("way", "tau", "expected", "a pass", "accepted %", "eta", "1/C", "time %")
#: A table of a report: its title, its columns and its rows.
Section = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
#: Blanks between two columns.
_GAP = 2
#: What the columns of a table mean, by its columns.
LEGENDS = {
    SPEED: (
        "Medians over interleaved rounds, with their range. tokens/s, speedup: decoding, over our own plain decoding in "
        "the same round. first: to the first token. whole: with the prompt. gaps: between arrivals, median and 99th "
        "percentile. GiB: peak of memory. 8-grams: share repeated."
    ),
    DRAFTS: (
        "tau: mean acceptance length. expected: (1 - a^(K+1)) / (1 - a) of conditional acceptance a and draft length K. "
        "a pass: tokens per target pass, with or without a draft. accepted: conditional, position by position. "
        "eta: speedup / tau; 1/C: what it would be if only the target's pass cost time. time: propose/forward/verify/host."
    ),
    PREFILL: (
        "GFLOP/s: multiplications and additions of a part of a prompt, products with weights and attention, over its time. "
        "of the peak: of what torch's product of two matrices reaches here in the model's type, or in float32 where that "
        "is more."
    ),
}
#: What marks in the columns of SPEED mean; told where they stand.
MARKS = {
    "disturbed": "disturbed: seemed faster than its tokens per pass allow, also when measured again.",
    "loops": f"loops: greedy text that repeats more than {LOOPS_ABOVE:.0%}, which flatters every proposer: no headline.",
    "replay": "replay: recorded text, forced as the target's choice at full target cost.",
}


def tables(results: Results, cells: Sequence[CellResult], width: int) -> list[Table]:
    """Tables for the terminal: what a pass costs, and then the speed and the drafts of each cell. The first table of a kind
    says below what its columns mean."""
    from rich.table import Table

    views = []
    sections = list(_sections(results, cells))
    legends = _legends(sections)
    for title, columns, rows in sections:
        for part in _parts(columns, rows, width):
            look: Any = {"title_justify": "left", "title_style": "bold", "header_style": "dim"}
            look |= {"caption_justify": "left", "caption_style": "dim"}
            view = Table(title=title if part[1] == 1 else None, box=None, pad_edge=False, padding=(0, _GAP, 0, 0), **look)
            for number in part:
                view.add_column(columns[number], justify="right" if number else "left", no_wrap=True)
            for row in rows:
                view.add_row(*(row[number] for number in part))
            views.append(view)
        views[-1].caption = legends.pop(columns, None)
    return views


def _parts(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Columns that stand beside each other, the first one in every part: no number is cut off."""
    wide = [max(map(len, (name, *(row[number] for row in rows)))) + _GAP for number, name in enumerate(columns)]
    parts = [[0]]
    for number in range(1, len(columns)):
        if len(parts[-1]) > 1 and sum(wide[each] for each in (*parts[-1], number)) - _GAP > width:
            parts.append([0])
        parts[-1].append(number)
    return parts


def _legends(sections: Iterable[Section]) -> dict[tuple[str, ...], str]:
    """Returns what the columns of each kind of table mean, and the marks that stand in it."""
    cells: dict[tuple[str, ...], list[str]] = {}
    for _, columns, rows in sections:
        cells.setdefault(columns, []).extend(cell for row in rows for cell in row)
    found = {}
    for columns in [each for each in LEGENDS if each in cells]:
        marks = [text for mark, text in MARKS.items() if columns == SPEED and any(mark in cell for cell in cells[columns])]
        found[columns] = " ".join([LEGENDS[columns], *marks])
    return found


def conclusion(advice: Iterable[Advice]) -> Text:
    """Text for the terminal: what pays, and the lines that use it."""
    from rich.text import Text

    styles = {Outcome.PAYS: "bold green", Outcome.UNCLEAR: "bold yellow", Outcome.PLAIN: "bold red"}
    text = Text(HEADING, "bold")
    for said in advice:
        text.append(f"\n{said.group}: ", "dim")
        text.append(said.text, styles.get(said.outcome, "bold"))
        for line in pasted(said):
            text.append(f"\n    {line}", "not bold")
    return text


def pasted(advice: Advice) -> list[str]:
    """The lines that use what is best. There are none where nothing is known."""
    return [] if advice.python is None or advice.command is None else [advice.python, advice.command]


def markdown(results: Results, cells: Sequence[CellResult], command: str, plots: Iterable[str] = ()) -> str:
    """A page for a document."""
    lines = ["# Benchmark", "", f"{machine_line(results)} Made by `{command}`.", ""]
    lines += [f"- {note}" for note in results.remarks]
    lines += ["", f"## {HEADING}"]
    for said in results.advice:
        lines += ["", f"**{said.group}**: {said.text}"]
        lines += ["", *(f"    {line}" for line in pasted(said))] if pasted(said) else []
    sections = list(_sections(results, cells))
    legends = _legends(sections)
    for title, columns, rows in sections:
        lines += ["", f"## {title}"]
        lines += ["", legends.pop(columns)] if columns in legends else []
        lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines += [part for name in plots for part in ("", f"![{name}]({name})")]
    return "\n".join(lines) + "\n"


def _in_billions(peak: float) -> str:
    """Small figures have a decimal: without products of bf16, torch does less than one."""
    return f"{peak / 1e9:,.{0 if peak >= 1e10 else 1}f}"


def machine_line(results: Results) -> str:
    """One sentence about the machine and the versions."""
    facts = results.machine
    read = "" if results.bandwidth is None else f" Reads {results.bandwidth / 1e9:.1f} GB/s from memory."
    where = "" if facts["device"] == "cpu" else f", {facts['device']}"
    kernels = f" (kernels: {facts['kernels']})" if "kernels" in facts else ""
    multiplied = " and ".join(f"{_in_billions(peak)} GFLOP/s in {name}" for name, peak in results.products.items())
    if multiplied:
        read += f" torch multiplies two matrices of up to {PRODUCT_SIZE} x {PRODUCT_SIZE} at {multiplied}."
    return (
        f"{facts['cpu']}, {facts['instruction_set']}{kernels}, {facts['threads']} threads{where}, "
        f"outrider {facts['outrider']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"Python {facts['python']}.{read}"
    )


def _sections(results: Results, cells: Sequence[CellResult]) -> Iterable[Section]:
    """The tables of a report."""
    yield from _costs(results)
    yield from _by_workload(cells)
    for found in cells:
        yield _title(found), SPEED, [speed_row(found, way) for way in found.shown]
        if any(way.tau is not None for way in found.shown):
            drafting = [way for way in found.shown if way.tau is not None or way.plain]
            yield f"{found.cell.load}: drafts", DRAFTS, [draft_row(way) for way in drafting]


def _by_workload(cells: Sequence[CellResult]) -> Iterator[Section]:
    """For each load of several workloads, the speedup of each way in each of them, and over all."""
    groups: dict[str, list[CellResult]] = {}
    for found in cells:
        groups.setdefault(found.cell.group, []).append(found)
    for group, members in groups.items():
        if len(members) < 2:
            continue
        rows = []
        for name in dict.fromkeys(way.name for found in members for way in found.shown if not way.plain):
            ways = [next((way for way in found.ways if way.name == name), None) for found in members]
            known = [way.speedup.median for way in ways if way is not None and way.speedup is not None]
            if known:
                shown = ("" if way is None or way.speedup is None else f"{way.speedup.median:.2f}" for way in ways)
                rows.append((name, f"{fmean(known):.2f}", *shown))
        yield f"Speedup by workload: {group}", ("way", "mean", *(found.cell.workload for found in members)), rows


def _title(found: CellResult) -> str:
    """The load, and how near plain decoding comes to the limit of the memory."""
    share = next((way.bandwidth_share for way in found.ways if way.bandwidth_share is not None), None)
    return found.cell.load + ("" if share is None else f" (plain decoding reads weights at {share:.0%} of the bandwidth)")


def _costs(results: Results) -> Iterable[Section]:
    """The tables of what passes cost: ratios, milliseconds, and parts of a prompt."""
    places = [(name, model, context) for name, model in results.models.items() for context in model.pass_seconds]
    counts = sorted({n for _, model, context in places for n in model.pass_seconds[context]})
    ratios, times = [], []
    for name, model, context in places:
        seconds, costs = model.pass_seconds[context], model.row_costs(context)
        about = (_shown_model(name, model), f"{context}")
        one = _milliseconds(seconds[1]) if 1 in seconds else ""
        ratios.append((*about, one, *(f"{costs[n]:.2f}" if n in costs else "" for n in counts if n > 1)))
        times.append((*about, *(_milliseconds(seconds[n]) if n in seconds else "" for n in counts)))
    rows = tuple(f"n={n}" for n in counts)
    yield (
        "What a pass costs by its rows, C(n) = T(n) / T(1)",
        ("model", "context", "T(1) ms", *(f"n={n}" for n in counts if n > 1)),
        ratios,
    )
    yield "The same in milliseconds, T(n)", ("model", "context", *rows), times
    if any(model.prefill for model in results.models.values()):
        yield "How fast prompts are read, in parts", PREFILL, list(_prefill_rows(results))


def _shown_model(name: str, model: ModelResult) -> str:
    return name if model.positions is None else f"{name} (stretched to {model.positions})"


def _milliseconds(seconds: float) -> str:
    """Milliseconds, with a decimal below a hundred. A table of many columns has no room for more."""
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _prefill_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """The columns of PREFILL."""
    for name, model in results.models.items():
        peak = results.product_peak(name.rpartition(", ")[2])
        for part in model.prefill:
            done = part.operations_per_second
            yield (
                _shown_model(name, model),
                f"{part.start}",
                f"{part.rows}",
                _milliseconds(part.seconds),
                f"{part.tokens_per_second:.0f}",
                "" if done is None else f"{done / 1e9:.0f}",
                "" if done is None or peak is None else f"{done / peak:.0%}",
            )


def speed_row(found: CellResult, way: WayResult) -> tuple[str, ...]:
    """The columns of SPEED."""
    speed = "?" if way.tokens_per_second is None else _spread(way.tokens_per_second)
    first = way.time_to_first_token
    gaps = "" if way.gap_p50 is None or way.gap_p99 is None else f"{1e3 * way.gap_p50:.1f}/{1e3 * way.gap_p99:.1f}"
    peaks = [f"{bytes_ / 2**30:.2f}" for bytes_ in (way.peak_resident, way.peak_cuda) if bytes_ is not None]
    return (
        way.name,
        speed,
        "1" if way.plain else "disturbed" if way.disturbed else _times(way.speedup),
        "" if first is None else f"{1e3 * first.median:.0f}",
        f"{way.whole_tokens_per_second.median:.1f}",
        "1" if way.plain or way.whole_speedup is None else f"{way.whole_speedup.median:.2f}x",
        gaps,
        " + cuda ".join(peaks),
        f"{way.repeated_8grams:.0%}{_mark(found, way)}",
    )


def draft_row(way: WayResult) -> tuple[str, ...]:
    """The columns of DRAFTS."""
    positions = "/".join("-" if a is None else f"{100 * a:.0f}" for a in way.acceptance_by_position[:8])
    if len(way.acceptance_by_position) > 8:
        positions += "/…"
    phases = ("propose", "forward", "verify", "host")
    return (
        way.name,
        *(_number(value) for value in (way.tau, way.expected_tokens, way.tokens_per_pass)),
        positions,
        _number(way.eta),
        _number(way.eta_limit),
        "/".join(f"{100 * way.shares[phase]:.0f}" for phase in phases) if way.shares else "",
    )


def _mark(found: CellResult, way: WayResult) -> str:
    if found.cell.replay:
        return " replay"
    return " loops" if found.flatters(way) else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _times(value: Spread | None) -> str:
    return "" if value is None else f"{value.median:.2f}x{_range(value, 2)}"


def _spread(value: Spread) -> str:
    return f"{value.median:.1f}{_range(value, 1)}"


def _range(value: Spread, digits: int) -> str:
    """From the smallest to the largest value; nothing where one round gave one value."""
    return "" if value.low == value.high else f" ({value.low:.{digits}f}-{value.high:.{digits}f})"


# --- Advice for each precision, sampling and batch: what pays here, by how much, and how to use it.


_MORE = "Measure more before you choose it: --num-prompts 16 --max-tokens 128."

_REPLAYS = (
    " A replay leaves out every draft that follows the target's probabilities. Add a way that looks texts up: "
    "--way ngram:3 or --way suffix-tree:16."
)


@dataclass(frozen=True)
class _Candidate:
    """A way to draft, with its figures over all cells of a group that count."""

    name: str  # the name of the way
    # The speedup over plain decoding: the median over cells of their medians, and the range over all rounds.
    speedup: Spread
    num_rounds: int  # the number of rounds in all cells
    clear: tuple[str, ...]  # the workloads in which every round was faster than plain decoding

    @property
    def pays(self) -> bool:
        """Tells whether there were several rounds, and each was faster than plain decoding."""
        return self.speedup.low > 1.0 and self.num_rounds > 1

    @property
    def costs(self) -> bool:
        """Tells whether there were several rounds, and each was slower than plain decoding."""
        return self.speedup.high < 1.0 and self.num_rounds > 1


def advise(cells: Iterable[CellResult]) -> list[Advice]:
    """One advice for each model, precision, sampling and batch, in the order of the cells."""
    groups: defaultdict[str, list[CellResult]] = defaultdict(list)
    for found in cells:
        groups[found.cell.group].append(found)
    return [_advice(group, found) for group, found in groups.items()]


def _advice(group: str, cells: Sequence[CellResult]) -> Advice:
    """The advice for one group: the best way among those that surely pay, or else the best of all."""
    ours = [way for found in cells for way in found.ways if way.peer is None and not way.plain]
    names = list(dict.fromkeys(way.name for way in ours))
    disturbed = list(dict.fromkeys(way.name for way in ours if way.disturbed))
    silent = [name for name in names if not any(way.drafted for way in ours if way.name == name)]
    found = [_candidate(name, cells) for name in names if name not in silent]
    candidates = [candidate for candidate in found if candidate is not None]
    best = max(candidates, key=lambda c: (c.pays, c.speedup.median), default=None)
    outcome = _outcome(best, looping=len(silent) < len(names)) if names else Outcome.ABSENT
    if best is None and disturbed:
        outcome = Outcome.DISTURBED
    looping = [found.cell.workload for found in cells if any(found.flatters(way) for way in found.ways)]
    left_out = f"Not counted, since the greedy text repeats itself: {', '.join(looping)}." if best and looping else ""
    never = f"Never drafted: {', '.join(silent)}." if silent else ""
    doubted = f"Not believed, since other work disturbed it: {', '.join(disturbed)}." if disturbed else ""
    sentences = [_said(outcome, best, cells), left_out, never, doubted]
    chosen = best.name if best and (best.pays or best.speedup.median >= 1.0) else "plain"
    unknown = (Outcome.LOOPS, Outcome.ABSENT, Outcome.DISTURBED)
    # Results that were kept before there were recipes have none.
    known = () if outcome in unknown else (found.recipes for found in cells if chosen in found.recipes)
    recipe = next((recipes[chosen] for recipes in known), None)
    return Advice(
        group=group,
        outcome=outcome,
        way=best.name if best else None,
        speedup=best.speedup if best else None,
        never_drafted=silent,
        text=" ".join(sentence for sentence in sentences if sentence),
        python=recipe.python if recipe else None,
        command=recipe.command if recipe else None,
    )


def _candidate(name: str, cells: Sequence[CellResult]) -> _Candidate | None:
    """The figures of a way over the cells. None where no figure of it counts."""
    found: list[tuple[CellResult, Spread]] = []
    for cell in cells:
        way = next((way for way in cell.ways if way.name == name), None)
        if way is not None and way.speedup is not None and not cell.flatters(way):
            found.append((cell, way.speedup))
    if not found:
        return None
    spreads = [speedup for _, speedup in found]
    whole = Spread(
        median=median(s.median for s in spreads), low=min(s.low for s in spreads), high=max(s.high for s in spreads)
    )
    clear = tuple(cell.cell.workload for cell, s in found if s.low > 1.0 and cell.cell.num_rounds > 1)
    return _Candidate(name, whole, sum(cell.cell.num_rounds for cell, _ in found), clear)


def _outcome(best: _Candidate | None, *, looping: bool) -> Outcome:
    """Returns what to recommend of the best way whose figures count; None where there is none."""
    if best is None:
        return Outcome.LOOPS if looping else Outcome.PLAIN
    if best.pays:
        return Outcome.PAYS
    return Outcome.PLAIN if best.costs else Outcome.UNCLEAR


def _said(outcome: Outcome, best: _Candidate | None, cells: Sequence[CellResult]) -> str:
    if outcome is Outcome.LOOPS:
        return "No advice: the greedy text repeats itself, which flatters every way to draft. Measure prompts of your own."
    if outcome is Outcome.DISTURBED:
        return "No advice: other work disturbed the measurement. Measure again when the machine is at rest."
    if outcome is Outcome.ABSENT:
        return f"No advice: no way to draft took part.{_REPLAYS if all(found.cell.replay for found in cells) else ''}"
    if best is None:
        return "Decode plainly: no way to draft found anything to draft."
    speed = f"{best.speedup.median:.2f} times as fast as plain decoding"
    if best.num_rounds == 1:
        return f"Nothing is certain: {best.name} was {speed} in a single round. So few rounds cannot tell. {_MORE}"
    several = len({found.cell.workload for found in cells}) > 1
    range_ = f"{best.speedup.low:.2f} to {best.speedup.high:.2f} over {best.num_rounds} rounds"
    range_ += " of all workloads" if several else ""
    if outcome is Outcome.PAYS:
        return f"{best.name} pays: it writes {speed} ({range_})."
    if outcome is Outcome.PLAIN:
        return f"Decode plainly: the best way to draft, {best.name}, is {speed} ({range_})."
    only = f" It surely pays in {', '.join(best.clear)} alone." if best.clear else ""
    found = f"the best way to draft, {best.name}, is {speed}, and its range holds 1 ({range_})"
    return f"Nothing is certain: {found}.{only} So few rounds cannot tell. {_MORE}"
