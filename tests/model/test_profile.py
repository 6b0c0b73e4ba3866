"""Profiles: what a tuning writes is what `LLM` uses; one that does not fit is refused or ignored, and says so."""

from __future__ import annotations

import json
import logging
from itertools import count
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.building import FORMAT, Profile, read_profile
from outrider.cli.app import app
from outrider.cli.options import load
from outrider.engine.engine import Engine
from outrider.errors import ContradictionError, InputError, InvalidParameterError, ProfileMismatchError
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.lab.tune.results import Recommendation
from outrider.lab.tune.tuner import Tuner
from outrider.propose.compositions import Auto
from outrider.propose.draft_model import DraftModel


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return save_tiny_llama(folder / "target", 5, speaks=True), save_tiny_llama(folder / "draft", 2, speaks=True)


@pytest.fixture(scope="module")
def made(pair: tuple[str, str]) -> dict[str, Any]:
    """A profile of the pair, as plain data."""
    with LLM(pair[0], speculation="none", dtype="float64") as llm:
        settings = {"method": "draft_model", "model": pair[1], "num_draft_tokens": 3}
        profile = Profile(identity=llm.identity, speculation=settings, concurrency=4, gain=1.4, measured=True)
    found: dict[str, Any] = json.loads(profile.model_dump_json())
    return found


def write(folder: Path, content: dict[str, Any] | str) -> str:
    path = folder / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return str(path)


def test_its_settings_are_used(pair: tuple[str, str], made: dict[str, Any], tmp_path: Path) -> None:
    with LLM(pair[0], dtype="float64", profile=write(tmp_path, made)) as llm:
        assert isinstance(llm.speculation.method, DraftModel)
        assert llm.speculation.method.model == pair[1]
        assert llm.speculation.num_draft_tokens == 3
        llm.generate([0, 1, 0])
        assert llm.stats.finished.num_drafts > 0


def test_other_settings_draft_later_texts_and_what_drafted_before_is_let_go(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, allowed, go = Engine.step, count(), Event()

    def step(engine: Engine) -> None:  # the text has begun, and does not end before its settings change
        stock(engine) if go.is_set() or next(allowed) < 3 else sleep(0.001)

    def settings(folder: str, length: int) -> dict[str, Any]:
        return {"method": "draft_model", "model": folder, "num_draft_tokens": length}

    other = save_tiny_llama(tmp_path / "other", 3, speaks=True)
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=3)
    with LLM(pair[0], dtype="float64", speculation=settings(pair[1], 3)) as llm:
        plain = llm.generate([0, 1, 0], params, speculation="none")[0].token_ids
        monkeypatch.setattr(Engine, "step", step)
        stream = llm.stream([0, 1, 0], params)
        pieces = [next(stream)]
        llm.change_speculation(settings(other, 2))
        assert [(found.method.model, found.num_users) for found in llm.proposers._alive] == [(pair[1], 1), (other, 0)]
        go.set()
        pieces += stream
        output = pieces[-1].output
        assert output is not None
        assert len(output.stats.drafted_per_position) == 3
        assert output.token_ids == plain
        assert llm.between_steps(lambda engine: [found.method.model for found in engine.proposers._alive]) == [other]
        for wrong in (settings(str(tmp_path / "nowhere"), 1), {"method": "medusa"}):
            with pytest.raises(InputError):
                llm.change_speculation(wrong)
        assert len(llm.generate([0, 1, 0], params)[0].stats.drafted_per_position) == 2


def test_plain_decoding_can_be_recommended(pair: tuple[str, str], made: dict[str, Any], tmp_path: Path) -> None:
    with LLM(pair[0], dtype="float64", profile=write(tmp_path, {**made, "speculation": {"method": "none"}})) as llm:
        assert not llm.speculation.enabled


def test_another_copy_of_the_model_fits(made: dict[str, Any], tmp_path: Path) -> None:
    copy = save_tiny_llama(tmp_path / "elsewhere", 5, speaks=True)
    with LLM(copy, dtype="float64", profile=write(tmp_path, made)) as llm:
        assert llm.speculation.name == "draft_model"


def test_one_of_another_model_is_an_error(made: dict[str, Any], tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "other", 5, num_layers=2, speaks=True)
    with pytest.raises(ProfileMismatchError, match="outrider tune") as raised:
        LLM(other, dtype="float64", profile=write(tmp_path, made))
    assert raised.value.field == "config"
    assert raised.value.needed == made["identity"]["config"] != raised.value.found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("quantization", "int8"),
        ("processor", "another processor"),
        ("kernels", "none that exist"),
        ("threads", 4096),
    ],
)
def test_one_of_other_circumstances_is_ignored_with_a_warning(
    pair: tuple[str, str],
    made: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    field: str,
    value: object,
) -> None:
    path = write(tmp_path, {**made, "identity": {**made["identity"], field: value}})
    with (
        caplog.at_level(logging.WARNING),
        LLM(pair[0], dtype="float64") as usual,
        LLM(pair[0], dtype="float64", profile=path) as llm,
    ):
        assert llm.speculation == usual.speculation
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "outrider.building"]
    assert "the profile is ignored" in warning
    assert f"{field} was {value!r}" in warning


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": FORMAT + 1, "outrider": "99.0", "news": []}, "Outrider 99.0 wrote it in form 2"),
        ({"gain": -1.0}, "gain"),
        ({"gain": "much"}, "gain"),
        ({"more": 1}, "more"),
        ({"identity": {}}, "identity.model"),
        ({"speculation": {"method": "no_such_method"}}, "no such method"),
        ({"speculation": {"method": "suffix", "branch": True}}, "its settings cannot be used"),
        ({"speculation": {"method": "draft_model", "model": "/no/such/folder"}}, "no such folder"),
        ({"speculation": {"method": "eagle3", "model": "/no/such/folder"}}, "no such folder"),
    ],
)
def test_what_cannot_be_read_is_named(made: dict[str, Any], tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = write(tmp_path, {**made, **changes})
    with pytest.raises(InvalidParameterError, match=r"outrider tune|version") as raised:
        read_profile(path)
    assert raised.value.field == "profile"
    assert says in str(raised.value.problem)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}"])
def test_a_file_that_is_no_profile_is_refused_before_the_model_is_read(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidParameterError, match="profile"):
        LLM("no/such-model", profile=write(tmp_path, content))
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        LLM("no/such-model", profile=tmp_path)


@pytest.mark.parametrize("other", [{"speculation": "suffix"}, {"speculation": "none"}, {"draft_model": "x"}])
def test_it_stands_alone(made: dict[str, Any], tmp_path: Path, other: dict[str, str]) -> None:
    with pytest.raises(ContradictionError, match="profile"):
        LLM("no/such-model", profile=write(tmp_path, made), **other)  # type: ignore[arg-type]
    with pytest.raises(ContradictionError, match="other options"):
        load(None, None, {"num_draft_tokens": 3}, chats=False, profile=Path("profile.json"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "none"},
        {"method": "suffix", "branches": True, "num_draft_tokens": 7},
        {"method": "auto", "methods": [{"method": "draft_model", "model": "DRAFT"}, "suffix"]},
    ],
)
def test_what_a_tuning_writes_is_what_is_read(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setenv("OUTRIDER_COSTS", "off")
    monkeypatch.chdir(Path(pair[1]).parent)
    found = SpeculationConfig.of(json.loads(json.dumps(settings).replace("DRAFT", Path(pair[1]).name))).as_mapping()
    recommended = Recommendation(name="x", speculation=found, gain=1.2, measured=True, said="")
    monkeypatch.setattr(Tuner, "_recommend", lambda self, rows: recommended)
    out = str(tmp_path / "out")
    options = ["--dtype", "float64", "--way", "ngram:2", "--max-tokens", "8", "--out", out, "-c", "2", "-n", "2"]
    result = CliRunner().invoke(app, ["tune", pair[0], *options])
    assert result.exit_code == 0, result.output
    monkeypatch.chdir(tmp_path)
    profile, config = read_profile(tmp_path / "out" / "profile.json")
    assert (profile.concurrency, profile.gain, config.name) == (2, 1.2, settings["method"])
    if isinstance(config.method, Auto):
        first = config.method.methods[0].method
        assert isinstance(first, DraftModel)
        assert first.model == pair[1]  # named from the root
