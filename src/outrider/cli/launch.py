"""`outrider launch`: a coding agent that asks a server of Outrider, with the settings by which it finds the server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer

from outrider.errors import ContradictionError, EngineAnswerError, InvalidParameterError

_URL = "http://127.0.0.1:8000"
#: What starts a server.
_SERVE = (sys.executable, "-m", "outrider", "serve")
#: How long a server that runs may take to say what it serves.
_SECONDS = 10.0
#: How long a program may wait for the first word of an answer.
_PATIENCE_MS = 3_600_000
#: How long a server that was started here may take to end.
_END_SECONDS = 40.0


@dataclass(frozen=True)
class Place:
    """Says where a server is, and what it serves."""

    url: str
    model: str
    max_model_len: int
    key: str


@dataclass(frozen=True)
class Settings:
    """Says how a program is told of a server: by variables, and by arguments before the user's own."""

    variables: dict[str, str]
    arguments: list[str] = field(default_factory=list)


def _claude(place: Place) -> Settings:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    reached = {"ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_AUTH_TOKEN": place.key}
    habits = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # nothing is asked of Anthropic's own servers
        # It leaves after five minutes without a word, and its first prompt may take a processor longer.
        **dict.fromkeys(("CLAUDE_STREAM_IDLE_TIMEOUT_MS", "API_TIMEOUT_MS"), str(_PATIENCE_MS)),
    }
    return Settings({**reached, **dict.fromkeys(models, place.model), **habits})


def _codex(place: Place) -> Settings:
    own = "model_providers.outrider"
    given = {
        "model_provider": "outrider", f"{own}.name": "Outrider", f"{own}.base_url": f"{place.url}/v1",
        f"{own}.wire_api": "responses", f"{own}.env_key": "OUTRIDER_API_KEY",
        "web_search": "disabled",  # which OpenAI's servers would do
    }  # fmt: skip
    written = [f"{name}={json.dumps(value)}" for name, value in given.items()]  # which TOML reads alike
    arguments = [part for each in [*written, f"model_context_window={place.max_model_len}"] for part in ("-c", each)]
    return Settings({"OUTRIDER_API_KEY": place.key}, [*arguments, "-m", place.model])


def _opencode(place: Place) -> Settings:
    limit = {"context": place.max_model_len, "output": max(1, place.max_model_len // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Outrider",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {place.model: {"name": place.model, "limit": limit}},
    }
    named = dict.fromkeys(("model", "small_model"), f"outrider/{place.model}")
    return Settings({"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"outrider": provider}, **named})})


def _aider(place: Place) -> Settings:
    variables = {"OPENAI_API_BASE": f"{place.url}/v1", "OPENAI_API_KEY": place.key}
    return Settings(variables, ["--model", f"openai/{place.model}"])


#: By name: how a program is told of a server, and how it is installed.
_PROGRAMS: dict[str, tuple[Callable[[Place], Settings], str]] = {
    "claude": (_claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (_codex, "npm install -g @openai/codex"),
    "opencode": (_opencode, "npm install -g opencode-ai"),
    "aider": (_aider, "python -m pip install aider-chat"),
}


def launch(
    program: Annotated[str, typer.Argument(help=f"One of {', '.join(_PROGRAMS)}.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Behind --: what the program itself is told.")] = None,
    url: Annotated[str, typer.Option(help="Of a server that runs.")] = _URL,
    model: Annotated[str | None, typer.Option(help="Start a server with this model, until the program ends.")] = None,
    serve: Annotated[str | None, typer.Option(help='Options of that server, as "--method suffix --port 8001".')] = None,
    api_key: Annotated[
        str, typer.Option(help="A key of the server, where it has some.", envvar="OUTRIDER_API_KEY")
    ] = "any",
) -> None:
    """Start a coding agent that asks a server of yours."""
    settings, path = _program(program)
    if model is None and serve is not None:
        raise ContradictionError("serve", serve, "a server that runs is asked", "Give --model, or leave it out.")
    options = _options(serve or "")
    with _ended_with_this():
        if model is None:
            code = _run(path, settings(_asked(url, api_key)), arguments or [])
        else:
            with _server(model, options) as started:
                code = _run(path, settings(_asked(started, api_key)), arguments or [])
    raise typer.Exit(code)


def _options(given: str) -> list[str]:
    try:
        return shlex.split(given)
    except ValueError as error:
        raise InvalidParameterError("serve", given, f"no options ({error})", "Quote them as in a shell.") from None


def _program(name: str) -> tuple[Callable[[Place], Settings], str]:
    """How a program is told of a server, and where it is."""
    if name not in _PROGRAMS:
        remedy = f"Use one of {', '.join(_PROGRAMS)}."
        raise InvalidParameterError("program", name, "no such program is known here", remedy)
    settings, install = _PROGRAMS[name]
    path = shutil.which(name)
    if path is None:
        raise InvalidParameterError("program", name, "it is not installed", f"Install it: {install}")
    return settings, path


def _asked(url: str, key: str) -> Place:
    """What a server says of itself."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        asked = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        with urlopen(asked, timeout=_SECONDS) as answer:
            (found, *_) = json.load(answer)["data"]
        return Place(url, found["id"], found["max_model_len"], key)
    except HTTPError as error:
        error.close()
        remedy = "Give --api-key with one of its keys." if error.code == 401 else "Name a server of Outrider."
        raise EngineAnswerError(url, f"it does not say what it serves ({error})", remedy) from error
    except (OSError, HTTPException) as error:
        remedy = "Start one with `outrider serve`, name it with --url, or give --model, which starts one."
        raise EngineAnswerError(url, f"no server answers ({error})", remedy) from error
    except (ValueError, KeyError, TypeError) as error:
        problem = "what it answers to /v1/models is not what a server of Outrider answers"
        raise EngineAnswerError(url, problem, "Name a server of Outrider with --url.") from error


def _run(path: str, settings: Settings, arguments: list[str]) -> int:
    """Run a program to its end; returns its exit code. Ctrl-C is for it alone."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # which it does not inherit
    program = subprocess.Popen([path, *settings.arguments, *arguments], env={**os.environ, **settings.variables})
    try:
        code = program.wait()
    finally:
        program.terminate()
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code  # as shells tell of a signal


@contextmanager
def _ended_with_this() -> Iterator[None]:
    """Within the block, the signals that end this process end what it has started before."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), leave) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def _server(model: str, options: list[str]) -> Iterator[str]:
    """A server with a model for as long as the block runs; its address. What it writes is for a file, since the terminal
    belongs to the program. It takes a free port, unless its options name one, and of a file the name is the model's."""
    own = ["--port", "0", *(["--served-model-name", Path(model).stem] if Path(model).is_file() else [])]
    command = [*_SERVE, model, *own, *options]
    typer.echo(f"outrider: starts outrider serve {shlex.join(command[len(_SERVE) :])}", err=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as written:  # in a session of its own, Ctrl-C in the terminal does not reach it
            process = subprocess.Popen(command, stdout=written, stderr=written, start_new_session=True)
        try:
            yield _listening(process, log)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
            process.wait()


#: Lines that say nothing of an error: edges of boxes, and what a library says of its memory when a process ends.
_NOISE = re.compile(r"\s*$|[╭╰]|nanobind: | - leaked | - \.\.\. skipped |See https://nanobind")


def _last_words(lines: list[str]) -> str:
    """The error with which a server has ended: its own, of the lines of a box, or its last line. Empty for none."""
    said = [line for line in lines if not _NOISE.match(line)]
    own = [place for place, line in enumerate(said) if line.startswith("outrider: ")]
    boxed = [line for line in said if line.startswith("│")]
    words = said[own[-1] :] if own else boxed or said[-1:]
    return " ".join(word.removeprefix("outrider: ").strip("│ \n") for word in words)


def _listening(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address of a server that has begun; waits for it."""
    while True:
        is_over = process.poll() is not None
        lines = log.read_text("utf-8", "replace").splitlines(keepends=True)
        found = next((line for line in lines if '"listening"' in line and line.endswith("\n")), None)
        if found is not None:
            return str(json.loads(found)["url"])
        if is_over:
            said = _last_words(lines) or f"exit code {process.returncode}"
            raise EngineAnswerError("outrider serve", f"it has ended ({said})", "Start it alone to see more.")
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
