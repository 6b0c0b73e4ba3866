"""`outrider vocabulary`: whether a model of one vocabulary can draft for a model of another."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options
from outrider.lab.cli.convert import read_text

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.propose.bridge import VocabularyReport


def vocabulary(
    target: Annotated[str, typer.Argument(help="Local folder or hub id of the target.", show_default=False)],
    draft: Annotated[str, typer.Argument(help="The same of the draft model.", show_default=False)],
    text: Annotated[Path | None, typer.Option(help="A file with a sample of your texts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    no_color: options.NoColor = False,
) -> None:
    """Compare the tokens of two models: how many they share, how much text these write, and which way to draft follows.

    The sample is the prompts of the benchmark unless a file is given.
    """
    from rich.console import Console

    from outrider.propose.bridge import compare_vocabularies

    found = compare_vocabularies(target, draft, _sample() if text is None else read_text(text))
    if as_json:
        sys.stdout.write(json.dumps({**asdict(found), "share_of_target": found.share_of_target}) + "\n")
    else:
        _show(found, Console(no_color=no_color or None, highlight=False))


def _sample() -> str:
    """The prompts of the benchmark."""
    from outrider.lab.measure.tasks import WORKLOADS, built_in

    return "\n".join(task.prompt for name in WORKLOADS for task in built_in(name))


def _show(found: VocabularyReport, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    rows = (
        ("tokens of the target", f"{found.target_size:,}"),
        ("tokens of the draft", f"{found.draft_size:,}"),
        ("shared tokens", f"{found.num_shared:,}, {found.share_of_target:.1%} of the target's"),
        ("they write", f"{found.share_of_text:.1%} of the sample's tokens, {found.share_of_bytes:.1%} of its bytes"),
        ("the draft lacks", "  ".join(map(repr, found.outside)) or "none of the sample's tokens"),
    )
    for name, value in rows:
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(table)
    console.print(escape(_follows(found)), soft_wrap=True)


def _follows(found: VocabularyReport) -> str:
    """Returns what the caller may do with the pair."""
    settings = json.dumps({"method": "cross_vocabulary", "model": found.draft, "match": found.match})
    if found.same_ids:
        return f"The vocabularies are the same: use --draft-model {found.draft}."
    if found.match is None:
        return "The target's tokens write nothing that the draft's write: use another draft model."
    if found.match == "tokens":
        return f"The draft can draft in shared tokens: use --method '{settings}'."
    return f"Few tokens are shared, so the draft's text is the better guess: use --method '{settings}'."
