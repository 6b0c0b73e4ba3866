"""Thoughts between marks before an answer: how a text is cut changes nothing, and all three APIs tell them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidParameterError
from outrider.server.settings import ServerSettings
from outrider.server.thoughts import ThoughtUse, thought_use
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


class Ends:
    """A tokenizer that knows how a prompt ends, and nothing else."""

    def __init__(self, end: str) -> None:
        self.end = end

    def decode(self, tokens: list[int]) -> str:
        return self.end


@pytest.mark.parametrize(
    ("template", "form", "begin"),
    [
        ("", None, None),
        ("{# </think> #}", None, "<think>"),
        ("", "deepseek_r1", "<think>"),
        ("", "qwen3", "<think>"),
        ("{# </think> #}", "mistral", "[THINK]"),
        ("{# [/THINK] #}", None, "[THINK]"),
        ("{# </think> #}", "none", None),
        ("{# </think> #}", "gpt_oss", None),
    ],
)
def test_a_parser_says_more_than_the_template(template: str, form: Any, begin: str | None) -> None:
    found = thought_use(template, (1,), Ends(f"{begin}\n"), is_free=True, form=form)
    assert (None if found is None else found.begin) == begin
    if found is not None:
        assert (found.is_begun, found.is_over) == (True, False)
        closed = thought_use(template, (1,), Ends(f"{found.end}\n\n"), is_free=True, form=form)
        assert closed is not None
        assert (closed.is_begun, closed.is_over) == (False, True)


def test_a_parser_of_another_name_is_answered_with_the_list() -> None:
    with pytest.raises(InvalidParameterError, match=r"deepseek, deepseek_r1, .*, none, openai_gptoss, qwen3"):
        ServerSettings(model_name="x", reasoning_parser="r1")  # type: ignore[arg-type]


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
