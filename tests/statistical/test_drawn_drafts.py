"""Every proposer draws what it says: a chi-square test of all sampled draft tokens against the probabilities they state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tests.model.core import DRAFTING, core
from tests.model.vocabularies import save_permuted_and_cut

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.draft import Draft, Law
from outrider.engine import engine
from outrider.engine.drafting import drafting
from outrider.lab.prove.tiny_heads import (
    save_random_dflash,
    save_random_eagle,
    save_random_heads,
    save_random_mtp,
    save_random_peagle,
)
from outrider.propose import base
from outrider.propose import settings as registry
from outrider.propose.trees import growth
from outrider.propose.trees.adaptive import FixedPace

#: The chance that a proposer that draws right fails.
SURE = 1e-6
BINS = 16
TEXTS = ["def main(", "The little dog went to", '{"name": "', "for i in range(", "import os\n", "Once upon a time"] * 3

#: Trees, and heads that are nearly always wrong, draw enough in a few tokens.
_FEW = {"max_tokens": 14}
#: Ways that draw, each with parameters of the request.
DRAWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "draft model": ({"method": "draft_model", "num_draft_tokens": 4}, {}),
    "token rule, filters": (
        {"method": "draft_model", "num_draft_tokens": 4, "rule": "token"},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ),
    "penalties": ({"method": "draft_model", "num_draft_tokens": 4}, {"repetition_penalty": 1.5, "frequency_penalty": 0.3}),
    "tree": ({"method": "draft_model", "tree": (3, 2, 1)}, _FEW),
    "best-first tree": ({"method": "draft_model", "tree": "best_first"}, {}),
    "Sequoia's tree": ({"method": "draft_model", "tree": "sequoia"}, {"temperature": 0.8, "max_tokens": 40}),
    "low confidence": ({"method": "draft_model", "num_draft_tokens": 6, "min_confidence": 0.3}, {}),
    "low confidence in a tree": ({"method": "draft_model", "tree": "best_first", "min_confidence": 0.2}, {}),
    "early exit": ({"method": "early_exit", "layers": 4, "num_draft_tokens": 4}, {}),
    "early exit, best-first tree": ({"method": "early_exit", "tree": "best_first"}, {"top_p": 0.95}),
    "layer skip": ({"method": "layer_skip", "num_draft_tokens": 4}, {}),
    "layer skip, tree": ({"method": "layer_skip", "tree": (2, 2)}, _FEW),
    "Medusa's heads": ({"method": "medusa", "num_draft_tokens": 3}, {}),
    "Medusa's heads, token rule, filters": (
        {"method": "medusa", "num_draft_tokens": 3, "rule": "token"},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ),
    "Medusa's heads, penalties": ({"method": "medusa"}, {"repetition_penalty": 1.5, "frequency_penalty": 0.3}),
    "Medusa's heads, tree": ({"method": "medusa", "tree": (3, 2, 1)}, _FEW),
    "Medusa's heads, low confidence": ({"method": "medusa", "tree": "best_first", "min_confidence": 0.01}, {}),
    "blockwise heads": ({"method": "blockwise", "num_draft_tokens": 3}, {"temperature": 0.8, **_FEW}),
    "blockwise heads, Sequoia's tree": ({"method": "blockwise", "tree": "sequoia"}, {}),
    "a head to exit with": ({"method": "exit", "num_draft_tokens": 4}, _FEW),
    "a head to exit with, tree": ({"method": "exit", "tree": (2, 2)}, {"top_p": 0.95}),
    "EAGLE-2": ({"method": "eagle1", "tree": "best_first"}, _FEW),
    "EAGLE-3": ({"method": "eagle3", "num_draft_tokens": 4}, {"temperature": 0.8, **_FEW}),
    "EAGLE-3, tree": ({"method": "eagle3", "tree": (3, 2, 1)}, _FEW),
    "EAGLE-3, best-first tree": ({"method": "eagle3", "tree": "best_first"}, {"top_p": 0.95}),
    "layers of the checkpoint, tree": ({"method": "mtp", "tree": (3, 2, 1)}, {"top_p": 0.95, **_FEW}),
    "DFlash, best-first tree": ({"method": "dflash", "tree": "best_first"}, {"temperature": 0.8, **_FEW}),
    "DSpark": ({"method": "dspark", "num_draft_tokens": 4, "min_confidence": 0.0}, {"temperature": 0.8, **_FEW}),
    "DSpark, tree": ({"method": "dspark", "tree": (3, 2, 1)}, {"top_p": 0.95, **_FEW}),
    "P-EAGLE, tree": ({"method": "peagle", "tree": (3, 2, 1)}, {"temperature": 0.8, **_FEW}),
    "staged, a lookup": ({"method": "staged", "drafter": "ngram", "num_draft_tokens": 5}, {}),
    "staged, a drawn tree": (
        {"method": "staged", "drafter": {"method": "early_exit", "tree": (2, 2)}, "num_draft_tokens": 5},
        {"temperature": 1.2, "top_p": 0.95, "max_tokens": 20},
    ),
    "other vocabulary": ({"method": "cross_vocabulary", "num_draft_tokens": 4}, {}),
    "other vocabulary, tree": ({"method": "cross_vocabulary", "tree": (2, 2)}, {"temperature": 0.7}),
}
#: What the method of that name drafts from.
PREDICTION = "\n    for name in names:\n        return self\n"
#: Ways that never draw.
CHOSEN: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "min_match": 1},
    "suffix": {"method": "suffix", "min_match": 1, "branches": True},
    "token recycling": {"method": "token_recycling"},
    "lookahead": {"method": "lookahead"},
    "prediction": {"method": "prediction", "min_match": 1},
    "text of another vocabulary": {"method": "cross_vocabulary", "match": "text"},
    "likeliest tokens of heads": {"method": "medusa", "draft_sampling": "greedy", "tree": (2, 2)},
    "likeliest tokens": {"method": "draft_model", "draft_sampling": "greedy", "tree": "best_first"},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = LLM(dtype="float32")
    # On a busy machine a clock would leave too few rows to trees that adapt.
    llm.engine.drafting.builders.use_pace(FixedPace({1: 1.0, 2: 1.0, 3: 1.02, 4: 1.1, 8: 1.6}))
    return llm


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By method: what it drafts with."""
    folder: Path = tmp_path_factory.mktemp("models")
    heads = ("medusa", "blockwise", "exit")
    made = {name: save_random_heads(folder / name, default_model("target"), name, scale=0.3) for name in heads}
    for method, layout in (("eagle1", "safeailab1"), ("eagle3", "safeailab")):
        made[method] = save_random_eagle(folder / method, default_model("target"), layout, scale=0.1)
    made["mtp"] = save_random_mtp(folder / "mtp", default_model("target"), "deepseek_v3", 2, scale=0.1)
    made["dflash"] = save_random_dflash(folder / "dflash", default_model("target"), scale=0.1)
    made["dspark"] = save_random_dflash(folder / "dspark", default_model("target"), "deepspec", scale=0.1)
    made["peagle"] = save_random_peagle(folder / "peagle", default_model("target"), scale=0.1)
    return {"cross_vocabulary": save_permuted_and_cut(folder / "cut", num_merges=1200), **made}


def with_model(way: dict[str, Any], models: dict[str, str]) -> dict[str, Any]:
    return {**way, "model": models[way["method"]]} if way["method"] in models else way


def drafts(
    llm: LLM, way: dict[str, Any], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch, texts: Sequence[str] = TEXTS
) -> list[Draft]:
    """Every draft of some texts, as the engine verified it."""
    seen: list[Draft] = []
    stock: Callable[..., Any] = drafting.propose_all

    def watched(*args: Any) -> Any:
        steps = stock(*args)
        seen.extend(step.draft for step in steps if len(step.draft))
        return steps

    with monkeypatch.context() as patch:
        patch.setattr(drafting, "propose_all", watched)
        seeds = count(1)  # the same draws in every run
        patch.setattr(engine.secrets, "randbits", lambda bits: next(seeds))
        settings = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params})
        for output in llm.generate(texts, settings, speculation=SpeculationConfig.of(way), prediction=PREDICTION):
            assert output.stats.num_proposer_faults == 0
    return seen


def ranks(found: Sequence[Draft], rng: np.random.Generator) -> Iterator[float]:
    """Where each drawn token lies in what it was drawn from, behind its elder siblings, with the likeliest tokens first:
    evenly spread if it was."""
    for draft in found:
        assert draft.draft_probs is not None
        left: dict[int, torch.Tensor] = {}
        tokens = torch.arange(draft.draft_probs.shape[-1])
        for node, (token, parent, law) in enumerate(zip(draft.token_ids, draft.parents, draft.laws, strict=True)):
            if law is not Law.SAMPLED:
                continue
            probs = left.setdefault(parent, draft.draft_probs[node].double().clone())
            own, total = float(probs[token]), float(probs.sum())
            below = float(probs[(probs > own) | ((probs == own) & (tokens < token))].sum())
            yield (below + rng.random() * own) / total
            probs[token] = 0.0


def p_value(found: Sequence[Draft]) -> float:
    places = list(ranks(found, np.random.default_rng(1)))
    assert len(places) > 400, "too few to tell"
    counts, _ = np.histogram(places, BINS, (0.0, 1.0))
    expected = len(places) / BINS
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), BINS - 1))


#: What guesses from rows of its own draws as draft models do, with the same filters and from the same trees.
LIKE_DRAFT_MODELS = (
    "early exit, best-first tree",
    "EAGLE-3, best-first tree",
    "Medusa's heads, tree",
    "low confidence in a tree",
    "other vocabulary",
    "Medusa's heads, token rule, filters",
    "Medusa's heads, penalties",
    "Medusa's heads, low confidence",
    "blockwise heads, Sequoia's tree",
    "a head to exit with, tree",
    "EAGLE-3, tree",
    "layer skip, tree",
    "blockwise heads",
    "EAGLE-2",
)


#: What always runs: chains and trees of draft models, of rows of heads, of blocks and of a stage.
FEW = ("draft model", "tree", "low confidence", "Medusa's heads", "EAGLE-3", "DSpark", "staged, a lookup")


@pytest.mark.parametrize("name", core(DRAWN, FEW, *DRAFTING, slow=LIKE_DRAFT_MODELS))
def test_drawn_tokens_follow_the_probabilities_that_are_stated(
    llm: LLM, models: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, params = DRAWN[name]
    assert p_value(drafts(llm, with_model(way, models), params, monkeypatch)) > SURE


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_not_drawn_does_not_claim_to_be(
    llm: LLM, models: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drafts(llm, with_model(CHOSEN[name], models), {"max_tokens": 12}, monkeypatch, TEXTS[:6])
    assert found
    assert not any(Law.SAMPLED in draft.laws for draft in found)


def test_every_method_is_drawn_from() -> None:
    tried = {way["method"] for way, _ in DRAWN.values()} | {way["method"] for way in CHOSEN.values()}
    others = {"auto", "merge", "then"}  # which draw through others
    assert tried == set(registry._BUILT_IN) - others - {"gemma4_assistant"}, "which has a test of its own"


of_the_proof = pytest.mark.by_change("src/outrider/propose/trees/", "tests/statistical/test_drawn_drafts.py")


@of_the_proof
@pytest.mark.parametrize("name", ["draft model", "best-first tree", "early exit"])
def test_a_proposer_that_keeps_likely_tokens_alone_has_faults(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a drawn token is taken back where it is unlikely. Drafts hold it all the same."""
    stock = growth._draw

    def choosy(families: Any, noise: Any) -> None:
        stock(families, noise)
        for family in families:
            row = family.growth.laws[family.parent].row
            family.tokens = [token for token in family.tokens if float(row[token]) > 0.06 * float(row.max())]

    monkeypatch.setattr(growth, "_draw", choosy)
    way, params = DRAWN[name]
    with pytest.raises(AssertionError, match="proposer_faults"):
        drafts(llm, way, params, monkeypatch)


@of_the_proof
@pytest.mark.parametrize("name", ["Medusa's heads", "a head to exit with"])
def test_a_proposer_that_draws_from_other_probabilities_than_it_states_turns_red(
    llm: LLM, models: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the draws are those of a lower temperature than is noted."""
    stock = base._left

    def sharper(probs: torch.Tensor, taken: Any) -> Any:
        left, alive = stock(probs, taken)
        return left.pow(1.5), alive

    monkeypatch.setattr(base, "_left", sharper)
    way, params = DRAWN[name]
    assert p_value(drafts(llm, with_model(way, models), params, monkeypatch)) < SURE
