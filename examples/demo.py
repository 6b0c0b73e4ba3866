"""The point of the project in a minute: one model writes code twice, side by side, with and without a draft model.

    python examples/demo.py            (or: make demo)

The target is the *wide* copy of the embedded one (outrider.bench.widen): the same function, so the draft model guesses as
well as it really does, at 25 times the weights, so a forward pass costs what it costs a model of 0.36 B parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider import LLM, SamplingParams, SpeculationConfig, StreamPiece
from outrider.bench.widen import wide_target
from outrider.cli.render import coloured, legend
from outrider.kernels.library import kernel_library
from outrider.llm import default_model

PROMPT = "class Reader:\n    def __init__(self, path):\n"
MAX_TOKENS = 96
console = Console(highlight=False)


@dataclass
class Side:
    """One of the two runs; its clock counts only its own steps."""

    title: str
    pieces: Iterator[StreamPiece]
    text: Text = field(default_factory=lambda: Text().append(PROMPT, "dim"))
    seconds: float = 0.0
    num_tokens: int = 0
    last: StreamPiece | None = None
    done: bool = False

    def advance(self) -> None:
        start = perf_counter()
        piece = next(self.pieces, None)
        self.seconds += perf_counter() - start
        if piece is None:
            self.done = True
            return
        self.last = piece
        self.num_tokens += len(piece.token_ids)
        self.text.append_text(coloured(piece.spans))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    def panel(self) -> Panel:
        speed = f"{self.num_tokens} tokens, {self.seconds:.1f} s, {self.tokens_per_second:.1f} tokens/s"
        return Panel(self.text, title=self.title, subtitle=speed, width=max(40, console.width // 2 - 1), height=22)


def pick_settings() -> tuple[str, int]:
    """dtype and draft length that pay on this machine."""
    if torch.cuda.is_available() or kernel_library() is not None:
        return "bfloat16", 4
    return "float32", 3  # without our kernels: four rows of float32 cost what one row costs


def race(llm: LLM) -> tuple[Side, Side]:
    """Both runs, a step each in turn, always the one that is behind in its own time."""
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    sides = (
        Side("plain decoding", llm.stream(PROMPT, params, speculation="none")),
        Side("with a draft model", llm.stream(PROMPT, params)),
    )
    with Live(console=console, refresh_per_second=12, transient=not console.is_terminal) as live:
        while not all(side.done for side in sides):
            min((side for side in sides if not side.done), key=lambda side: side.seconds).advance()
            live.update(Group(legend(), Columns([side.panel() for side in sides])))
    return sides


def closing_table(plain: Side, drafted: Side) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("", "tokens", "seconds", "tokens/s", "mean acceptance length", "acceptance rate", "speedup"):
        table.add_column(column, justify="left" if not column else "right")
    for side in (plain, drafted):
        assert side.last is not None
        assert side.last.output is not None
        stats = side.last.output.stats
        ratio = side.tokens_per_second / plain.tokens_per_second
        accepted = (f"{stats.mean_acceptance_length:.2f}", f"{stats.acceptance_rate:.0%}") if stats.num_drafts else ("", "")
        speed = (str(side.num_tokens), f"{side.seconds:.2f}", f"{side.tokens_per_second:.1f}")
        table.add_row(side.title, *speed, *accepted, f"{ratio:.2f}x")
    return table


def main() -> None:
    dtype, num_draft_tokens = pick_settings()
    with console.status(f"making the wide target in {dtype} (once)"):
        path = wide_target(dtype)
    speculation = SpeculationConfig(
        proposer="draft_model", draft_model=default_model("draft"), num_draft_tokens=num_draft_tokens
    )
    with console.status("loading"):
        llm = LLM(path, speculation=speculation)
        llm.generate(PROMPT, SamplingParams(max_tokens=6))  # warm up
        llm.generate(PROMPT, SamplingParams(max_tokens=2), speculation="none")
    plain, drafted = race(llm)
    console.print(closing_table(plain, drafted))
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    console.print(
        f"\nThe target is a wide copy of the embedded one in {dtype}: the same function at 25 times the weight traffic, "
        f"so what it writes is a small model's and what it costs is a 0.36 B model's. {num_draft_tokens} draft tokens a "
        "step, T = 1. Both texts are samples of the same law: `outrider prove` shows it.",
        style="dim",
    )
    if ratio < 1:
        console.print(f"On this machine the draft does not pay: {ratio:.2f}x. See docs/performance.md.", style="bold red")


if __name__ == "__main__":
    main()
