"""Compositions of methods: their settings, their turns, and how their members share rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.engine.drafting.planning import RowShares
from outrider.errors import ContradictionError, InputError, InvalidParameterError
from outrider.propose.compositions import MAX_DEPTH, turns_of
from outrider.propose.defaults import SpeculationDefaults
from outrider.propose.draft_model import DraftModel
from outrider.propose.ngram import Ngram
from outrider.propose.settings import SpeculationConfig
from outrider.propose.staged import Staged

DRAFT: dict[str, Any] = {"method": "draft_model", "model": "m", "num_draft_tokens": 4}


def merge(*methods: Any, **more: Any) -> dict[str, Any]:
    return {"method": "merge", "methods": list(methods), **more}


def then(*methods: Any, **more: Any) -> dict[str, Any]:
    return {"method": "then", "methods": list(methods), **more}


def staged(drafter: Any, **more: Any) -> dict[str, Any]:
    return {"method": "staged", "model": "m", "drafter": drafter, **more}


def auto(*methods: Any) -> dict[str, Any]:
    return {"method": "auto", "methods": list(methods)}


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Callable[[SpeculationDefaults], list[str]]:
    """Tells what is looked for before anything is loaded, each with the name of its setting."""
    found: list[str] = []
    monkeypatch.setattr(DraftModel, "check_source", lambda self, field: found.append(f"{field}={self.model}"))

    def names(defaults: SpeculationDefaults) -> list[str]:
        defaults.check_sources()
        return found

    return names


def turns(asked: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(turn.config.name, turn.behind) for turn in turns_of([SpeculationConfig.of(asked)])]


def test_a_method_alone_is_one_turn() -> None:
    assert turns("ngram") == [("ngram", ())]
    assert turns("none") == []


def test_members_of_a_merge_begin_together_and_lookups_first() -> None:
    assert turns(merge(DRAFT, "ngram")) == [("ngram", ()), ("draft_model", ())]


def test_each_member_of_then_goes_on_behind_all_before_it() -> None:
    assert turns(then("ngram", DRAFT, "suffix")) == [("ngram", ()), ("draft_model", (0,)), ("suffix", (0, 1))]


def test_compositions_inside_each_other() -> None:
    asked = then(merge(DRAFT, "ngram"), merge(then("suffix", {**DRAFT, "min_confidence": 0.5}), "lookahead"))
    assert turns(asked) == [
        ("ngram", ()),
        ("draft_model", ()),
        ("lookahead", (0, 1)),
        ("suffix", (0, 1)),
        ("draft_model", (0, 1, 3)),
    ]


def test_settings_come_back_from_their_mapping() -> None:
    for asked in (
        merge(DRAFT, then("ngram", "suffix"), num_draft_tokens=7),
        merge(staged(staged("ngram", model="n")), "ngram"),
    ):
        config = SpeculationConfig.of(asked)
        assert SpeculationConfig.of(config.as_mapping()) == config


def _deep(depth: int) -> Any:
    return "suffix" if not depth else then("ngram" if depth % 2 else DRAFT, _deep(depth - 1))


def _stages(depth: int) -> Any:
    return "ngram" if not depth else staged(_stages(depth - 1), model=f"model {depth}")


@pytest.mark.parametrize(
    ("asked", "error", "field"),
    [
        (merge("ngram"), InvalidParameterError, "methods"),
        (merge("ngram", "ngram"), ContradictionError, "methods.1"),
        (merge("ngram", {"method": "ngram", "min_match": 0}), InvalidParameterError, "methods.1.min_match"),
        (merge("ngram", then("suffix", {**DRAFT, "model": 5})), InvalidParameterError, "methods.1.methods.1.model"),
        (merge("ngram", "none"), InvalidParameterError, "methods.1.method"),
        (merge("ngram", "auto"), InvalidParameterError, "methods.1.method"),
        (merge("ngram", {**DRAFT, "rule": "token"}), ContradictionError, "methods.1.rule"),
        (merge("ngram", "sufix"), InvalidParameterError, "methods.1.method"),
        ({"method": "merge", "methods": "ngram"}, InvalidParameterError, "methods"),
        (merge("ngram", DRAFT, tree=[2]), ContradictionError, "tree"),
        (_deep(MAX_DEPTH + 1), InvalidParameterError, None),
        (merge(*({"method": "ngram", "max_match": n} for n in range(5, 15))), InvalidParameterError, "methods"),
        ({"method": "staged"}, InvalidParameterError, "drafter"),
        ({"method": "staged", "draftr": "ngram"}, InvalidParameterError, "draftr"),
        (staged("none"), InvalidParameterError, "drafter.method"),
        (staged("auto"), InvalidParameterError, "drafter.method"),
        (staged(merge("ngram", "suffix")), InvalidParameterError, "drafter.method"),
        (staged("sufix"), InvalidParameterError, "drafter.method"),
        (staged({"method": "ngram", "min_match": 0}), InvalidParameterError, "drafter.min_match"),
        (staged({"method": "ngram", "rule": "coupled"}), ContradictionError, "drafter.rule"),
        (staged({**DRAFT, "model": "n", "tree": "best_first"}), InvalidParameterError, "drafter.tree"),
        (staged(DRAFT), ContradictionError, "drafter.model"),
        (staged({**staged(DRAFT), "model": "n"}), ContradictionError, "drafter.drafter.model"),
        (staged("ngram", tree=[2]), ContradictionError, "tree"),
        (merge("ngram", staged("none")), InvalidParameterError, "methods.1.drafter.method"),
        (_stages(MAX_DEPTH + 1), InvalidParameterError, None),
        (auto(merge("ngram", then("suffix", "none"))), InvalidParameterError, "methods.0.methods.1.methods.1.method"),
        (auto("suffix", merge("ngram", {**DRAFT, "rule": "token"})), ContradictionError, "methods.1.methods.1.rule"),
        (auto("suffix", "auto"), InvalidParameterError, "methods.1.method"),
        (auto("suffix", {**DRAFT, "model": 5}), InvalidParameterError, "methods.1.model"),
        (auto(_deep(MAX_DEPTH)), InvalidParameterError, None),
        (
            auto(*(merge({"method": "ngram", "max_match": n}, DRAFT) for n in range(5, 10))),
            InvalidParameterError,
            "methods",
        ),
    ],
)
def test_settings_that_cannot_be_name_their_place(asked: Any, error: type[InputError], field: str | None) -> None:
    with pytest.raises(error) as raised:
        SpeculationConfig.of(asked)
    if field is not None:
        assert raised.value.field == field


def test_members_are_completed_as_settings_at_the_top_are() -> None:
    defaults = SpeculationDefaults.of(DRAFT, None, None)
    config = defaults.complete(merge("ngram", then("suffix", "draft_model")))
    assert [turn.config.method for turn in turns_of([config])][-1] == DraftModel(model="m")
    with pytest.raises(InvalidParameterError) as raised:
        SpeculationDefaults().complete(merge("ngram", then("suffix", "draft_model")))
    assert raised.value.field == "methods.1.methods.1.model"
    asked = SpeculationDefaults.of(merge("ngram", "draft_model"), "given", None)
    assert asked.draft == DraftModel(model="given")


def test_a_drafter_is_completed_as_settings_at_the_top_are() -> None:
    defaults = SpeculationDefaults.of(DRAFT, None, None)
    asked = {"method": "staged", "model": "large", "drafter": "draft_model"}
    for place, around in (("drafter", asked), ("methods.1.drafter", merge("ngram", asked))):
        (*_, stage) = turns_of([defaults.complete(around)])
        assert isinstance(stage.config.method, Staged)
        assert stage.config.method.drafter.method == DraftModel(model="m")
        with pytest.raises(InvalidParameterError) as raised:
            SpeculationDefaults().complete(around)
        assert raised.value.field == f"{place}.model"
    own = defaults.complete({"method": "staged", "drafter": "ngram"}).method
    assert isinstance(own, Staged)
    assert own.model == "m"
    with pytest.raises(ContradictionError) as same:
        defaults.complete({"method": "staged", "drafter": {"method": "draft_model", "model": "m"}})
    assert same.value.field == "drafter.model"


def test_a_draft_model_given_beside_a_stage_goes_where_none_is_named() -> None:
    given = SpeculationDefaults.of({"method": "staged", "drafter": "ngram"}, "given", None).draft
    assert isinstance(given, Staged)
    assert given.model == "given"
    inner = SpeculationDefaults.of(staged("draft_model"), "given", None).draft
    assert isinstance(inner, Staged)
    assert inner.model == "m"
    assert inner.drafter.method == DraftModel(model="given")
    with pytest.raises(ContradictionError):
        SpeculationDefaults.of(staged("ngram"), "given", None)


def test_what_the_engine_chooses_from_is_completed_wherever_it_stands() -> None:
    asked = auto("suffix", merge("ngram", "draft_model"))
    given = SpeculationDefaults.of(asked, "given", None).draft
    assert given == DraftModel(model="given")
    completed = SpeculationDefaults.of(DRAFT, None, None).complete(asked)
    assert [part.config.method for part in turns_of([completed.candidates[1]])][1] == DraftModel(model="m")
    with pytest.raises(InvalidParameterError) as raised:
        SpeculationDefaults().complete(asked)
    assert raised.value.field == "methods.1.methods.1.model"


@pytest.mark.parametrize("name", ["merge", "then"])
def test_a_draft_model_given_beside_a_composition_without_members_is_one_of_them(
    name: str, sources: Callable[[SpeculationDefaults], list[str]]
) -> None:
    defaults = SpeculationDefaults.of(name, "given", None)
    assert [turn.config.name for turn in turns_of([defaults.config])] == ["suffix", "draft_model"]
    assert defaults.draft == DraftModel(model="given")
    assert sources(defaults) == ["methods.1.model=given"]


def test_every_draft_model_has_the_place_of_its_setting(sources: Callable[[SpeculationDefaults], list[str]]) -> None:
    inner = {**DRAFT, "model": "n"}
    asked = auto(DRAFT, merge("suffix", staged(inner)), staged(inner))
    assert sources(SpeculationDefaults.of(asked, None, None)) == [
        "draft_model=m",
        "methods.1.methods.1.model=m",
        "methods.1.methods.1.drafter.model=n",
        "draft_model=m",
        "methods.2.drafter.model=n",
    ]


def test_models_are_shared_where_all_of_their_settings_are_equal() -> None:
    assert DraftModel(model="m").identity == DraftModel(model="m", min_confidence=0.5).identity
    assert DraftModel(model="m").identity != DraftModel(model="m", quantization="int8").identity


def test_without_members_a_merge_takes_the_usual_methods() -> None:
    names = [turn.config.name for turn in turns_of([SpeculationDefaults.of(DRAFT, None, None).complete("merge")])]
    assert names == ["suffix", "draft_model"]
    assert [t.config.name for t in turns_of([SpeculationDefaults().complete("then")])] == ["token_recycling", "suffix"]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_go_where_tokens_stand() -> None:
    shares = RowShares()
    config = SpeculationConfig.of(merge({**DRAFT, "num_draft_tokens": 8}, {"method": "ngram", "num_draft_tokens": 8}))
    assert sum(shares.of(config, 8)) == 8
    assert shares.of(config, 40) == [8, 8], "no member gets more than it may use"
    for _ in range(100):
        shares.observe(Ngram(), 1, 0)
        shares.observe(DraftModel(model="m"), 4, 4)
    assert shares.of(config, 8) == [0, 8]
    for _ in range(200):
        shares.observe(Ngram(), 4, 3)
        shares.observe(DraftModel(model="m"), 2, 1)
    lookup, model = shares.of(config, 8)
    assert lookup > model > 0
    shares.forget()
    assert shares.of(config, 8) == [4, 4]


def test_members_of_then_fill_up_in_order() -> None:
    config = SpeculationConfig.of(then({"method": "ngram", "num_draft_tokens": 6}, DRAFT))
    assert RowShares().of(config, 8) == [6, 2]
    assert RowShares().of(config, 4) == [4, 0], "and what the first one leaves over is the other's"
