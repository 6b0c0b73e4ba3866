"""A patched model with an encoder writes what the stock one writes, and types of tokens are taken where they say "text"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig, LogitsProcessorList

import outrider
from outrider.errors import InvalidPromptError, UnsupportedParameterError
from tests.model import checkpoints, encoders
from tests.model.core import core

PAD = 0
SOURCES = torch.tensor([[5, 17, 3, 44, PAD, PAD, PAD], [9, 2, 30, 9, 2, 30, 9], [6, 6, 7, 6, 6, 7, PAD]])
MASK = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7, [1, 1, 1, 1, 1, 1, 0]])
#: The stock cache is left out: it has as many layers as the encoder.
CALL: Any = {"input_ids": SOURCES, "attention_mask": MASK, "do_sample": False, "use_cache": False, "max_new_tokens": 14}
SETTINGS: Any = {"kv_cache_tokens": 1024, "speculation": "suffix"}
KINDS = ("T5Config", "BartConfig", "MBartConfig", "MarianConfig")


def model_from(path: str) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float64).eval()


class Streamer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.told += tokens.flatten().tolist()

    def end(self) -> None:
        self.told.append(-1)


def follow_length(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that counts the tokens of the text before, the start token too."""
    scores = scores.clone()
    scores[:, ids.shape[1] % 3 :: 3] -= 2.0
    return scores


@pytest.mark.parametrize("kind", core(KINDS, ("T5Config", "BartConfig"), "src/outrider/patching.py", "src/outrider/model/"))
def test_greedy_texts_are_those_of_the_stock_model(kind: str, tmp_path: Path) -> None:
    model = model_from(encoders.save(tmp_path) if kind == "T5Config" else encoders.save_other(tmp_path, kind))
    stock = model.generate(**CALL)
    assert len({tuple(row) for row in stock.tolist()}) > 1, "texts depend on their sources"
    ends = [int(stock[0, 5]), int(stock[1, 8])]
    calls: list[dict[str, Any]] = [
        {},
        {"input_ids": None, "inputs": SOURCES},
        {"attention_mask": None},
        {"eos_token_id": ends, "pad_token_id": 1},
        {"eos_token_id": ends, "min_length": 8},
        {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1, "max_length": 9, "max_new_tokens": None},
        {"forced_bos_token_id": 8, "forced_eos_token_id": 7, "eos_token_id": 7},
        {"logits_processor": LogitsProcessorList([follow_length])},
    ]
    want = [model.generate(**{**CALL, **call}) for call in calls]
    outrider.patch(model, **SETTINGS)
    for call, expected in zip(calls, want, strict=True):
        assert torch.equal(model.generate(**{**CALL, **call}), expected), call
    assert model.generate.llm.stats.finished.num_accepted_tokens > 0
    outrider.unpatch(model)
    assert torch.equal(model.generate(**CALL), stock)


def test_a_token_that_the_checkpoint_forces_stands_in_the_text(tmp_path: Path) -> None:
    model = model_from(encoders.save(tmp_path, forced=8))
    first = {**CALL, "input_ids": SOURCES[:1, :4], "attention_mask": None}
    heard, want = Streamer(), Streamer()
    stock = [model.generate(**CALL, return_dict_in_generate=True), model.generate(**{**CALL, "max_new_tokens": 1})]
    model.generate(**first, streamer=want)
    outrider.patch(model, **SETTINGS)
    found = model.generate(**CALL, return_dict_in_generate=True)
    assert type(found) is type(stock[0])
    assert torch.equal(found.sequences, stock[0].sequences)
    assert torch.equal(model.generate(**{**CALL, "max_new_tokens": 1}), stock[1])
    model.generate(**first, streamer=heard)
    assert heard.told == want.told
    outrider.unpatch(model)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"decoder_start_token_id": 5}, "decoder_start_token_id"),
        ({"forced_bos_token_id": 9}, "forced_bos_token_id"),
        ({"decoder_input_ids": torch.tensor([[3, 4]] * 3)}, "decoder_input_ids"),
        ({"encoder_outputs": (torch.zeros(3, 7, 32),)}, "encoder_outputs"),
        ({"attention_mask": MASK.flip(1)}, "attention_mask[0]"),
        ({"input_ids": None}, "inputs"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "generation mode"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(asked: dict[str, Any], field: str, tmp_path: Path) -> None:
    model = outrider.patch(model_from(encoders.save(tmp_path, forced=8)), **SETTINGS)
    with pytest.raises((UnsupportedParameterError, InvalidPromptError)) as caught:
        model.generate(**{**CALL, **asked})
    assert caught.value.field == field
    outrider.unpatch(model)


def test_types_of_tokens_are_taken_where_they_say_text(tmp_path: Path) -> None:
    """Gemma 3 marks pictures by type 1. GPT-2 adds the embedding of token 0 to all tokens of type 0."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    pictures = {**vision, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = Gemma3Config(text_config={**text, **heads}, vision_config=pictures, image_token_index=299)
    gemma: Any = Gemma3ForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 17, 3, 44, 9]])
    asked: Any = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    stock = gemma.generate(ids, **asked, token_type_ids=torch.zeros_like(ids))
    outrider.patch(gemma, **SETTINGS)
    assert torch.equal(gemma.generate(ids, **asked, token_type_ids=torch.zeros_like(ids)), stock)
    with pytest.raises(UnsupportedParameterError, match="token_type_ids"):
        gemma.generate(ids, **asked, token_type_ids=torch.ones_like(ids))
    outrider.unpatch(gemma)
    gpt2: Any = AutoModelForCausalLM.from_pretrained(checkpoints.save("gpt2", tmp_path), dtype=torch.float32).eval()
    outrider.patch(gpt2, **SETTINGS)
    with pytest.raises(UnsupportedParameterError, match="token_type_ids"):
        gpt2.generate(ids, **asked, token_type_ids=torch.zeros_like(ids))
    outrider.unpatch(gpt2)
