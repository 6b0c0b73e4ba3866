"""The verbs of the `outrider` command, and the options before a verb."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.bench import bench
from outrider.cli.chat import chat
from outrider.cli.convert import convert
from outrider.cli.doctor import doctor
from outrider.cli.generate import generate
from outrider.cli.plan import plan
from outrider.cli.prove import prove
from outrider.cli.quantize import quantize
from outrider.cli.serve import serve
from outrider.cli.train import app as train
from outrider.cli.tune import tune
from outrider.cli.vocabulary import vocabulary

app = typer.Typer(
    name="outrider",
    help="Lossless speculative decoding for any Hugging Face causal language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(prove)
app.command()(bench)
app.command()(vocabulary)
app.command()(quantize)
app.command()(convert)
app.add_typer(train, name="train")
app.command()(plan)
app.command()(doctor)
app.command()(tune)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Before the verb: show the traceback of an error.")] = False,
) -> None:
    if debug:
        os.environ["OUTRIDER_DEBUG"] = "1"
