"""What callers write, in every form that is taken, and what the others are told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, RequestOutput, SamplingParams
from outrider.errors import InputError, InvalidParameterError, InvalidPromptError

SHORT = SamplingParams(temperature=0, max_tokens=4)
TEMPLATE = (
    "{% for m in messages %}{{ raise_exception('who speaks?') if m.role == 'nobody' }}# {{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}# answer:{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, kv_cache_tokens=4096)


@pytest.fixture
def talking(llm: LLM) -> Iterator[LLM]:
    """The model with a chat template."""
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    yield llm
    llm.tokenizer.chat_template = None


# -- prompts -----------------------------------------------------------------------------------------------------------

IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        np.array(IDS),
        np.array(IDS, np.uint16),
        list(np.array(IDS)),
        list(torch.tensor(IDS)),
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": torch.tensor(IDS)},
    ],
    ids=repr,
)
def test_every_form_of_token_ids_is_one_prompt(llm: LLM, prompt: Any) -> None:
    expected = llm.generate(IDS, SHORT)[0]
    (alone,) = llm.generate(prompt, SHORT)
    assert alone.prompt_token_ids == tuple(IDS)
    assert all(type(token) is int for token in alone.prompt_token_ids)
    assert alone.token_ids == expected.token_ids
    first, second = llm.generate([prompt, prompt], SHORT)
    assert first.token_ids == second.token_ids == expected.token_ids
    assert tuple(t for piece in llm.stream(prompt, SHORT) for t in piece.token_ids) == expected.token_ids


def test_a_text_may_stand_in_a_dict(llm: LLM) -> None:
    (plain,) = llm.generate("def f(", SHORT)
    for prompt in ({"prompt": "def f("}, [{"prompt": "def f("}]):
        (output,) = llm.generate(prompt, SHORT)
        assert (output.prompt, output.prompt_token_ids) == ("def f(", plain.prompt_token_ids)
        assert output.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("prompt", "problem", "remedy"),
    [
        (torch.tensor([IDS]), "an array of 2 dimensions", "a list of 1-D arrays of integers"),
        (np.array([IDS]), "an array of 2 dimensions", "a list of 1-D arrays of integers"),
        (np.array(5), "an array of 0 dimensions", "a 1-D array of integers"),
        (torch.tensor([0.5]), "an array of torch.float32", "a 1-D array of integers"),
        (np.array([0.5]), "an array of float64", "a 1-D array of integers"),
        (np.array([True]), "an array of bool", "a 1-D array of integers"),
        (torch.tensor([True]), "an array of torch.bool", "a 1-D array of integers"),
        (np.array(["a", "b"]), "an array of <U1", "a 1-D array of integers"),
        ({}, "a dict", "{'prompt': text} or {'prompt_token_ids': token ids}"),
        ({"text": "x"}, "a dict", "{'prompt': text} or {'prompt_token_ids': token ids}"),
        ({"prompt": "x", "prompt_token_ids": IDS}, "a dict", "{'prompt': text} or {'prompt_token_ids': token ids}"),
        ({"prompt": "x", "multi_modal_data": 1}, "a dict", "{'prompt': text} or {'prompt_token_ids': token ids}"),
        ({"prompt": IDS}, "not text", "{'prompt': text}"),
        ({"prompt_token_ids": "x"}, "not token ids", "{'prompt_token_ids': token ids}"),
    ],
    ids=repr,
)
def test_other_arrays_and_dicts_are_refused_with_what_is_right(llm: LLM, prompt: Any, problem: str, remedy: str) -> None:
    for call in (lambda: llm.generate(prompt, SHORT), lambda: llm.stream(prompt, SHORT), lambda: llm.encode(prompt)):
        with pytest.raises(InvalidPromptError) as caught:
            call()
        assert problem in caught.value.problem
        assert remedy in caught.value.remedy
    good, bad = llm.generate(["x", prompt], SHORT)
    assert good.error is None
    assert isinstance(bad.error, InvalidPromptError)


def test_a_prompt_longer_than_the_tokenizer_says_brings_no_warning(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The tokenizer of the embedded pair names 1024 tokens; its model takes 2048, and longer prompts are refused."""
    assert llm.tokenizer is not None
    llm.tokenizer.deprecation_warnings.clear()  # it warns once
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        assert len(llm.encode("x = y\n" * 400)) > 1024
        with pytest.raises(InvalidPromptError, match="no room in the context"):
            llm.generate("x = y\n" * 1000)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.text == ""


def test_a_long_conversation_brings_no_warning_either(talking: LLM, caplog: pytest.LogCaptureFixture) -> None:
    assert talking.tokenizer is not None
    talking.tokenizer.deprecation_warnings.clear()  # it warns once
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        assert len(talking.chat_prompt([{"role": "user", "content": "x = y\n" * 400}])) > 1024
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.text == ""


# -- keywords ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["generate", "stream", "chat"])
@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("sampling_params", SHORT, "Its name here is params: {}(x, SamplingParams(...))."),
        ("max_tokens", 5, "Give it in {}(x, SamplingParams(max_tokens=...))."),
        ("temperature", 0, "Give it in {}(x, SamplingParams(temperature=...))."),
        ("max_new_tokens", 5, "Its name here is max_tokens: {}(x, SamplingParams(max_tokens=...))."),
        ("num_draft_tokens", 5, "Give it in {}(x, speculation=SpeculationConfig(num_draft_tokens=...))."),
        ("speculative_config", {}, "Its name here is speculation."),
        ("proposer", "ngram", "Use method='ngram', in speculation=SpeculationConfig(...)."),
        ("num_speculative_tokens", 3, "Use num_draft_tokens=3, in speculation=SpeculationConfig(...)."),
        ("name_space", "a", "Did you mean namespace? "),
        ("use_tqdm", False, "knows: "),
    ],
)
def test_keywords_that_belong_elsewhere_are_named(llm: LLM, method: str, name: str, value: Any, remedy: str) -> None:
    call = {"generate": "generate(prompts", "stream": "stream(prompt", "chat": "chat(messages"}[method]
    with pytest.raises(InvalidParameterError) as caught:
        getattr(llm, method)("x", **{name: value})
    assert (caught.value.field, caught.value.value) == (name, value)
    assert remedy.replace("{}(x", call) in caught.value.remedy
    assert "unknown" not in caught.value.remedy


@pytest.mark.parametrize("method", ["generate", "stream", "chat"])
@pytest.mark.parametrize("namespace", [1, True, "", b"a", ("a",)])
def test_a_namespace_is_a_name(talking: LLM, method: str, namespace: Any) -> None:
    given: Any = [{"role": "user", "content": "x"}] if method == "chat" else "x"
    with pytest.raises(InvalidParameterError) as caught:
        getattr(talking, method)(given, SHORT, namespace=namespace)
    assert (caught.value.field, caught.value.value) == ("namespace", namespace)
    assert caught.value.remedy == "Give a string that is not empty, or None."


def test_a_dtype_may_be_torchs_own() -> None:
    assert "dtype=float32 " in repr(LLM(dtype=torch.float32, speculation="none", kv_cache_tokens=512))
    with pytest.raises(InvalidParameterError, match="dtype='complex64'"):
        LLM(dtype=torch.complex64)


# -- conversations -----------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]
BYE = [{"role": "user", "content": "bye"}]


def test_one_conversation_or_a_list_of_them(talking: LLM) -> None:
    (hi,), (bye,) = talking.chat(HI, SHORT), talking.chat(BYE, SHORT)
    assert hi.prompt_token_ids == tuple(talking.chat_prompt(HI)) != bye.prompt_token_ids
    together = talking.chat([HI, BYE], SHORT)
    assert [o.prompt_token_ids for o in together] == [hi.prompt_token_ids, bye.prompt_token_ids]
    assert [o.token_ids for o in together] == [hi.token_ids, bye.token_ids]
    assert [len(o.token_ids) for o in talking.chat([HI, BYE], [SHORT, SHORT.replace(max_tokens=2)])] == [4, 2]


def test_a_conversation_that_cannot_be_served_leaves_the_others_alone(talking: LLM) -> None:
    refused = [{"role": "nobody", "content": "x"}]
    good, bad, empty, odd = talking.chat([HI, refused, [], ["hi"]], SHORT)  # type: ignore[list-item]
    assert good.error is None
    for output, problem in ((bad, "who speaks"), (empty, "it is empty"), (odd, "not a list of messages")):
        assert isinstance(output, RequestOutput)
        assert isinstance(output.error, InvalidPromptError)
        assert output.error.field == "messages"
        assert problem in output.error.problem
    with pytest.raises(InvalidPromptError, match="who speaks"):
        talking.chat(refused, SHORT)


@pytest.mark.parametrize(
    "messages", [[], ["hi"], [5], "hi", 5, None, {"role": "user", "content": "x"}, [HI, HI[0]]], ids=repr
)
def test_what_is_neither_a_conversation_nor_a_list_of_them(talking: LLM, messages: Any) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        talking.chat(messages, SHORT)
    assert caught.value.field == "messages"
    assert "{'role': ..., 'content': ...}" in caught.value.remedy


def test_one_prompt_for_a_conversation(talking: LLM) -> None:
    with pytest.raises(InputError, match="messages"):
        talking.chat_prompt([HI, BYE])  # type: ignore[list-item]
