"""Advice for each precision, sampling and batch: what pays here, by how much, and how to use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.lab.bench.results import Advice, CellResult, Outcome
from outrider.lab.measure.decoding_config import Recipe
from outrider.lab.measure.figures import Spread

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
    never = f"Never drafted: {', '.join(silent)}." if silent else ""
    doubted = f"Not believed, since other work disturbed it: {', '.join(disturbed)}." if disturbed else ""
    sentences = [_said(outcome, best, cells), _left_out(cells) if best else "", never, doubted]
    chosen = best.name if best and (best.pays or best.speedup.median >= 1.0) else "plain"
    unknown = (Outcome.LOOPS, Outcome.ABSENT, Outcome.DISTURBED)
    recipe = None if outcome in unknown else _recipe(chosen, cells)
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


def _left_out(cells: Sequence[CellResult]) -> str:
    """A sentence about the texts that do not count."""
    looping = [found.cell.workload for found in cells if any(found.flatters(way) for way in found.ways)]
    return f"Not counted, since the greedy text repeats itself: {', '.join(looping)}." if looping else ""


def _recipe(name: str, cells: Sequence[CellResult]) -> Recipe | None:
    """Returns how to use a way. None for results that were kept before there were recipes."""
    return next((found.recipes[name] for found in cells if name in found.recipes), None)
