"""The point of the project in a minute: one model writes code twice, side by side, with and without a draft model. Then
both write in turns, A B A B, and the median of the rounds says what the draft model is worth.

    python examples/demo.py            (or: make demo)

The target is the *wide* copy of the embedded one (outrider.widen): the same function, so the draft model guesses as
well as it really does, at 25 times the weights, so a forward pass costs what it costs a model of 0.36 B parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table
from rich.text import Text

from outrider import LLM, SamplingParams, StreamPiece
from outrider.cli.render import coloured, legend
from outrider.config import default_model
from outrider.kernels.library import kernel_library
from outrider.lab.measure.decoding_config import DecodingConfig, parse_ways
from outrider.lab.measure.figures import Spread
from outrider.lab.measure.writing import EncodedTask, Run, interleave, ours
from outrider.results import RequestStats
from outrider.widen import wide_target

PROMPT = "class Reader:\n    def __init__(self, path):\n"
MAX_TOKENS = 96
NUM_ROUNDS, ROUND_TOKENS = 5, 40
console = Console(highlight=False)


@dataclass
class Side:
    """One of the two runs; its clock counts only its own steps."""

    title: str
    pieces: Iterator[StreamPiece]
    text: Text = field(default_factory=lambda: Text().append(PROMPT, "dim"))
    seconds: float = 0.0
    num_tokens: int = 0
    done: bool = False

    def advance(self) -> None:
        start = perf_counter()
        piece = next(self.pieces, None)
        self.seconds += perf_counter() - start
        if piece is None:
            self.done = True
            return
        self.num_tokens += len(piece.token_ids)
        self.text.append_text(coloured(piece.spans))

    def panel(self) -> Panel:
        speed = f"{self.num_tokens} tokens, {self.seconds:.1f} s"
        return Panel(self.text, title=self.title, subtitle=speed, width=max(40, console.width // 2 - 1), height=22)


def pick_settings() -> tuple[str, int]:
    """dtype and draft length that pay on this machine."""
    if torch.cuda.is_available() or kernel_library() is not None:
        return "bfloat16", 4
    return "float32", 3  # without our kernels: four rows of float32 cost what one row costs


@dataclass(frozen=True)
class Writer:
    """One of the two, with an engine of its own: a step of an engine goes on with every text that it holds.

    Attributes:
        title: As it is shown.
        way: How it decodes.
        llm: The target.
    """

    title: str
    way: DecodingConfig
    llm: LLM


def race(writers: Sequence[Writer]) -> tuple[Side, ...]:
    """Both texts, a step each in turn, always the one that is behind in its own time."""
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    sides = tuple(Side(w.title, w.llm.stream(PROMPT, params, speculation=w.way.config)) for w in writers)
    with Live(console=console, refresh_per_second=12, transient=not console.is_terminal) as live:
        while not all(side.done for side in sides):
            min((side for side in sides if not side.done), key=lambda side: side.seconds).advance()
            live.update(Group(legend(()), Columns([side.panel() for side in sides])))
    return sides


def measure(writers: Sequence[Writer], num_rounds: int, on_turn: Callable[[], None] = lambda: None) -> list[list[Run]]:
    """The runs of each writer, in rounds: one writes after the other, so that a slow moment of the machine hits both."""
    task = EncodedTask("demo", writers[0].llm.encode(PROMPT), ROUND_TOKENS)
    contestants = [ours(w.llm, w.way, temperature=1.0) for w in writers]
    runs = interleave([[task]] * num_rounds, contestants, on_turn=lambda _: on_turn())
    return [runs[w.way.name] for w in writers]


def speedups(plain: Sequence[Run], drafted: Sequence[Run]) -> Spread:
    """Within each round, over plain decoding."""
    pairs = zip(plain, drafted, strict=True)
    return spread([b.whole_tokens_per_second / a.whole_tokens_per_second for a, b in pairs])


def spread(values: Sequence[float]) -> Spread:
    found = Spread.of(values)
    assert found is not None
    return found


def closing_table(titles: Sequence[str], plain: Sequence[Run], drafted: Sequence[Run]) -> Table:
    """Medians over the rounds, with the range."""
    table = Table(box=None, header_style="bold")
    for column in ("", "tokens/s", "mean acceptance length", "acceptance rate", "speedup"):
        table.add_column(column, justify="left" if not column else "right")
    for title, runs in zip(titles, (plain, drafted), strict=True):
        speed = spread([run.whole_tokens_per_second for run in runs])
        counts = RequestStats()
        for run in runs:
            counts.add(run.drafts or RequestStats())
        accepted = ("", "")
        if counts.num_drafts:
            accepted = (f"{counts.mean_acceptance_length:.2f}", f"{counts.acceptance_rate:.0%}")
        ratio = speedups(plain, runs)
        gain = "1" if runs is plain else f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
        table.add_row(title, f"{speed.median:.1f} ({speed.low:.1f}-{speed.high:.1f})", *accepted, gain)
    return table


def load(path: str, num_draft_tokens: int) -> tuple[Writer, Writer]:
    plain, drafting = parse_ways([f"draft_model:{num_draft_tokens}"], default_model("draft"))
    writers = (
        Writer("plain decoding", plain, LLM(path, speculation=plain.config, prefix_caching=False)),
        Writer("with a draft model", drafting, LLM(path, speculation=drafting.config, prefix_caching=False)),
    )
    for writer in writers:
        writer.llm.generate(PROMPT, SamplingParams(max_tokens=6))  # warm up
    return writers


def main() -> None:
    dtype, num_draft_tokens = pick_settings()
    with console.status(f"making the wide target in {dtype} (once)"):
        path = wide_target(dtype)
    with console.status("loading"):
        writers = load(path, num_draft_tokens)
    race(writers)
    with Progress("measuring in turns", BarColumn(), MofNCompleteColumn(), console=console, transient=True) as bar:
        turns = bar.add_task("", total=NUM_ROUNDS * len(writers))
        plain, drafted = measure(writers, NUM_ROUNDS, lambda: bar.advance(turns))
    console.print(f"\n{NUM_ROUNDS} more rounds of {ROUND_TOKENS} tokens, in turns: medians, with the range", style="bold")
    console.print(closing_table([writer.title for writer in writers], plain, drafted))
    console.print(
        f"\nThe target is a wide copy of the embedded one in {dtype}: the same function at 25 times the weight traffic, "
        f"so what it writes is a small model's and what it costs is a 0.36 B model's. {num_draft_tokens} draft tokens a "
        "step, T = 1. All texts are samples of the same distribution: `outrider prove` shows it.",
        style="dim",
    )
    gain = speedups(plain, drafted)
    if gain.median < 1:
        console.print(
            f"On this machine the draft does not pay: {gain.median:.2f}x. See docs/explanation/performance.md.",
            style="bold red",
        )


if __name__ == "__main__":
    main()
