"""Every proof in one run: rules, engine, random numbers, identity of text, truth of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from outrider.params import SamplingParams
from outrider.prove.engine_law import QUICK_SETTINGS, SETTINGS, EngineProof, Setting
from outrider.prove.own_model import OwnModel
from outrider.prove.reference import ReferenceRule
from outrider.prove.report import Check, Finding, Report
from outrider.prove.rules_law import prove_decisions, prove_functions, prove_reference, prove_verifier
from outrider.prove.runner import Proof, run_proofs
from outrider.prove.sampled import prove_sampled
from outrider.prove.tiny import save_tiny_llama

_RATIO_RULES = (ReferenceRule.TOKEN, ReferenceRule.BLOCK)


def run_suite(
    model: str | None = None,
    draft_model: str | None = None,
    *,
    quick: bool = False,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Run the proofs.

    Args:
        model: A model to prove identity of text and truth of the cache on; None takes the embedded pair.
        draft_model: Its draft model.
        quick: Fewer cases and samples.
        on_check: Called after each check.
    """
    with TemporaryDirectory() as folder:
        return run_proofs(_proofs(Path(folder), model, draft_model, quick=quick), on_check)


def num_checks(*, quick: bool = False) -> int:
    """How many checks `run_suite` makes, for progress bars."""
    return len(list(_proofs(Path(), None, None, quick=quick)))


def _proofs(folder: Path, model: str | None, draft_model: str | None, *, quick: bool) -> Iterator[Proof]:
    yield from _rule_proofs(12 if quick else 56)
    for rule in ("token", "block", "walk", "coupled"):
        yield f"random numbers, {rule}", partial(prove_sampled, rule, 100_000 if quick else 1_000_000)
    tiny = _TinyPair(folder)
    for setting in QUICK_SETTINGS if quick else SETTINGS:
        deep = not quick and setting in QUICK_SETTINGS  # two rounds and more
        yield f"engine law: {setting.name}", partial(tiny.prove, setting, 4 if deep else 3)
    own, length = OwnModel(model, draft_model), 24 if quick else 48
    yield "greedy text is identical", partial(_on_own, own, length, seed=None)
    yield "seeded text is identical", partial(_on_own, own, length, seed=11)
    yield "KV memory is true", lambda: own.cache_is_true(12 if quick else 32)


def _rule_proofs(count: int) -> Iterator[Proof]:
    for rule in ReferenceRule:
        yield f"rule {rule} is exact", partial(prove_reference, rule, count, 2, 4)
    yield "acceptance functions", partial(prove_functions, count)
    for rule in _RATIO_RULES:
        yield f"decisions of rule {rule}", partial(prove_decisions, rule, count // 4)
    for rule in ReferenceRule:
        yield f"verifier law: {rule}", partial(prove_verifier, rule, count // 2, 2, 3)


def _on_own(own: OwnModel, length: int, *, seed: int | None) -> Finding:
    """The caller's model is no toy: give it the threads back."""
    torch.set_num_threads(_ALL_THREADS)
    greedy = SamplingParams(temperature=0, max_tokens=length)
    return own.text_is_identical(greedy if seed is None else SamplingParams(seed=seed, max_tokens=length))


class _TinyPair:
    """Two random models over three tokens, made on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._proof: EngineProof | None = None

    def prove(self, setting: Setting, length: int) -> Finding:
        if self._proof is None:
            target = save_tiny_llama(self._folder / "target", seed=1)
            self._proof = EngineProof(target, save_tiny_llama(self._folder / "draft", seed=2))
        return self._proof.prove(setting, length)


_ALL_THREADS = torch.get_num_threads()
