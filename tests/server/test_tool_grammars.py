"""Grammars of required calls: they take what a model of the form writes and the listener hears, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import llguidance
import pytest
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from outrider.config import default_model
from outrider.errors import UnsupportedParameterError
from outrider.loading.tokenizers import given_tokenizer
from outrider.params import StructuredOutputs
from outrider.server.chat import tool_use
from outrider.server.schemas import ChatRequest
from outrider.server.tool_forms import FORMS, ToolForm
from outrider.server.tool_grammars import calls_grammar
from outrider.server.tools import ToolListener, special_marks
from tests.server.running import TEMPLATE, running
from tests.server.test_tool_forms import (
    deepseek,
    dsml,
    function_gemma,
    gemma,
    glm,
    harmony,
    hermes,
    mistral,
    new_mistral,
    old_deepseek,
    qwen,
)
from tests.unit.test_added_tokens import compiler_of, written

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer", "maximum": 9},
        "ok": {"type": "boolean"},
        "level": {"enum": ["low", "high"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "integer"}},
        "inner": {"$ref": "#/$defs/point"},
    },
    "required": ["text", "n"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "of": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {"add": SCHEMA, "ping": {"type": "object", "properties": {}, "additionalProperties": False}}
GOOD: list[dict[str, Any]] = [
    {"text": "two\nlines </x> ]", "n": 3},
    {"text": "", "n": -1, "ok": True, "level": "high", "maybe": None, "list": [1, 2], "inner": {"x": 0.5, "of": "a"}},
    {"text": "a", "n": 9, "maybe": "b", "list": [], "inner": {"x": 1}},
    {"text": "a", "n": 9, "list": [7]},
]
BAD: list[dict[str, Any]] = [
    {"text": "a"},
    {"n": 1, "text": "a"},
    {"text": "a", "n": 10},
    {"text": "a", "n": 1, "level": "x"},
]


def pythonic(name: str, arguments: dict[str, Any]) -> str:
    def value(each: Any) -> str:
        if isinstance(each, str):
            return json.dumps(each, ensure_ascii=False)
        if isinstance(each, dict):
            return "{" + ", ".join(f"{json.dumps(key)}: {value(inner)}" for key, inner in each.items()) + "}"
        return "[" + ", ".join(map(value, each)) + "]" if isinstance(each, list) else repr(each)

    return f"[{name}({', '.join(f'{key}={value(each)}' for key, each in arguments.items())})]"


def one_of_harmony(name: str, arguments: Any) -> str:
    return harmony(name, arguments).removeprefix("<|start|>assistant").removesuffix("<|call|>")


def bare_mistral(name: str, arguments: Any) -> str:
    return mistral(name, arguments).replace(', "id": "abcdefghi"', "")


#: The form, what writes it, and what a template has that teaches this variant.
WRITERS: dict[str, tuple[ToolForm, Any, str]] = {
    "hermes": ("hermes", hermes, ""),
    "qwen": ("qwen", qwen, ""),
    "glm": ("glm", glm, ""),
    "mistral": ("mistral", bare_mistral, ""),
    "mistral with ids": ("mistral", new_mistral, "[CALL_ID] [ARGS]"),
    "newest mistral": ("mistral", lambda *call: new_mistral(*call).replace("[CALL_ID]abcdefghi", ""), "[ARGS]"),
    "deepseek": ("deepseek", deepseek, ""),
    "old deepseek": ("deepseek", old_deepseek, "```json"),
    "dsml": ("deepseek", dsml, "｜DSML｜"),
    "gemma": ("gemma", gemma, ""),
    "function gemma": ("gemma", function_gemma, "<start_function_call>"),
    "harmony": ("harmony", one_of_harmony, ""),
    "pythonic": ("pythonic", pythonic, ""),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(default_model("target"))


def taken(tokenizer: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(from_tokenizer(tokenizer), llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    tokens = tokenizer.encode(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("name", WRITERS)
def test_the_grammar_of_a_form_takes_what_is_heard_and_nothing_else(name: str, tokenizer: Any) -> None:
    form, write, template = WRITERS[name]
    grammar = calls_grammar(form, SCHEMAS, several=False, template=template)
    for function, arguments in [*(("add", each) for each in GOOD), ("ping", {})]:
        text = write(function, arguments)
        assert taken(tokenizer, grammar, text), text
        listener = ToolListener(form, schemas=SCHEMAS, only_calls=True)
        (call,) = [each for heard in (listener.hear(text), listener.finish()) for each in heard.calls]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (function, arguments)
    for text in (*(write("add", each) for each in BAD), write("fly", {}), f"I call {write('ping', {})}", ""):
        assert not taken(tokenizer, grammar, text), text


@pytest.mark.parametrize("name", WRITERS)
def test_there_may_be_several_calls_where_the_form_has_them(name: str, tokenizer: Any) -> None:
    form, write, template = WRITERS[name]
    one, two = write("ping", {}), write("add", GOOD[0])
    between = {"hermes": "\n", "qwen": "\n", "glm": "\n", "mistral": ", ", "pythonic": ", ", "old deepseek": "\n"}
    heads = {
        "mistral": ("[TOOL_CALLS] [", "]"),
        "pythonic": ("[", "]"),
        "dsml": ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    }
    deep = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    head, tail = heads.get(name, deep if "deepseek" in name else ("", ""))
    inside = [text.removeprefix(head).removesuffix(tail) for text in (one, two)]
    pair = head + between.get(name, "").join(inside) + tail
    for several in (False, True):
        grammar = calls_grammar(form, SCHEMAS, several=several, template=template)
        assert taken(tokenizer, grammar, pair) == (several and name != "harmony"), pair


@pytest.mark.parametrize("name", WRITERS)
def test_marks_that_are_special_tokens_are_written_as_these(name: str) -> None:
    """As the model was trained to write them, and not in pieces that spell them."""
    form, write, template = WRITERS[name]
    tokenizer = given_tokenizer(default_model("target"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*{*FORMS[form].opens, *FORMS[form].marks}]})
    special = special_marks(form, tokenizer)
    compiler = compiler_of(tokenizer)
    grammar = calls_grammar(form, SCHEMAS, several=False, special=special, template=template)
    text = write("add", GOOD[1])
    tokens = written(compiler, tokenizer, StructuredOutputs(grammar=grammar), text)
    assert tokenizer.decode(tokens) == text
    marks = [token for token in tokenizer(text, add_special_tokens=False)["input_ids"] if token in special]
    assert [token for token in tokens if token in special] == marks
    assert marks or form in ("pythonic", "llama")


@pytest.mark.parametrize("form", ["qwen", "gemma", "deepseek", "pythonic"])
def test_a_call_that_is_required_comes_in_every_form(form: str, tmp_path: Path) -> None:
    """With a model that has never seen it, so the grammar alone makes it."""
    (tmp_path / "template").write_text(TEMPLATE, "utf-8")
    short = {**SCHEMA, "properties": {**SCHEMA["properties"], "text": {"type": "string", "maxLength": 8}}}
    short["properties"]["maybe"] = {"type": "null"}
    short["properties"]["list"] = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}
    short["properties"]["inner"] = {"enum": [1]}
    tools = [{"type": "function", "function": {"name": name, "parameters": short}} for name in ("add", "take")]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 400, "temperature": 1}
    with running("--chat-template", str(tmp_path / "template"), "--tool-parser", form) as server:
        named = {"type": "function", "function": {"name": "take"}}
        for seed, choice in ((1, "required"), (2, named)):
            body = {**asked, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
            answer = server.post("/v1/chat/completions", body).json()
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            jsonschema.validate(json.loads(call["function"]["arguments"]), short)
            assert call["function"]["name"] in (("take",) if choice is named else ("add", "take"))


@pytest.mark.parametrize("form", ["qwen", "glm", "gemma", "pythonic"])
def test_what_a_text_without_quotes_cannot_be_held_to_is_refused_by_name(form: ToolForm) -> None:
    text = {"type": "string"}
    refused = {
        "'pattern' of a text": {"properties": {"a": {**text, "pattern": "x+"}}},
        "'anyOf' of an object": {"properties": {"a": text, "b": text}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "'a', which has no schema,": {"required": ["a"]},
    }
    for what, schema in refused.items():
        with pytest.raises(UnsupportedParameterError, match=f"{what} cannot be required"):
            calls_grammar(form, {"f": {"type": "object", **schema}}, several=False)
    annotated = {**text, "deprecated": True, "nullable": True, "x-order": 1, "examples": ["a"], "format": "path"}
    assert calls_grammar(form, {"f": {"type": "object", "properties": {"a": annotated}}}, several=False)


@pytest.mark.parametrize("form", ["qwen", "gemma", "pythonic"])
def test_the_length_of_a_text_is_held(form: ToolForm, tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a"]}
    grammar, (_, write, _) = calls_grammar(form, {"f": schema}, several=False), WRITERS[form]
    assert taken(tokenizer, grammar, write("f", {"a": "ab"}))
    assert not taken(tokenizer, grammar, write("f", {"a": "abc"}))


@pytest.mark.parametrize("form", ["qwen", "glm", "gemma", "pythonic", "deepseek", "hermes"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": ["a"]},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": {"a": {"type": 5}}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": "x"}}},
        {"type": "object", "properties": {"a": {"anyOf": 5}}},
        {"type": "object", "properties": {"a": {"enum": 5}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}, "minItems": "x"}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": 5},
    ],
)
def test_a_malformed_schema_is_left_to_the_library_which_refuses_it(form: ToolForm, schema: Any, tokenizer: Any) -> None:
    grammar = calls_grammar(form, {"f": schema}, several=False, template="｜DSML｜" if form == "deepseek" else "")
    matcher = llguidance.LLMatcher(from_tokenizer(tokenizer), llguidance.LLMatcher.grammar_from_lark(grammar))
    assert matcher.is_error(), grammar


@pytest.mark.parametrize("name", ["pythonic", "qwen", "gemma"])
def test_names_may_be_words_of_a_language_or_have_signs(name: str, tokenizer: Any) -> None:
    form, write, _ = WRITERS[name]
    properties = {each: {"type": "string"} for each in ("from", "my-key", "größe")}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    text = write("get-weather", dict.fromkeys(properties, "x"))
    assert taken(tokenizer, calls_grammar(form, {"get-weather": schema}, several=False), text)
    listener = ToolListener(form, schemas={"get-weather": schema}, only_calls=True)
    (call,) = [each for heard in (listener.hear(text), listener.finish()) for each in heard.calls]
    assert json.loads(call["function"]["arguments"]) == dict.fromkeys(properties, "x")


@pytest.mark.parametrize(
    ("form", "template", "name"),
    [
        *(("pythonic", "", "a b"), ("qwen", "", "a>b"), ("glm", "", "größer als"), ("gemma", "", "f{")),
        *(("harmony", "", "a<"), ("deepseek", "", "a b"), ("mistral", "[ARGS]", "a b"), ("gemma", "", "x" * 257)),
    ],
)  # fmt: skip
def test_a_function_whose_calls_could_not_be_heard_is_refused_by_its_name(form: ToolForm, template: str, name: str) -> None:
    prompts: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{{ tools }}" + template))
    tools = [{"type": "function", "function": {"name": each}} for each in ("größer", name)]
    asked = ChatRequest.model_validate({"messages": [], "tools": tools})
    with pytest.raises(UnsupportedParameterError) as error:
        tool_use(asked, prompts, form)
    assert error.value.field == "tools.1.function.name"
    for other in ("hermes", "llama", "mistral"):  # these write it as a text of JSON
        assert tool_use(asked, SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{{ tools }}")), other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "key"), [("pythonic", "a b"), ("pythonic", "a=b"), ("qwen", "a>b"), ("gemma", "xml:lang")]
)
def test_a_name_that_could_not_be_heard_is_refused(form: ToolForm, key: str) -> None:
    schema = {"type": "object", "properties": {key: {"type": "string"}}}
    with pytest.raises(UnsupportedParameterError, match="name"):
        calls_grammar(form, {"f": schema}, several=False)


OBJECTS: list[dict[str, Any]] = [
    {},
    {"z": [1, "a", {}], "size": "two words"},
    {"a": {"b": None, "c d": {"e": [True, 0.5]}}, "my-key": False},
]


@pytest.mark.parametrize("name", WRITERS)
def test_an_object_of_which_nothing_is_said_may_be_any(name: str, tokenizer: Any) -> None:
    form, write, template = WRITERS[name]
    inner = {"type": "object", "properties": {"z": {"type": "object"}, "of": {}}, "additionalProperties": False}
    schemas = {"any": {"type": "object"}, "inner": inner, "none": {**inner, "properties": {}}}
    grammar = calls_grammar(form, schemas, several=False, template=template)
    inside = [{"z": each, "of": value} for each, value in zip(OBJECTS, (["x"], "two\nwords", 3), strict=True)]
    for function, arguments in (*(("any", each) for each in OBJECTS), *(("inner", each) for each in inside), ("none", {})):
        text = write(function, arguments)
        assert taken(tokenizer, grammar, text), text
        listener = ToolListener(form, schemas=schemas, only_calls=True)
        (call,) = [each for heard in (listener.hear(text), listener.finish()) for each in heard.calls]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (function, arguments)
    assert not taken(tokenizer, grammar, write("none", {"z": 1}))


@pytest.mark.parametrize("name", WRITERS)
def test_members_that_no_schema_names_have_the_values_that_are_asked_of_them(name: str, tokenizer: Any) -> None:
    form, write, template = WRITERS[name]
    for kind, good, bad in (("string", "5", None), ("integer", 5, "x")):
        schema = {"type": "object", "additionalProperties": {"type": kind}}
        grammar = calls_grammar(form, {"f": schema}, several=False, template=template)
        text = write("f", {"a": good, "b": good})
        assert taken(tokenizer, grammar, text), text
        listener = ToolListener(form, schemas={"f": schema}, only_calls=True)
        (call,) = [each for heard in (listener.hear(text), listener.finish()) for each in heard.calls]
        assert json.loads(call["function"]["arguments"]) == {"a": good, "b": good}
        assert bad is None or not taken(tokenizer, grammar, write("f", {"a": bad}))
