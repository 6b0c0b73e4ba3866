"""Plots the predicted value of drafts of every length, for `outrider plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.govern.economics import Economics


def draw(economics: Economics, acceptance: Sequence[float], batch: Sequence[int], longest: int, path: Path) -> None:
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
