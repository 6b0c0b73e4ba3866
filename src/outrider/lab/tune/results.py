"""Results of a tuning: predicted and measured figures, their plot, and the recommendation."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from outrider.lab.measure.figures import Spread
from outrider.propose.settings import PLAIN

#: A way must be expected to gain at least this factor over plain decoding to be recommended.
PAYS_FROM = 1.02


class Row(BaseModel):
    """One way."""

    model_config = ConfigDict(extra="forbid")

    name: str  # like "draft_model k=3"
    speculation: dict[str, Any]  # its settings, as SpeculationConfig.of takes them
    predicted: float | None = None  # the speedup that shadow acceptance predicts; None where text alone does not tell
    predicted_tokens: float | None = None  # tokens a pass that it predicts
    measured: Spread | None = None  # the speedup that was measured, over rounds; None where nothing was written
    measured_tokens: float | None = None  # tokens a pass that were written
    tokens_per_second: float | None = None  # of decoding, all texts together
    disturbed: bool = False  # whether other work disturbed the measurement, so that the speedup is not known

    @property
    def plain(self) -> bool:
        return bool(self.speculation["method"] == "none")

    @property
    def gain(self) -> float | None:
        """The speedup to choose by: the measured one where there is one, and none where it was disturbed."""
        if self.disturbed:
            return None
        return self.measured.median if self.measured is not None else self.predicted


class Recommendation(BaseModel):
    """Says what to use."""

    model_config = ConfigDict(extra="forbid")

    name: str  # the way
    speculation: dict[str, Any]  # its settings
    gain: float  # the expected speedup over plain decoding: measured again in rounds of its own, or predicted
    measured: bool  # whether the gain was measured
    said: str  # the same as a sentence
    disturbed: bool = False  # whether other work disturbed what it rests on. Then there is no profile.


class TuningResults(BaseModel):
    """A whole tuning."""

    model_config = ConfigDict(extra="forbid")

    model: str  # the target
    dtype: str  # of its weights
    machine: dict[str, Any]  # hardware and versions
    traffic: str  # where the texts come from
    num_texts: int  # how many were used
    bad_lines: list[str]  # lines that could not be used, each with the reason
    concurrency: int  # texts at a time
    temperature: float  # 0 is greedy
    rows: list[Row]  # of every way, plain decoding first
    recommendation: Recommendation  # what to use
    remarks: list[str] = []  # what a reader should know beside

    def as_csv(self) -> str:
        """A line for each way."""
        paper = io.StringIO()
        writer = csv.writer(paper)
        heads = ("way", "predicted", "predicted_tokens", "measured", "low", "high", "measured_tokens", "tokens_per_second")
        writer.writerow(heads)
        for row in self.rows:
            spread = ("", "", "") if row.measured is None else (row.measured.median, row.measured.low, row.measured.high)
            cells = (row.predicted, row.predicted_tokens, *spread, row.measured_tokens, row.tokens_per_second)
            writer.writerow([row.name, *("" if cell is None else cell for cell in cells)])
        return paper.getvalue()


def best(rows: list[Row]) -> Row:
    """The way to use: that of the largest gain, or plain decoding where none is expected to pay."""
    (plain,) = (row for row in rows if row.plain)
    paying = [row for row in rows if not row.plain and row.gain is not None and row.gain >= PAYS_FROM]
    return max(paying, key=lambda row: row.gain or 0.0, default=plain)


def recommend(winner: Row, again: Spread | None, concurrency: int) -> Recommendation:
    """Returns what to say of the winner. Its speedup is that of rounds of its own, which nobody chose it by; None where
    nothing is measured."""
    at = f"at {concurrency} {'text' if concurrency == 1 else 'texts'} at a time"
    if winner.plain:
        return _plainly(f"Decode plainly {at}: no way to draft is expected to gain.", measured=winner.measured is not None)
    gain = winner.predicted if again is None else again.median
    assert gain is not None, "nothing else could have chosen it"
    if again is None:
        said = f"Use {winner.name}: {gain:.2f} times as fast as plain decoding is predicted {at}."
    else:
        range_ = f"{again.low:.2f} to {again.high:.2f} in rounds that it was not chosen by"
        said = f"Use {winner.name}: it writes {gain:.2f} times as fast as plain decoding {at} ({range_})."
        if gain < PAYS_FROM:
            said = f"Decode plainly {at}: {winner.name} came first, but measured again it is {gain:.2f} ({range_})."
            return _plainly(said, measured=True)
    return Recommendation(
        name=winner.name, speculation=winner.speculation, gain=gain, measured=again is not None, said=said
    )


def _plainly(said: str, *, measured: bool) -> Recommendation:
    return Recommendation(name="plain", speculation=PLAIN.as_mapping(), gain=1.0, measured=measured, said=said)


def nothing_known(doubt: str) -> Recommendation:
    """Returns what to say where other work disturbed what a recommendation would rest on."""
    said = f"Nothing is recommended: {doubt} Tune again when the machine is at rest."
    return _plainly(said, measured=False).model_copy(update={"disturbed": True})


def whole_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the folders and files of models named from the root, so that they hold wherever a profile is read."""
    found = dict(settings)
    if isinstance(found.get("model"), str) and os.path.exists(found["model"]):
        found["model"] = os.path.abspath(found["model"])
    if isinstance(found.get("methods"), list):
        found["methods"] = [whole_paths(each) for each in found["methods"]]
    if isinstance(found.get("drafter"), dict):
        found["drafter"] = whole_paths(found["drafter"])
    return found


# --- A plot of measured against predicted speedups.


def draw(results: TuningResults, path: Path) -> None:
    """Write a point for each way that has both figures, or a bar for each prediction where nothing was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 6))
    drafting = [row for row in results.rows if not row.plain]
    measured = [row for row in drafting if row.measured is not None and row.predicted is not None]
    if measured:
        _against(panel, measured)
    else:
        _alone(panel, [row for row in drafting if row.predicted is not None])
    panel.set_title(f"{results.traffic}, {results.concurrency} at a time, {results.dtype}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def _against(panel: Any, rows: list[Row]) -> None:
    ends = [1.0]
    for row in rows:
        assert row.measured is not None
        assert row.predicted is not None
        spread = row.measured
        panel.errorbar(
            [row.predicted],
            [spread.median],
            yerr=[[spread.median - spread.low], [spread.high - spread.median]],
            fmt="o",
            capsize=3,
            label=row.name,
        )
        ends += [row.predicted, spread.median]
    line = [min(ends) * 0.9, max(ends) * 1.1]
    panel.plot(line, line, color="grey", linewidth=0.8, linestyle="--")
    panel.set_xlabel("predicted speedup")
    panel.set_ylabel("measured speedup, with its range over rounds")
    panel.legend(fontsize=8)


def _alone(panel: Any, rows: list[Row]) -> None:
    panel.barh([row.name for row in rows], [row.predicted for row in rows])
    panel.axvline(1.0, color="grey", linewidth=0.8, linestyle="--")
    panel.set_xlabel("predicted speedup")
