"""The `outrider` command: verbs, exit codes, and errors as one clear line.

Exit codes: 0 done, 1 something failed while running, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.bench import bench
from outrider.cli.chat import chat
from outrider.cli.generate import generate
from outrider.cli.prove import prove
from outrider.errors import InputError, OutriderError

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
app.command()(prove)
app.command()(bench)


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


def main() -> None:
    """Run the command line and exit; the entry point of the package."""
    # Only this process: the library's own loading bars would tear the display, and ours shows the same.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app(standalone_mode=True)
    except OutriderError as error:
        _leave(error, 2 if isinstance(error, InputError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        _leave(f"unexpected {type(error).__name__}: {error} (outrider --debug ... shows where)", 1)


def _leave(problem: object, code: int) -> None:
    """One line, or the whole traceback where it was asked for."""
    if os.environ.get("OUTRIDER_DEBUG"):
        traceback.print_exc()
    typer.secho(f"outrider: {problem}", err=True, fg=typer.colors.RED)
    sys.exit(code)


if __name__ == "__main__":
    main()
