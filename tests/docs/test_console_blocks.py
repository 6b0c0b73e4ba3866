"""Every command line on the site: the command takes its options, and it runs unless a reason is given why it does not."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from outrider import config
from outrider.cli.app import app
from tests.docs.blocks import Command, commands
from tests.server.running import Server, running

COMMANDS = commands()
ADDRESS = "http://127.0.0.1:8000"
KEY = "sk-3f9a"
_INSTALLS = "it installs packages; `make test` itself runs on such an install"
_LONG = "it takes minutes or hours, and tests of its own run it with smaller settings"
#: Beginnings of command lines that are not run, with the reason.
NOT_RUN = {
    "make ": "it makes an environment, and calls these tests itself",
    "python -m venv": _INSTALLS,
    "source ": _INSTALLS,
    "pip install": _INSTALLS,
    "docker ": "Docker is not there",
    "OPENAI_API_BASE_URL=": "Open WebUI is not installed",
    "OTEL_SERVICE_NAME=": "its launcher is not installed; tests/server/test_spans.py starts a server with the SDK",
    "cp -r traffic/web": "the server before has kept nothing yet; tests/train/test_command.py trains on what one keeps",
    "kill -HUP": "tests/server/test_renewal.py sends the signal",
    "lm_eval ": "its tasks come from a hub; tests/server/test_harness.py runs a task of its own",
    "RAY_ADDRESS=": "there is no cluster; tests/server/test_replicas.py starts one",
    "outrider serve MODEL --draft-model DRAFT --replicas": "tests/server/test_replicas.py runs it",
    "outrider serve --wide --draft-model draft": "the page before trains the draft for a minute",
    "outrider launch": "its programs are not installed; tests/unit/test_launch.py starts others by their names",
    "outrider chat": "the embedded pair has no chat template",
    "outrider bench": _LONG,
    "outrider prove": _LONG,
    "outrider tune": _LONG,
    "outrider train": _LONG,
    "outrider convert HEAD": "it needs trained heads",
    "outrider convert eagle3": "it needs trained heads",
    "outrider serve qwen2.5-coder": "its models are no part of the project",
    "outrider convert MODEL": "the embedded pair has no vocabulary of files; tests/unit/test_gguf.py writes others",
    "ik-llama-quantize": "its package is not installed; tests/model/test_gguf_by_llama_cpp.py runs it where it is",
    "outrider convert T": "it needs trained heads; tests/model/test_gguf_mtp_conversion.py converts some",
    "outrider generate whole.gguf": "the line before needs trained heads",
    "outrider serve T": "it needs trained heads",
    "outrider doctor MODEL --method": "it needs trained heads",
    "outrider generate --draft-model draft -p": "the line before trains the draft for a minute",
    "outrider generate T": "it needs trained heads",
    "python recipes/": _LONG,
    "python -m benchmarks.": _LONG,
}
#: Verbs that say by their exit code that speculation does not gain.
ADVISING = ("doctor",)


def reason(command: Command) -> str | None:
    """Why a command is not run."""
    return next((why for begin, why in NOT_RUN.items() if command.line.startswith(begin)), None)


RUN = [command for command in COMMANDS if reason(command) is None]


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.words[0] == "outrider"], ids=str)
def test_the_command_takes_its_options(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(config, "check_file", lambda field, source: None)  # files of other people are not here
    verb: Any = get_command(app)
    words = command.words[1:]
    while hasattr(verb, "commands"):
        name, *words = words
        verb = verb.commands[name]
    verb.make_context(verb.name, words)


def test_every_reason_belongs_to_a_command() -> None:
    assert [begin for begin in NOT_RUN if not any(command.line.startswith(begin) for command in COMMANDS)] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(command.page for command in RUN))
def test_its_commands_run(page: str, folder: Path, request: Any) -> None:
    """In their order, since a command may read what one before it wrote."""
    for command in RUN:
        if command.page == page:
            runs(command, folder, request)


def runs(command: Command, folder: Path, request: Any) -> None:
    """A command line ends well and writes something."""
    line = command.line
    if ".gguf" in line:
        request.getfixturevalue("gguf_files")
    if "tuning/profile.json" in line:
        request.getfixturevalue("profile")
    if line.split("outrider ")[-1].startswith("serve"):
        serves(command, folder)
        return
    if ADDRESS in line:
        server: Server = request.getfixturevalue("server_with_keys" if KEY in line else "server")
        line = line.replace(ADDRESS, server.url).replace("curl ", "curl --fail ")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    told = f"{command}: {done.stdout + done.stderr}"
    assert done.returncode in ((0, 1) if command.words[1] in ADVISING else (0,)), told
    assert done.stdout, told
    assert "Traceback" not in done.stderr, told


def serves(command: Command, folder: Path) -> None:
    """The server of a command line listens and answers."""
    variables = dict(re.findall(r"\b([A-Z_]+)=(\S+)", command.line.partition("outrider")[0]))
    with running(*command.words[2:], folder=folder, warm=False, **variables) as server:
        assert server.get("/health").status_code == 200
