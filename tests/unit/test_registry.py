"""Proposers by name: built in, registered in this process, or brought by an installed package."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.config import SpeculationConfig
from outrider.errors import InvalidParameterError, ProposerError, VocabularyMismatchError
from outrider.propose import registry
from outrider.propose.base import Proposer, TargetFacts
from outrider.propose.ngram import NgramProposer
from outrider.propose.registry import ProposerContext


def context(proposer: str, **settings: Any) -> ProposerContext:
    def no_runner(model: str, dtype: str | None) -> Any:
        raise AssertionError("no model is needed")

    facts = TargetFacts("target", None, None, 10, 100)
    return ProposerContext(SpeculationConfig(proposer=proposer, **settings), facts, 64, no_runner)


@pytest.fixture(autouse=True)
def _factories_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path whose metadata offers proposers, as an installed one does."""
    (tmp_path / "outrider_plugin.py").write_text(
        "from outrider.propose.base import Proposer\n"
        "class Mine(Proposer):\n"
        "    def __init__(self, context): self.context = context\n"
        "def broken(context): raise RuntimeError('no luck')\n"
        "def shadow(context): return Mine(context)\n"
    )
    info = tmp_path / "outrider_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outrider-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[outrider.proposers]\n"
        "mine = outrider_plugin:Mine\n"
        "broken = outrider_plugin:broken\n"
        "absent = outrider_plugin:gone\n"
        "nowhere = no_such_module_at_all:factory\n"
        "ngram = outrider_plugin:shadow\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "outrider_plugin", raising=False)
    return tmp_path


def test_built_in_names() -> None:
    assert {"draft_model", "ngram", "none"} <= set(registry.names())


def test_ngram_is_built_from_its_settings() -> None:
    proposer = registry.build(context("ngram", ngram_max=4, ngram_min=3))
    assert isinstance(proposer, NgramProposer)
    assert list(proposer._lengths) == [3, 4]


def test_a_draft_model_must_be_named() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        registry.build(context("draft_model"))
    assert caught.value.field == "draft_model"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    for ask in (lambda: registry.check_name("nope"), lambda: registry.build(context("nope"))):
        with pytest.raises(InvalidParameterError) as caught:
            ask()
        assert (caught.value.field, caught.value.value) == ("proposer", "nope")
        for name in registry.names():
            assert name in caught.value.remedy


@pytest.mark.parametrize("name", ["none", "ngram", "draft_model"])
def test_known_names_pass(name: str) -> None:
    registry.check_name(name)


def test_a_registered_factory_gets_the_context_and_is_known() -> None:
    seen = []

    def factory(given: ProposerContext) -> Proposer:
        seen.append(given)
        return Proposer()

    with pytest.raises(InvalidParameterError):
        registry.check_name("bigram")
    registry.register("bigram", factory)
    registry.check_name("bigram")
    given = context("bigram", options={"a": 1})
    assert type(registry.build(given)) is Proposer
    assert seen == [given]


def test_a_factory_that_fails_is_a_proposer_error_with_its_cause() -> None:
    cause = RuntimeError("no luck")

    def factory(given: ProposerContext) -> Proposer:
        raise cause

    registry.register("broken", factory)
    with pytest.raises(ProposerError, match=r"'broken'.*no luck") as caught:
        registry.build(context("broken"))
    assert caught.value.__cause__ is cause


def test_our_own_errors_pass_through_a_factory() -> None:
    error = VocabularyMismatchError("m", "other tokens", "Use another.")

    def factory(given: ProposerContext) -> Proposer:
        raise error

    registry.register("other", factory)
    with pytest.raises(VocabularyMismatchError) as caught:
        registry.build(context("other"))
    assert caught.value is error


@pytest.mark.usefixtures("plugin")
def test_an_installed_package_brings_a_proposer() -> None:
    assert "mine" in registry.names()
    registry.check_name("mine")
    given = context("mine")
    proposer = registry.build(given)
    assert type(proposer).__name__ == "Mine"
    assert proposer.context is given  # type: ignore[attr-defined]


@pytest.mark.usefixtures("plugin")
def test_naming_plugins_does_not_load_them() -> None:
    registry.names()
    registry.check_name("broken")
    assert "outrider_plugin" not in sys.modules


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", ["broken", "absent", "nowhere"])
def test_a_plugin_that_cannot_be_loaded_or_built_is_a_proposer_error(name: str) -> None:
    with pytest.raises(ProposerError, match=name) as caught:
        registry.build(context(name))
    assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("plugin")
def test_a_plugin_does_not_replace_a_built_in_proposer() -> None:
    assert isinstance(registry.build(context("ngram")), NgramProposer)
    assert registry.names().count("ngram") == 1


@pytest.mark.usefixtures("plugin")
def test_a_registration_in_this_process_comes_before_a_plugin() -> None:
    registry.register("mine", lambda given: NgramProposer(2, 1))
    assert isinstance(registry.build(context("mine")), NgramProposer)


def test_the_registry_loads_a_proposer_only_when_it_is_built() -> None:
    code = (
        "import sys; from outrider.propose import registry; registry.names();"
        "print([m for m in ('outrider.propose.draft_model', 'outrider.propose.ngram') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
