"""Calls in the forms of families of models: whole and streamed they are the same, wherever a text is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import UnsupportedParameterError
from outrider.server.tool_forms import FORMS, ToolForm, tool_form
from outrider.server.tools import ToolListener

#: Signs of the forms, as texts and files hold them that models write about.
TRAP = 'a </tool_call> <tool_call> } "] [TOOL_CALLS] <|call|> <｜tool▁call▁end｜> \\" \n</x>'
SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "ok": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"enum": ["1", "2"]},
            "list": {"type": "array"},
            "size": {"type": ["string", "number"]},
        },
    }
}
_BETWEEN = "<｜tool▁calls▁end｜><｜tool▁calls▁begin｜>"
Calls = list[tuple[str, Any]]


def told(
    form: ToolForm, pieces: Any, *, in_parts: bool = True, shown: tuple[str, ...] = (), **how: Any
) -> tuple[str, Calls]:
    """The content of a text and its calls, put together from what a listener tells of pieces."""
    listener = ToolListener(form, in_parts=in_parts, schemas=SCHEMAS, shown=shown, **how)
    found, calls = [*map(listener.hear, pieces), listener.finish()], list[list[str]]()
    for part in (part for each in found for part in each.calls):
        if "id" in part:
            assert part["index"] == len(calls)
            calls.append([part["function"]["name"], ""])
        calls[part["index"]][1] += part["function"]["arguments"]
    assert listener.num_calls == len(calls)
    return "".join(each.content for each in found), [(name, json.loads(arguments)) for name, arguments in calls]


def heard_by(form: ToolForm, text: str) -> list[Any]:
    listener = ToolListener(form, schemas=SCHEMAS)
    return [listener.hear(text), listener.finish()]


def check(form: ToolForm, text: str, want: tuple[str, Calls], **how: Any) -> None:
    """Whole, in two pieces wherever it is cut, and character by character; told whole and in parts."""
    for in_parts in (False, True):
        assert told(form, [text], in_parts=in_parts, **how) == want
        assert told(form, text, in_parts=in_parts, **how) == want
        for cut in range(1, len(text)):
            assert told(form, [text[:cut], text[cut:]], in_parts=in_parts, **how) == want, (in_parts, text[:cut])


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def qwen(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def mistral(name: str, arguments: Any) -> str:
    return f"[TOOL_CALLS] [{json.dumps({'name': name, 'arguments': arguments, 'id': 'abcdefghi'})}]"


def new_mistral(name: str, arguments: Any) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{json.dumps(arguments)}"


def deepseek(name: str, arguments: Any) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def old_deepseek(name: str, arguments: Any) -> str:
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def dsml(name: str, arguments: dict[str, Any]) -> str:
    open_ = "<｜DSML｜parameter"
    values = "".join(
        f'{open_} name="{key}" string="{json.dumps(isinstance(value, str))}">{plain(value)}</｜DSML｜parameter>\n'
        for key, value in arguments.items()
    )
    call = f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'
    return f"<｜DSML｜function_calls>\n{call}</｜DSML｜function_calls>"


def gemma(name: str, arguments: dict[str, Any], quote: str = '<|"|>') -> str:
    values = ",".join(f"{key}:{gemma_value(value, quote)}" for key, value in arguments.items())
    return f"<|tool_call>call:{name}{{{values}}}<tool_call|>"


def function_gemma(name: str, arguments: dict[str, Any]) -> str:
    marks = {"<|tool_call>": "<start_function_call>", "<tool_call|>": "<end_function_call>"}
    text = gemma(name, arguments, "<escape>")
    return text.replace("<|tool_call>", marks["<|tool_call>"]).replace("<tool_call|>", marks["<tool_call|>"])


def harmony(name: str, arguments: Any) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{json.dumps(arguments)}<|call|>"


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{quote}{key}{quote}:{gemma_value(each, quote)}" for key, each in value.items()) + "}"
    return (
        "[" + ",".join(gemma_value(each, quote) for each in value) + "]" if isinstance(value, list) else json.dumps(value)
    )


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


WRITERS: dict[str, tuple[ToolForm, Any]] = {
    "hermes": ("hermes", hermes),
    "qwen": ("qwen", qwen),
    "glm": ("glm", glm),
    "mistral": ("mistral", mistral),
    "new mistral": ("mistral", new_mistral),
    "deepseek": ("deepseek", deepseek),
    "old deepseek": ("deepseek", old_deepseek),
    "deepseek with tags": ("deepseek", dsml),
    "gemma": ("gemma", gemma),
    "function gemma": ("gemma", function_gemma),
    "harmony": ("harmony", harmony),
}
#: Texts may hold the signs of other forms, and their own where they are quoted or stand between lines.
ARGUMENTS: dict[str, Any] = {"text": TRAP.replace("<tool_call|>", ""), "n": 3, "list": ["</x>", {"b": None}], "ok": True}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_call_is_heard_whatever_its_texts_hold(kind: str) -> None:
    form, write = WRITERS[kind]
    check(form, write("add", ARGUMENTS), ("", [("add", ARGUMENTS)]))
    check(form, write("now", {}), ("", [("now", {})]))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_mark_that_is_mentioned_is_text_and_the_call_behind_it_is_heard(kind: str) -> None:
    form, write = WRITERS[kind]
    for mark in FORMS[form].opens:
        said = f"I may write {mark} here, or `{mark}`."
        check(form, f"{said}\n{write('add', {'n': 1})}", (f"{said}\n", [("add", {"n": 1})]))
        check(form, said, (said, []))
        check(form, f"{mark} first", (f"{mark} first", []))
    thoughts = f"<think>\nShall I use {FORMS[form].opens[0]}? Yes.\n</think>\n\n"
    check(form, f"{thoughts}{write('add', {'n': 1})}", (thoughts, [("add", {"n": 1})]))


@pytest.mark.parametrize("kind", WRITERS)
def test_words_stand_before_between_and_behind_calls(kind: str) -> None:
    form, write = WRITERS[kind]
    text = f"One. {write('add', {'n': 1})} Two.\n{write('add', {'n': 2})}\n"
    check(form, text, ("One.  Two.\n", [("add", {"n": 1}), ("add", {"n": 2})]))
    check(form, f"\n\n{write('add', {'n': 1})}\n{write('now', {})}\n", ("", [("add", {"n": 1}), ("now", {})]))
    check(form, text, ("One.  Two.\n", [("add", {"n": 1})]), max_calls=1)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_text_that_ends_within_a_call_tells_no_call_at_once_and_what_there_is_in_parts(kind: str) -> None:
    """And what there is of the call is no text either, since a stream has told it as a call."""
    form, write = WRITERS[kind]
    text = write("add", {"text": "abc", "n": 3})
    for end in range(len(text)):
        listeners = [ToolListener(form, in_parts=in_parts, schemas=SCHEMAS) for in_parts in (False, True)]
        whole, parts = ([each.hear(text[:end]), each.finish()] for each in listeners)
        called = [call for heard in whole for call in heard.calls]
        content = "".join(heard.content for heard in whole)
        if called:
            assert (content, json.loads(called[0]["function"]["arguments"])) == ("", {"text": "abc", "n": 3})
        else:
            is_cut_off = any(heard.calls for heard in parts)
            assert content == "".join(heard.content for heard in parts) == ("" if is_cut_off else text[:end])
            assert [each.is_cut_off for each in listeners] == [is_cut_off] * 2
        assert told(form, text[:end], in_parts=False)[0] == content


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "add"}</tool_call>', "", [("add", {"n": 1})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"n\\": 1}"}</tool_call>', "", [("add", {"n": 1})]),
        ("hermes", '<tool_call>{"id": [1], "name": "add", "arguments": {"n": 1}, "x": 2} </tool_call>.', ".",
         [("add", {"n": 1})]),
        ("hermes", '<tool_call>{"name": "add", "parameters": {}}', "", [("add", {})]),
        ("hermes", '<tool_call>{"name": ..., "arguments": ...}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {...}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": <function-name>}</tool_call>', None, []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None, []),
        ("hermes", f'<tool_call>{hermes("add", {})}', "<tool_call>", [("add", {})]),
        ("hermes", '{"name": "add", "arguments": {"n": 1}}', "", [("add", {"n": 1})]),
        ("hermes", '\n```json\n{"name": "add", "arguments": {"n": 1}}\n```\nDone.', "\nDone.", [("add", {"n": 1})]),
        ("hermes", '```\n{"name": "add", "arguments": {"n": 1}}\n```\n\n```json\n{"name": "add", "arguments": {}}\n```', "",
         [("add", {"n": 1}), ("add", {})]),
        ("hermes", '{"name": "add", "arguments": {"n": 1}}\n{"name": "add", "arguments": {}} and {"n": 2}', ' and {"n": 2}',
         [("add", {"n": 1}), ("add", {})]),
        ("hermes", '{"name": "add", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}</tool_call>', "",
         [("add", {}), ("now", {})]),
        ("hermes", '{"name": "nobody", "arguments": {"n": 1}}', None, []),
        ("hermes", '{"n": 1, "name": "add", "arguments": {"n": 1}}', None, []),
        ("hermes", '```json\n{"n": 1}\n```', None, []),
        ("hermes", '```python\nadd(1)\n```', None, []),
        ("hermes", 'So: {"name": "add", "arguments": {"n": 1}}', None, []),
        ("hermes", '{"name": "add"', None, []),
        ("qwen", "<function=now>\n</function>", "", [("now", {})]),
        ("qwen", "<function=f>\n<parameter=a>\nx\n", None, []),
        ("qwen", "<tool_call>\n<function=add>\n<parameter=text>\n\n x \n\n</parameter>\n</function>\n</tool_call>", "",
         [("add", {"text": "\n x \n"})]),
        ("qwen", "<tool_call>\n<function=f>{}</function>", None, []),
        ("qwen", qwen("add", {"text": "5", "n": 5, "level": "1", "maybe": None, "size": 2}), "",
         [("add", {"text": "5", "n": 5, "level": "1", "maybe": None, "size": 2})]),
        ("qwen", qwen("add", {"ok": "True", "maybe": "so", "other": "x"}), "",
         [("add", {"ok": True, "maybe": "so", "other": "x"})]),
        ("glm", "<tool_call>now</tool_call>", "", [("now", {})]),
        ("glm", "<tool_call>add<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", "", [("add", {"n": 1})]),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"n": 1}}, {"name": "now", "arguments": {}}]', "",
         [("add", {"n": 1}), ("now", {})]),
        ("mistral", '[TOOL_CALLS]add{"n": 1}[TOOL_CALLS]now{}', "", [("add", {"n": 1}), ("now", {})]),
        ("mistral", "[TOOL_CALLS][1, 2]", None, []),
        ("deepseek", (deepseek("add", {"n": 1}) + deepseek("now", {})).replace(_BETWEEN, "\n"), "",
         [("add", {"n": 1}), ("now", {})]),
        ("gemma", "<|tool_call>call:add{text:<|\"|>a,}<|\"|>,list:[],n:-2,ok:false}<tool_call|>", "",
         [("add", {"text": "a,}", "list": [], "n": -2, "ok": False})]),
        ("gemma", "<|tool_call>call:add{n}<tool_call|>", None, []),
        ("harmony", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"n": 1}<|call|>', "",
         [("add", {"n": 1})]),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"n": 1}', "", [("add", {"n": 1})]),
        ("harmony", "<|channel|>final<|message|>to=functions.add", "to=functions.add", []),
        ("harmony", "<|channel|>later<|message|>to=functions.add", None, []),
        ("harmony", "<|channel|>final\n<|message|>x", None, []),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"n": 1}}; {"name": "now", "parameters": {}}', "",
         [("add", {"n": 1}), ("now", {})]),
        ("llama", '{"type": "function", "name": "add", "parameters": {"n": 1}}', "", [("add", {"n": 1})]),
        ("llama", '{"name": "add", "parameters": {"n": 1}} is how.', None, []),
        ("llama", 'See {"name": "add", "parameters": {"n": 1}}', None, []),
        ("pythonic", "[add(text='a)]', n=-1, list=[1, {'b': None}]), now()]", "",
         [("add", {"text": "a)]", "n": -1, "list": [1, {"b": None}]}), ("now", {})]),
        ("pythonic", '<|python_start|>[a.add(ok=True, text="\\"x")]<|python_end|>', "",
         [("a.add", {"ok": True, "text": '"x'})]),
        ("pythonic", "[add(n=1)] is a call", None, []),
        ("pythonic", '[get-weather(from="x", my-key=[true, null],), f.g()]', "",
         [("get-weather", {"from": "x", "my-key": [True, None]}), ("f.g", {})]),
        ("pythonic", "[1, 2, 3]", None, []),
        ("pythonic", "[add(n=open('x'))]", None, []),
        ("pythonic", "[add(1)]", None, []),
    ],
)  # fmt: skip
def test_what_else_models_write(form: ToolForm, text: str, content: str | None, calls: Calls) -> None:
    check(form, text, (text if content is None else content, calls))


def test_special_tokens_are_read_and_not_shown() -> None:
    check("harmony", f"{THOUGHT}{harmony('add', {'n': 1})}", ("", [("add", {"n": 1})]), shown=HARMONY)
    check("harmony", f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>5", ("5", []), shown=HARMONY)
    check("mistral", f"So:{mistral('add', {'n': 1})}", ("So:", [("add", {"n": 1})]), shown=("[TOOL_CALLS]",))
    check("mistral", "a [TOOL_CALLS] b", ("a  b", []), shown=("[TOOL_CALLS]",))
    check("llama", "a <|python_tag|> b", ("a  b", []), shown=("<|python_tag|>",))


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
THOUGHT = "<|channel|>analysis<|message|>hm <|end|>"
_FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        (f"{THOUGHT}{_FINAL}5\n", "hm ", "5\n"),
        (f"{THOUGHT}{THOUGHT}{_FINAL}5<|end|>", "hm \nhm ", "5"),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{THOUGHT}{_FINAL}5", "hm ", "I look.\n5"),
        (f"{THOUGHT}<|start|>assistant to=browser.search<|channel|>commentary <|constrain|>json<|message|>{{}}<|call|>",
         "hm \n{}", ""),
        (f"{THOUGHT}<|start|>assistant<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "hm \n1 + 1", ""),
        (f"{THOUGHT}<|start|>assistant<|channel|>final <|constrain|>json<|message|>{{}}", "hm ", "{}"),
        ("<|start|>assistant<|message|>5", "", "5"),
        (f"{THOUGHT}<|start|>assistant<|channel|>fi", "hm ", ""),
        (f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>js", "hm ", ""),
        ("<|channel|>analysis<|message|>\n what", "\n what", ""),
        ("5", "", "5"),
    ],
)  # fmt: skip
def test_a_message_says_for_whom_it_is(text: str, thoughts: str, content: str) -> None:
    """However the text is cut, but within its marks, which are tokens."""
    tokens = re.findall(r"<\|\w+\|>|.", text, re.DOTALL)
    for cut in range(len(tokens) + 1):
        listener = ToolListener("harmony", shown=HARMONY, in_parts=True, max_calls=0)
        pieces = ("".join(tokens[:cut]), "".join(tokens[cut:]))
        heard = [*map(listener.hear, pieces), listener.finish()]
        assert "".join(each.thoughts for each in heard) == thoughts, pieces
        assert "".join(each.content for each in heard) == content, pieces
        assert not any(each.calls for each in heard)


_PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {',
        '"a": "}"}}',
        "\n",
        " ",
        "x",
        "<",
        "[TOOL_CALLS]",
        "[",
        "]",
    ),
    *(
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<arg_key>a</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *("<|tool_call>call:f{", 'a:<|"|>', '<|"|>', "}", "<tool_call|>", "f(", "a=1", ")", ";", "<|channel|>", "<|message|>"),
    *(
        "<|start|>assistant",
        "analysis",
        "final",
        "<|end|>",
        "to=functions.f",
        "<｜tool▁call▁begin｜>f",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "{}",
        "f",
    ),
]


@settings(max_examples=300)
@given(st.sampled_from(sorted(FORMS)), st.lists(st.sampled_from(_PARTS), max_size=12), st.booleans(), st.data())
def test_how_any_text_is_cut_changes_nothing(form: ToolForm, parts: list[str], in_parts: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def raw(pieces: list[str]) -> Any:
        listener = ToolListener(form, in_parts=in_parts)
        found, calls = [*map(listener.hear, pieces), listener.finish()], list[str]()
        for part in (part for each in found for part in each.calls):
            calls += [part["function"]["name"]] if "id" in part else []
            calls[-1] += part["function"]["arguments"]
        return "".join(each.content for each in found), "".join(each.thoughts for each in found), calls

    assert raw(pieces) == raw([text])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>\\n{\\\"name\\\": <function-name>, \\\"arguments\\\": <args-json-object>}\\n</tool_call>", "hermes"),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", "qwen"),
        ('{{- "[TOOL_CALLS] [" }}{{ tool_call.function|tojson }}', "mistral"),
        ("'<|tool_call>call:' + function['name'] + '{'", "gemma"),
        ("<start_function_call>call:", "gemma"),
        ("<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>", "harmony"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name']", "deepseek"),
        ('dsml_token = "｜DSML｜"', "deepseek"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm"),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]", "pythonic"),
        ("<|python_tag|>", "llama"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama"),
    ],
)  # fmt: skip
def test_the_chat_template_tells_the_form(template: str, form: ToolForm) -> None:
    assert tool_form("{% if tools %}" + template) == form
    for none in (None, "", template, "{% if tools %}<functions>"):
        with pytest.raises(UnsupportedParameterError):
            tool_form(none)


@pytest.mark.parametrize(
    "template",
    [
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": name, "parameters": {}}]<|END_ACTION|>',  # Command R
        "'<|tool|>' + (tool['function']['parameters'] | tojson) + '<|/tool|>'",
        "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
        'within <tool_call> tags: <tool_calls>[{"name": <function-name-1>, "arguments": <args-dict-1>}]</tool_calls>',
    ],
)
def test_a_form_that_only_looks_like_one_that_is_known_is_refused(template: str) -> None:
    with pytest.raises(UnsupportedParameterError, match="--tool-parser"):
        tool_form("{% if tools %}" + template)


def test_values_are_those_of_a_schema_that_refers_to_definitions() -> None:
    level = {"Level": {"enum": ["1", "2"]}, "Size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "string"}]}}
    properties = {"level": {"$ref": "#/$defs/Level"}, "size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]}}
    listener = ToolListener("qwen", schemas={"f": {"properties": properties, "$defs": level}})
    (call,) = [*listener.hear(qwen("f", {"level": "1", "size": "2"})).calls, *listener.finish().calls]
    assert json.loads(call["function"]["arguments"]) == {"level": "1", "size": "2"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["a"]},
        {"properties": {"a": {"type": [5, ["string"]]}}},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"anyOf": 5, "enum": 6}}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_malformed_schema_is_passed_over_where_calls_are_only_heard(schema: dict[str, Any]) -> None:
    listener = ToolListener("glm", schemas={"f": schema})
    (call,) = [*listener.hear(glm("f", {"a": 1})).calls, *listener.finish().calls]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_no_numbers(number: str) -> None:
    for form, text in (("qwen", qwen("add", {"n": number})), ("gemma", f"<|tool_call>call:add{{n:{number}}}<tool_call|>")):
        (call,) = [each for heard in heard_by(form, text) for each in heard.calls]
        found = json.loads(call["function"]["arguments"])
        assert found == {"n": number}, "it stays a text"
    check("pythonic", f"[add(n={number})]", (f"[add(n={number})]", []))
