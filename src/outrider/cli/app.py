"""The verbs of the `outrider` command, and the options before a verb."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from outrider import __version__
from outrider.cli.elsewhere import AnsweringCommand, answer_command

#: Where each verb is, in the order in which help names them: module, and function or group.
_VERBS = {
    "generate": ("outrider.cli.generate", "generate"),
    "chat": ("outrider.cli.chat", "chat"),
    "serve": ("outrider.cli.serve", "serve"),
    "launch": ("outrider.cli.launch", "launch"),
    "prove": ("outrider.lab.cli.prove", "prove"),
    "bench": ("outrider.lab.cli.bench", "bench"),
    "vocabulary": ("outrider.lab.cli.vocabulary", "vocabulary"),
    "quantize": ("outrider.lab.cli.convert", "quantize"),
    "convert": ("outrider.lab.cli.convert", "convert"),
    "plan": ("outrider.lab.cli.plan", "plan"),
    "doctor": ("outrider.lab.cli.doctor", "doctor"),
    "tune": ("outrider.lab.cli.tune", "tune"),
    "train": ("outrider.lab.cli.train", "app"),
}


class _Commands(Mapping[str, Any]):
    """The verbs by their names. The module of a verb is imported when the verb is asked for."""

    def __iter__(self) -> Iterator[str]:
        return iter(_VERBS)

    def __len__(self) -> int:
        return len(_VERBS)

    def __getitem__(self, name: str) -> Any:
        found = _found(name)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(name, cls=AnsweringCommand)(function)
        command = typer.main.get_command(found)
        command.name = name
        return command


def _found(name: str) -> Any:
    """The function or group of a verb."""
    module, attribute = _VERBS[name]
    return getattr(import_module(module), attribute)


def _told(name: str) -> TyperCommand:
    """A verb with what is said of it, and without its options."""
    found = _found(name)
    return TyperCommand(name, help=found.info.help if isinstance(found, typer.Typer) else getdoc(found))


class _Verbs(TyperGroup):
    """The verbs of the command, each imported when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_VERBS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb as usual. An error that suggests none names them all. A command of Ollama is answered."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            answer_command(args[0])
            if type(error).__name__ == "UsageError" and "Did you mean" not in str(error):  # of typer's copy of click
                error.message = f"{error} The commands are {', '.join(_VERBS)}."  # type: ignore[attr-defined]
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Tell of all verbs. Their options would take long to find out."""
        verbs, self.commands = self.commands, {name: _told(name) for name in _VERBS}
        super().format_help(ctx, formatter)
        self.commands = verbs


app = typer.Typer(
    name="outrider",
    cls=_Verbs,
    help="Lossless speculative decoding for any Hugging Face causal language model.",
    epilog="Exit codes: 0 done, 1 something failed while running, 2 wrong usage, 130 interrupted by Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


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
