"""The command line as a shell sees it: real processes, the embedded pair, exit codes and clean streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def outrider(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
        timeout=120,
    )


def as_json(*arguments: str, **kwargs: Any) -> Any:
    result = outrider("generate", "--json", *arguments, **kwargs)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help"), ("chat", "-h"), ("prove", "--help")])
def test_help(arguments: tuple[str, ...]) -> None:
    result = outrider(*arguments)
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_version() -> None:
    from outrider import __version__

    assert outrider("--version").stdout.split() == ["outrider", __version__]


def test_json_is_one_object_with_everything() -> None:
    answer = as_json("-p", "def f(", "--max-tokens", "12", "--seed", "3", "--dtype", "float64")
    assert len(answer["token_ids"]) == len(answer["origins"]) == 12
    assert set(answer["origins"]) <= {"plain", "accepted", "recovered", "bonus"}
    assert answer["finish_reason"] == "length"
    stats = answer["stats"]
    assert stats["num_accepted_tokens"] == answer["origins"].count("accepted")
    assert stats["mean_acceptance_length"] == pytest.approx(1 + stats["num_accepted_tokens"] / stats["num_drafts"])
    assert set(answer["time_shares"]) == {"propose", "forward", "verify", "host"}
    plain = as_json("-p", "def f(", "--max-tokens", "12", "--seed", "3", "--dtype", "float64", "--proposer", "none")
    assert plain["text"] == answer["text"]
    assert set(plain["origins"]) == {"plain"}


def test_prompts_from_files_and_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("class A:\n", "utf-8")
    common = ("--max-tokens", "4", "-t", "0")
    from_file = as_json("--file", str(file), *common)
    from_stdin = as_json(*common, stdin="class A:\n")
    assert from_file["token_ids"] == from_stdin["token_ids"]
    assert len(as_json("-p", "a", "-p", "b", *common)["outputs"]) == 2


def test_text_goes_to_standard_output_without_colours() -> None:
    result = outrider("generate", "-p", "def f(", "--max-tokens", "8", "--seed", "1")
    assert result.returncode == 0
    answer = as_json("-p", "def f(", "--max-tokens", "8", "--seed", "1")
    assert result.stdout == f"def f({answer['text']}\n"
    assert "\x1b" not in result.stdout
    assert "tokens/s" in result.stderr
    assert "mean acceptance length" in result.stderr


def test_compare_shows_the_speedup() -> None:
    result = outrider("generate", "-p", "def f(", "--max-tokens", "8", "--seed", "1", "--dtype", "float64", "--compare")
    assert "speedup" in result.stderr
    assert "same text, token by token" in result.stderr
    assert as_json("-p", "x", "--max-tokens", "4", "--compare")["speedup"] > 0


def test_one_bad_prompt_among_several() -> None:
    result = outrider("generate", "-p", "def f(", "-p", "", "--max-tokens", "4")
    assert result.returncode == 1
    assert "prompt 1" in result.stdout
    assert "prompt 2: prompt=''" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("generate", "-p", "x", "--temperature", "-1"), 2, "temperature=-1.0"),
        (("generate", "-p", "x", "--proposer", "psychic"), 2, "Known: "),
        (("generate", "-p", "x", "--proposer", "ngram", "--draft-model", "y"), 2, "draft_model"),
        (("generate", "-p", "x", "--seed", "1", "--rule", "block"), 2, "seed"),
        (("generate", "-p", "x", "--frobnicate"), 2, "No such option"),
        (("generate", "-f", "/nowhere/at/all"), 2, "cannot be read"),
        (("generate",), 2, "is empty"),
        (("generate", "/nowhere/at/all", "-p", "x"), 1, "cannot be read"),
        (("chat",), 2, "chat template"),
    ],
)
def test_failures_are_one_clear_line(arguments: tuple[str, ...], code: int, says: str) -> None:
    result = outrider(*arguments)
    assert result.returncode == code
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_unreadable_output_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m outrider.cli.main generate -p x --max-tokens 30 | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr


def test_prove_reports_and_exits_by_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from outrider.cli.main import app
    from outrider.prove import suite
    from outrider.prove.report import Finding

    for measured, code in ((0.0, 0), (1.0, 1)):
        finding = Finding(measured, 0.5, "planted")
        monkeypatch.setattr(suite, "_proofs", lambda *a, finding=finding, **k: iter([("claim", lambda: finding)]))
        result = CliRunner().invoke(app, ["prove", "--json"])
        assert result.exit_code == code
        assert json.loads(result.stdout)["passed"] is (code == 0)
        assert "claim" in CliRunner().invoke(app, ["prove"]).stdout
