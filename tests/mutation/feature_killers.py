"""Checks that a bug in heads with attention of their own must turn red."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.lab.prove.tiny_heads import save_random_eagle
from tests.model import checkpoints, test_feature_heads, test_mtp, test_staged_heads
from tests.model.mtp_reference import MtpReference

_NAMES = ("safeailab", "speculators, normed residual", "eagle1")
#: One that only names its layers otherwise.
_NVIDIA = "nvidia"
#: One whose queries, keys and values have biases.
_BIASED = "eagle1, without a bias"
#: Of texts that are drafted for in one step.
_TREES: list[dict[str, Any]] = [{"tree": (3, 2, 1)}, {"tree": (2, 3, 1)}, {"tree": (1, 2, 2)}]


def features_make_the_drafts() -> None:
    """Every row of every draft, in chains and trees, of several samples and behind a prefix, is what the reference says."""
    _all_compared("paged")


def kernels_features() -> None:
    """The same where our kernels compute the head: several texts at a time, in chains and in trees that differ."""
    params = SamplingParams(temperature=0, max_tokens=12)
    for name in (*_NAMES, _BIASED):
        _compared(name, {}, [params, params.replace(n=2), params], "fused")
        _compared(name, _TREES, [params, params, params.replace(n=2)], "fused")


def features_of_samples() -> None:
    """Samples part inside a block, and go on with the feature that their prompt ends with."""
    _compared("safeailab", {}, [SamplingParams(temperature=0, max_tokens=6, n=3)], "paged")


def mtp_makes_the_drafts() -> None:
    """Every row of every draft of layers that a checkpoint carries is what the reference says, whether our kernels compute
    the layer or its module does."""
    for family in (test_mtp.QWEN_3_5, test_mtp.LLAMA):
        path, reference = _made_mtp(family)
        with pytest.MonkeyPatch.context() as patch:
            watch = test_feature_heads.Watch(reference, patch)
            outputs = test_mtp.load(path).generate(
                test_feature_heads.PROMPTS[:2], SamplingParams(temperature=0, max_tokens=6), speculation=test_mtp.way()
            )
        assert test_feature_heads.faults(outputs) == 0
        assert watch.num_rows > 5
        assert watch.worst <= 10 * test_feature_heads.BOUND


def heads_in_a_stage() -> None:
    """Every row of every guess is what the reference says, whatever the target and the draft model took before."""
    with pytest.MonkeyPatch.context() as patch:
        test_staged_heads.test_every_guess_is_what_the_reference_says(_made_pair(), "eagle3", patch)


def heads_beside_their_draft_model() -> None:
    """A head in a stage is shown the rows that the draft model computed for others."""
    test_staged_heads.test_who_else_reads_with_the_draft_model_leaves_no_gap(_made_pair(), in_turn=False)


@cache
def _made_pair() -> test_staged_heads.Pair:
    return test_staged_heads.make(Path(tempfile.mkdtemp()))


@cache
def _made_mtp(family: test_mtp.Family) -> tuple[str, MtpReference]:
    path = test_mtp.made(family, Path(tempfile.mkdtemp()))
    return path, MtpReference(path, family.layout, family.num_layers, test_feature_heads.Oracle(path).model)


@cache
def _made() -> test_feature_heads.Made:
    folder = Path(tempfile.mkdtemp())
    path = checkpoints.save("llama", folder / "target", seed=3, layers=test_feature_heads.LAYERS)
    heads = {
        name: save_random_eagle(folder / name, path, scale=0.1, **test_feature_heads.HEADS[name])
        for name in (*_NAMES, _NVIDIA, _BIASED)
    }
    return test_feature_heads.Made(path, test_feature_heads.Oracle(path), heads)


@cache
def _llm(backend: str) -> LLM:
    return test_feature_heads.load(_made(), backend)


def _all_compared(backend: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    for name in _NAMES:
        for shape in ({}, {"tree": (3, 2)}):
            _compared(name, shape, [params, params.replace(n=2), params], backend)
    _compared(_NVIDIA, {}, [params], backend)


def _compared(name: str, shapes: dict[str, Any] | list[dict[str, Any]], params: list[SamplingParams], backend: str) -> None:
    """With one shape of drafts for all texts, or one for each."""
    made = _made()
    ways = [made.way(name, **shape) for shape in ([shapes] * len(params) if isinstance(shapes, dict) else shapes)]
    with pytest.MonkeyPatch.context() as patch:
        watch = test_feature_heads.Watch(made.reference(name), patch)
        prompts = test_feature_heads.PROMPTS[: len(params)]
        outputs = _llm(backend).generate(prompts, params, speculation=ways)
    assert test_feature_heads.faults(outputs) == 0
    assert watch.num_rows > 5
    assert watch.worst <= test_feature_heads.BOUND
