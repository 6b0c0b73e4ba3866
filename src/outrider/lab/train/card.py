"""The model card: what was trained, from what, and what was measured."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.config import default_model
from outrider.files import write_text
from outrider.lab.train.checkpoint import Measurement, Progress
from outrider.lab.train.settings import TrainSettings
from outrider.lab.train.trainer import by_position
from outrider.records import Manifest
from outrider.results import RequestStats


@dataclass(frozen=True)
class Outcome:
    """Holds what a training came to."""

    target: str  # folder or hub id of the target
    facts: dict[str, Any]  # what the trainee says of itself
    manifest: Manifest  # of the data
    settings: TrainSettings  # how it ran
    progress: Progress  # its course
    stats: RequestStats | None  # what the engine counted with the result; None where it did not run

    @property
    def before(self) -> Measurement:
        """Held-out texts before the first step."""
        return self.progress.measurements[0]

    @property
    def best(self) -> Measurement:
        """Returns the same with the weights that were kept."""
        return next(each for each in self.progress.measurements if each.step == self.progress.best)

    @property
    def target_title(self) -> str:
        """The target's name, without the folders above it."""
        return Path(self.target).name

    def judged(self, stats: RequestStats) -> Outcome:
        """The same, and what the engine counted."""
        return replace(self, stats=stats)

    def figures(self) -> dict[str, Any]:
        """The numbers, for programs."""
        found: dict[str, Any] = {
            "parameters": self.facts["parameters"],
            "steps": self.progress.step,
            "tokens": self.progress.tokens,
            "seconds": self.progress.seconds,
            "best_step": self.progress.best,
            "acceptance_before": list(self.before.acceptance),
            "acceptance": list(self.best.acceptance),
            "tau_from_acceptance": self.best.tau,
        }
        if self.stats is not None:
            found |= {"engine_tau": self.stats.mean_acceptance_length, "engine_acceptance": list(by_position(self.stats))}
            found["engine_target_passes"] = self.stats.num_target_passes
        return found


def write_card(folder: Path, outcome: Outcome, speculation: dict[str, Any]) -> None:
    """Write README.md. Raises StorageError."""
    own = {"method": speculation["method"], "model": "THIS_FOLDER"}
    parts = [
        f"# {_title(outcome)}",
        "It drafts for its target in [Outrider](https://pypi.org/project/outrider), which checks every draft, so that the "
        "target's distribution stays as it is. It is of no use without this target.",
        f"```python\nLLM({_argument(outcome.target)}speculation={own})\n```",
        "## What it is",
        _table(outcome.facts | {"target": outcome.target_title, "made by": f"Outrider {__version__}"}),
        "## What it learnt from",
        _table(_data_facts(outcome)),
        "## What was measured",
        _measured(outcome),
        f"The course of the training is in `curves.csv` and `curves.png`. Machine: {platform.machine()}, "
        f"Python {platform.python_version()}.",
    ]
    write_text(folder / "README.md", "\n\n".join(parts) + "\n")


def _argument(target: str) -> str:
    """Returns how the target is written where it is loaded: nothing for the embedded one, and no folder of this machine."""
    if target == default_model("target"):
        return ""
    return '"FOLDER_OF_THE_TARGET", ' if Path(target).is_dir() else f"{json.dumps(target)}, "


def _title(outcome: Outcome) -> str:
    kind = str(outcome.facts["kind"])
    return f"{kind[0].upper()}{kind[1:]} for {outcome.target_title}"


def _data_facts(outcome: Outcome) -> dict[str, Any]:
    manifest, progress = outcome.manifest, outcome.progress
    asked = manifest.settings
    return {
        "texts": f"{manifest.num_records:,}, of which {manifest.num_held_out:,} were held out",
        "written by the target": f"up to {asked.max_tokens} tokens behind each prompt" if asked.max_tokens else "no",
        "temperature, top_k, top_p": f"{asked.temperature}, {asked.top_k}, {asked.top_p}",
        "steps": f"{progress.step:,}; the best weights are those of step {progress.best:,}",
        "tokens learnt from": f"{progress.tokens:,}",
        "minutes": f"{progress.seconds / 60:.1f}",
    }


def _measured(outcome: Outcome) -> str:
    texts = min(outcome.settings.held_out_texts, outcome.manifest.num_held_out)
    before, best = outcome.before, outcome.best
    lines = [
        f"On up to {texts} held-out texts, the chance that the token rule accepts a draft token (the sum of the smaller of "
        "the two probabilities):",
        "| | before | after |\n|---|---|---|\n"
        + "\n".join(
            f"| position {depth + 1} | {a:.3f} | {b:.3f} |"
            for depth, (a, b) in enumerate(zip(before.acceptance, best.acceptance, strict=True))
        )
        + f"\n| tokens of a target pass that follow | {before.tau:.2f} | {best.tau:.2f} |",
    ]
    if outcome.stats is not None:
        settings, stats = outcome.settings, outcome.stats
        by = ", ".join(f"{share:.2f}" for share in by_position(stats))
        began = "" if before.engine_tau is None else f" Before the training it yielded {before.engine_tau:.2f}."
        lines.append(
            f"In the engine itself, with {settings.num_draft_tokens} draft tokens a step on up to "
            f"{settings.engine_prompts} held-out prompts of {settings.engine_tokens} tokens each, in "
            f"{stats.num_target_passes:,} target passes, a draft yielded **{stats.mean_acceptance_length:.2f} tokens** of "
            f"a pass. Share of draft tokens that stood, by position, where those before them stood: {by}.{began}"
        )
    return "\n\n".join(lines)


def _table(rows: dict[str, Any]) -> str:
    shown = (f"| {name} | {f'{value:,}' if isinstance(value, int) else value} |" for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *shown])
