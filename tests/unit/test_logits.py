"""Sampling parameters become probabilities: against transformers' own warpers, row by row, ties and extremes included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider.params import SamplingParams
from outrider.verify import logits as module
from outrider.verify.logits import argmax, target_probs

pytestmark = pytest.mark.usefixtures("kernels")

FEW = settings(max_examples=100, deadline=None, derandomize=True)


def scattered(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> Tensor:
    """Random logits without ties."""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def stock(logits: Tensor, params: SamplingParams) -> Tensor:
    """transformers' processors in transformers' order."""
    scores, ids = logits.clone(), torch.zeros(len(logits), 1, dtype=torch.int64)
    if params.temperature != 1.0:
        scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(-1)


def one(logits: Tensor, **sampling: object) -> Tensor:
    """Law of a single row."""
    return target_probs(logits[None], [SamplingParams(**sampling)])[0]


def kept(law: Tensor) -> list[int]:
    return law.nonzero().flatten().tolist()


temperatures = st.integers(1, 40).map(lambda n: n / 10)
tenths = st.integers(1, 999).map(lambda n: n / 1000)
params = st.builds(
    SamplingParams,
    temperature=st.just(1.0) | temperatures,
    top_k=st.sampled_from([0, -1]) | st.integers(1, 40),
    top_p=st.just(1.0) | tenths,
    min_p=st.just(0.0) | tenths,
)


@FEW
@given(params, st.integers(2, 60), st.integers(0, 10**6))
def test_laws_equal_those_of_transformers(sampling: SamplingParams, vocab_size: int, seed: int) -> None:
    logits = scattered(3, vocab_size, seed)
    law = target_probs(logits, [sampling] * 3)
    torch.testing.assert_close(law, stock(logits, sampling), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(law.sum(-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_parameter_equals_transformers_on_a_real_vocabulary(setting: dict[str, float], dtype: torch.dtype) -> None:
    logits = scattered(4, 32_000, 7).to(dtype)
    sampling = SamplingParams(**setting)
    law = target_probs(logits, [sampling] * 4)
    assert law.dtype == dtype
    close = {"rtol": 1e-4, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(law, stock(logits, sampling), **close)


@FEW
@given(st.lists(params | st.just(SamplingParams(temperature=0.0)), min_size=1, max_size=6), st.data())
def test_a_row_in_a_mixed_batch_is_that_row_alone(mixed: list[SamplingParams], data: st.DataObject) -> None:
    logits = scattered(len(mixed), 30, data.draw(st.integers(0, 10**6)))
    law = target_probs(logits, mixed)
    for i, row in enumerate(mixed):
        assert torch.equal(law[i], target_probs(logits[i : i + 1], [row])[0])


@FEW
@given(st.lists(params, min_size=1, max_size=4), st.integers(0, 10**6))
def test_the_input_is_left_as_it_was(mixed: list[SamplingParams], seed: int) -> None:
    logits = scattered(len(mixed), 20, seed)
    before = logits.clone()
    target_probs(logits, mixed)
    assert torch.equal(logits, before)


# -- greedy and ties ---------------------------------------------------------------------------------------------------


def test_greedy_is_a_point_mass_on_the_lowest_id_of_the_largest() -> None:
    law = one(torch.tensor([1.0, 5.0, 5.0, 2.0]), temperature=0.0, top_p=0.3, min_p=0.5, top_k=2)
    assert law.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_argmax_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [7.0, 7.0, 7.0], [float("-inf"), float("-inf"), -1.0], [-0.0, 0.0, -1.0]])
    assert argmax(logits).tolist() == [1, 0, 2, 0]


def test_argmax_of_many_equals_is_still_the_lowest() -> None:
    logits = torch.zeros(3, 50_000)
    logits[1, 777:] = 1.0
    logits[2, 49_999] = 1.0
    assert argmax(logits).tolist() == [0, 777, 49_999]


def test_all_tokens_tied_at_the_edge_of_top_k_stay() -> None:
    law = one(torch.tensor([2.0, 1.0, 1.0, 0.0, 1.0]), top_k=2)
    assert kept(law) == [0, 1, 2, 4]


def test_at_the_edge_of_top_p_the_lowest_ids_stay_and_no_more_than_needed() -> None:
    logits = torch.log(torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2], dtype=torch.float64))
    assert kept(one(logits, top_p=0.5)) == [0, 1, 2]
    skewed = torch.log(torch.tensor([0.1, 0.3, 0.1, 0.4, 0.1], dtype=torch.float64))
    assert kept(one(skewed, top_p=0.75)) == [0, 1, 3]
    assert kept(one(skewed, top_p=0.85)) == [0, 1, 2, 3]


def test_top_p_keeps_at_least_the_most_likely_token() -> None:
    assert kept(one(torch.tensor([0.0, 9.0, 1.0]), top_p=1e-9)) == [1]
    assert kept(one(torch.tensor([3.0, 3.0, 3.0]), top_p=1e-9)) == [0]


def test_the_token_that_reaches_top_p_exactly_is_the_last_to_stay() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64))
    law = one(logits, top_p=0.75)
    assert law.tolist() == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])


def test_min_p_is_measured_on_what_the_filters_before_left() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
    assert kept(one(logits, min_p=0.5)) == [0, 1]
    assert kept(one(logits, min_p=0.61)) == [0]
    assert kept(one(logits, temperature=2.0, min_p=0.61)) == [0, 1, 2], "temperature comes first"


def test_filters_that_keep_everything_change_nothing() -> None:
    logits = scattered(1, 40, 3)[0]
    for setting in ({"top_k": 0}, {"top_k": -1}, {"top_k": 40}, {"top_k": 10**6}, {"top_p": 1.0}, {"min_p": 0.0}):
        torch.testing.assert_close(one(logits, **setting), logits.softmax(-1), rtol=1e-14, atol=0)


# -- impossible tokens -------------------------------------------------------------------------------------------------


def test_the_models_own_minus_infinity_stays_impossible() -> None:
    logits = torch.tensor([float("-inf"), 0.0, 1.0, float("-inf")])
    for setting in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 0.0}, {"temperature": 50.0}):
        law = one(logits, **setting)
        assert law[[0, 3]].tolist() == [0.0, 0.0]
        assert float(law.sum()) == pytest.approx(1.0)


# -- extremes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_a_tiny_temperature_is_nearly_greedy_and_never_nan(setting: dict[str, float]) -> None:
    for dtype in (torch.float32, torch.float64):
        for temperature in (1e-3, 1e-12, 1e-38, 1e-45, 1e-300, 5e-324):
            law = one(torch.tensor([-30.0, 12.0, 40.0, float("-inf")], dtype=dtype), temperature=temperature, **setting)
            assert law.tolist() == [0.0, 0.0, 1.0, 0.0], (dtype, temperature)


def test_large_logits_do_not_overflow() -> None:
    law = one(torch.tensor([3e38, -3e38, 3e38]), temperature=0.5, top_p=0.999)
    assert law.tolist() == [0.5, 0.0, 0.5]


def test_one_token_vocabulary() -> None:
    assert one(torch.tensor([3.0]), top_k=1, top_p=0.1, min_p=1.0).tolist() == [1.0]


# -- large vocabularies ------------------------------------------------------------------------------------------------


def _top_p_by_full_sort(probs: Tensor, top_p: float) -> Tensor:
    """The definition: walk down the sorted law until the mass is reached."""
    order = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    mass, law = 0.0, torch.zeros_like(probs)
    for i in order:
        if mass >= top_p:
            break
        law[i] = probs[i]
        mass += float(probs[i])
    return law / law.sum()


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.0101, 0.503, 0.9, 0.99])
def test_top_p_over_a_large_vocabulary_equals_the_full_sort(top_p: float, spread: float) -> None:
    logits = scattered(1, 20_000, 5, spread)[0]
    torch.testing.assert_close(one(logits, top_p=top_p), _top_p_by_full_sort(logits.softmax(-1), top_p), rtol=1e-9, atol=0)


def test_top_p_of_a_peaked_law_sorts_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")  # ours sort nothing
    logits = scattered(2, 50_000, 5, 6.0)
    expected = target_probs(logits, [SamplingParams(top_p=0.9)] * 2)
    asked: list[int] = []
    real = Tensor.topk
    monkeypatch.setattr(Tensor, "topk", lambda self, k, *args, **kwargs: asked.append(k) or real(self, k, *args, **kwargs))
    monkeypatch.setattr(Tensor, "sort", lambda *args, **kwargs: pytest.fail("sorted the whole vocabulary"))
    assert torch.equal(target_probs(logits, [SamplingParams(top_p=0.9)] * 2), expected)
    assert asked
    assert max(asked) < 10_000


def test_a_flat_neighbour_does_not_change_a_peaked_row() -> None:
    logits = torch.cat([scattered(1, 5000, 1, 8.0), scattered(1, 5000, 2, 0.01)])
    rows = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.95)]
    law = target_probs(logits, rows)
    for i in range(2):
        torch.testing.assert_close(law[i], target_probs(logits[i : i + 1], rows[i : i + 1])[0], rtol=1e-12, atol=0)


def test_the_search_widens_until_the_mass_is_reached() -> None:
    probs = torch.full((1, 3000), 1 / 3000, dtype=torch.float64)
    assert module._enough_of_the_top(probs, torch.tensor([[0.05]])).shape[-1] == 256
    assert module._enough_of_the_top(probs, torch.tensor([[0.2]])).shape[-1] == 1024
    assert module._enough_of_the_top(probs, torch.tensor([[0.9]])).shape[-1] == 3000
