"""One conversation makes one prompt: in a request to the server, in LLM.chat, and in data of trainings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import InputError, InvalidPromptError
from outrider.lab.train.collect import encode_prompts, read_sources
from outrider.server.chat import encode, ignored_fields, quotable
from outrider.server.requests import AllowedMethods, JobMaker
from outrider.server.schemas import ChatRequest
from outrider.server.settings import ServerSettings
from outrider.server.tool_forms import ToolForm
from outrider.server.tools import ToolUse

#: Templates that read messages as those of families do, each with a macro less.
CHATML = """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}{% endfor %}"""
QWEN = CHATML.replace(
    "{%- for m in messages %}", "{%- for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}"
)
THINKING = CHATML.replace("{{ m.content }}", "[{{ m.reasoning_content }}]{{ m.content }}")
LLAMA = """{% for m in messages %}<{{ m['role'] }}>{% if 'tool_calls' in m %}{% set call = m.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% else %}{{ m['content'] | trim }}{% endif -%}
{% endfor %}"""
MISTRAL = """{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]
{%- else %}[{{ m.role }}] {{ m.content }}{% endif %}{% endfor %}"""
GLM = """{% for m in messages %}<|{{ m.role }}|>{% for call in m.tool_calls or [] %}{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>
{{- value if value is string else value | tojson }}{% endfor %}{% endfor %}{{ m.content }}{% endfor %}"""
DEEPSEEK = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}
{{- '<sep>' + call['function']['name'] + ' ' + call['function']['arguments'] + '<end>' }}{% endfor %}{% endfor %}"""
HARMONY = """{% for m in messages %}
{%- if m.role == 'developer' or m.role == "system" %}{% if loop.first %}<|start|>developer{{ m.content }}{% endif %}
{%- else %}<|start|>{{ m.role }}{% if m.thinking %}<analysis>{{ m.thinking }}{% endif %}
{{- m.content }}{% endif %}{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "thinking": THINKING,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
}

USER = {"role": "user", "content": "go"}
TOOLS = [{"function": {"parameters": {"type": "object"}, "description": "adds", "name": "add"}, "type": "function"}]


def call_of(arguments: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


ANSWER = {"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_id": "call_1"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "texts": [{"role": "system", "content": "be"}, USER],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]}
    ],
    "call": [USER, call_of('{"a": {"b": [1, "x"]}}'), ANSWER, USER],
    "call without arguments": [USER, call_of(""), ANSWER, USER],
    "developer": [{"role": "developer", "content": "be"}, USER],
    "thoughts": [USER, {"role": "assistant", "content": "so", "reasoning_content": "hm", "refusal": None}, USER],
    "thoughts of others": [USER, {"role": "assistant", "content": "so", "reasoning": "hm", "annotations": []}, USER],
    "blocks": [USER, {"role": "assistant", "content": "so", "thinking_blocks": [{"type": "t", "thinking": "hm"}]}, USER],
    "fields of others": [{"role": "user", "content": "go", "x_id": 3, "cache_control": {"type": "ephemeral"}}],
}


@pytest.fixture
def write(llm: LLM, template: str, tmp_path: Path) -> Iterator[Any]:
    """What a template makes of a conversation in the three ways; they make the same."""
    tokenizer: Any = llm.tokenizer

    def written(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
        tokenizer.chat_template = source
        asked = ChatRequest.read(json.dumps({"messages": messages, **more}).encode())
        by_server = encode(asked, llm.prompts)
        lines = tmp_path / "log.jsonl"
        lines.write_text(json.dumps({"messages": messages, **more}) + "\n")
        longest = max((prompt.token_ids for prompt in encode_prompts(read_sources(lines), llm.prompts, 64)), key=len)
        assert tuple(llm.chat_prompt(messages, **more)) == by_server == longest
        text: str = tokenizer.decode(by_server)
        return text

    yield written
    tokenizer.chat_template = template


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_is_one_prompt_in_all_three_ways(write: Any, source: str, kind: str) -> None:
    text = write(source, CONVERSATIONS[kind], tools=TOOLS)
    assert "{'" not in text, "an object is shown as Python shows it"
    assert '\\"' not in text, "arguments were encoded twice"
    if kind == "developer":
        assert "be" in text


def test_contents_arguments_and_tools_have_the_forms_that_templates_know(write: Any) -> None:
    assert write(CHATML, CONVERSATIONS["parts"]) == "<user>a\nb"
    called = '<user>go<assistant><tool_call>add{"a": {"b": [1, "x"]}}</tool_call><tool>7<user>go'
    assert write(CHATML, CONVERSATIONS["call"]) == called
    assert write(CHATML, [USER, call_of({"a": {"b": [1, "x"]}}), ANSWER, USER]) == called
    assert "add{}" in write(CHATML, CONVERSATIONS["call without arguments"])
    joined = '<user>go<assistant><sep>add {"a": {"b": [1, "x"]}}<end><tool>7<user>go'
    assert write(DEEPSEEK, CONVERSATIONS["call"]) == joined
    described = '{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}'
    assert write(CHATML, [USER], tools=TOOLS) == f"<tools>{described}</tools><user>go"


@pytest.mark.parametrize("kind", ["thoughts", "thoughts of others", "blocks"])
def test_thoughts_reach_the_templates_that_read_them(write: Any, kind: str) -> None:
    assert "[hm]so" in write(THINKING, CONVERSATIONS[kind])
    assert "<analysis>hmso" in write(HARMONY, CONVERSATIONS[kind])
    assert "hm" not in write(CHATML, CONVERSATIONS[kind])


def test_what_a_developer_says_is_in_the_prompt_or_refused(write: Any) -> None:
    developer = {"role": "developer", "content": "be"}
    assert write(QWEN, [developer, USER]) == "<system>be<user>go"
    assert write(HARMONY, [developer, USER]).startswith("<|start|>developerbe")
    with pytest.raises(InvalidPromptError) as caught:
        write(HARMONY, [USER, developer])
    assert (caught.value.field, caught.value.value) == ("messages.1.role", "developer")
    assert "leaves out" in caught.value.problem


@pytest.mark.parametrize("arguments", ["null", "[1]", '"x"', "{", "x"])
def test_arguments_that_are_no_object_are_refused(write: Any, llm: LLM, arguments: str) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        write(CHATML, [USER, call_of(arguments), ANSWER])
    assert caught.value.field == "messages.1.tool_calls.0.function.arguments"
    with pytest.raises(InvalidPromptError):
        llm.chat_prompt([USER, call_of(arguments), ANSWER])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "assistant", "tool_calls": [{"function": 3}]}], "messages.0.tool_calls.0"),
    ],
)
def test_what_is_no_message_is_refused_in_python_too(
    llm: LLM, write: Any, messages: list[dict[str, Any]], field: str
) -> None:
    with pytest.raises(InputError) as caught:
        llm.chat_prompt(messages)
    assert caught.value.field == field
    for tools in ("add", [{"name": 3}]):
        with pytest.raises(InputError, match="tools"):
            llm.chat_prompt([USER], tools=tools)  # type: ignore[arg-type]


def test_fields_that_nobody_reads_are_told(llm: LLM, write: Any) -> None:
    messages = [
        {"role": "user", "contnt": "x", "x\r\ny: z": 1, "cache_control": {}},
        {"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}], "reasoning_details": [1], "x_id": None},
    ]
    asked = ChatRequest.read(json.dumps({"messages": messages, "metadata": {}}).encode())
    llm.tokenizer.chat_template = CHATML  # type: ignore[union-attr]
    told = ("messages.content.txt", "messages.contnt", "messages.reasoning_details", "messages.x??y??z")
    assert ignored_fields(asked, llm.prompts) == ("metadata", *told)
    llm.tokenizer.chat_template = CHATML + "{{ messages[1].reasoning_details[0] }}"  # type: ignore[union-attr]
    assert "messages.reasoning_details" not in ignored_fields(asked, llm.prompts)
    text = llm.tokenizer.decode(encode(asked, llm.prompts))  # type: ignore[union-attr]
    assert text == "<user><user>a1"


def test_fields_without_number_hold_up_nobody(llm: LLM, write: Any) -> None:
    message = {"role": "user", "content": "a", **{f"k{place:070}": 1 for place in range(20_000)}}
    asked = ChatRequest.read(json.dumps({"messages": [message]}).encode())
    llm.tokenizer.chat_template = CHATML  # type: ignore[union-attr]
    began = time.thread_time()
    assert len(ignored_fields(asked, llm.prompts)) == 50
    assert time.thread_time() - began < 0.5, "as long the event loop serves nobody"


def _quoted(messages: list[dict[str, Any]], form: ToolForm | None = "hermes", **more: Any) -> tuple[str, ...]:
    asked = ChatRequest.read(json.dumps({"messages": messages, **more}).encode())
    return quotable(asked, None if form is None else ToolUse(form, {"f": {}}, {}, only_calls=False, max_calls=None))


def test_answers_in_json_may_quote_what_users_and_tools_said() -> None:
    file = 'a = "ä"\n\tb'
    messages = [
        {"role": "system", "content": "be\nshort"},
        {"role": "user", "content": [{"type": "text", "text": "one\nline"}]},
        {"role": "assistant", "content": "x\ny"},
        {"role": "tool", "content": file, "tool_call_id": "a"},
        {"role": "user", "content": "nothing to quote"},
    ]
    assert _quoted(messages) == ('a = \\"ä\\"\\n\\tb', "one\\nline")
    assert json.loads(f'"{_quoted(messages)[0]}"') == file
    assert _quoted(messages, "glm") == (), "texts stand there as they are"
    assert _quoted(messages, None) == (), "nothing says that the answer is JSON"
    assert len(_quoted(messages, None, response_format={"type": "json_object"})) == 2


def test_the_latest_of_much_that_may_be_quoted_is_taken() -> None:
    messages = [{"role": "user", "content": f"{number}\n" + number * 9_998} for number in "123456"]
    found = _quoted(messages)
    assert [text[0] for text in found] == ["6", "5", "4", "3"]
    assert [len(text) for text in found] == [10_001, 10_001, 10_001, 32_768 - 30_003], "as it reads within JSON"


def test_the_engine_gets_what_may_be_quoted(llm: LLM) -> None:
    maker = JobMaker(
        llm.prompts, llm.default_params, 512, AllowedMethods(llm.speculation), ServerSettings(model_name="m"), 512
    )
    for wanted, found in ({"type": "json_object"}, ("a\\nb",)), (None, ()):
        body = {"messages": [{"role": "user", "content": "a\nb"}], "response_format": wanted}
        job = maker.make(ChatRequest.read(json.dumps(body).encode()), None)
        assert job.options()["references"] == found
