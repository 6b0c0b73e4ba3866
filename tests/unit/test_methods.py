"""Methods by name: built in, registered in this process, given by their address, or brought by an installed package."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outrider import DraftModel, Lookahead, Ngram, Suffix, TokenRecycling
from outrider.errors import InvalidParameterError, ProposerError, VocabularyMismatchError
from outrider.propose import settings
from outrider.propose.base import Proposer
from outrider.propose.ngram import NgramProposer
from outrider.propose.settings import Method, ProposerContext, SpeculationConfig
from outrider.propose.suffix import SuffixProposer


class NoRunner:
    """Loads nothing: no test here needs a model."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, model: str, **how: Any) -> Any:
        self.asked.append((model, how))
        raise VocabularyMismatchError(model, "other tokens", "Use another.")


def context(load: Any = None) -> ProposerContext:
    return ProposerContext(None, 64, load or NoRunner())  # type: ignore[arg-type]  # the target is not looked at


@pytest.fixture(autouse=True)
def _known_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_registered", dict(settings._registered))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path whose metadata offers methods, as an installed one does."""
    (tmp_path / "outrider_plugin.py").write_text(
        "from typing import ClassVar\n"
        "from outrider.propose.base import Proposer\n"
        "from outrider.propose.settings import Method\n"
        "class MineProposer(Proposer):\n"
        "    def __init__(self, context, size): self.context, self.size = context, size\n"
        "class Mine(Method):\n"
        "    name: ClassVar[str] = 'mine'\n"
        "    size: int = 3\n"
        "    def build(self, context): return MineProposer(context, self.size)\n"
        "class Shadow(Mine):\n"
        "    name: ClassVar[str] = 'ngram'\n"
        "def function(context): return MineProposer(context, 1)\n"
        "number = 3\n"
    )
    (tmp_path / "outrider_broken.py").write_text("raise RuntimeError('no luck')\n")
    (tmp_path / "outrider_garbled.py").write_text("class Mine(:\n")
    info = tmp_path / "outrider_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outrider-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[outrider.methods]\n"
        "mine = outrider_plugin:Mine\n"
        "absent = outrider_plugin:gone\n"
        "nowhere = no_such_module_at_all:factory\n"
        "broken = outrider_broken:Mine\n"
        "garbled = outrider_garbled:Mine\n"
        "function = outrider_plugin:function\n"
        "number = outrider_plugin:number\n"
        "ngram = outrider_plugin:Shadow\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for module in ("outrider_plugin", "outrider_broken", "outrider_garbled"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


# -- built in ----------------------------------------------------------------------------------------------------------


def test_built_in_names() -> None:
    assert {"draft_model", "lookahead", "ngram", "suffix", "token_recycling"} <= set(settings.names())
    assert settings.names() == sorted(settings.names())


@pytest.mark.parametrize("method", [DraftModel, Lookahead, Ngram, Suffix, TokenRecycling])
def test_a_built_in_name_finds_its_settings(method: type[Method]) -> None:
    assert settings.find(method.name) is method


def test_lookups_are_built_from_their_settings() -> None:
    ngram = context().build(Ngram(max_match=4, min_match=3))
    assert isinstance(ngram, NgramProposer)
    assert list(ngram._lengths) == [3, 4]
    suffix = context().build(Suffix(min_match=3, factor=1.5, branches=True, shared=True, cache_mib=2))
    assert isinstance(suffix, SuffixProposer)
    assert (suffix._min_match, suffix._factor, suffix._branches) == (3, 1.5, True)
    assert suffix.shared is not None
    assert suffix.shared.max_bytes == 2 * 2**20
    alone = context().build(Suffix())
    assert isinstance(alone, SuffixProposer)
    assert alone.shared is None


def test_a_draft_model_must_be_named() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        context().build(DraftModel())
    assert (caught.value.field, caught.value.value) == ("model", None)
    assert "draft_model" in caught.value.problem


def test_a_draft_model_is_loaded_as_its_settings_say() -> None:
    runner = NoRunner()
    method = DraftModel(model="m", dtype="float32", revision="r", trust_remote_code=True)
    with pytest.raises(VocabularyMismatchError):
        context(runner).build(method)
    assert runner.asked == [("m", {"dtype": "float32", "quantization": None, "revision": "r", "trust_remote_code": True})]


def test_an_unknown_name_is_refused_with_the_nearest_and_the_known_ones() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        settings.find("n-gramm")
    assert (caught.value.field, caught.value.value) == ("method", "n-gramm")
    assert caught.value.remedy.startswith("Did you mean ngram? Known: none, ")
    for name in settings.names():
        assert name in caught.value.remedy


# -- registered in this process ----------------------------------------------------------------------------------------


class Bigram(Method):
    """A method of the tests."""

    name: ClassVar[str] = "bigram"

    size: int = 2

    def build(self, context: ProposerContext) -> Proposer:
        proposer = Proposer()
        proposer.made_from = (self, context)  # type: ignore[attr-defined]
        return proposer


def test_a_registered_method_is_known_and_builds_with_the_context() -> None:
    with pytest.raises(InvalidParameterError):
        settings.find("bigram")
    assert settings.register(Bigram) is Bigram, "it serves as a decorator"
    assert settings.find("bigram") is Bigram
    assert settings.names().count("bigram") == 1
    config = SpeculationConfig.of({"method": "bigram", "size": 7})
    assert config == SpeculationConfig(method=Bigram(size=7))
    given = context()
    assert config.method is not None
    assert given.build(config.method).made_from == (Bigram(size=7), given)  # type: ignore[attr-defined]


def test_what_is_registered_later_takes_the_name() -> None:
    class Other(Bigram):
        pass

    settings.register(Bigram)
    settings.register(Other)
    assert settings.find("bigram") is Other


@pytest.mark.parametrize("thing", [3, "bigram", Bigram(), Proposer, lambda context: Proposer(), Method])
def test_what_is_no_method_is_not_registered(thing: Any) -> None:
    before = settings.names()
    with pytest.raises((InvalidParameterError, ProposerError)):
        settings.register(thing)
    assert settings.names() == before


@pytest.mark.parametrize("name", ["none", "off"])
def test_a_name_that_means_nothing_is_drafted_is_not_registered(name: str) -> None:
    """Nobody could ask for it."""
    mute = type(Method)(
        "Mute", (Bigram,), {"__module__": __name__, "name": name, "__annotations__": {"name": "ClassVar[str]"}}
    )
    with pytest.raises((InvalidParameterError, ProposerError)):
        settings.register(mute)


# -- building ----------------------------------------------------------------------------------------------------------


class Built(Method):
    """Builds what the test says, or raises it."""

    name: ClassVar[str] = "built"

    what: Any = None

    def build(self, context: ProposerContext) -> Proposer:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what  # type: ignore[no-any-return]


def test_a_method_that_cannot_build_is_a_proposer_error_with_its_cause() -> None:
    cause = RuntimeError("no luck")
    with pytest.raises(ProposerError, match=r"'built'.*no luck") as caught:
        context().build(Built(what=cause))
    assert caught.value.__cause__ is cause


def test_our_own_errors_pass_through() -> None:
    error = VocabularyMismatchError("m", "other tokens", "Use another.")
    with pytest.raises(VocabularyMismatchError) as caught:
        context().build(Built(what=error))
    assert caught.value is error


@pytest.mark.parametrize("what", [None, 3, Proposer, Ngram()])
def test_what_is_built_must_be_a_proposer(what: object) -> None:
    with pytest.raises(ProposerError, match=r"'built'.*no Proposer"):
        context().build(Built(what=what))


def test_a_method_that_builds_nothing_of_its_own_is_a_proposer_error() -> None:
    class Unwritten(Method):
        name: ClassVar[str] = "unwritten"

    with pytest.raises(ProposerError, match="'unwritten'"):
        context().build(Unwritten())


# -- given by its address ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plugin")
def test_an_address_imports_a_method_and_makes_it_known() -> None:
    found = settings.load("outrider_plugin:Mine")
    assert found.name == "mine"
    assert settings.find("mine") is found
    assert context().build(found(size=5)).size == 5  # type: ignore[attr-defined]
    assert settings.load("outrider.propose.ngram:Ngram") is Ngram


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    "address",
    [
        "",
        ":",
        ":Mine",
        ".relative:Mine",
        "outrider_plugin",
        "outrider_plugin:",
        "outrider_plugin:gone",
        "no_such_module_at_all:Mine",
        "outrider_broken:Mine",
        "outrider_garbled:Mine",
    ],
)
def test_what_cannot_be_imported_is_refused_with_how_to_write_it(address: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        settings.load(address)
    assert (caught.value.field, caught.value.value) == ("method", address)
    assert caught.value.__cause__ is not None
    assert "module:Class" in caught.value.remedy


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    "address", ["outrider_plugin:function", "outrider_plugin:number", "json:dumps", "outrider.propose.settings:Method"]
)
def test_an_address_of_something_that_is_no_method_is_refused(address: str) -> None:
    before = settings.names()
    with pytest.raises(InvalidParameterError) as caught:
        settings.load(address)
    assert (caught.value.field, caught.value.value) == ("method", address)
    assert "outrider.propose.settings.Method" in caught.value.remedy
    assert settings.names() == before


# -- brought by an installed package -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("plugin")
def test_an_installed_package_brings_a_method() -> None:
    assert "mine" in settings.names()
    config = SpeculationConfig.of({"method": "mine", "size": 4})
    assert config.name == "mine"
    assert SpeculationConfig.of(config.as_mapping()) == config
    given = context()
    assert config.method is not None
    proposer = given.build(config.method)
    assert (type(proposer).__name__, proposer.context, proposer.size) == ("MineProposer", given, 4)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("plugin")
def test_naming_plugins_does_not_load_them() -> None:
    settings.names()
    with pytest.raises(InvalidParameterError):
        settings.find("no_such_method_at_all")
    assert "outrider_plugin" not in sys.modules


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", ["absent", "nowhere", "broken", "garbled"])
def test_a_plugin_that_cannot_be_loaded_is_a_proposer_error(name: str) -> None:
    for ask in (
        lambda: settings.find(name),
        lambda: SpeculationConfig(method=name),
        lambda: SpeculationConfig.of({"method": name}),
    ):
        with pytest.raises(ProposerError, match=name) as caught:
            ask()
        assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", ["function", "number"])
def test_a_plugin_that_brings_no_method_is_a_proposer_error(name: str) -> None:
    with pytest.raises(ProposerError, match=rf"'{name}'.*outrider\.propose\.settings\.Method"):
        settings.find(name)


@pytest.mark.usefixtures("plugin")
def test_a_plugin_does_not_replace_a_built_in_method() -> None:
    assert settings.find("ngram") is Ngram
    assert settings.names().count("ngram") == 1


@pytest.mark.usefixtures("plugin")
def test_a_registration_in_this_process_comes_before_a_plugin() -> None:
    class Own(Bigram):
        name: ClassVar[str] = "mine"

    settings.register(Own)
    assert settings.find("mine") is Own
    assert settings.names().count("mine") == 1


@pytest.mark.by_change("src/outrider/propose/")
def test_methods_are_imported_only_when_they_are_found() -> None:
    code = (
        "import sys; from outrider.propose import settings; settings.names();"
        "print([m for m in ('outrider.propose.draft_model', 'outrider.propose.ngram') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
