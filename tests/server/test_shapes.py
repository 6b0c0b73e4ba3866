"""Parts of the server that need no process: calls of tools, methods that may be named, log probabilities."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ContradictionError, InvalidParameterError, UnsupportedParameterError
from outrider.params import Logprob
from outrider.propose.speculation import PLAIN, SpeculationConfig
from outrider.server.allowed import AllowedMethods
from outrider.server.errors import api_error
from outrider.server.logprobs import CompletionLogprobs, chat_logprobs
from outrider.server.tools import ToolForm, ToolListener, tool_form

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
ADD = ("add", '{"a": 1}')


def heard(form: ToolForm, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """The text for the reader, and the calls as (name, arguments)."""
    listener = ToolListener(form)
    found = [*(listener.hear(piece) for piece in pieces), listener.finish()]
    calls = [call for each in found for call in each.calls]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(each.content for each in found), functions


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", "no call <at all>", "no call <at all>", []),
        ("hermes", HERMES, "", [ADD]),
        ("hermes", f"I add. {HERMES}", "I add. ", [ADD]),
        ("hermes", f"{HERMES}\n{HERMES}", "", [ADD, ADD]),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", [ADD]),
        ("hermes", "<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("hermes", "<tool_call>{", "<tool_call>{", []),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        ("llama", LLAMA, "", [ADD]),
        ("llama", f"<|python_tag|>{LLAMA}", "", [ADD]),
        ("llama", f"{LLAMA}; {LLAMA}", "", [ADD, ADD]),
        ("llama", f"Text. {LLAMA}", f"Text. {LLAMA}", []),
        ("llama", f"{LLAMA} and text", f"{LLAMA} and text", []),
        ("llama", '{"a": 1}', '{"a": 1}', []),
        ("llama", "<|python", "<|python", []),
        ("llama", "{" * 5000, "{" * 5000, []),
    ],
)
def test_calls_are_taken_out_of_the_text(form: ToolForm, text: str, content: str, calls: list[Any]) -> None:
    assert heard(form, text) == (content, calls)
    assert heard(form, *text) == (content, calls), "character by character"


@given(st.lists(st.sampled_from(["<", "<tool_call>", "</tool_call>", '{"name": "f"}', "x", " "]), max_size=8), st.data())
def test_how_a_text_is_cut_changes_nothing(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert heard("hermes", *pieces)[1] == heard("hermes", text)[1]
    assert "".join(heard("hermes", *pieces)[0].split()) == "".join(heard("hermes", text)[0].split())


def test_the_chat_template_tells_the_form() -> None:
    assert tool_form('{% if tools %}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}') == "hermes"
    assert tool_form('{% if tools %}<tool_call>\\n{\\"name\\": x, \\"arguments\\": y}{% endif %}') == "hermes"
    assert tool_form('{% if tools %}{"name": function name, "parameters": ...}<|python_tag|>{% endif %}') == "llama"
    for template in (None, "{{ messages }}", "{% if tools %}<functions>{{ tools }}{% endif %}"):
        with pytest.raises(UnsupportedParameterError):
            tool_form(template)


def test_a_request_names_what_the_server_was_started_with() -> None:
    usual = SpeculationConfig.of({"method": "draft_model", "model": "/secret/draft", "num_draft_tokens": 3})
    allowed = AllowedMethods(usual, [SpeculationConfig.of("suffix")])
    assert allowed.names == ("off", "draft_model", "prediction", "suffix")
    assert allowed.of(None, predicted=False) == usual
    assert allowed.of("off", predicted=False) == PLAIN == allowed.of({"method": "none"}, predicted=False)
    assert allowed.of({"num_draft_tokens": 7}, predicted=False).method == usual.method
    assert allowed.of({"method": "suffix", "num_draft_tokens": 7}, predicted=False).num_draft_tokens == 7
    assert allowed.of(None, predicted=True).name == "prediction"
    for asked in ("ngram", "/secret/draft", {"method": None}, {"method": 3}, {"method": "draft_model", "model": "/x"}):
        with pytest.raises(InvalidParameterError):
            allowed.of(asked, predicted=False)
    with pytest.raises(ContradictionError):
        allowed.of("suffix", predicted=True)
    with pytest.raises(ContradictionError):
        AllowedMethods(usual, [SpeculationConfig.of({"method": "draft_model", "model": "/other"})])


def test_faults_of_the_server_tell_nothing_of_it() -> None:
    found = api_error(RuntimeError("/secret/path"))
    assert (found.status, "secret" in json.dumps(found.body)) == (500, False)


def test_what_was_ruled_out_is_a_number_too() -> None:
    entry = {7: Logprob(-1.0, 2, "b"), 3: Logprob(-0.5, 1, "a"), 9: Logprob(-math.inf, 3, "\ufffd")}
    (told,) = chat_logprobs([entry], 3)["content"]
    assert [other["logprob"] for other in told["top_logprobs"]] == [-0.5, -1.0, -9999.0]
    assert (told["bytes"], told["top_logprobs"][2]["bytes"]) == ([98], None)
    lists = CompletionLogprobs(1, 4)
    assert lists.shape([None, entry], "xy")["text_offset"] == [4, 6]
    assert lists.shape([entry])["text_offset"] == [7]
    assert lists.shape([entry])["top_logprobs"] == [{"b": -1.0, "a": -0.5}]
