"""`outrider chat`: a conversation in the terminal, through the tokenizer's own chat template."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.flags import with_options
from outrider.cli.lines import QUOTES, Reader, reader
from outrider.errors import InputError, InvalidParameterError, OutriderError

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console

    from outrider.llm import LLM
    from outrider.params import CompletionOutput, SamplingParams

_HELP = f"""\
/help                  shows this
/clear                 forgets the conversation
/save FILE, /load FILE writes it as JSON, and goes on with one
/set system TEXT       what the model is told first; without TEXT nothing
/set temperature 0.7   and {{}}
/stats                 how fast it is, and how the drafts fare
/bye or Ctrl-D         leaves; Ctrl-C stops an answer
{QUOTES} begins and ends a message of several lines, Alt-Enter begins a new one, and pasted lines are one message"""
#: A line that is for the program. A path, as /usr/bin, is none.
_COMMAND = re.compile(r"/(\w*)(?:\s+(.*))?")


@with_options(max_tokens=512)
def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    chat_template: options.ChatTemplate = None,
    *,
    drafting: options.Drafting,
    drawing: options.Sampling,
    loading: options.Loading,
    no_color: options.NoColor = False,
) -> None:
    """Talk with a model that has a chat template (the embedded pair has none)."""
    from rich.console import Console

    console = Console(no_color=no_color or None, highlight=False, soft_wrap=True)
    notes = Console(stderr=True, no_color=no_color or None, highlight=False, soft_wrap=True)
    params, template = options.sampling(drawing), options.template(chat_template)
    llm = options.load(notes, model, drafting.config(), chats=True, **loading)
    options.use_template(llm, template)
    params = options.usual_sampling(llm, params, notes)
    talk = Conversation(llm, params, system, console, notes)
    llm.chat_prompt([*talk.messages, {"role": "user", "content": "hello"}])  # refuse now, not after the first question
    notes.print("/help shows what there is beside questions, /bye or Ctrl-D leaves, Ctrl-C stops an answer", style="dim")
    talk.run(reader(console, notes))


class Conversation:
    """Holds what is said, and how it goes on.

    Args:
        system: What it is told first; None for nothing.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, console: Console, notes: Console) -> None:
        self._llm, self.params, self.system = llm, params, system
        self._console, self._notes = console, notes
        self.turns: list[dict[str, str]] = []
        self._last: tuple[CompletionOutput, float] | None = None
        self._commands: dict[str, Callable[[str], object]] = {
            "help": lambda _: self._say(_HELP.format(", ".join(_settings()[1:]))),
            "clear": lambda _: self._clear(),
            "reset": lambda _: self._clear(),
            "save": self._save,
            "load": self._load,
            "set": self._set,
            "stats": lambda _: self._show_stats(),
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that was said, as the model reads it."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def run(self, ask: Reader) -> None:
        """Until whoever asks leaves."""
        while (line := ask()) is not None:
            found = None if "\n" in line.text or line.is_quoted else _COMMAND.fullmatch(line.text.strip())
            if found is None:
                if line.text.strip():
                    self._turn(line.text.strip())
            elif found[1] in ("bye", "exit", "quit"):
                return
            else:
                self._obey(found[1], (found[2] or "").strip())

    def _obey(self, name: str, rest: str) -> None:
        if name not in self._commands:
            self._say(f"there is no command /{name}. /help shows those that there are", style="yellow")
            return
        try:
            self._commands[name](rest)
        except (OutriderError, OSError) as error:
            self._say(f"outrider: {error}", style="red")

    def _turn(self, question: str) -> None:
        """One question and its answer. A question that cannot be answered is reported and forgotten, and so is one whose
        answer was stopped before it began."""
        self.turns.append({"role": "user", "content": question})
        written = ""
        try:
            written = self._answer()
        except OutriderError as error:
            self._say(f"outrider: {error}", style="red")
        if written:
            self.turns.append({"role": "assistant", "content": written})
        else:
            self.turns.pop()

    def _answer(self) -> str:
        """Stream one turn; an interrupt ends it between two steps and keeps what was written so far."""
        from outrider.cli.render import Wrapped, ending, write_closing

        start, written, paper = perf_counter(), "", Wrapped(self._console)
        stream = self._llm.stream(self._llm.chat_prompt(self.messages), self.params)
        with _no_echo(), _interrupts() as interrupted:
            for piece in stream:
                paper.write(piece.spans)
                written += piece.text
                if piece.output is not None:
                    paper.finish()
                    self._console.print()
                    self._last = (piece.output, perf_counter() - start)
                    ended = ending(piece.output, self.params)
                    write_closing(self._notes, len(piece.output.token_ids), self._last[1], piece.output.stats, ended)
                elif interrupted():
                    stream.close()  # type: ignore[attr-defined]
                    paper.finish()
                    self._console.print()
                    self._say("stopped")
                    break
        return written

    # -- commands ------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self.turns = []
        self._say("the conversation is forgotten")

    def _save(self, name: str) -> None:
        path = _path(name, "save")
        path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
        self._say(f"written to {path}: {len(self.turns)} messages")

    def _load(self, name: str) -> None:
        path = _path(name, "load")
        try:
            found = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidParameterError("load", name, f"it is not JSON ({error})", "Give what /save has written.") from None
        known = isinstance(found, list) and all(
            isinstance(each, dict) and all(isinstance(each.get(field), str) for field in ("role", "content"))
            for each in found
        )
        if not known:
            raise InvalidParameterError("load", name, "it is no conversation", "Give what /save has written.")
        has_system = bool(found) and found[0]["role"] == "system"
        self.system, self.turns = (found[0]["content"], found[1:]) if has_system else (self.system, found)
        self._say(f"{len(self.turns)} messages from {path}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        value = value.strip().removeprefix(QUOTES).removesuffix(QUOTES)
        if name == "system":
            self.system = value or None
            self._say("the model is told this first" if value else "the model is told nothing first")
            return
        if name not in _settings():
            remedy = f"Use system, {', '.join(_settings())}."
            raise InvalidParameterError("set", name, "there is no such setting", remedy)
        try:
            number: Any = None if value in ("", "none") and name == "seed" else json.loads(value)
        except ValueError:
            raise InvalidParameterError(name, value, "no number", f"Write a number, as /set {name} 1.") from None
        self.params = self.params.replace(**{name: number})
        self._say(f"{name} is {number}")

    def _show_stats(self) -> None:
        from outrider.cli.render import write_closing

        if self._last is None:
            self._say("nothing was answered yet")
            return
        output, seconds = self._last
        write_closing(self._notes, len(output.token_ids), seconds, output.stats, "the last answer")
        context = self._llm.engine.runner.loaded.max_model_len
        used = len(self._llm.chat_prompt(self.messages)) if self.turns else 0
        self._say(f"the conversation has {used:,} of {context:,} tokens, in {len(self.turns)} messages")

    def _say(self, text: str, style: str = "dim") -> None:
        self._notes.print(text, style=style, markup=False)


def _settings() -> list[str]:
    """Names what `/set` changes beside the system message, the temperature first."""
    from outrider.config import Flag, declared
    from outrider.params import SamplingParams

    found = [name for name, flag in declared(SamplingParams, Flag) if "chat" in flag.verbs]
    return sorted(found, key=lambda name: name != "temperature")


def _path(name: str, command: str) -> Path:
    if not name:
        raise InputError(command, name, "there is no name of a file", f"Write /{command} FILE.")
    return Path(name).expanduser()


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keep a terminal from writing ^C, or what is typed meanwhile, into an answer."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    now = termios.tcgetattr(number)
    now[3] &= ~(termios.ECHO | termios.ECHOCTL)
    termios.tcsetattr(number, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C instead of breaking off in the middle of an engine step; the second one breaks off."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(caught)
    finally:
        signal.signal(signal.SIGINT, before)
