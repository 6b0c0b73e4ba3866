"""All proofs in one run, and the proofs of one method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.config import ActivationsName
from outrider.lab.prove import target_settings as more
from outrider.lab.prove.deep_rounds import DEEP_SETTINGS, prove_deep
from outrider.lab.prove.engine import EngineProof
from outrider.lab.prove.own_model import OwnModel
from outrider.lab.prove.reference import ReferenceRule
from outrider.lab.prove.rules import (
    prove_decisions,
    prove_functions,
    prove_reference,
    prove_tree_reference,
    prove_tree_verifier,
    prove_verifier,
)
from outrider.lab.prove.running import Check, Finding, Proof, Report, run_in_processes, run_proofs
from outrider.lab.prove.sampled import prove_sampled
from outrider.lab.prove.settings import DRAFT, HEADS, LOOKUP, OTHER_DRAFT, QUICK_SETTINGS, SETTINGS, TARGET, Setting
from outrider.lab.prove.target_settings import PARAMETERS, SHARED_TARGET_LAYERS
from outrider.lab.prove.tiny import CROSSED_PIECES, PIECES, save_layered, save_tiny_hybrid, save_tiny_llama, save_tiny_t5
from outrider.lab.prove.tiny_heads import FEATURE_METHODS, HEAD_METHODS, save_tiny_heads
from outrider.lab.prove.tree_reference import TreeRule
from outrider.params import SamplingParams
from outrider.propose import settings as registry
from outrider.propose.compositions import Auto, Composition
from outrider.propose.cross_vocabulary import CrossVocabulary
from outrider.propose.own_layers import EarlyExit, LayerSkip
from outrider.propose.settings import Method, SpeculationConfig

_RATIO_RULES = (ReferenceRule.TOKEN, ReferenceRule.BLOCK)
#: The tests prove every parameter under every way to draft. A run proves them under these ways, which differ most.
_PROVED_WAYS = ("block", "tree", "coupled")
_PROCESSES = 2


def run_suite(
    model: str | None = None,
    draft_model: str | None = None,
    *,
    activations: ActivationsName | None = None,
    quick: bool = False,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Run the proofs. Texts and the KV memory are checked on a model, or on the embedded pair."""
    OwnModel(model, draft_model, activations=activations)  # refuses before the long proofs that need no model
    plan = partial(proofs, model=model, draft_model=draft_model, activations=activations, quick=quick)
    with TemporaryDirectory() as folder:
        if quick:
            return run_proofs(plan(Path(folder)), on_check)
        return run_in_processes(plan, Path(folder), _PROCESSES, on_check)


def run_method_suite(
    asked: Mapping[str, Any],
    model: str | None = None,
    draft_model: str | None = None,
    *,
    activations: ActivationsName | None = None,
    quick: bool = False,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Run the proofs of one method alone. Texts are compared on a model, or on the embedded pair."""
    own = OwnModel(model, draft_model, speculations(asked), activations)
    for config in own.speculations:  # settings that do not fit the model are refused before any proof
        if config.method is not None:
            own.llm.proposers.prepare(own.llm.resolve(config))
    method = SpeculationConfig.of(asked).method
    with TemporaryDirectory() as folder:
        crossed = isinstance(method, CrossVocabulary)
        tiny = _Pair(Path(folder) / "tiny", num_layers=_layers_for(method), crossed=crossed)
        return replace(run_proofs(method_proofs(asked, tiny.prove, own, quick=quick), on_check), unasked=UNASKED)


def _layers_for(method: Method | None) -> int:
    """Returns as many layers as a small target needs, so that the settings of a method fit it, too."""
    named = [method.layers or 0] if isinstance(method, EarlyExit) else []
    named += (method.skip or ()) if isinstance(method, LayerSkip) else ()
    return max(SHARED_TARGET_LAYERS, *(layer + 1 for layer in named), 0)


def num_method_checks(asked: Mapping[str, Any], *, quick: bool = False) -> int:
    """Returns how many checks `run_method_suite` makes, for progress bars."""
    own = OwnModel(None, None, speculations(asked))
    return len(list(method_proofs(asked, _Pair(Path()).prove, own, quick=quick)))


def num_checks(*, quick: bool = False) -> int:
    """Returns how many checks `run_suite` makes, for progress bars."""
    return len(list(proofs(Path(), None, None, quick=quick)))


def proofs(
    folder: Path, model: str | None, draft_model: str | None, *, activations: ActivationsName | None = None, quick: bool
) -> Iterator[Proof]:
    """All claims, each with the function that proves it."""
    yield from _rule_proofs(12 if quick else 56)
    for rule in ("token", "block", "walk", "coupled"):
        yield f"random numbers, {rule}", partial(prove_sampled, rule, 100_000 if quick else 1_000_000)
    for deep_setting in DEEP_SETTINGS[:2] if quick else DEEP_SETTINGS:
        yield f"deep round: {deep_setting.name}", partial(prove_deep, deep_setting)
    for pair, settings in _proved_on(folder, quick=quick):
        for setting in settings:
            long = not quick and setting in QUICK_SETTINGS  # two rounds and more
            length = 5 if setting in more.STRUCTURE_SETTINGS else 4 if long else 3
            yield f"joint distribution: {setting.name}", partial(pair.prove, setting, length)
    own, length = OwnModel(model, draft_model, activations=activations), 24 if quick else 48
    yield "greedy text is identical", partial(_on_own, own, length, seed=None)
    yield "seeded text is identical", partial(_on_own, own, length, seed=11)
    yield "KV memory is true", lambda: own.cache_is_true(12 if quick else 32)
    if not quick:
        for dtype in ("bfloat16", "float32"):
            yield f"batch-invariant mode, {dtype}", partial(own.bits_are_identical, dtype, 12)


def _rule_proofs(count: int) -> Iterator[Proof]:
    for rule in ReferenceRule:
        coupled = rule is ReferenceRule.COUPLED  # slow: it follows the shape of the noise itself
        yield f"rule {rule} is exact", partial(prove_reference, rule, count, 2, 3 if coupled else 4)
    for tree_rule in TreeRule:
        yield f"tree rule {tree_rule} is exact", partial(prove_tree_reference, tree_rule, (2, 1), count // 2, 3)
    yield "acceptance functions", partial(prove_functions, count)
    for rule in _RATIO_RULES:
        yield f"decisions of rule {rule}", partial(prove_decisions, rule, count // 4)
    for rule in ReferenceRule:
        yield f"distribution of the verifier: {rule}", partial(prove_verifier, rule, count // 2, 2, 3)
    for tree_rule in TreeRule:
        yield (
            f"distribution of the verifier: tree, {tree_rule}",
            partial(prove_tree_verifier, tree_rule, (2,), count // 3, 3),
        )


def _proved_on(folder: Path, *, quick: bool) -> Sequence[tuple[_Pair, Sequence[Setting]]]:
    """The pairs of models, each with the requests that are proven on it."""
    tiny, deep = _Pair(folder / "tiny"), _Pair(folder / "deep", num_layers=SHARED_TARGET_LAYERS)
    if quick:
        return ((tiny, QUICK_SETTINGS),)
    return (
        (tiny, (*SETTINGS, *(each for each in more.PARAMETER_SETTINGS if each.name.endswith(_PROVED_WAYS)))),
        (_Pair(folder / "speaking", speaks=True), more.STRUCTURE_SETTINGS),
        (deep, (*more.SHARED_TARGET_SETTINGS, *more.HEADS_SETTINGS)),
        (_Pair(folder / "crossed", crossed=True), more.CROSSED_SETTINGS),
        (_Pair(folder / "hybrid", save=save_tiny_hybrid), more.RUNNING_SETTINGS),
        (_Pair(folder / "encoder", save=save_tiny_t5), more.ENCODER_SETTINGS),
    )


def _on_own(own: OwnModel, length: int, *, seed: int | None) -> Finding:
    greedy = SamplingParams(temperature=0, max_tokens=length)
    return own.text_is_identical(greedy if seed is None else SamplingParams(seed=seed, max_tokens=length))


_SEEDS = {"target": 1, "draft": 2}


class _Pair:
    """Two random models over three tokens, made when they are first used: Llamas with heads, unless `save` writes another
    kind."""

    def __init__(
        self,
        folder: Path,
        *,
        speaks: bool = False,
        num_layers: int = 1,
        crossed: bool = False,
        save: Callable[[Path, int], str] | None = None,
    ) -> None:
        self._folder, self._speaks, self._crossed, self._save = folder, speaks or crossed, crossed, save
        self._layers = {"target": num_layers, "draft": 1}

    @cached_property
    def _proof(self) -> EngineProof:
        pair = [(self._save or self._llama)(self._folder / part, seed) for part, seed in _SEEDS.items()]
        if self._save is not None:
            return EngineProof(*pair)
        heads: dict[str, Any] = {"heads": save_tiny_heads(self._folder, pair[0])}
        if self._layers["target"] > 1:
            heads |= save_layered(self._folder / "layered", self._layers["target"])
        return EngineProof(*pair, speaks=self._speaks, crossed=self._crossed, **heads)

    def _llama(self, folder: Path, seed: int) -> str:
        part = folder.name
        pieces = CROSSED_PIECES[part] if self._crossed else PIECES
        return save_tiny_llama(folder, seed, speaks=self._speaks, pieces=pieces, num_layers=self._layers[part])

    def prove(self, setting: Setting, length: int, *, faultless: bool = False) -> Finding:
        return self._proof.prove(setting, length, faultless=faultless)


# --- The proofs of one method: the joint distribution of the engine's text, identical texts, and a KV memory that is true.


#: What the caller predicts in every setting, over a vocabulary of three tokens, and what the text may quote; only the
#: methods `prediction` and `suffix` read it.
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
_REACHING: dict[str, dict[str, Any]] = {"top_k": {"top_k": 2}, "min_p": {"min_p": 0.6}, **PARAMETERS}
#: A confidence that some tokens of the proof's draft model have and others have not.
_DOUBT = 0.33
#: What can be asked for and no proof of a method asks.
UNASKED = (
    "structured_outputs", "bad_words and stop as text", "texts longer than the joint distributions",
    "more than two samples", "a source that an encoder reads",
)  # fmt: skip
#: Methods that draft with layers of the model whose tokens they guess.
_LAYERS = frozenset({"early_exit", "layer_skip"})
_HEADS = frozenset({*HEAD_METHODS, *FEATURE_METHODS})
#: Fields of SpeculationConfig that the settings of a proof vary.
_VARIED = frozenset({"num_draft_tokens", "tree", "rule", "draft_sampling"})


def method_settings(asked: Mapping[str, Any]) -> list[Setting]:
    """Ways to use a method over a vocabulary of three tokens."""
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
    return [replace(setting, prediction=PREDICTION, references=(PREDICTION,)) for setting in found]


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
    """Settings with the models of the proof, in the settings inside them too."""
    method = {"method": asked} if isinstance(asked, str) else dict(asked)
    staged = _model_of_stage(method.get("drafter"), stage)
    usual = {"draft_model": _STAGES[stage], "staged": staged, "cross_vocabulary": {"model": OTHER_DRAFT}}
    filled = {**({} if "model" in method else usual.get(method["method"], {})), **method}
    if "drafter" in method:
        filled["drafter"] = _with_models(method["drafter"], stage + 1)
    if method["method"] in _HEADS:
        filled["model"] = HEADS
    if issubclass(registry.find(method["method"]), Composition | Auto):
        members = method.get("methods") or ("suffix", "draft_model")
        filled["methods"] = [_with_models(each, stage) for each in members]
    return filled


def _model_of_stage(drafter: Any, stage: int) -> dict[str, Any]:
    """The draft model of a stage. Heads and first layers draft for one that has several layers, and that the heads of the
    proof were made for."""
    name = drafter.get("method") if isinstance(drafter, Mapping) else drafter
    if name in _HEADS or name in _LAYERS:
        return next(model for model in _STAGES[stage:] if model["model"] == TARGET)
    return _STAGES[stage]


def method_proofs(
    asked: Mapping[str, Any], prove: Callable[..., Finding], own: OwnModel, *, quick: bool
) -> Iterator[Proof]:
    """The claims about one method, each with the function that proves it. `prove` takes a setting and a number of tokens,
    and proves the engine's joint distribution, and that the method has no fault where that is asked."""
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
