"""Settings are declared once: keywords, options and fields of requests follow from the fields that check them."""

from __future__ import annotations

import re
from inspect import Parameter, getsource, signature
from typing import Any, get_args, get_type_hints

import pytest
import torch

from outrider import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from outrider.cli.app import _VERBS
from outrider.config import CONFIGS, Asked, Elsewhere, Flag, RequestOptions, declared
from outrider.lab.cli import train
from outrider.options import CallOptions, LLMSettings, TextOptions
from outrider.server.messages import MessagesRequest
from outrider.server.schemas import SAME, ChatRequest, CompletionRequest
from outrider.server.settings import ServerSettings

FIELDS = {name: field for kind in CONFIGS for name, field in kind.model_fields.items() if name != "model"}
OWN = {"tokenizer", "consume", "speculation", "draft_model", "profile"}


def parts(hint: Any) -> set[Any]:
    """The types and names that a value may have."""
    found = get_args(hint)
    return set().union(*map(parts, found)) if found else {hint}


def test_the_keywords_of_an_engine_are_the_fields_of_its_configurations() -> None:
    hints = get_type_hints(LLMSettings)
    assert hints.keys() - OWN == FIELDS.keys()
    for name, field in FIELDS.items():
        assert parts(hints[name]) - {torch.dtype, torch.device} == parts(field.annotation), name


def test_the_reference_says_the_defaults_that_are_numbers() -> None:
    texts = dict(re.findall(r'^    (\w+): [^\n]+\n    """(.*?)"""$', getsource(LLMSettings), re.DOTALL | re.MULTILINE))
    numbers = {name: field.default for name, field in FIELDS.items() if type(field.default) is int}
    assert {name: int(re.findall(r"(\d+) unless given", texts[name])[0]) for name in numbers} == numbers
    assert texts.keys() == get_type_hints(LLMSettings).keys()


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_signatures_name_every_keyword_with_its_default(kind: Any) -> None:
    found = signature(kind).parameters
    assert [*found] == ["model", *get_type_hints(LLMSettings)]
    assert found["model"].default is None
    assert {name: found[name].default for name in FIELDS} == {name: field.default for name, field in FIELDS.items()}
    assert not any(each.kind is Parameter.VAR_KEYWORD for each in found.values())


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize("name", ["generate", "stream", "chat"])
def test_calls_take_every_option(kind: Any, name: str) -> None:
    options = CallOptions.__annotations__.keys()
    found = signature(getattr(kind, name)).parameters
    assert options <= found.keys()
    assert "options" not in found
    assert found["priority"].default == RequestOptions().priority
    assert options - {"speculation"} == TextOptions.__annotations__.keys()


def test_what_a_request_carries_is_what_a_call_takes() -> None:
    assert TextOptions.__annotations__.keys() | {"streaming"} == RequestOptions.__dataclass_fields__.keys()


@pytest.mark.parametrize("kind", [*CONFIGS, SamplingParams, StructuredOutputs, ServerSettings])
def test_options_belong_to_verbs_that_there_are_and_once_to_each(kind: Any) -> None:
    seen = [(name, verb) for name, flag in declared(kind, Flag) for verb in flag.verbs]
    assert len(set(seen)) == len(seen)
    assert {verb for _, verb in seen} <= {*_VERBS, train.data.__name__}


def test_requests_give_parameters_by_their_own_names() -> None:
    assert dict(declared(SamplingParams, Asked)) == SAME
    for kind in (CompletionRequest, ChatRequest):
        assert SAME.keys() <= kind.model_fields.keys()
        assert all(kind.model_fields[name].annotation == (asked.kind | None) for name, asked in SAME.items())
    assert {"temperature", "top_p", "top_k"} <= MessagesRequest.model_fields.keys()


def test_no_two_parameters_have_one_name_elsewhere() -> None:
    for place in ("transformers", "vllm", "gguf", "llama_cpp"):
        names = [getattr(each, place) for _, each in declared(SamplingParams, Elsewhere) if getattr(each, place)]
        assert len(set(names)) == len(names)
