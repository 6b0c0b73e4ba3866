"""Predicts the time of a step from measured ones: target passes by rows, texts and context, drafts by method, and the host.

A calibration at start says what passes take. Every step corrects it, near the number of rows that it had and, more slowly,
everywhere. Where passes become longer in steps, the calibration knows the steps, and a correction keeps them. What makes a
machine slower as a whole moves the whole curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, sqrt

#: Observations of one number of rows that its correction looks back on. Fewer show in "long pauses", more in "noisy times".
_NEAR_MEMORY = 48.0
#: Observations of any number of rows that the general correction looks back on. Shows in
#: test_a_machine_that_becomes_slower_changes_nothing.
_FAR_MEMORY = 48.0
#: The general correction weighs as much as so many observations of a number of rows. Shows in "a calibration with wrong
#: stairs".
_FAR_WEIGHT = 0.5
#: What was observed elsewhere weighs as much as so many observations at most. Shows in
#: test_one_text_gains_within_a_second_of_a_crowd.
_DOUBTED = 2.0
#: In so many steps an observation of one number of rows loses all of its weight. Fewer show in "noisy times", and no end
#: at all in test_planning_is_paid_for_like_trials.
_STALE_AFTER = 400.0
#: One observation changes nothing by more than this factor, since a machine may pause for any reason. Shows in "long
#: pauses".
_MOST = 3.0
#: Observations of a number of rows after which its correction is so well known that a further change is one of the machine
#: as a whole: the corrections of all others follow, since plain steps are seldom seen where drafts pay. Shows in
#: test_plain_steps_are_believed_to_be_as_slow_as_the_machine_is.
_TELLS_OF_ALL = 8.0
#: Bounds of a pass: its seconds on any machine, and a factor. A pass is no shorter than that of one row over the factor,
#: and no longer than the passes of its rows one after another times the factor.
_SHORTEST, _LONGEST, _ABSURD = 1e-7, 3600.0, 50.0
#: An observation that differs by more than this share is odd; so many of them in a row are believed, instead of all before,
#: where these were so many that the number of rows seemed to be known. Shows in "rows become dear".
_ODD, _BELIEVED, _KNOWN = 0.2, 3, 3.0
#: Times of equal passes differ: by this share before any was seen, and later by what is learnt from so many of them. An odd
#: one differs by more than so many times this share. Shows in "noisy times".
_SPREAD, _SPREAD_MEMORY, _ODD_SPREADS = 0.15, 32.0, 2.5
#: The share by which a time is taken to be wrong at most, since a calibration errs by no more. Where equal passes differ by
#: more than that, trials would else seem too dear for ever, and nothing would become certain. Shows in
#: test_it_gains_where_other_work_disturbs_most_steps.
_MOST_UNCERTAIN = 0.3


@dataclass(frozen=True)
class CostTable:
    """Times of passes that a calibration found."""

    passes: Mapping[int, float]  # seconds of a pass of the target by its number of rows
    context_seconds: float = 0.0  # what a pass takes longer for each token of context, all texts together
    #: For each method that runs a model of its own, seconds of that model's pass by its number of rows.
    drafts: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError where no machine could take such times."""
        for name, points in {"the target": self.passes, **self.drafts}.items():
            if not points or min(points) < 1:
                raise ValueError(f"{name}: no pass has fewer rows than one")
            one = points[min(points)]
            for rows, seconds in points.items():
                if not _SHORTEST <= seconds <= _LONGEST or not 1.0 / _ABSURD <= seconds / one <= _ABSURD * rows:
                    raise ValueError(f"{name}: a pass of {rows} rows cannot take {seconds} s beside one of {one} s")
        if not 0.0 <= self.context_seconds <= min(self.passes.values()):
            raise ValueError(f"a token of context cannot make a pass {self.context_seconds} s longer")

    @staticmethod
    def assumed(pass_seconds: float = 0.05) -> CostTable:
        """The table where nothing was calibrated: a pass is flat up to 4 rows, 8 rows cost 1.2 times as much, and from
        16 rows on twice the rows take twice the time. Steps correct it."""
        shape = {1: 1.0, 4: 1.05, 8: 1.2, 16: 1.6, 32: 3.0, 64: 6.0, 128: 12.0, 256: 24.0}
        return CostTable({rows: factor * pass_seconds for rows, factor in shape.items()})


@dataclass(frozen=True)
class DraftWork:
    """One method's part in a step."""

    method: str
    texts: int  # texts that it drafted for
    levels: int  # length of the longest draft that was asked for
    rows: int = 0  # tokens that its own model caught up with beyond the usual ones
    chosen: str = ""  # the composite that it drafted for as a member; empty where it drafted by itself


@dataclass(frozen=True)
class StepWork:
    """The work of a step of texts that decode."""

    rows: int  # of the target's pass
    texts: int
    context: int  # tokens that the texts had before, all together
    drafts: tuple[DraftWork, ...] = ()
    #: Rows of tokens that the structures of the texts force. They are there without drafts too.
    forced: int = 0

    @property
    def plain_rows(self) -> int:
        """Rows that the step would have without drafts."""
        return self.texts + self.forced


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: of proposing, of the target's pass, and of all else."""

    propose: float
    forward: float
    host: float

    @property
    def total(self) -> float:
        return self.propose + self.forward + self.host


class Curve:
    """Seconds by a number of rows: a calibrated curve of one point at least, and corrections that follow what is observed.

    A number of rows that was not seen lately is corrected as its neighbours are.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self.sizes = sorted(points)
        self._seconds = [points[size] for size in self.sizes]
        self._near = [1.0] * len(self.sizes)
        self._weights = [0.0] * len(self.sizes)
        self._seen = [0] * len(self.sizes)
        self._odd = [0] * len(self.sizes)
        self._ratios: dict[int, float] = {}  # until the next observation
        self._spread = _SPREAD
        self._far, self._far_weight, self._step = 1.0, 0.0, 0

    def base(self, rows: float) -> float:
        """Returns the calibrated time: on a line between two points, and beyond the last as many times as long as there are
        more rows."""
        sizes, seconds = self.sizes, self._seconds
        place = bisect_left(sizes, rows)
        if place == 0:
            return seconds[0]
        if place == len(sizes):
            return seconds[-1] * rows / sizes[-1]
        low, high = sizes[place - 1], sizes[place]
        return seconds[place - 1] + (seconds[place] - seconds[place - 1]) * (rows - low) / (high - low)

    def seconds(self, rows: float) -> float:
        """Returns the calibrated time, as it was corrected."""
        return self.base(rows) * self.ratio(rows)

    def ratio(self, rows: float) -> float:
        """The ratio by which passes of so many rows differ from what was calibrated."""
        place = self._place(rows)
        ratio = self._ratios.get(place)
        if ratio is None:
            ratio = self._ratios[place] = self._ratio(place)
        return ratio

    def observe(self, rows: int, expected: float, seconds: float) -> bool:
        """A pass of so many rows took so long, where `expected` was calibrated. Returns whether about so many rows seem to
        cost something else than before."""
        self._step += 1
        place, ratio = self._place(rows), max(seconds, _SHORTEST) / max(expected, 1e-9)  # a clock may stand still
        known = self._ratio(place)
        if self._far_weight >= 1.0:
            ratio = min(max(ratio, known / _MOST), known * _MOST)
        apart, usual = abs(ratio / known - 1.0), max(_ODD, _ODD_SPREADS * self._spread)
        self._odd[place] = self._odd[place] + 1 if apart > usual else 0
        if self._far_weight >= 1.0 and self._odd[place] < _BELIEVED and self._weights[place] < _KNOWN:  # it may be a pause
            ratio = min(ratio, known * (1.0 + usual))
        self._spread += (min(apart, _MOST * self._spread) - self._spread) / _SPREAD_MEMORY
        changed = self._odd[place] >= _BELIEVED and self._weights[place] >= _KNOWN
        if changed:
            self._weights[place], self._odd[place] = 1.0, 0
        tells_of_all, before = not self._odd[place] and self._fresh(place) >= _TELLS_OF_ALL, self._near[place]
        self._far_weight = min(self._far_weight + 1.0, _FAR_MEMORY)
        self._far += (ratio - self._far) / self._far_weight
        self._weights[place] = min(self._fresh(place) + 1.0, _NEAR_MEMORY)
        self._seen[place] = self._step
        self._near[place] += (ratio - self._near[place]) / self._weights[place]
        if tells_of_all:
            share = self._near[place] / before
            self._near = [near if other == place else near * share for other, near in enumerate(self._near)]
        self._ratios.clear()
        return changed

    def begin_anew(self, ratio: float) -> None:
        """The machine as a whole takes another time than before, by this ratio to what was calibrated: all corrections were
        learnt on another machine, so to speak."""
        self._far, self._far_weight = ratio, _DOUBTED
        self._ratios.clear()
        self._near, self._weights = [1.0] * len(self.sizes), [0.0] * len(self.sizes)

    def doubt(self) -> None:
        """Take all observations for those of another batch: go on from it, and let a few observations outweigh it."""
        self._far_weight = min(self._far_weight, _DOUBTED)
        self._weights = [min(weight, _DOUBTED) for weight in self._weights]
        self._odd = [0] * len(self.sizes)
        self._ratios.clear()

    def uncertainty(self, rows: int) -> float:
        """The share by which the time of a pass of so many rows may be wrong, as far as times that differ tell."""
        return self._spread / sqrt(self._fresh(self._place(rows)) + _FAR_WEIGHT)

    def knows(self, rows: int) -> bool:
        """True if passes of about so many rows were seen lately, and not once only."""
        return self._fresh(self._place(rows)) > 1.0

    def is_odd(self, rows: int) -> bool:
        """True if about so many rows seemed to be known, and the latest observation was odd: another one is wanted."""
        place = self._place(rows)
        return self._odd[place] > 0 and self._weights[place] >= _KNOWN

    def last_seen(self, rows: int) -> int:
        """Observations since one of about so many rows, or since the first of all."""
        return self._step - self._seen[self._place(rows)]

    def _place(self, rows: float) -> int:
        return min(bisect_left(self.sizes, rows), len(self.sizes) - 1)

    def _fresh(self, place: int) -> float:
        return self._weights[place] * max(0.0, 1.0 - (self._step - self._seen[place]) / _STALE_AFTER)

    def _ratio(self, place: int) -> float:
        return self._careful(place) if self._fresh(place) > 0.0 else self._around(place)

    def _around(self, place: int) -> float:
        """The correction of the nearest numbers of rows that were seen lately, on a line between two of them."""
        below = next((p for p in range(place - 1, -1, -1) if self._fresh(p) > 0.0), None)
        above = next((p for p in range(place + 1, len(self.sizes)) if self._fresh(p) > 0.0), None)
        if below is None or above is None:
            found = below if above is None else above
            return self._far if found is None else self._careful(found)
        share = (self.sizes[place] - self.sizes[below]) / (self.sizes[above] - self.sizes[below])
        return (1.0 - share) * self._careful(below) + share * self._careful(above)

    def _careful(self, place: int) -> float:
        weight = self._fresh(place)
        return (weight * self._near[place] + _FAR_WEIGHT * self._far) / (weight + _FAR_WEIGHT)


#: Sizes for which what the host adds is learnt apart.
_HOST_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class CostModel:
    """Predicts what steps take and learns from those that were.

    Methods without a model of their own, lookups, take time for each text, however long the drafts are. Others draft all
    tokens of a text in one pass of theirs.
    """

    def __init__(self, table: CostTable, lookups: Sequence[str] = (), in_one_pass: Sequence[str] = ()) -> None:
        one = min(table.passes.values())
        self.passes = Curve(table.passes)
        self.host = Curve({size: one * (0.02 + 0.001 * size) for size in _HOST_SIZES})
        self._context_seconds = table.context_seconds
        self._lookups = frozenset(lookups)
        self._in_one_pass = self._lookups.union(in_one_pass)
        self._drafts = {name: Curve(points) for name, points in table.drafts.items()}
        self._default = {size: one * (0.05 + 0.001 * size) for size in _HOST_SIZES}
        self._lookup = {size: one * 0.002 * size for size in _HOST_SIZES}

    def step_seconds(self, rows: float, context: int) -> float:
        """Time of a step without its drafts."""
        behind = self.passes.base(rows) + context * self._context_seconds
        return behind * self.passes.ratio(rows) + self.host.seconds(rows)

    def draft_seconds(self, method: str, texts: int, levels: int) -> float:
        """Time in which a method drafts so many tokens for each of so many texts."""
        if not texts or not levels:
            return 0.0
        return self._curve(method).seconds(texts) * (1 if method in self._in_one_pass else levels)

    def catch_up_seconds(self, method: str, rows: int) -> float:
        """Time in which a method's own model reads so many tokens."""
        return 0.0 if method in self._lookups or rows <= 0 else self._curve(method).seconds(rows)

    def reading_seconds(self, method: str, rows: int) -> float:
        """Time in which it reads so many tokens beyond that of the first pass of a draft, which reads a few as it is."""
        return max(0.0, self.catch_up_seconds(method, rows) - self.catch_up_seconds(method, 1))

    def work_seconds(self, work: StepWork) -> float:
        """Time of a step with its drafts."""
        drafts = [
            self.draft_seconds(each.method, each.texts, each.levels) + self.reading_seconds(each.method, each.rows)
            for each in work.drafts
        ]
        return self.step_seconds(work.rows, work.context) + sum(drafts)

    def most_longer(self, work: StepWork) -> float:
        """Seconds by which a step is longer than a plain one of the same texts, as far as times are certain."""
        if not work.drafts:
            return 0.0
        seconds, plain = self.work_seconds(work), work.plain_rows
        return seconds * (1.0 + self.uncertainty(work.rows, plain)) - self.step_seconds(plain, work.context)

    def uncertainty(self, rows: int, plain: int) -> float:
        """The share by which the times of passes of so many rows may be wrong beside those of plain ones of so many
        rows."""
        if rows == plain:
            return 0.0
        return min(hypot(self.passes.uncertainty(rows), self.passes.uncertainty(plain)), _MOST_UNCERTAIN)

    def observe(self, work: StepWork, times: StepTimes) -> bool:
        """Learn from a step in which nothing but decoding was done. Returns whether such passes seem to cost something else
        than before."""
        expected = self.passes.base(work.rows) + work.context * self._context_seconds
        changed = self.passes.observe(work.rows, expected, times.forward)
        if changed and work.rows == work.texts:
            self.passes.begin_anew(times.forward / max(expected, 1e-9))
        self.host.observe(work.rows, self.host.base(work.rows), times.host)
        self._observe_drafts(work.drafts, times.propose)
        return changed

    def _observe_drafts(self, drafts: Sequence[DraftWork], seconds: float) -> None:
        """Learn what one method takes: the only one, or the only one with a model among the members of a composite, whose
        lookups take little. Else nobody knows whose time it was."""
        models = [draft for draft in drafts if draft.method not in self._lookups]
        together = len({draft.chosen for draft in drafts}) == 1 and any(draft.chosen for draft in drafts)
        own = models if together and len(drafts) > 1 else drafts
        if len(own) != 1 or own[0].rows or not own[0].texts:
            return
        (draft,) = own
        others = [self.draft_seconds(each.method, each.texts, each.levels) for each in drafts if each is not draft]
        curve = self._curve(draft.method)
        levels = 1 if draft.method in self._in_one_pass else max(draft.levels, 1)
        curve.observe(draft.texts, curve.base(draft.texts) * levels, max(seconds - sum(others), 0.0))

    def doubt(self) -> None:
        """Let a few observations outweigh all earlier ones."""
        for curve in (self.passes, self.host, *self._drafts.values()):
            curve.doubt()

    def _curve(self, method: str) -> Curve:
        if method not in self._drafts:
            self._drafts[method] = Curve(self._lookup if method in self._lookups else self._default)
        return self._drafts[method]
