"""Settings of speculation: every form that says the same, every range and contradiction, and nothing unknown gets in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import (
    Auto,
    Blockwise,
    CrossVocabulary,
    DFlash,
    DraftModel,
    DSpark,
    Eagle1,
    Eagle3,
    EarlyExit,
    ExitHead,
    Gemma4Assistant,
    LayerSkip,
    Lookahead,
    Medusa,
    Merge,
    Mtp,
    Ngram,
    PEagle,
    Prediction,
    Staged,
    Suffix,
    Then,
    TokenRecycling,
)
from outrider.config import DTypeName, Frozen
from outrider.errors import ContradictionError, InputError, InvalidParameterError, ProposerError
from outrider.propose import settings as methods
from outrider.propose.base import Proposer
from outrider.propose.settings import (
    PLAIN,
    RESERVED,
    Member,
    Members,
    Method,
    ProposerContext,
    SpeculationConfig,
    tree_size,
)
from tests.unit.builders import PlantedTree

BUILT_IN: tuple[type[Method], ...] = (
    Auto,
    Blockwise,
    CrossVocabulary,
    DraftModel,
    EarlyExit,
    ExitHead,
    LayerSkip,
    Lookahead,
    DFlash,
    DSpark,
    Eagle1,
    Eagle3,
    Medusa,
    Merge,
    Mtp,
    Ngram,
    Gemma4Assistant,
    PEagle,
    Prediction,
    Staged,
    Suffix,
    Then,
    TokenRecycling,
)


class Chorus(Method):
    """A nested method of the tests: whole settings inside settings, one after another and one apart."""

    name: ClassVar[str] = "chorus"

    members: Members = ()
    last: Member = PLAIN
    weight: float = 1.0

    def build(self, context: ProposerContext) -> Proposer:
        return Proposer()


class Pair(Method):
    """Another one, whose members are a plain tuple."""

    name: ClassVar[str] = "pair"

    members: tuple[Member, ...] = ()

    def build(self, context: ProposerContext) -> Proposer:
        return Proposer()


@pytest.fixture(autouse=True, scope="module")
def _known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "_registered", dict(methods._registered))
        methods.register(Chorus)
        methods.register(Pair)
        yield


# -- ranges ------------------------------------------------------------------------------------------------------------

#: Those that need no setting.
BY_NAME = tuple(kind for kind in BUILT_IN if not any(field.is_required() for field in kind.model_fields.values()))
KINDS: tuple[type[Frozen], ...] = (SpeculationConfig, *BUILT_IN)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (SpeculationConfig, "num_draft_tokens", 1),
        (SpeculationConfig, "num_draft_tokens", 512),
        (SpeculationConfig, "tree", ()),
        *[(SpeculationConfig, "rule", name) for name in ("auto", "walk", "token", "block", "coupled")],
        (SpeculationConfig, "draft_sampling", "greedy"),
        (DraftModel, "model", "m"),
        (DraftModel, "model", None),
        *[(DraftModel, "dtype", name) for name in (None, "auto", "float64", "float32", "bfloat16", "float16")],
        (DraftModel, "revision", "main"),
        (DraftModel, "trust_remote_code", True),
        (Ngram, "max_match", 2),
        (Ngram, "min_match", 1),
        (Ngram, "min_match", 5),
        (Medusa, "model", "heads"),
        (Medusa, "min_confidence", 1.0),
        (Suffix, "min_match", 1),
        (Suffix, "factor", 1e-9),
        (Suffix, "factor", 64.0),
        (Suffix, "branches", True),
        (Suffix, "shared", True),
        (Suffix, "cache_mib", 1),
    ],
)
def test_both_ends_of_every_range_are_allowed(kind: type[Frozen], field: str, value: Any) -> None:
    assert getattr(kind(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (SpeculationConfig, "method", ""),
        (SpeculationConfig, "method", 3),
        (SpeculationConfig, "method", ["suffix"]),
        (SpeculationConfig, "method", Ngram),
        (SpeculationConfig, "num_draft_tokens", 0),
        (SpeculationConfig, "num_draft_tokens", 513),
        (SpeculationConfig, "num_draft_tokens", 2.5),
        (SpeculationConfig, "num_draft_tokens", None),
        (SpeculationConfig, "tree", "32"),
        (SpeculationConfig, "tree", 3),
        (SpeculationConfig, "rule", "typical"),
        (SpeculationConfig, "draft_sampling", "beam"),
        (DraftModel, "model", ""),
        (DraftModel, "model", 3),
        (DraftModel, "dtype", "int8"),
        (DraftModel, "revision", 1),
        (DraftModel, "trust_remote_code", "yes"),
        (Medusa, "model", ""),
        (Medusa, "min_confidence", 1.1),
        (ExitHead, "min_confidence", -0.1),
        (Ngram, "max_match", 0),
        (Ngram, "min_match", 0),
        (Ngram, "max_match", 2.0),
        (Suffix, "min_match", 0),
        (Suffix, "factor", 0.0),
        (Suffix, "factor", 64.5),
        (Suffix, "factor", float("nan")),
        (Suffix, "branches", 1),
        (Suffix, "shared", "yes"),
        (Suffix, "cache_mib", 0),
    ],
)
def test_a_value_outside_is_refused_by_field_value_and_remedy(kind: type[Frozen], field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        kind(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value or caught.value.value == value
    assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize(
    ("widths", "bad"), [((3, 0), 0), ((0,), 0), ((-2,), -2), ((65,), 65), ((2, "a"), "a"), ((2, 1.5), 1.5), ((True,), True)]
)
def test_every_width_of_a_tree_is_looked_at(widths: tuple[Any, ...], bad: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SpeculationConfig(tree=widths)
    assert (caught.value.field, caught.value.value) == ("tree", bad)


def test_a_tree_of_too_many_nodes_is_refused() -> None:
    assert SpeculationConfig(method="draft_model", tree=(8, 7, 8)).num_draft_tokens == tree_size((8, 7, 8)) == 8 + 56 + 448
    with pytest.raises(InvalidParameterError) as caught:
        SpeculationConfig(method="draft_model", tree=(8, 8, 8))
    assert (caught.value.field, caught.value.value) == ("tree", (8, 8, 8))
    assert str(8 + 64 + 512) in caught.value.problem


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_refused_and_the_known_ones_listed(kind: type[Frozen]) -> None:
    with pytest.raises(InvalidParameterError, match="no such setting") as caught:
        kind(xyzzy=5)
    assert caught.value.field == "xyzzy"
    for name in kind.model_fields:
        assert name in caught.value.remedy


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        (SpeculationConfig, "num_draft_token", "num_draft_tokens"),
        (SpeculationConfig, "rules", "rule"),
        (SpeculationConfig, "xyzzy", None),
        (DraftModel, "modle", "model"),
        (Ngram, "max_macth", "max_match"),
        (Suffix, "branch", "branches"),
        (Suffix, "xyzzy", None),
    ],
)
def test_the_nearest_known_key_is_offered_where_one_is_near(kind: type[Frozen], name: str, near: str | None) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        kind(**{name: 1})
    known = f"{kind.__name__} knows: "
    assert caught.value.remedy.startswith(f"Did you mean {near}? {known}" if near else known)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_frozen(kind: type[Frozen]) -> None:
    config = kind() if kind is not Staged else Staged(drafter="ngram")
    field = next(iter(kind.model_fields))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        setattr(config, field, getattr(config, field))


# -- settings that cannot hold together --------------------------------------------------------------------------------


def test_match_lengths_must_not_cross() -> None:
    assert Ngram(min_match=3, max_match=3).min_match == 3
    with pytest.raises(ContradictionError) as caught:
        Ngram(min_match=4, max_match=3)
    assert (caught.value.field, caught.value.value) == ("min_match", 4)


@pytest.mark.parametrize(("method", "instead"), [("ngram", "another method"), ("suffix", "branches=True")])
def test_a_method_that_takes_no_shape_is_given_none(method: str, instead: str) -> None:
    with pytest.raises(ContradictionError) as caught:
        SpeculationConfig(method=method, tree=(2, 2))
    assert (caught.value.field, caught.value.value) == ("tree", (2, 2))
    assert method in caught.value.problem
    assert instead in caught.value.remedy
    assert SpeculationConfig(method="draft_model", tree=(2, 2)).tree == (2, 2)


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_a_model_that_nobody_would_load_is_refused(method: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SpeculationConfig.of({"method": method, "model": "m"})
    assert (caught.value.field, caught.value.value) == ("model", "m")


def test_replace_validates() -> None:
    config = SpeculationConfig(method=DraftModel(model="m"), tree=(2, 2))
    changed = config.replace(num_draft_tokens=4)
    assert (changed.method, changed.tree, changed.num_draft_tokens) == (DraftModel(model="m"), (2, 2), 4)
    with pytest.raises(ContradictionError):
        config.replace(method="ngram")
    with pytest.raises(InvalidParameterError):
        config.replace(lenght=3)


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_plain_is_off_and_everything_else_is_on() -> None:
    for config in (PLAIN, SpeculationConfig(), *(SpeculationConfig(method=off) for off in (None, "none", "off"))):
        assert not config.enabled
        assert (config.method, config.name) == (None, "none")
    for method in BY_NAME:
        assert SpeculationConfig(method=method()).enabled
        assert SpeculationConfig(method=method()).name == method.name


@pytest.mark.parametrize(
    ("values", "length"),
    [
        ({}, 5),
        ({"method": "ngram"}, 5),
        ({"method": "suffix"}, 16),
        ({"method": Suffix(branches=True)}, 16),
        ({"method": "medusa"}, 4),
        ({"method": "token_recycling"}, 10),
        ({"method": "token_recycling", "tree": (3, 2)}, 9),
        ({"method": Lookahead(window=2, ngram=4, guesses=1)}, 9),
        ({"method": "draft_model", "tree": (3, 2)}, 9),
        ({"method": "draft_model", "tree": [3, 2, 1]}, 15),
        ({"method": "draft_model", "tree": (3, 2), "num_draft_tokens": 4}, 4),
        ({"method": "suffix", "num_draft_tokens": 7}, 7),
    ],
)
def test_unless_given_the_length_is_what_suits(values: dict[str, Any], length: int) -> None:
    assert SpeculationConfig(**values).num_draft_tokens == length


def test_a_method_whose_settings_need_rows_says_how_many() -> None:
    assert SpeculationConfig(method=PlantedTree(needs=4)).num_draft_tokens == 12
    assert SpeculationConfig(method=PlantedTree(needs=4), num_draft_tokens=4).num_draft_tokens == 4
    with pytest.raises(ContradictionError) as caught:
        SpeculationConfig(method=PlantedTree(needs=4), num_draft_tokens=3)
    assert (caught.value.field, caught.value.value) == ("num_draft_tokens", 3)
    with pytest.raises(ContradictionError):
        SpeculationConfig(method=PlantedTree(needs=4)).replace(num_draft_tokens=1)


# -- all forms say the same --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BY_NAME)
def test_a_name_is_a_method_with_its_defaults(method: type[Method]) -> None:
    expected = SpeculationConfig(method=method())
    assert SpeculationConfig.of(method.name) == expected
    assert SpeculationConfig.of(method()) == expected
    assert SpeculationConfig.of({"method": method.name}) == expected
    assert SpeculationConfig.of({"method": method()}) == expected
    assert SpeculationConfig.of(expected) is expected


@pytest.mark.parametrize("nothing", [None, "none", "off", {}, {"method": None}, {"method": "none"}, {"method": "off"}])
def test_nothing_is_plain(nothing: object) -> None:
    assert SpeculationConfig.of(nothing) == PLAIN


def test_one_flat_mapping_holds_both() -> None:
    flat = {"method": "draft_model", "model": "m", "dtype": "float32", "num_draft_tokens": 3, "rule": "token"}
    method = DraftModel(model="m", dtype="float32")
    given = dict(flat)
    assert SpeculationConfig.of(given) == SpeculationConfig(method=method, num_draft_tokens=3, rule="token")
    assert given == flat, "what the caller gave is left as it is"


def test_settings_do_not_alias_the_callers_lists() -> None:
    widths, members = [2, 2], [{"method": "ngram"}]
    config = SpeculationConfig.of({"method": "chorus", "tree": widths, "members": members})
    widths.append(9)
    members.append({"method": "suffix"})
    members[0]["method"] = "suffix"
    assert config == SpeculationConfig(method=Chorus(members=(Ngram(),)), tree=(2, 2))
    written = config.as_mapping()
    written["tree"].append(9)
    written["members"].clear()
    assert config == SpeculationConfig(method=Chorus(members=(Ngram(),)), tree=(2, 2))


def _configs(
    method: st.SearchStrategy[Method | None], *, trees: bool, least: int = 1
) -> st.SearchStrategy[SpeculationConfig]:
    """Whole settings around a method whose settings need so many rows."""
    widths = st.lists(st.integers(1, 4), max_size=3).map(tuple) if trees else st.just(())
    lengths = st.fixed_dictionaries({}, optional={"num_draft_tokens": st.integers(least, 512)})
    rest = st.fixed_dictionaries(
        {
            "tree": widths,
            "rule": st.sampled_from(["auto", "walk", "token", "block", "coupled"]),
            "draft_sampling": st.sampled_from(["sampled", "greedy"]),
        }
    )
    return st.builds(lambda m, r, length: SpeculationConfig(method=m, **r, **length), method, rest, lengths)


texts = st.none() | st.text(min_size=1, max_size=8)
loaded: dict[str, st.SearchStrategy[Any]] = {
    "model": texts,
    "dtype": st.none() | st.sampled_from(DTypeName.__args__),  # type: ignore[attr-defined]
    "revision": texts,
    "trust_remote_code": st.booleans(),
}
METHOD_CLASSES = {method.name: method for method in BUILT_IN}
own_heads: dict[str, st.SearchStrategy[Any]] = {"model": texts, "min_confidence": st.floats(0, 1)}
#: Of methods that are made of others.
_members = st.sampled_from([("ngram", "suffix"), ({"method": "suffix", "num_draft_tokens": 9}, "ngram", "token_recycling")])
_drafters = st.sampled_from(["suffix", {"method": "staged", "model": "another one", "drafter": "ngram", "rule": "walk"}])
METHODS: dict[str, st.SearchStrategy[Method]] = {
    "auto": st.builds(
        Auto, methods=st.sampled_from([(), ("ngram",), ({"method": "suffix", "num_draft_tokens": 9}, "ngram")])
    ),
    "merge": st.builds(Merge, methods=_members),
    "then": st.builds(Then, methods=_members),
    "staged": st.builds(Staged, **loaded, drafter=_drafters),
    "blockwise": st.builds(Blockwise, **own_heads),
    "exit": st.builds(ExitHead, **own_heads),
    "eagle1": st.builds(Eagle1, **own_heads),
    "eagle3": st.builds(Eagle3, **own_heads),
    "mtp": st.builds(Mtp, **own_heads),
    "dflash": st.builds(DFlash, **own_heads),
    "dspark": st.builds(DSpark, **own_heads),
    "gemma4_assistant": st.builds(Gemma4Assistant, **own_heads),
    "peagle": st.builds(PEagle, **own_heads),
    "medusa": st.builds(Medusa, **own_heads),
    "draft_model": st.builds(DraftModel, **loaded, min_confidence=st.floats(0, 1)),
    "cross_vocabulary": st.builds(CrossVocabulary, **loaded, match=st.sampled_from(["tokens", "text"])),
    "early_exit": st.builds(EarlyExit, layers=st.none() | st.integers(1, 99)),
    "layer_skip": st.builds(LayerSkip, skip=st.none() | st.sets(st.integers(0, 99), min_size=1).map(sorted).map(tuple)),
    "lookahead": st.builds(Lookahead, window=st.integers(1, 9), ngram=st.integers(2, 9), guesses=st.integers(1, 64)),
    "ngram": st.integers(1, 9).flatmap(
        lambda low: st.builds(Ngram, min_match=st.just(low), max_match=st.integers(low, 20))
    ),
    "prediction": st.builds(Prediction, min_match=st.integers(1, 64)),
    "suffix": st.builds(
        Suffix,
        min_match=st.integers(1, 99),
        factor=st.floats(0, 64, exclude_min=True) | st.integers(1, 64),
        branches=st.booleans(),
        shared=st.booleans(),
        cache_mib=st.integers(1, 10**6),
    ),
    "token_recycling": st.builds(
        TokenRecycling, top_k=st.integers(1, 64), context=st.integers(1, 8), cache_mib=st.integers(1, 10**6)
    ),
}
flat = st.one_of(
    _configs(st.none(), trees=False),
    *(
        _configs(
            method,
            trees=METHOD_CLASSES[name].takes_tree and name != "cross_vocabulary",  # by text it takes none
            least=72 if name == "lookahead" else 1,
        )
        for name, method in METHODS.items()
    ),
)
nested = st.recursive(
    flat,
    lambda inner: _configs(
        st.builds(Chorus, members=st.lists(inner, max_size=3).map(tuple), last=inner, weight=st.floats(0, 1)), trees=True
    ),
    max_leaves=6,
)


def test_every_built_in_method_is_tried_here() -> None:
    assert set(METHODS) == {method.name for method in BUILT_IN} == set(methods._BUILT_IN)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(flat | nested)
def test_what_is_written_as_a_mapping_reads_back_the_same(config: SpeculationConfig) -> None:
    written = config.as_mapping()
    assert SpeculationConfig.of(written) == config
    assert SpeculationConfig.of(json.loads(json.dumps(written))) == config, "plain values, such as files hold"
    assert SpeculationConfig.of(written).as_mapping() == written
    assert type(SpeculationConfig.of(written).method) is type(config.method)


@pytest.mark.parametrize("value", [3, 2.5, ["suffix"], ("suffix",), Ngram, object(), b"suffix", True])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SpeculationConfig.of(value)
    assert (caught.value.field, caught.value.value) == ("speculation", value)


@pytest.mark.parametrize("key", [1, None, ("method",)])
def test_a_key_that_is_no_name_is_refused(key: object) -> None:
    with pytest.raises(InvalidParameterError):
        SpeculationConfig.of({key: "suffix"})


# -- unknown methods and settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"), [("sufix", "suffix"), ("n-gram", "ngram"), ("draft", "draft_model"), ("zzz", None)]
)
def test_an_unknown_method_is_refused_with_the_nearest_and_the_known_ones(name: str, near: str | None) -> None:
    forms = (
        lambda: SpeculationConfig(method=name),
        lambda: SpeculationConfig.of(name),
        lambda: SpeculationConfig.of({"method": name, "model": "m"}),
        lambda: Chorus(last=name),
        lambda: Chorus(members=[{"method": name}]),
        lambda: Pair(members=({"method": name},)),
    )
    for form in forms:
        with pytest.raises(InvalidParameterError) as caught:
            form()
        assert (caught.value.field, caught.value.value) == ("method", name)
        known = "Known: none, " + ", ".join(methods.names())
        assert caught.value.remedy.startswith(f"Did you mean {near}? {known}" if near else known)


@pytest.mark.parametrize(
    ("mapping", "name", "near"),
    [
        ({"method": "ngram", "max_macth": 3}, "max_macth", "max_match"),
        ({"method": "suffix", "num_draft_token": 3}, "num_draft_token", "num_draft_tokens"),
        ({"method": "draft_model", "modle": "m"}, "modle", "model"),
        ({"method": "suffix", "max_match": 3}, "max_match", "min_match"),
        ({"method": "suffix", "xyzzy": 3}, "xyzzy", None),
    ],
)
def test_an_unknown_setting_names_the_nearest_of_that_method(mapping: dict[str, Any], name: str, near: str | None) -> None:
    for form in (SpeculationConfig.of, lambda value: Chorus(last=value), lambda value: Chorus(members=[value])):
        with pytest.raises(InvalidParameterError, match="no such setting") as caught:
            form(mapping)
        assert (caught.value.field, caught.value.value) == (name, mapping[name])
        remedy = caught.value.remedy
        assert remedy.startswith(f"Did you mean {near}? " if near else "SpeculationConfig with")
        for known in (*SpeculationConfig.model_fields, *methods.find(mapping["method"]).model_fields):
            assert known in remedy


def test_settings_of_a_method_belong_to_its_own_class() -> None:
    """Flat mappings hold both; in Python the method's settings stand in the method."""
    for form in (
        lambda: SpeculationConfig(method="ngram", max_match=3),
        lambda: SpeculationConfig.of({"method": Ngram(), "max_match": 3}),
        lambda: SpeculationConfig.of({"max_match": 3}),
    ):
        with pytest.raises(InvalidParameterError, match="no such setting") as caught:
            form()
        assert caught.value.field == "max_match"


# -- names of earlier forms --------------------------------------------------------------------------------------------

FORMER: dict[str, tuple[Any, SpeculationConfig | None]] = {
    "proposer": ("suffix", SpeculationConfig(method="suffix")),
    "draft_model": ("m", SpeculationConfig(method=DraftModel(model="m"))),
    "draft_dtype": ("float32", SpeculationConfig(method=DraftModel(model="m", dtype="float32"))),
    "ngram_max": (7, SpeculationConfig(method=Ngram(max_match=7))),
    "ngram_min": (3, SpeculationConfig(method=Ngram(min_match=3))),
    "suffix_min_match": (3, SpeculationConfig(method=Suffix(min_match=3))),
    "suffix_factor": (3.5, SpeculationConfig(method=Suffix(factor=3.5))),
    "suffix_tree": (True, SpeculationConfig(method=Suffix(branches=True))),
    "suffix_shared": (True, SpeculationConfig(method=Suffix(shared=True))),
    "suffix_cache_mib": (9, SpeculationConfig(method=Suffix(cache_mib=9))),
    "options": ({"a": 1}, None),
    "num_speculative_tokens": (9, SpeculationConfig(num_draft_tokens=9)),
}


def test_every_setting_that_there_was_is_remembered() -> None:
    """The settings of the form before this one; what kept its name is no former name."""
    before = {
        "proposer", "draft_model", "draft_dtype", "num_draft_tokens", "tree", "rule", "draft_sampling", "ngram_max",
        "ngram_min", "suffix_min_match", "suffix_factor", "suffix_tree", "suffix_shared", "suffix_cache_mib", "options",
    }  # fmt: skip
    assert before - set(SpeculationConfig.model_fields) <= set(FORMER)


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_gives_its_new_form(name: str) -> None:
    value, meant = FORMER[name]
    for form in (
        lambda: SpeculationConfig(**{name: value}),
        lambda: SpeculationConfig.of({name: value}),
        lambda: SpeculationConfig.of({"method": "ngram", name: value}),
        lambda: SpeculationConfig(method="suffix", **{name: value}),
        lambda: Chorus(members=[{name: value}]),
    ):
        with pytest.raises(InvalidParameterError) as caught:
            form()
        assert (caught.value.field, caught.value.value) == (name, value)
    advice = (
        caught.value.remedy.removeprefix("Use ").split(", or LLM(")[0].removesuffix(".").replace("model=...", "model='m'")
    )
    if meant is not None:
        names = {"DraftModel": DraftModel, "Ngram": Ngram, "Suffix": Suffix, "SpeculationConfig": SpeculationConfig}
        names |= {"Lookahead": Lookahead, "TokenRecycling": TokenRecycling}
        assert eval(f"SpeculationConfig({advice})", names) == meant, "what the advice says does what was meant"
    else:
        assert "own class" in advice


# -- nested settings ---------------------------------------------------------------------------------------------------

MEMBERS = (
    "ngram",
    {"method": "draft_model", "model": "m", "tree": [2, 2]},
    Suffix(branches=True),
    SpeculationConfig(),
    None,
)
WHOLE = (
    SpeculationConfig(method=Ngram()),
    SpeculationConfig(method=DraftModel(model="m"), tree=(2, 2)),
    SpeculationConfig(method=Suffix(branches=True)),
    PLAIN,
    PLAIN,
)


def test_members_may_have_any_form() -> None:
    assert Pair(members=MEMBERS).members == WHOLE
    assert Chorus(members=MEMBERS).members == Chorus(members=list(MEMBERS)).members == WHOLE
    config = SpeculationConfig.of({"method": "chorus", "members": list(MEMBERS), "last": "suffix", "num_draft_tokens": 7})
    assert config == SpeculationConfig(method=Chorus(members=WHOLE, last=Suffix()), num_draft_tokens=7)
    assert config.method is not None
    assert config.method.members[1].num_draft_tokens == 6  # type: ignore[attr-defined]


def test_members_that_differ_make_another_method() -> None:
    one = Chorus(members=["ngram"])
    assert one == Chorus(members=[Ngram()])
    assert one != Chorus(members=[Ngram(max_match=6)])
    assert one != Chorus(members=["ngram", "ngram"])
    assert one != Chorus(members=["ngram"], last="suffix")
    assert Chorus(members=["ngram"]) != Pair(members=("ngram",))


@pytest.mark.parametrize("members", ["ngram", {"method": "ngram"}, 3, Ngram(), PLAIN])
def test_members_are_several(members: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        Chorus(members=members)
    assert caught.value.field == "members"


@pytest.mark.parametrize(
    ("member", "kind", "field", "value"),
    [
        ({"method": "ngram", "min_match": 9, "max_match": 3}, ContradictionError, "min_match", 9),
        ({"method": "ngram", "tree": [2]}, ContradictionError, "tree", (2,)),
        ({"method": "suffix", "factor": 0.0}, InvalidParameterError, "factor", 0.0),
        ({"method": "suffix", "num_draft_tokens": 0}, InvalidParameterError, "num_draft_tokens", 0),
        ({"method": "suffix", "rule": "typical"}, InvalidParameterError, "rule", "typical"),
        ({"method": "ngram", "model": "m"}, InvalidParameterError, "model", "m"),
        ({"method": 3}, InvalidParameterError, "method", 3),
        (3, InvalidParameterError, "speculation", 3),
    ],
)
def test_what_is_wrong_inside_is_said_by_its_own_field(
    member: Any, kind: type[InputError], field: str, value: object
) -> None:
    deep = {"method": "chorus", "last": member}
    for form in (
        lambda: Chorus(members=[member]),
        lambda: Chorus(members=["ngram", member]),
        lambda: Pair(members=(member,)),
        lambda: Chorus(last=member),
        lambda: SpeculationConfig.of({"method": "chorus", "members": [deep]}),
    ):
        with pytest.raises(kind) as caught:
            form()
        assert (caught.value.field, caught.value.value) == (field, value)


# -- a method's own class ----------------------------------------------------------------------------------------------


def test_reserved_names_are_those_of_the_settings_around() -> None:
    assert set(SpeculationConfig.model_fields) == RESERVED


@pytest.mark.parametrize("field", sorted(RESERVED))
def test_a_setting_of_a_reserved_name_is_refused_when_the_class_is_made(field: str) -> None:
    for base in (Method, Ngram):
        annotations = {"name": "ClassVar[str]", field: int}
        body = {"__module__": __name__, "__annotations__": annotations, "name": "clash", field: 1}
        with pytest.raises(ProposerError, match=f"Clash.*{field}"):
            type(base)("Clash", (base,), body)


@pytest.mark.parametrize("body", [{}, {"name": 3}, {"name": None}])
def test_a_method_without_a_name_is_refused_when_the_class_is_made(body: dict[str, Any]) -> None:
    with pytest.raises(ProposerError, match=r"Nameless.*no name"):
        type(Method)("Nameless", (Method,), {"__module__": __name__, "__annotations__": {"name": "ClassVar[Any]"}, **body})


def test_a_method_may_have_settings_that_were_names_of_the_earlier_form() -> None:
    class Odd(Method):
        name: ClassVar[str] = "odd"
        options: dict[str, int] = {}  # noqa: RUF012  # pydantic copies it
        draft_model: str = "m"

    methods.register(Odd)
    config = SpeculationConfig.of({"method": "odd", "options": {"a": 1}, "draft_model": "n"})
    assert config == SpeculationConfig(method=Odd(options={"a": 1}, draft_model="n"))
    assert SpeculationConfig.of(config.as_mapping()) == config
