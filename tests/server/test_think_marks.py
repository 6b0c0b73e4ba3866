"""Thoughts between marks before an answer: how a text is cut changes nothing, and all three APIs tell them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.thoughts import ThoughtUse
from tests.server.running import TEMPLATE, Server, running

PROMPT = [{"role": "user", "content": "def f(x):"}]


def heard(parts: list[str], *, is_begun: bool = False) -> tuple[str, str]:
    listener = ThoughtUse("<think>", "</think>", is_begun, {}).listener()
    told = [listener.hear(part, last=place == len(parts) - 1) for place, part in enumerate(parts)]
    return "".join(thoughts for thoughts, _ in told), "".join(text for _, text in told)


@pytest.mark.parametrize(
    ("text", "is_begun", "thoughts", "answer"),
    [
        ("<think>\nhm, 5\n</think>\n\nIt is 5.\n", False, "hm, 5", "It is 5.\n"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("hm\n</think>\nIt is", True, "hm", "It is"),
        ("never over </thi", True, "never over </thi", ""),
        ("<think></think>\n\nok", False, "", "ok"),
        (" ok <think>no</think>", False, "", " ok <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("a < b </think> <think>c</think>", True, "a < b", "<think>c</think>"),
        ("", False, "", ""),
        ("  ", False, "", "  "),
    ],
)
def test_thoughts_stand_before_the_answer(text: str, is_begun: bool, thoughts: str, answer: str) -> None:
    assert heard([text], is_begun=is_begun) == (thoughts, answer)
    assert heard([*text, ""], is_begun=is_begun) == (thoughts, answer)


PIECES = ("<think>", "</think>", "<th", "ink>", "</", " ", "\n", "a", "<")


@given(st.lists(st.sampled_from(PIECES)), st.data(), st.booleans())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str], data: st.DataObject, is_begun: bool) -> None:
    text = "".join(pieces)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    cut = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert heard(cut, is_begun=is_begun) == heard([text], is_begun=is_begun)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("server")
    (folder / "template.jinja").write_text(TEMPLATE + "{% if begins %}<think>\n{% endif %}{# </think> #}", "utf-8")
    with running("--method", "draft_model", "--chat-template", str(folder / "template.jinja")) as server:
        yield server


THOUGHT = {"guided_choice": ["<think>\nhm, 5\n</think>\n\nIt is 5."], "temperature": 0, "max_tokens": 60}


def test_a_chat_tells_thoughts_apart_whole_and_streamed(server: Server) -> None:
    message = server.post("/v1/chat/completions", {"messages": PROMPT, **THOUGHT}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, 5", "It is 5.")
    with server.stream("/v1/chat/completions", {"messages": PROMPT, **THOUGHT, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.read().decode().split("\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if line != "[DONE]"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, 5"
    assert "".join(delta.get("content", "") for delta in deltas) == "It is 5."


def test_a_prompt_that_ends_within_thoughts_begins_with_them(server: Server) -> None:
    body = {"messages": PROMPT, "temperature": 0, "max_tokens": 12, "chat_template_kwargs": {"begins": True}}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    free = {**body, "guided_choice": ["It is 5."]}  # a structure leaves no room for the end of thoughts
    message = server.post("/v1/chat/completions", free).json()["choices"][0]["message"]
    assert message["content"] == "It is 5."
    assert "reasoning_content" not in message


def test_other_apis_have_thoughts_in_their_own_form(server: Server) -> None:
    asked = {"guided_choice": THOUGHT["guided_choice"]}
    client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
    found = client.messages.create(model="outrider-embedded", messages=PROMPT, max_tokens=60, extra_body=asked)  # type: ignore[arg-type]
    assert [block.type for block in found.content] == ["thinking", "text"]
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    response = other.responses.create(model="outrider-embedded", input="x", max_output_tokens=60, extra_body=asked)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "It is 5."
