"""The proofs of one method: the joint distribution of the engine's text, identical texts, and a KV memory that is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.params import SamplingParams
from outrider.propose import registry
from outrider.propose.auto import Auto
from outrider.propose.compositions import Composition
from outrider.propose.speculation import SpeculationConfig
from outrider.prove.findings import Finding
from outrider.prove.own_model import OwnModel
from outrider.prove.running import Proof
from outrider.prove.settings.methods import DRAFT, HEADS, LOOKUP, OTHER_DRAFT, TARGET
from outrider.prove.settings.parameters import PARAMETERS
from outrider.prove.settings.setting import Setting
from outrider.prove.tiny_heads import FEATURE_METHODS, HEAD_METHODS

#: What the caller predicts in every setting, over a vocabulary of three tokens; only the method `prediction` reads it.
PREDICTION = (1, 0, 1, 2)
#: The draft model of a method, of its drafter, of that one's drafter, and so on; neighbours are models of other laws.
_STAGES: tuple[dict[str, Any], ...] = (
    {"model": DRAFT},
    {"model": TARGET},
    {"model": DRAFT, "dtype": "float64"},
    {"model": TARGET, "dtype": "float64"},
    {"model": DRAFT, "dtype": "float64", "revision": "main"},
)
#: Parameters of a request that a proposer is shown and that change what it draws from, alone and all together.
_REACHING: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.6},
    **PARAMETERS,
}
#: A confidence that some tokens of the proof's draft model have and others have not.
_DOUBT = 0.33
#: What can be asked for and no proof of a method asks.
UNASKED = (
    "structured_outputs", "bad_words and stop as text", "texts longer than the joint distributions",
    "more than two samples", "a source that an encoder reads",
)  # fmt: skip
#: Methods that draft with layers of the model whose tokens they guess.
_LAYERS = frozenset({"early_exit", "layer_skip"})
#: Fields of SpeculationConfig that the settings of a proof vary.
_VARIED = frozenset({"num_draft_tokens", "tree", "rule", "draft_sampling"})


def method_settings(asked: Mapping[str, Any]) -> list[Setting]:
    """Ways to use a method over a vocabulary of three tokens.

    Args:
        asked: Its settings in the form of one mapping. A method with a draft model takes the one of the proof unless it is
            given another. Heads fit one target only, so a method with heads always takes those of the proof.
    """
    method = _with_models({name: value for name, value in asked.items() if name not in _VARIED})
    base = {**method, "num_draft_tokens": _length(method, 2)}
    found = [
        Setting("as it is", base),
        Setting("token rule", {**base, "rule": "token"}),
        Setting("walk", {**base, "rule": "walk"}),
        Setting("seeded", base, {"seed": 5}),
        Setting("most likely tokens", {**base, "draft_sampling": "greedy"}),
        Setting("temperature and top_p", base, {"temperature": 1.5, "top_p": 0.97}),
        Setting("stop tokens", base, {"stop_token_ids": (2,)}),
        Setting("two samples", {**method, "num_draft_tokens": _length(method, 1)}, _samples(method)),
        Setting("behind a lookup", base, turns=(({**LOOKUP, "num_draft_tokens": 1}, base),)),
        Setting(
            "a lookup behind it",
            {**method, "num_draft_tokens": _length(method, 1)},
            turns=(({**method, "num_draft_tokens": _length(method, 1)}, {**LOOKUP, "num_draft_tokens": 1}),),
        ),
        Setting("in turns with others", base, turns=((base,), (), (LOOKUP,))),
    ]
    found += [Setting(name, base, dict(params)) for name, params in _REACHING.items()]
    found.append(Setting("a namespace", base, namespace="of the proof"))
    doubted = _doubting(base)
    if doubted != base:
        found.append(Setting("doubted tokens", doubted))
    found += [Setting(f"a fault behind token {token}", base, fails_behind=token) for token in range(3)]
    if any(name in asked for name in _VARIED):
        found.insert(0, Setting("as it was asked for", {**asked, **method}))
    kind = SpeculationConfig.of(method).method
    if kind is not None and kind.allows_tree:
        tree = {**method, "tree": (2, 1)}
        found += [Setting("tree", tree), Setting("tree, token rule", {**tree, "rule": "token"})]
        if kind.grows_from_probabilities:
            found.append(Setting("best-first tree", {**method, "tree": "best_first", "num_draft_tokens": 3}))
            found.append(Setting("Sequoia's tree", {**method, "tree": "sequoia", "num_draft_tokens": 3}))
    if kind is not None and kind.candidates is not None:
        found = [setting for setting in found if not setting.turns]  # a planner names who drafts, and never the engine
    return [replace(setting, prediction=PREDICTION) for setting in found]


def _doubting(settings: Any) -> Any:
    """Settings with confidences that the models of the proof come to, and fall short of, wherever a method has one."""
    if isinstance(settings, list | tuple):
        return [_doubting(each) for each in settings]
    if isinstance(settings, str) and settings in registry.names():
        settings = {"method": settings}
    if not isinstance(settings, Mapping):
        return settings
    found = {name: _doubting(value) if name in ("methods", "drafter") else value for name, value in settings.items()}
    if "min_confidence" in registry.find(found["method"]).model_fields:
        found["min_confidence"] = _DOUBT
    return found


def _with_models(asked: Mapping[str, Any] | str, stage: int = 0) -> dict[str, Any]:
    """Settings with the models of the proof, in the settings inside them too.

    Args:
        asked: The settings, or a method's name.
        stage: How many stages they draft for.
    """
    method = {"method": asked} if isinstance(asked, str) else dict(asked)
    staged = _model_of_stage(method.get("drafter"), stage)
    usual = {"draft_model": _STAGES[stage], "staged": staged, "cross_vocabulary": {"model": OTHER_DRAFT}}
    filled = {**({} if "model" in method else usual.get(method["method"], {})), **method}
    if "drafter" in method:
        filled["drafter"] = _with_models(method["drafter"], stage + 1)
    if method["method"] in FEATURE_METHODS or method["method"] in HEAD_METHODS:
        filled["model"] = HEADS
    if issubclass(registry.find(method["method"]), Composition | Auto):
        members = method.get("methods") or ("suffix", "draft_model")
        filled["methods"] = [_with_models(each, stage) for each in members]
    return filled


def _model_of_stage(drafter: Any, stage: int) -> dict[str, Any]:
    """The draft model of a stage. Heads and first layers draft for one that has several layers, and that the heads of the
    proof were made for."""
    name = drafter.get("method") if isinstance(drafter, Mapping) else drafter
    if name in HEAD_METHODS or name in FEATURE_METHODS or name in _LAYERS:
        return next(model for model in _STAGES[stage:] if model["model"] == TARGET)
    return _STAGES[stage]


def method_proofs(
    asked: Mapping[str, Any], prove: Callable[..., Finding], own: OwnModel, *, quick: bool
) -> Iterator[Proof]:
    """The claims about one method, each with the function that proves it.

    Args:
        asked: The method's settings in the form of one mapping.
        prove: Proves the engine's joint distribution under a setting, for a number of tokens, and that the method has no
            fault where that is asked.
        own: The model on which texts are compared.
        quick: Take fewer settings and shorter texts.
    """
    settings = method_settings(asked)
    tokens = 4 if asked["method"] in HEAD_METHODS else 3
    for setting in settings[:4] if quick else settings:
        yield f"joint distribution: {setting.name}", partial(prove, setting, tokens, faultless=True)
    length = 16 if quick else 32
    yield "greedy text is identical", partial(own.text_is_identical, SamplingParams(temperature=0, max_tokens=length))
    yield "seeded text is identical", partial(own.text_is_identical, SamplingParams(seed=11, max_tokens=length))
    yield "KV memory is true", partial(own.cache_is_true, length // 2)
    if not SpeculationConfig.of(asked).engine_chooses:  # what it chooses follows from times
        yield "it drafts", partial(own.drafts, length)


def _samples(method: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a text with two samples. Heads draft behind its first token only: the row that they would read before
    comes from the prefix cache."""
    return {"n": 2, "max_tokens": 3, "top_k": 2} if method["method"] in HEAD_METHODS else {"n": 2, "max_tokens": 2}


def speculations(asked: Mapping[str, Any]) -> list[SpeculationConfig]:
    """A method with the settings that were asked for, and with three other numbers of draft tokens."""
    lengths = ({**asked, "num_draft_tokens": _length(asked, length)} for length in (1, 3, 6))
    return [SpeculationConfig.of(asked), *(SpeculationConfig.of(settings) for settings in lengths)]


def _length(asked: Mapping[str, Any], length: int) -> int:
    """A number of draft tokens, or as many as the method's settings need where that is more."""
    method = SpeculationConfig.of({name: value for name, value in asked.items() if name not in _VARIED}).method
    return length if method is None else max(length, method.least_length())
