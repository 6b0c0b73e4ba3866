"""What a request of the Messages API is as a chat, and the pings of its streams, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from outrider.errors import InputError
from outrider.server.chat import SystemPrompts, conversation
from outrider.server.messages import CountRequest, MessagesRequest, as_chat
from outrider.server.replicas.routing import beginnings
from outrider.server.schemas import ChatRequest
from outrider.server.streams import with_pauses

USER = {"role": "user", "content": "x"}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [None, 1]}}


def chat(*messages: Any, template: str = "", **fields: Any) -> ChatRequest:
    body = {"max_tokens": 1, "messages": list(messages), **fields}
    return as_chat(MessagesRequest.read(json.dumps(body).encode()), template)


def told(*messages: Any, **fields: Any) -> list[tuple[Any, ...]]:
    """The roles and texts of the chat, with what else is in them."""
    found = conversation(chat(*messages, **fields).messages)
    return [(each.pop("role"), "|".join(part["text"] for part in each.pop("content")), *each.items()) for each in found]


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": content, **more}


def test_a_system_prompt_comes_first_without_what_is_for_anthropic() -> None:
    assert told(USER, system="be kind") == [("system", "be kind"), ("user", "x")]
    billing = text("x-anthropic-billing-header: cc_version=2.1; cch=5f")
    assert told(USER, system=[billing, text("be"), text("kind")]) == [("system", "be|kind"), ("user", "x")]
    lines = f"{billing['text']}\nbe\nkind"
    assert told(USER, system=lines) == told(USER, system=[text(lines)]) == [("system", "be\nkind"), ("user", "x")]
    assert told(USER, system=[billing]) == told(USER, system="") == told(USER) == [("user", "x")]
    assert told(USER, {"role": "system", "content": "now"}, USER)[1:] == [("system", "now"), ("user", "x")]


LINES = [f"{place}: this line of a long system prompt stays the same" for place in range(60)]


def dated(date: str, *, at: int = 20) -> str:
    return "\n".join([*LINES[:at], f"Today is {date}.", *LINES[at:]])


def test_a_system_prompt_that_changes_within_is_told_once() -> None:
    watched, text = SystemPrompts(), dated("Tuesday")
    assert watched.change(chat(USER, system=dated("Monday"))) is None
    behind = len(text) - text.index("Tuesday")
    assert watched.change(chat(USER, system=text)) == {"line": 21, "characters_behind": behind}
    assert watched.change(chat(USER, system=dated("Sunday"))) is None


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (dated("Monday"), dated("Monday")),
        (dated("Monday"), dated("Tuesday", at=60)),  # the cache has nearly all
        (dated("Monday"), "\n".join(line.upper() for line in LINES)),  # another agent
        ("short, Monday", "short, Tuesday"),
        (dated("Monday"), None),
    ],
)
def test_other_system_prompts_are_not_told(first: str, then: str | None) -> None:
    watched = SystemPrompts()
    assert watched.change(chat(USER, system=first)) is watched.change(chat(USER, system=then)) is None


def test_turns_of_one_role_are_one() -> None:
    model = {"role": "assistant", "content": [text("a")]}
    assert told(USER, USER, model, model, USER) == [("user", "x|x"), ("assistant", "a|a"), ("user", "x")]


def test_calls_and_their_results_have_messages_of_their_own() -> None:
    model = {"role": "assistant", "content": [text("I call"), CALL]}
    function = {"name": "f", "arguments": {"x": [None, 1]}}
    found = told(USER, model, {"role": "user", "content": [result([text("4"), text("5")]), text("so?")]})
    assert found[1] == ("assistant", "I call", ("tool_calls", [{"id": "a", "type": "function", "function": function}]))
    assert found[2:] == [("tool", "4|5", ("name", "f"), ("tool_call_id", "a")), ("user", "so?")]
    assert told({"role": "user", "content": [result("4")]}) == [("tool", "4", ("tool_call_id", "a"))]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "Error"), ("gone", "Error: gone"), ([text("ERROR 5")], "ERROR 5"), ([], "Error")]
)
def test_a_result_that_is_an_error_says_so(content: Any, said: str) -> None:
    ((_, found, _),) = told({"role": "user", "content": [result(content, is_error=True)]})
    assert found == said
    ((_, found, _),) = told({"role": "user", "content": [result("gone", is_error=False)]})
    assert found == "gone"


def test_thoughts_go_back_and_those_that_nobody_can_read_do_not() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "..."}
    found = told(USER, {"role": "assistant", "content": [thought, hidden, thought, text("5")]}, USER)
    assert found[1] == ("assistant", "5", ("reasoning_content", "hm\nhm"))
    assert chat(USER, {"role": "assistant", "content": [hidden]}, USER).ignored == ("messages.content.data",)


def test_whether_to_think_becomes_the_variables_that_the_template_reads() -> None:
    for wish, thinks in (("enabled", True), ("adaptive", True), ("disabled", False)):
        thinking = {"type": wish, "budget_tokens": 1024}
        found = chat(USER, thinking=thinking, template="{{ enable_thinking }}")
        assert (found.chat_template_kwargs, found.ignored) == ({"enable_thinking": thinks}, ("thinking.budget_tokens",))
        assert chat(USER, thinking=thinking, template="{{ thinking }}").chat_template_kwargs == {"thinking": thinks}
        found = chat(USER, thinking=thinking, template="{{ other }}")
        assert (found.chat_template_kwargs, found.ignored) == (None, ("thinking",))
    given = {"chat_template_kwargs": {"enable_thinking": True, "a": 1}, "thinking": {"type": "disabled"}}
    assert chat(USER, **given, template="{{ enable_thinking }}").chat_template_kwargs == given["chat_template_kwargs"]
    effort = {"output_config": {"effort": "low"}}
    assert chat(USER, **effort, template="{{ reasoning_effort }}").reasoning_effort == "low"
    assert chat(USER, **effort).ignored == ("output_config.effort",)


def test_tools_and_choices_are_those_of_a_chat() -> None:
    tools = [{"type": "custom", "name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    named = {"type": "function", "function": {"name": "f"}}
    for kind, choice in (("auto", "auto"), ("any", "required"), ("tool", named), ("none", "none")):
        for alone in (True, False, None):
            given = {"type": kind, "name": "f", "disable_parallel_tool_use": alone}
            found = chat(USER, tools=tools, tool_choice=given)
            assert (found.tool_choice, found.parallel_tool_calls) == (choice, not alone)
    assert [tool.model_dump() for tool in found.tools or ()] == [{"type": "function", "function": function}]
    assert chat(USER, tool_choice={"type": "auto"}).tool_choice is None


def test_fields_of_chats_may_stand_beside_those_of_the_api() -> None:
    more = {"seed": 7, "speculation": "off", "store": False, "top_k": 5, "stop_sequences": ["a"]}
    found = chat(USER, **more, n=3, trace=True)
    assert (found.seed, found.speculation, found.store, found.top_k, found.stop) == (7, "off", False, 5, ["a"])
    assert (found.n, found.trace, found.ignored) == (None, None, ("n", "trace"))


def test_what_is_deep_or_long_is_read_or_refused() -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    call = {**CALL, "input": {"x": deep}}
    (told_call,) = conversation(chat({"role": "assistant", "content": [call]}, USER).messages)[0]["tool_calls"]
    assert told_call["function"]["arguments"] == {"x": deep}
    nested: Any = result("x")
    for _ in range(200):
        nested = result([nested])
    with pytest.raises(InputError, match="the result of a tool is text here"):
        chat({"role": "user", "content": [nested]})
    blocks = [text("x", **{f"field{place}": 1}) for place in range(10_000)]
    found = chat({"role": "user", "content": blocks})
    assert len(found.messages[0].content or ()) == 10_000
    assert len(found.ignored) == 50


def test_a_count_asks_for_no_more_than_a_conversation() -> None:
    found = as_chat(CountRequest.read(b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'), "")
    assert (found.stream, found.max_tokens, found.ignored) == (None, None, ("stream",))


def test_the_beginning_of_a_prompt_has_its_system_prompt() -> None:
    bodies = [json.dumps({"system": system * 40, "messages": [USER]}).encode() for system in ("abc ", "xyz ", "abc ")]
    first, second, third = (beginnings(body, None) for body in bodies)
    assert len(first) > 2
    assert first == third
    assert not {*first} & {*second}


def test_pauses_of_a_stream_are_told_and_nothing_is_lost() -> None:
    closed = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            for number in range(3):
                await asyncio.sleep(0.3 if number == 1 else 0)
                yield number
            await asyncio.sleep(3600)
        finally:
            closed.append(True)

    async def read() -> list[int | None]:
        found: list[int | None] = []
        paused = with_pauses(items(), 0.05)
        async for item in paused:
            found.append(item)
            if len(found) > 2 and found[-3:] == [None] * 3 and 2 in found:
                break
        await paused.aclose()
        return found

    found = asyncio.run(asyncio.wait_for(read(), 60))
    assert [item for item in found if item is not None] == [0, 1, 2]
    assert found[:2] == [0, None]
    assert closed == [True]
