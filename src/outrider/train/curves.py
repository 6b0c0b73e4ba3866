"""The course of a training: a table in CSV, a drawing, and TensorBoard where it is installed."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.files import write_text, write_whole
from outrider.train.checkpoint import Measurement

TABLE, DRAWING = "curves.csv", "curves.png"


def write_table(folder: Path, measurements: Sequence[Measurement]) -> None:
    """Write every measurement as a line. Raises StorageError."""
    depths = max((len(each.acceptance) for each in measurements), default=0)
    positions = max((len(each.engine_acceptance) for each in measurements), default=0)
    names = ["step", "tokens", "seconds", "loss", "lr", "tau", "engine_tau"]
    names += [f"acceptance_{depth + 1}" for depth in range(depths)]
    names += [f"engine_acceptance_{position + 1}" for position in range(positions)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for each in measurements:
        line = {name: getattr(each, name) for name in names[:7]}
        line |= {f"acceptance_{depth + 1}": value for depth, value in enumerate(each.acceptance)}
        line |= {f"engine_acceptance_{place + 1}": value for place, value in enumerate(each.engine_acceptance)}
        writer.writerow(line)
    write_text(folder / TABLE, text.getvalue())


def draw(folder: Path, measurements: Sequence[Measurement], title: str) -> None:
    """Draw loss, acceptance and tau over the steps. Raises StorageError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    FigureCanvasAgg(figure)
    loss, acceptance, tau = figure.subplots(1, 3)
    steps = [each.step for each in measurements]
    loss.plot(steps[1:], [each.loss for each in measurements[1:]])  # nothing was learnt before the first step
    loss.set_title("loss on training texts")
    for depth in range(max(len(each.acceptance) for each in measurements)):
        acceptance.plot(steps, [each.acceptance[depth] for each in measurements], label=f"position {depth + 1}")
    acceptance.set_title("acceptance on held-out texts")
    acceptance.legend(fontsize="small")
    tau.plot(steps, [each.tau for each in measurements], label="from acceptance")
    ran = [each for each in measurements if each.engine_tau is not None]
    tau.plot([each.step for each in ran], [each.engine_tau for each in ran], "o", label="counted by the engine")
    tau.set_title("tokens of a target pass")
    tau.legend(fontsize="small")
    for axes in (loss, acceptance, tau):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    write_whole(folder / DRAWING, lambda path: figure.savefig(path, dpi=110, format="png"))


class Board:
    """Events for TensorBoard where the package is installed, and nothing elsewhere.

    Args:
        folder: Where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, measurement: Measurement) -> None:
        """One measurement."""
        if self._writer is None:
            return
        values = {"loss": measurement.loss, "lr": measurement.lr, "tau": measurement.tau}
        values |= {f"acceptance/{depth + 1}": value for depth, value in enumerate(measurement.acceptance)}
        if measurement.engine_tau is not None:
            values["engine_tau"] = measurement.engine_tau
        for name, value in values.items():
            self._writer.add_scalar(name, value, measurement.step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
