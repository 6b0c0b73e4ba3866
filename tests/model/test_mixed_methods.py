"""All methods in one batch: every text is what plain decoding writes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.lab.prove.tiny_heads import (
    save_random_dflash,
    save_random_eagle,
    save_random_heads,
    save_random_mtp,
    save_random_peagle,
)
from outrider.propose import settings
from tests.model.vocabularies import save_permuted_and_cut

PROMPTS = ["def main(", "x = [1, 2, 3, 1, 2, 3,"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(seed=4, max_tokens=20, top_k=40, top_p=0.9),
    SamplingParams(seed=5, max_tokens=16, n=2, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=18, logit_bias={7: 2.0}, min_tokens=9),
]
WAYS: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "draft_model", "num_draft_tokens": 1},
    {"method": "draft_model", "num_draft_tokens": 7, "min_confidence": 0.3},
    {"method": "draft_model", "tree": (3, 1, 2)},
    {"method": "draft_model", "tree": "best_first"},
    {"method": "draft_model", "tree": "sequoia", "num_draft_tokens": 6},
    {"method": "draft_model", "rule": "walk", "num_draft_tokens": 3},
    {"method": "draft_model", "rule": "coupled", "draft_sampling": "greedy", "tree": "best_first"},
    {"method": "early_exit", "num_draft_tokens": 4},
    {"method": "early_exit", "layers": 6, "tree": (2, 1, 1)},
    {"method": "layer_skip", "tree": "best_first", "num_draft_tokens": 5},
    {"method": "layer_skip", "skip": (2, 3), "num_draft_tokens": 2},
    {"method": "cross_vocabulary", "num_draft_tokens": 3},
    {"method": "cross_vocabulary", "match": "text", "num_draft_tokens": 5},
    {"method": "medusa", "num_draft_tokens": 3},
    {"method": "medusa", "tree": (3, 2)},
    {"method": "blockwise", "tree": "best_first"},
    {"method": "exit", "num_draft_tokens": 4},
    {"method": "exit", "tree": (2, 1)},
    {"method": "eagle1", "tree": "best_first"},
    {"method": "eagle3", "num_draft_tokens": 4},
    {"method": "eagle3", "tree": "best_first"},
    {"method": "mtp", "num_draft_tokens": 4},
    {"method": "mtp", "tree": (3, 2)},
    {"method": "dflash", "num_draft_tokens": 4},
    {"method": "dflash", "tree": (2, 1)},
    {"method": "token_recycling", "num_draft_tokens": 9},
    {"method": "lookahead"},
    {"method": "ngram", "min_match": 1},
    {"method": "suffix", "branches": True, "shared": True},
    {"method": "prediction", "min_match": 1},
    {"method": "merge"},
    {
        "method": "merge",
        "methods": [{"method": "draft_model", "tree": (2, 1)}, "ngram", "layer_skip"],
        "num_draft_tokens": 9,
    },
    {"method": "then", "methods": [{"method": "ngram", "num_draft_tokens": 2}, {"method": "draft_model"}]},
    {"method": "staged", "drafter": {"method": "suffix", "branches": True}},
    {"method": "staged", "drafter": {"method": "early_exit", "tree": (2, 1)}, "num_draft_tokens": 4},
    {"method": "auto", "methods": [{"method": "draft_model"}, {"method": "ngram", "min_match": 1}]},
    {"method": "dspark", "num_draft_tokens": 4},
    {"method": "peagle", "num_draft_tokens": 4},
    {"method": "peagle", "tree": (2, 1)},
]
PREDICTION = "\n    for name in names:\n        return self\n"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float64", block_size=8, max_num_seqs=64, kv_cache_tokens=3000)


def test_every_method_takes_part() -> None:
    others = {"gemma4_assistant"}  # it drafts for another target
    assert {way["method"] for way in WAYS} == {"none", *settings._BUILT_IN} - others


@pytest.mark.parametrize("shift", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_batch_of_all_methods_writes_what_plain_decoding_writes_alone(llm: LLM, shift: int, tmp_path: Path) -> None:
    """With different lengths, trees, rules, parameters and numbers of samples, and too little memory for all at once.

    All texts are greedy, or seeded under a rule that keeps to the seed, so that who drafted must not show in any of them.
    """
    models = {"cross_vocabulary": {"model": save_permuted_and_cut(tmp_path / "cut", num_merges=1200)}}
    for method in ("medusa", "blockwise", "exit"):
        models[method] = {"model": save_random_heads(tmp_path / method, default_model("target"), method, scale=0.05)}
    for method, layout in (("eagle1", "safeailab1"), ("eagle3", "safeailab")):
        models[method] = {"model": save_random_eagle(tmp_path / method, default_model("target"), layout, scale=0.1)}
    models["mtp"] = {"model": save_random_mtp(tmp_path / "mtp", default_model("target"), "deepseek_v3", 2, scale=0.1)}
    models["dflash"] = {"model": save_random_dflash(tmp_path / "dflash", default_model("target"), scale=0.1)}
    models["dspark"] = {"model": save_random_dflash(tmp_path / "dspark", default_model("target"), "deepspec", scale=0.1)}
    models["peagle"] = {"model": save_random_peagle(tmp_path / "peagle", default_model("target"), scale=0.1)}
    requests = [
        (PROMPTS[(place + shift) % 2], PARAMS[(place // 2 + shift) % len(PARAMS)], {**way, **models.get(way["method"], {})})
        for place, way in enumerate(WAYS)
    ]
    prompts, params, ways = zip(*requests, strict=True)
    configs = [SpeculationConfig.of(way) for way in ways]
    together = llm.generate(list(prompts), list(params), speculation=configs, prediction=PREDICTION)
    assert [output.error for output in together] == [None] * len(together)
    alone = {
        (prompt, place): [sample.token_ids for sample in llm.generate(prompt, sampling, speculation="none")[0].outputs]
        for prompt in PROMPTS
        for place, sampling in enumerate(PARAMS)
    }
    for prompt, sampling, config, output in zip(prompts, params, configs, together, strict=True):
        want = alone[prompt, PARAMS.index(sampling)]
        assert [sample.token_ids for sample in output.outputs] == want, (prompt, sampling, config)
    llm.engine.check_integrity()
