"""The options that every training has: each command takes them, and its own, and hands them on."""

from __future__ import annotations

from dataclasses import MISSING, fields
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from outrider.lab.cli import train
from outrider.lab.cli.train import Training, with_training


@pytest.mark.parametrize("command", [train.distill, train.medusa, train.blockwise, train.exit_])
def test_every_training_has_the_same_options_with_their_help(command: Any) -> None:
    found = signature(command).parameters
    for field in fields(Training):
        parameter = found[field.name]
        assert parameter.annotation is command.__annotations__[field.name]
        assert get_args(parameter.annotation)[1].help
        if field.default is MISSING:
            assert parameter.default is parameter.empty
        elif field.name != "lr":
            assert parameter.default == field.default
    assert found["lr"].default == (2e-3 if command is train.distill else 1e-3)


def test_a_command_gets_what_was_given(tmp_path: Path) -> None:
    app, got = typer.Typer(), list[Any]()

    @app.command()
    @with_training(steps=7)
    def learn(training: Training, heads: Annotated[int, typer.Option(help="How many.")] = 4) -> None:
        """Learn."""
        got.extend((training, heads))

    given = ["--data", str(tmp_path), "--out", "o", "--lr", "0.5", "--heads", "2", "--json"]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert got == [Training(tmp_path, Path("o"), lr=0.5, steps=7, as_json=True), 2]
    assert CliRunner().invoke(app, given[2:]).exit_code == 2


def test_a_job_has_every_setting(tmp_path: Path) -> None:
    job = Training(tmp_path, tmp_path / "o", target="t", steps=3, lr=0.5, seed=9, dtype="float32").job(6)
    assert (job.data, job.out, job.target, job.dtype) == (tmp_path, tmp_path / "o", "t", "float32")
    settings = job.settings
    assert (settings.steps, settings.lr, settings.seed, settings.num_draft_tokens) == (3, 0.5, 9, 6)
