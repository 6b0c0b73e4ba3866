"""Reads messages that somebody types, pastes or pipes: with history and editing in a terminal, or line by line."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: What begins and ends a message of several lines.
QUOTES = '"""'
_PROMPT, _MORE = "> ", ". "


@dataclass(frozen=True)
class Typed:
    """A message."""

    text: str  # without its quotes
    is_quoted: bool = False  # whether it had some; then it is never a command


#: Gives the next message, or None where nobody writes any more.
Reader = Callable[[], Typed | None]


def reader(console: Console, notes: Console) -> Reader:
    """Returns what reads from this terminal, or from what is in its place."""
    typed = sys.stdin.isatty()
    if typed and console.is_terminal and not console.is_dumb_terminal:
        with suppress(ImportError):
            return _editor(notes)
    pasted = partial(_pasted, sys.stdin.fileno()) if typed else str
    return lambda: _read_lines(lambda prompt: console.input(f"[bold]{prompt}[/bold]"), pasted, console)


def _read_lines(ask: Callable[[str], str], pasted: Callable[[], str], console: Console) -> Typed | None:
    """A line, several that were pasted, or several between quotes. An interrupt, or the end of the input, ends
    everything."""

    def lines(prompt: str) -> str:
        text = ask(prompt)
        while more := pasted():
            text += "\n" + (more[:-1] if more.endswith("\n") else more + ask(""))  # the last line waits for its end
        return text

    try:
        text = lines(_PROMPT)
        while not _is_whole(text):
            text += "\n" + lines(_MORE)
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return _unquoted(text)


def _pasted(terminal: int) -> str:
    """Returns what a terminal holds behind a line that was read, as it does where lines are pasted; a terminal gives line
    by line.

    Nobody types a key within a twentieth of a second behind a line. Systems without termios have their own ways to paste.
    """
    try:
        import termios
    except ImportError:
        return ""
    before = termios.tcgetattr(terminal)
    at_once = termios.tcgetattr(terminal)
    at_once[3] &= ~termios.ICANON  # else a last line without an end could not be seen
    at_once[6][termios.VMIN], at_once[6][termios.VTIME] = 0, 0
    found = b""
    termios.tcsetattr(terminal, termios.TCSANOW, at_once)
    try:
        while select.select([terminal], [], [], 0.05)[0] and (part := os.read(terminal, 65536)):
            found += part
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
    return found.decode(errors="replace")


def _is_whole(text: str) -> bool:
    """Tells whether a message that begins with quotes has their end, too."""
    begun = text.lstrip()
    return not begun.startswith(QUOTES) or QUOTES in begun[len(QUOTES) :]


def _unquoted(text: str) -> Typed:
    begun = text.strip()
    if not begun.startswith(QUOTES):
        return Typed(text)
    inside, _, behind = begun[len(QUOTES) :].partition(QUOTES)
    return Typed(f"{inside}{behind}".strip("\n"), is_quoted=True)


# --- In a terminal.


def _editor(notes: Console) -> Reader:
    """Enter sends, Alt-Enter begins a new line, and what is pasted is one message. Raises ImportError."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        buffer = event.current_buffer
        if _is_whole(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        multiline=True,
        key_bindings=keys,
        history=_history(),
        prompt_continuation=lambda width, number, is_soft: _MORE,
        enable_open_in_editor=True,
    )

    def read() -> Typed | None:
        while True:
            try:
                return _unquoted(session.prompt(_PROMPT))
            except KeyboardInterrupt:  # what was typed is dropped, as in a shell
                notes.print("/bye or Ctrl-D leaves", style="dim")
            except EOFError:
                return None

    return read


def _history() -> Any:
    """Returns what was typed in earlier conversations; in memory alone where no file can be had."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "outrider"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        os.close(os.open(folder / "chat_history", os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(folder / "chat_history"))
