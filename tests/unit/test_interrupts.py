"""Ctrl-C at any moment of the command: exit code 130, nothing on standard error."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import outrider

LONG = ("generate", "-p", "def f(", "--max-tokens", "1900", "--ignore-eos", "-n", "64")
#: The last module that is imported before the command takes Ctrl-C over; Python reports an import when it is finished.
FIRST, REPORT = "outrider.cli.main", "import time:"


def hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it


#: Seconds; in most runs of the tests two moments are enough.
MOMENTS = (0.3, 1.3)
OTHER_MOMENTS = (0.05, 0.1, 0.15, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0, 1.7, 2.3, 3.0)


@pytest.mark.parametrize("delay", [*MOMENTS, *(pytest.param(delay, marks=pytest.mark.slow) for delay in OTHER_MOMENTS)])
def test_an_interrupt_is_quiet_at_any_moment(delay: float) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "outrider.cli.main", *LONG]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=hear_interrupts, **pipes) as process:  # type: ignore[call-overload]
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    lines = said.splitlines()
    if process.returncode in (-signal.SIGINT, 1):  # Python itself was still beginning
        imported = [line.split()[-1] for line in lines if line.startswith(REPORT)]
        assert FIRST not in imported[:-1], said
    else:
        assert process.returncode == 130, said
        assert [line for line in lines if not line.startswith(REPORT)] == []


def test_little_happens_before_an_interrupt_is_quiet() -> None:
    code = f"import sys; before = set(sys.modules); import {FIRST}; print(*sorted(set(sys.modules) - before))"
    where = {**os.environ, "PYTHONPATH": str(Path(outrider.__file__).parents[1])}  # without site packages, nor links there
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=where)
    found = done.stdout.split()
    assert {name for name in found if name.startswith("outrider")} == {"outrider", "outrider.cli", FIRST}
    assert not {"typing", "typer", "re", "importlib"} & set(found)


def test_an_interrupt_that_became_another_error_is_an_interrupt() -> None:
    code = (
        "import signal, sys; from outrider.cli import app, main\n"
        "def masked(*args, **kwargs):\n"
        "    try:\n        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n        raise ModuleNotFoundError('x') from None\n"
        "app.app = masked; main.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], preexec_fn=hear_interrupts, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "")


def test_an_interrupt_inside_a_finaliser_is_an_interrupt() -> None:
    code = (
        "import signal; from outrider.cli import app, main\n"
        "class Dying:\n    def __del__(self):\n        signal.raise_signal(signal.SIGINT)\n"
        "app.app = lambda **kwargs: Dying() and None; main.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], preexec_fn=hear_interrupts, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "")


def test_who_had_it_ignored_is_not_interrupted() -> None:
    code = "import signal; from outrider.cli import main; signal.raise_signal(signal.SIGINT); main.main()"

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    result = subprocess.run([sys.executable, "-c", code, "--version"], preexec_fn=ignore, capture_output=True, text=True)
    assert result.returncode == 0


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
def test_the_cursor_comes_back() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "outrider.cli.main", *LONG]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment, preexec_fn=hear_interrupts
    ) as process:
        os.close(theirs)
        said = b""
        while b"\x1b[?25l" not in said:  # the spinner turns
            said += os.read(ours, 1024)
        process.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 1024):
                said += more
        except OSError:  # Linux says so where the other side is closed
            pass
        assert process.wait(60) == 130
    os.close(ours)
    assert said.rfind(b"\x1b[?25h") > said.rfind(b"\x1b[?25l"), said
    assert b"Traceback" not in said


def test_an_interrupt_inside_code_made_from_a_string_is_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(
        "import signal\nfrom outrider.cli import app, main\n"
        "def generated(*args, **kwargs):\n    exec('signal.raise_signal(signal.SIGINT)', {'signal': signal})\n"
        "app.app = generated\nmain.main()\n"
    )
    command = [sys.executable, "-m", "command"]
    result = subprocess.run(command, preexec_fn=hear_interrupts, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (130, "")
