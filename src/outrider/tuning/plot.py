"""A plot of measured against predicted speedups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.tuning.results import Row, TuningResults


def draw(results: TuningResults, path: Path) -> None:
    """Write a point for each way that has both figures, or a bar for each prediction where nothing was measured.

    Args:
        results: Of a tuning.
        path: Where to write it, as PNG.
    """
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
