"""A patched model: `generate` with transformers' own arguments writes what the stock one writes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessorList, TextStreamer, pipeline
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import outrider
from outrider.config import default_model
from outrider.errors import InputError, InvalidParameterError, InvalidPromptError, UnsupportedParameterError
from tests.model import checkpoints
from tests.model.core import core

FAMILIES = ("llama", "gemma2", "gpt2", "mixtral", "qwen2", "phi3")
PAD = 1
ROWS = torch.tensor([[PAD, PAD, PAD, 5, 17, 3, 44], [9, 2, 30, 9, 2, 30, 9], [PAD, 6, 6, 7, 6, 6, 7]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7, [0, 1, 1, 1, 1, 1, 1]])
BATCH: Any = {"input_ids": ROWS, "attention_mask": MASK, "pad_token_id": PAD}
SETTINGS: Any = {"kv_cache_tokens": 1024, "speculation": "suffix"}


def model_from(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def model(path: str) -> Any:
    """A patched model that no test changes."""
    return outrider.patch(model_from(path), **SETTINGS)


def halve_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of a caller, which counts all tokens before, padding too."""
    scores = scores.clone()
    scores[:, ids.shape[1] % 2 :: 2] /= 2
    return scores


@pytest.mark.parametrize(
    "family",
    core(FAMILIES, ("llama", "gemma2"), "src/outrider/patching/", "src/outrider/model/", "tests/model/test_patched.py"),
)
def test_greedy_tokens_are_those_of_the_stock_model(family: str, tmp_path: Path) -> None:
    model = model_from(checkpoints.save(family, tmp_path))
    stock = model.generate(**BATCH, max_new_tokens=20, do_sample=False)
    calls: list[dict[str, Any]] = [
        {"max_new_tokens": 20},
        {"max_length": 16},
        {"max_new_tokens": 20, "eos_token_id": [int(stock[0, 10]), int(stock[1, 13])]},
        {"max_new_tokens": 20, "eos_token_id": int(stock[0, 8]), "min_new_tokens": 6},
        {"max_new_tokens": 20, "eos_token_id": int(stock[0, 8]), "min_length": 12},
        {"max_new_tokens": 20, "repetition_penalty": 1.4, "num_return_sequences": 1},
        {"max_new_tokens": 20, "no_repeat_ngram_size": 2, "bad_words_ids": [[int(stock[0, 7])]]},
        {"max_new_tokens": 12, "suppress_tokens": stock[:, 7].tolist(), "begin_suppress_tokens": [3, 4]},
        {"max_new_tokens": 12, "forced_eos_token_id": 7, "exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 7},
        {"max_new_tokens": 12, "logits_processor": LogitsProcessorList([halve_even])},
        {"generation_config": GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=PAD), "pad_token_id": None},
    ]
    want = [model.generate(**{**BATCH, "do_sample": False, **call}) for call in calls]
    outrider.patch(model, **SETTINGS)
    for call, expected in zip(calls, want, strict=True):
        assert torch.equal(model.generate(**{**BATCH, "do_sample": False, **call}), expected), call
    assert model.generate.llm.stats.finished.num_accepted_tokens > 0
    outrider.unpatch(model)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=20, do_sample=False), stock)


def test_drawn_texts_follow_the_stock_law(model: Any) -> None:
    """Two tokens, and among the likeliest only: their joint distribution, by a chi-squared test."""
    prompt, count = torch.tensor([[9, 2, 30, 9, 2, 30, 9]]), 1500
    asked: Any = {"temperature": 1.3, "top_k": 4, "top_p": 0.6, "do_sample": True, "max_new_tokens": 2}
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(4), TopPLogitsWarper(0.6)])

    def law(ids: torch.Tensor) -> dict[int, float]:
        with torch.no_grad():
            probabilities = warpers(ids, model(ids).logits[:, -1]).softmax(-1)[0]
        return {int(token): float(probabilities[token]) for token in probabilities.nonzero()}

    joint = {
        (first, second): likely * found
        for first, likely in law(prompt).items()
        for second, found in law(torch.cat([prompt, torch.tensor([[first]])], 1)).items()
    }
    torch.manual_seed(0)
    texts = model.generate(prompt, **asked, num_return_sequences=count, pad_token_id=PAD, eos_token_id=None)
    drawn = Counter(map(tuple, texts[:, 7:].tolist()))
    assert drawn.keys() <= joint.keys()
    assert math.isclose(sum(joint.values()), 1.0, abs_tol=1e-6)
    expected = [probability * count / sum(joint.values()) for probability in joint.values()]
    assert stats.chisquare([drawn[text] for text in joint], expected).pvalue > 1e-4


def test_the_generator_of_torch_repeats_a_text(model: Any) -> None:
    def write() -> torch.Tensor:
        found: torch.Tensor = model.generate(**BATCH, do_sample=True, max_new_tokens=8, num_return_sequences=3)
        return found

    torch.manual_seed(5)
    first, other = write(), write()
    torch.manual_seed(5)
    assert torch.equal(write(), first)
    assert not torch.equal(first, other)
    assert first.shape == (9, 15)
    assert torch.equal(first[:, :7], ROWS.repeat_interleave(3, 0))
    assert len({tuple(row) for row in first.tolist()}) > 3


def test_a_dictionary_is_returned_where_it_is_asked_for(model: Any) -> None:
    plain = model.generate(**BATCH, max_new_tokens=5, do_sample=False)
    found = model.generate(**BATCH, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain)


def test_streamers_and_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    folder = default_model("target")
    model, tokenizer = model_from(str(folder)), AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts, asked = ["def f(x):\n", "import os\nimport sys\n"], {"max_new_tokens": 12, "do_sample": False}

    def write() -> tuple[Any, ...]:
        write_texts: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)
        ids = tokenizer(prompts[0], return_tensors="pt").input_ids
        streamed = model.generate(ids, streamer=TextStreamer(tokenizer), **asked)
        return write_texts(prompts[0], **asked), write_texts(prompts, batch_size=2, **asked), streamed.tolist()

    stock, shown = write(), capsys.readouterr().out
    assert outrider.patch(model, draft_model=str(default_model("draft"))) is model
    assert write() == stock
    assert capsys.readouterr().out == shown
    assert shown.startswith(prompts[0])


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"num_beams": 2}, "generation mode"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "generation mode"),
        ({"assistant_model": "any"}, "assistant_model"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"prefix_allowed_tokens_fn": lambda place, ids: [1]}, "prefix_allowed_tokens_fn"),
        ({"stopping_criteria": [lambda ids, scores: False]}, "stopping_criteria"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"generation_config": GenerationConfig(max_time=1.0, do_sample=False)}, "max_time"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"inputs_embeds": torch.zeros(1, 2, 3)}, "inputs_embeds"),
        ({"position_ids": torch.zeros(3, 7)}, "position_ids"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"streamer": type("Streamer", (), {"put": lambda self, ids: None})()}, "streamer"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(model: Any, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        model.generate(**{**BATCH, "max_new_tokens": 4, "do_sample": False, **asked})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"attention_mask": MASK.flip(1)}, "attention_mask[0]"),
        ({"attention_mask": torch.zeros_like(MASK)}, "attention_mask[0]"),
        ({"logits_processor": LogitsProcessorList([TopKLogitsWarper(2)])}, "logits_processor"),
        ({"max_new_tokens": 900, "eos_token_id": None}, "max_new_tokens"),
    ],
)
def test_what_cannot_be_is_told(model: Any, asked: dict[str, Any], field: str) -> None:
    with pytest.raises((InvalidParameterError, InvalidPromptError)) as caught:
        model.generate(**{**BATCH, "max_new_tokens": 4, "do_sample": False, **asked})
    assert caught.value.field == field


def test_patching_twice_and_unpatching_what_is_not(model: Any, path: str) -> None:
    with pytest.raises(InvalidParameterError, match="patched already"):
        outrider.patch(model)
    with pytest.raises(InvalidParameterError, match="not patched"):
        outrider.unpatch(model_from(path))
    with pytest.raises(InputError, match="no such setting"):
        outrider.patch(model_from(path), draught_model="x")


def test_weights_that_are_consumed_write_the_same(model: Any, path: str) -> None:
    taken = outrider.patch(model_from(path), consume=True, **SETTINGS)
    asked: Any = {**BATCH, "max_new_tokens": 10, "do_sample": False}
    assert torch.equal(taken.generate(**asked), model.generate(**asked))


def lower_the_best(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor whose answer depends on which tokens others have forbidden before it."""
    best = scores.argmax(-1, keepdim=True)
    return scores.scatter_add(-1, best, torch.full_like(best, -3, dtype=scores.dtype))


def keep_three(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The three likeliest tokens of those that others have left."""
    return scores.masked_fill(scores < scores.topk(3).values[..., -1:], float("-inf"))


@pytest.mark.parametrize(
    "asked",
    [
        {"sequence_bias": [[[3], 8.0], [[9], -6.0]], "repetition_penalty": 1.8},
        {"min_new_tokens": 8, "logits_processor": LogitsProcessorList([lower_the_best])},
        {"min_length": 14, "logits_processor": LogitsProcessorList([keep_three])},
        {"min_new_tokens": 8, "logits_processor": LogitsProcessorList([keep_three])},
        {"repetition_penalty": 5.0, "pad_token_id": 17},
    ],
    ids=lambda asked: " and ".join(asked),
)
def test_processors_run_in_the_order_of_transformers(model: Any, path: str, asked: dict[str, Any]) -> None:
    ends = list(range(0, model.config.vocab_size, 2))
    call = {**BATCH, "do_sample": False, "max_new_tokens": 12, "eos_token_id": ends, **asked}
    ids = torch.where(MASK.bool(), ROWS, torch.tensor(call["pad_token_id"]))
    want = model_from(path).generate(**{**call, "input_ids": ids})
    assert torch.equal(model.generate(**{**call, "input_ids": ids}), want)


def test_a_ratio_rule_needs_no_seed(path: str) -> None:
    """Its texts depend on the drafts, so that no seed could promise anything."""
    found = outrider.patch(model_from(path), **{**SETTINGS, "speculation": {"method": "suffix", "rule": "token"}})
    for sampled in (True, False):
        assert found.generate(**BATCH, do_sample=sampled, max_new_tokens=4).shape == (3, 11)
    outrider.unpatch(found)
