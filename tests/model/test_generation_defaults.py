"""What a checkpoint's generation_config.json has to say, and when it is asked."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.config import default_model

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PROMPT = "def parse(line):\n"


def with_defaults(folder: Path, **defaults: Any) -> Path:
    shutil.copytree(default_model("draft"), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **defaults}), "utf-8")
    return folder


def test_they_are_used_where_no_params_are_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 9}
    with caplog.at_level(logging.INFO, "outrider.building"):
        llm = LLM(with_defaults(tmp_path / "m", **given), kv_cache_tokens=512)
    named = "max_tokens=9, temperature=0.1, top_k=1, repetition_penalty=1.3"
    (record,) = [r for r in caplog.records if "generation defaults" in r.message]
    assert record.levelno == logging.INFO
    assert record.message.endswith(f"without SamplingParams its own generation defaults are used: {named}")

    same = SamplingParams(temperature=0.1, top_k=1, repetition_penalty=1.3, max_tokens=9)
    expected = llm.generate(PROMPT, same)[0].token_ids
    assert llm.generate(PROMPT)[0].token_ids == expected
    assert llm.generate([PROMPT, PROMPT], [None, same])[0].token_ids == expected
    assert tuple(t for piece in llm.stream(PROMPT) for t in piece.token_ids) == expected
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    assert llm.chat([{"role": "user", "content": PROMPT}])[0].token_ids == expected

    greedy = LLM(default_model("draft"), kv_cache_tokens=512).generate(PROMPT, SamplingParams(temperature=0))
    assert llm.generate(PROMPT, SamplingParams(temperature=0))[0].token_ids == greedy[0].token_ids != expected


@pytest.mark.parametrize("given", [{}, {"do_sample": False}, {"do_sample": True}])
def test_without_any_the_defaults_are_those_of_sampling_params(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any]
) -> None:
    """As in vLLM, do_sample decides nothing: only values that are given are taken."""
    with caplog.at_level(logging.INFO, "outrider.building"):
        llm = LLM(with_defaults(tmp_path / "m", **given), kv_cache_tokens=512)
    assert "generation defaults" not in caplog.text
    assert llm.default_params == SamplingParams()


def test_a_value_that_cannot_be_served_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(with_defaults(tmp_path / "m", top_p=1.5, min_p=0.1), kv_cache_tokens=512)
    assert llm.default_params == SamplingParams(min_p=0.1)
    assert "top_p=1.5" in caplog.text


def test_the_embedded_pair_has_none() -> None:
    assert LLM(kv_cache_tokens=512).default_params == SamplingParams()


def test_the_ends_of_a_model_end_texts_whatever_a_request_adds(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    whole = LLM(default_model("draft"), kv_cache_tokens=512).generate(PROMPT, greedy)[0].token_ids
    end = next(token for place, token in enumerate(whole) if place >= 3 and token not in whole[:place])
    want = whole[: whole.index(end) + 1]
    unused = next(token for token in range(2, 200) if token not in whole)
    folder = with_defaults(tmp_path / "m", eos_token_id=[0, end], max_new_tokens=12, temperature=1e-9)
    llm = LLM(folder, kv_cache_tokens=512)
    for params in (None, greedy, greedy.replace(stop_token_ids=(unused,)), greedy.replace(stop=("never said",))):
        output = llm.generate(PROMPT, params)[0]
        assert (output.token_ids, output.finish_reason) == (want, "stop")
    assert llm.generate(PROMPT, greedy.replace(ignore_eos=True))[0].token_ids == whole
