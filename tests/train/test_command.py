"""`outrider train` from the command line: what it writes, and what it says of bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

from outrider.cli.app import app
from outrider.errors import InputError, InvalidParameterError, MissingExtraError, OutriderError
from outrider.heads.checkpoint import load_heads
from outrider.lab.cli.train import app as trainings
from outrider.lab.train.checkpoint import Progress
from outrider.lab.train.run import _LEARNING
from outrider.lab.train.trainer import Trainer
from outrider.llm import LLM
from outrider.records import Record, prompt_of, read_manifest
from outrider.server.recorder import NamespaceRecords, Origin
from tests.train.markov import VOCAB, walk

pytest.importorskip("accelerate")

FEW = ("--steps", "6", "--evaluate-every", "3", "--save-every", "3", "--batch-size", "8", "--precision", "fp32")


@pytest.fixture(scope="module")
def data(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    lines = (json.dumps({"prompt_token_ids": [i % VOCAB, i // VOCAB]}) for i in range(40))
    (folder / "p.jsonl").write_text("\n".join(lines))
    written = run(
        "data", "--prompts", folder / "p.jsonl", "--out", folder / "d", "--target", target, "--max-tokens", "8",
        "--held-out", "0.2", "--dtype", "float32", "--json",
    )  # fmt: skip
    counts = json.loads(written.stdout)
    assert counts["texts"] == counts["written_now"] == 40
    assert counts["tokens"] == 400
    assert 0 < counts["held_out"] < 20
    return folder / "d"


def run(*words: Any) -> Result:
    found = CliRunner().invoke(app, ["train", *map(str, words)])
    if found.exception is not None:
        raise found.exception
    return found


def train(method: str, target: str, data: Path, out: Path, *words: Any) -> Result:
    return run(method, "--target", target, "--data", data, "--out", out, "--dtype", "float32", *FEW, *words)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        pytest.param("distill", ("--shape", "1x32:32", "--loss", "jsd", "--on-policy", "0.5"), marks=pytest.mark.core),
        ("medusa", ("--heads", "2", "--output", "target")),
        ("blockwise", ("--heads", "2", "--inner", "16")),
        ("exit", ("--layer", "2")),
        pytest.param(
            "eagle3",
            ("--draft-vocab", "20", "--unroll", "2", "--layers", "1,3", "--loss", "accepted_length"),
            marks=pytest.mark.core,
        ),
        ("mtp", ("--unroll", "2")),
        ("dflash", ("--block-size", "3", "--own-layers", "1", "--layers", "2,3", "--mask-token", "7")),
        (
            "dspark",
            ("--block-size", "2", "--own-layers", "1", "--markov-rank", "4", "--markov-head", "gated", "--no-confidence"),
        ),
    ],
)
def test_a_method_is_trained(target: str, data: Path, tmp_path: Path, method: str, words: tuple[str, ...]) -> None:
    found = train(method, target, data, tmp_path / "out", *words, "--engine-prompts", "2")
    assert "tokens of a target pass in the engine" in found.stdout
    assert "step 6: loss" in found.stderr
    assert (tmp_path / "out" / "README.md").exists()
    if method in ("medusa", "mtp"):  # which nothing else reads
        for word in ((), ("--placeholders",)):
            asked = ["convert", str(tmp_path / "out"), "--to", "gguf", "--out", str(tmp_path / "head.gguf"), *word]
            refused = CliRunner().invoke(app, asked).exception
            assert isinstance(refused, OutriderError)
            assert "medusa" in str(refused) if method == "medusa" else "no config.json" in str(refused)


@pytest.mark.core
@pytest.mark.parametrize("method", _LEARNING)
def test_an_option_begins_as_the_setting_does(method: str) -> None:
    """The help of a command and the settings of a training from Python agree."""
    command: Any = get_command(trainings)
    options = {option.name: option.default for option in command.commands[method].params}
    usual = {name: field.default for name, field in _LEARNING[method].model_fields.items() if name in options}
    assert "loss" in usual
    assert {name: options[name] for name in usual} == usual


@pytest.mark.core
def test_without_a_target_the_one_that_wrote_the_data_is_trained_for(target: str, data: Path, tmp_path: Path) -> None:
    found = run("medusa", "--data", data, "--out", tmp_path / "out", "--dtype", "float32", *FEW, "--heads", "2", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)
    assert read_manifest(data).target.name == target


@pytest.mark.core
def test_what_a_server_has_kept_is_data(target: str, tmp_path: Path) -> None:
    with LLM(target, dtype="float32", kv_cache_tokens=1024, speculation="none") as llm:
        kept = NamespaceRecords(tmp_path / "web", Origin.of(llm), 2**20)
    texts = [prompt_of("", walk(i, 3), [i]) for i in range(VOCAB)]
    kept.add([Record(each.digest, 0, i % 4 == 0, 2, torch.tensor(walk(i, 12))) for i, each in enumerate(texts)])
    found = train("medusa", target, tmp_path / "web", tmp_path / "out", "--heads", "2", "--engine-prompts", "2")
    assert "tokens of a target pass in the engine" in found.stdout
    assert load_heads(tmp_path / "out").config.method == "medusa"


def test_figures_come_as_json(target: str, data: Path, tmp_path: Path) -> None:
    found = train("distill", target, data, tmp_path / "out", "--prune", "0,1", "--engine-prompts", "0", "--json")
    assert json.loads(found.stdout)["steps"] == 6


def test_a_command_leaves_the_precision_to_the_processor(
    target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    run("distill", "--target", target, "--data", data, "--out", tmp_path / "out", "--shape", "1x16:16", "--steps", "1",
        "--engine-prompts", "0", "--dtype", "float32")  # fmt: skip
    assert json.loads((tmp_path / "out" / "training.json").read_text())["settings"]["precision"] == "fp32"


def test_a_command_says_that_it_stops_and_that_it_goes_on(
    target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(self: Trainer, progress: Progress, stepped: Any = Trainer._stepped) -> Progress:
        if progress.step == 4 and not begun:
            begun.append(progress.step)
            raise KeyboardInterrupt
        return stepped(self, progress)

    begun: list[int] = []
    monkeypatch.setattr(Trainer, "_stepped", take)
    words = ("distill", "--target", target, "--data", data, "--out", tmp_path / "out", "--dtype", "float32", *FEW)
    stopped = CliRunner().invoke(app, ["train", *map(str, words), "--shape", "1x16:16", "--engine-prompts", "0"])
    assert "The training has stopped. The same command goes on from the last checkpoint." in stopped.stderr
    assert "goes on after" not in stopped.stderr
    again = run(*words, "--shape", "1x16:16", "--engine-prompts", "0")
    assert "The training that was broken off goes on after step 3" in again.stderr


def test_sizes_are_compared(target: str, data: Path, tmp_path: Path) -> None:
    found = train("distill", target, data, tmp_path / "out", "--sizes", "1x16:16,1x32:32,1x16:16", "-k", "2", "--json")
    assert sorted(size["shape"] for size in json.loads(found.stdout)) == ["1x16:16", "1x32:32"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--shape", "two"), "shape='two'"),
        (("--prune", "a,b"), "prune='a,b'"),
        ((), "nothing says what draft model to begin with"),
        (("--shape", "1x32", "--loss", "hinge"), "loss='hinge'"),
        (("--shape", "1x32", "--steps", "0"), "steps=0"),
        (("--shape", "1x32", "--sizes", "1x32"), "sizes='1x32'"),
        (("--shape", "1x32", "--precision", "fp8"), "precision='fp8'"),
        (("--shape", "1x32", "--timed-target", "other"), "--timed-target='other'"),
        (("--shape", "1x32", "--lr", "inf"), "lr=inf"),
    ],
)
def test_bad_options_are_named(target: str, data: Path, tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        train("distill", target, data, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_a_loss_that_is_none_is_refused_with_one_list(target: str, data: Path, tmp_path: Path, method: str) -> None:
    with pytest.raises(InputError, match="'cross_entropy' or 'accepted_length'"):
        train(method, target, data, tmp_path / "out", "--loss", "hinge")


def test_texts_that_are_too_short_to_draft_in_are_named(target: str, tmp_path: Path) -> None:
    lines = (json.dumps({"prompt_token_ids": [i % VOCAB, i // VOCAB]}) for i in range(20))
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    run("data", "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "d", "--target", target, "--max-tokens", "1",
        "--held-out", "0.5", "--dtype", "float32")  # fmt: skip
    with pytest.raises(InvalidParameterError, match=r"two tokens behind the prompt. Make data with a larger max_tokens"):
        train("medusa", target, tmp_path / "d", tmp_path / "out")


def test_data_must_be_made_first(target: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="Make it with outrider train data"):
        train("medusa", target, tmp_path, tmp_path / "out")


def test_a_missing_package_is_named(target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    with pytest.raises(MissingExtraError, match=r"accelerate is not installed. Install outrider\[train\]"):
        train("medusa", target, data, tmp_path / "out")
