"""All proofs in one run: the rules, the engine, the random numbers, identical texts and bits, and a true KV memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.config import ActivationsName
from outrider.params import SamplingParams
from outrider.propose.method import Method
from outrider.propose.methods.cross_vocabulary import CrossVocabulary
from outrider.propose.methods.early_exit import EarlyExit
from outrider.propose.methods.layer_skip import LayerSkip
from outrider.propose.speculation import SpeculationConfig
from outrider.prove.deep_rounds import DEEP_SETTINGS, prove_deep
from outrider.prove.engine_distribution import EngineProof
from outrider.prove.findings import Check, Finding, Report
from outrider.prove.one_method import UNASKED, method_proofs, speculations
from outrider.prove.own_model import OwnModel
from outrider.prove.reference import ReferenceRule
from outrider.prove.rules_distribution import (
    prove_decisions,
    prove_functions,
    prove_reference,
    prove_tree_reference,
    prove_verifier,
)
from outrider.prove.running import Proof, run_in_processes, run_proofs
from outrider.prove.sampled import prove_sampled
from outrider.prove.settings.crossed import CROSSED_SETTINGS
from outrider.prove.settings.drafts import QUICK_SETTINGS, SETTINGS
from outrider.prove.settings.encoders import ENCODER_SETTINGS
from outrider.prove.settings.heads import HEADS_SETTINGS
from outrider.prove.settings.parameters import PARAMETER_SETTINGS
from outrider.prove.settings.running import RUNNING_SETTINGS
from outrider.prove.settings.setting import Setting
from outrider.prove.settings.shared_target import SHARED_TARGET_LAYERS, SHARED_TARGET_SETTINGS
from outrider.prove.settings.structures import STRUCTURE_SETTINGS
from outrider.prove.tiny import CROSSED_PIECES, PIECES, save_tiny_hybrid, save_tiny_llama, save_tiny_t5
from outrider.prove.tiny_heads import save_layered, save_tiny_heads
from outrider.prove.tree_distribution import prove_tree_verifier
from outrider.prove.tree_reference import TreeRule

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
    """Run the proofs.

    Args:
        model: The model on which texts and the KV memory are checked. None takes the embedded pair.
        draft_model: Its draft model.
        activations: What enters its products with rounded weights, as LLM takes it.
        quick: Run fewer cases and samples, in this process. A full run uses two processes.
        on_check: Called after each check.

    Raises:
        InvalidParameterError: A folder does not exist.
        ContradictionError: Rows are to be rounded, and would meet no rounded weights.
    """
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
    """Run the proofs of one method alone.

    Args:
        asked: Its settings in the form of one mapping, see SpeculationConfig.of.
        model: The model on which texts are compared. None takes the embedded pair.
        draft_model: Its draft model.
        activations: What enters its products with rounded weights, as LLM takes it.
        quick: Take fewer settings and shorter texts.
        on_check: Called after each check.

    Raises:
        InputError: The method, a setting or a folder does not exist.
    """
    own = OwnModel(model, draft_model, speculations(asked), activations)
    for config in own.speculations:  # settings that do not fit the model are refused before any proof
        if config.method is not None:
            own.llm.proposers.prepare(own.llm.resolve(config))
    method = SpeculationConfig.of(asked).method
    with TemporaryDirectory() as folder:
        crossed = isinstance(method, CrossVocabulary)
        tiny = _TinyPair(Path(folder) / "tiny", num_layers=_layers_for(method), crossed=crossed)
        return replace(run_proofs(method_proofs(asked, tiny.prove, own, quick=quick), on_check), unasked=UNASKED)


def _layers_for(method: Method | None) -> int:
    """As many layers as a small target needs, so that the settings of a method fit it, too."""
    named = [method.layers or 0] if isinstance(method, EarlyExit) else []
    named += (method.skip or ()) if isinstance(method, LayerSkip) else ()
    return max(SHARED_TARGET_LAYERS, *(layer + 1 for layer in named), 0)


def num_method_checks(asked: Mapping[str, Any], *, quick: bool = False) -> int:
    """How many checks `run_method_suite` makes, for progress bars.

    Raises:
        InputError: The method or a setting does not exist.
    """
    own = OwnModel(None, None, speculations(asked))
    return len(list(method_proofs(asked, _TinyPair(Path()).prove, own, quick=quick)))


def num_checks(*, quick: bool = False) -> int:
    """How many checks `run_suite` makes, for progress bars."""
    return len(list(proofs(Path(), None, None, quick=quick)))


def proofs(
    folder: Path,
    model: str | None,
    draft_model: str | None,
    *,
    activations: ActivationsName | None = None,
    quick: bool,
) -> Iterator[Proof]:
    """All claims, each with the function that proves it.

    Args:
        folder: Where small checkpoints are written.
        model: See `run_suite`.
        draft_model: See `run_suite`.
        activations: See `run_suite`.
        quick: See `run_suite`.
    """
    yield from _rule_proofs(12 if quick else 56)
    for rule in ("token", "block", "walk", "coupled"):
        yield f"random numbers, {rule}", partial(prove_sampled, rule, 100_000 if quick else 1_000_000)
    for deep_setting in DEEP_SETTINGS[:2] if quick else DEEP_SETTINGS:
        yield f"deep round: {deep_setting.name}", partial(prove_deep, deep_setting)
    tiny, speaking = _TinyPair(folder / "tiny"), _TinyPair(folder / "speaking", speaks=True)
    crossed = _TinyPair(folder / "crossed", crossed=True)
    for setting in QUICK_SETTINGS if quick else SETTINGS:
        long = not quick and setting in QUICK_SETTINGS  # two rounds and more
        yield f"joint distribution: {setting.name}", partial(tiny.prove, setting, 4 if long else 3)
    if not quick:
        for setting in PARAMETER_SETTINGS:
            if setting.name.endswith(_PROVED_WAYS):
                yield f"joint distribution: {setting.name}", partial(tiny.prove, setting, 3)
        for setting in STRUCTURE_SETTINGS:
            yield f"joint distribution: {setting.name}", partial(speaking.prove, setting, 5)
        deep = _TinyPair(folder / "deep", num_layers=SHARED_TARGET_LAYERS)
        for setting in SHARED_TARGET_SETTINGS:
            yield f"joint distribution: {setting.name}", partial(deep.prove, setting, 3)
        for setting in HEADS_SETTINGS:
            yield f"joint distribution: {setting.name}", partial(deep.prove, setting, 3)
        for setting in CROSSED_SETTINGS:
            yield f"joint distribution: {setting.name}", partial(crossed.prove, setting, 3)
        hybrid, encoder = _SavedPair(folder / "hybrid", save_tiny_hybrid), _SavedPair(folder / "encoder", save_tiny_t5)
        for pair, settings in ((hybrid, RUNNING_SETTINGS), (encoder, ENCODER_SETTINGS)):
            for setting in settings:
                yield f"joint distribution: {setting.name}", partial(pair.prove, setting, 3)
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


def _on_own(own: OwnModel, length: int, *, seed: int | None) -> Finding:
    greedy = SamplingParams(temperature=0, max_tokens=length)
    return own.text_is_identical(greedy if seed is None else SamplingParams(seed=seed, max_tokens=length))


_SEEDS = {"target": 1, "draft": 2}


class _TinyPair:
    """Two random models over three tokens, made when they are first used.

    Args:
        folder: Where they are written.
        speaks: Whether they have a tokenizer and an end of text.
        num_layers: Of the target.
        crossed: Whether each has a tokenizer of its own.
    """

    def __init__(self, folder: Path, *, speaks: bool = False, num_layers: int = 1, crossed: bool = False) -> None:
        self._folder, self._speaks, self._crossed = folder, speaks or crossed, crossed
        self._layers = {"target": num_layers, "draft": 1}
        self._proof: EngineProof | None = None

    def prove(self, setting: Setting, length: int, *, faultless: bool = False) -> Finding:
        if self._proof is None:
            pieces = CROSSED_PIECES if self._crossed else dict.fromkeys(_SEEDS, PIECES)
            pair = [
                save_tiny_llama(
                    self._folder / part, seed, speaks=self._speaks, pieces=pieces[part], num_layers=self._layers[part]
                )
                for part, seed in _SEEDS.items()
            ]
            heads: dict[str, Any] = {"heads": save_tiny_heads(self._folder, pair[0])}
            if self._layers["target"] > 1:
                heads |= save_layered(self._folder / "layered", self._layers["target"])
            self._proof = EngineProof(*pair, speaks=self._speaks, crossed=self._crossed, **heads)
        return self._proof.prove(setting, length, faultless=faultless)


class _SavedPair:
    """Two random models over three tokens of another kind than a Llama, made when they are first used.

    Args:
        folder: Where they are written.
        save: Writes one of them to a folder, from a seed; returns its path.
    """

    def __init__(self, folder: Path, save: Callable[[Path, int], str]) -> None:
        self._folder = folder
        self._save = save

    @cached_property
    def _proof(self) -> EngineProof:
        return EngineProof(*(self._save(self._folder / part, seed) for part, seed in _SEEDS.items()))

    def prove(self, setting: Setting, length: int) -> Finding:
        return self._proof.prove(setting, length)
