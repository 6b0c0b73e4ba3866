"""Parts of the server that need no process: calls of tools, methods that may be named, log probabilities."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.config import Refusal, default_model
from outrider.errors import (
    ContradictionError,
    InputError,
    InvalidParameterError,
    InvalidPromptError,
    NonFiniteLogitsError,
    NoTokenLeftError,
    ProcessingError,
    UnsupportedParameterError,
)
from outrider.model.vocabulary import own_bytes
from outrider.params import CompletionOutput, Logprob, SamplingParams, StructuredOutputs, TokenOrigin
from outrider.propose.defaults import SpeculationDefaults
from outrider.propose.settings import PLAIN, SpeculationConfig
from outrider.results import RequestStats
from outrider.server.answers import CompletionLogprobs, chat_logprobs, usage
from outrider.server.chat import blamed, conversation, encode, forced_calls
from outrider.server.errors import ApiError, api_error
from outrider.server.messages import MessagesRequest
from outrider.server.requests import AllowedMethods, JobMaker, Prompt, field_names, sampling
from outrider.server.responses import ResponsesRequest
from outrider.server.schemas import IN_CHATS, IN_COMPLETIONS, ChatRequest, CompletionRequest
from outrider.server.settings import ServerSettings
from outrider.server.tool_forms import ToolForm, tool_form
from outrider.server.tools import Heard, ToolListener, ToolUse
from outrider.structured.grammar import GrammarCompiler, GrammarError

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
ADD = ("add", '{"a": 1}')


def heard(form: ToolForm, *pieces: str, only_calls: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The text for the reader, and the calls as (name, arguments)."""
    listener = ToolListener(form, only_calls=only_calls)
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


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", f"{HERMES}\n{HERMES[:20]}", [ADD]),
        ("hermes", f"{HERMES}\n", [ADD]),
        ("hermes", HERMES[:5], []),
        ("llama", f"{LLAMA}; {LLAMA[:20]}", [ADD]),
        ("llama", f"{LLAMA}; ", [ADD]),
        ("llama", LLAMA[:5], []),
    ],
)
def test_of_a_text_of_calls_only_the_whole_ones_are_told(form: ToolForm, text: str, calls: list[Any]) -> None:
    assert heard(form, text, only_calls=True) == ("", calls)
    assert heard(form, *text, only_calls=True) == ("", calls), "character by character"


@given(st.lists(st.sampled_from(["<", "<tool_call>", "</tool_call>", '{"name": "f"}', "x", " "]), max_size=8), st.data())
def test_how_a_text_is_cut_changes_nothing(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert heard("hermes", *pieces)[1] == heard("hermes", text)[1]
    assert "".join(heard("hermes", *pieces)[0].split()) == "".join(heard("hermes", text)[0].split())


def heard_in_parts(form: ToolForm, *pieces: str, only_calls: bool) -> tuple[str, list[tuple[str, Any]]]:
    """The same of a listener that tells arguments in parts, put together again."""
    listener = ToolListener(form, only_calls=only_calls, in_parts=True)
    found, calls = [*(listener.hear(piece) for piece in pieces), listener.finish()], list[tuple[str, str]]()
    for part in (part for each in found for part in each.calls):
        function = part["function"]
        if "id" in part:
            assert part["index"] == len(calls)
            calls.append((function["name"], function["arguments"]))
        else:
            assert part.keys() == {"index", "function"}
            name, before = calls[part["index"]]
            calls[part["index"]] = (name, before + function["arguments"])
    return "".join(each.content for each in found), [(name, json.loads(written)) for name, written in calls]


_ODD = {"a": '} "\\" {', "b": [{"c": "\\"}, "</x>", []], "": {"d": {}}}


@pytest.mark.parametrize("form", ["hermes", "llama"])
@given(st.lists(st.sampled_from([{}, {"a": 1}, _ODD]), min_size=1, max_size=3), st.sampled_from([None, 0, 2]), st.data())
def test_arguments_in_parts_are_those_of_whole_calls(
    form: ToolForm, given_: list[Any], indent: int | None, data: st.DataObject
) -> None:
    key = "arguments" if form == "hermes" else "parameters"
    calls = [json.dumps({"name": f'f"{place}', key: value}, indent=indent) for place, value in enumerate(given_)]
    text = "\n".join(f"<tool_call>{call}</tool_call>" for call in calls) if form == "hermes" else "; ".join(calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    want = [(f'f"{place}', value) for place, value in enumerate(given_)]
    assert heard_in_parts(form, *pieces, only_calls=True) == ("", want)
    assert heard_in_parts(form, *text, only_calls=True) == ("", want), "character by character"


def test_parts_come_before_the_call_is_whole() -> None:
    listener = ToolListener("hermes", in_parts=True)
    assert listener.hear('I add. <tool_call>{"name": "add", "argu') == Heard((("content", "I add. "),))
    (begun,) = listener.hear('ments": {"a"').calls
    assert (begun["function"], begun["type"]) == ({"name": "add", "arguments": '{"a"'}, "function")
    assert listener.hear(": 1") == Heard((("call", {"index": 0, "function": {"arguments": ": 1"}}),))
    assert listener.hear("}}\n</tool").calls == ({"index": 0, "function": {"arguments": "}"}},)
    assert listener.hear("_call> Done.") == Heard((("content", " Done."),))
    assert listener.finish() == Heard()


@pytest.mark.parametrize("text", ["<tool_call>no JSON</tool_call> x", '<tool_call>{"name": "\\q", "arguments": {', "{"])
def test_what_is_no_call_stays_text_in_parts(text: str) -> None:
    assert heard_in_parts("hermes", *text, only_calls=False) == (text, [])
    assert heard_in_parts("llama", *text, only_calls=False) == (text, [])


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


def test_what_the_engine_chooses_from_has_its_usual_length_where_a_request_names_it() -> None:
    """The engine considers drafts of up to 16 tokens of every method, which are far too long for one layer."""
    usual = SpeculationDefaults.of(None, None, None).with_carried("mtp").config
    allowed = AllowedMethods(usual)
    for asked in ("mtp", {"method": "mtp"}):
        assert allowed.of(asked, predicted=False) == SpeculationConfig.of("mtp")
    assert allowed.of({"method": "mtp", "num_draft_tokens": 7}, predicted=False).num_draft_tokens == 7
    assert allowed.of(None, predicted=False) == usual
    few = SpeculationConfig.of({"method": "auto", "methods": [{"method": "mtp", "num_draft_tokens": 2}]})
    assert AllowedMethods(few).of("mtp", predicted=False).num_draft_tokens == 2


def test_faults_of_the_server_tell_nothing_of_it() -> None:
    found = api_error(RuntimeError("/secret/path"))
    assert (found.status, "secret" in json.dumps(found.body)) == (500, False)


def test_what_was_ruled_out_is_a_number_too() -> None:
    entry = {7: Logprob(-1.0, 2, "b"), 3: Logprob(-0.5, 1, "a"), 9: Logprob(-math.inf, 3, "\ufffd")}
    (told,) = chat_logprobs([entry], 3, None)["content"]
    assert [other["logprob"] for other in told["top_logprobs"]] == [-0.5, -1.0, -9999.0]
    assert (told["bytes"], told["top_logprobs"][2]["bytes"]) == ([98], None), "without a tokenizer nobody knows"
    assert CompletionLogprobs(1, None).shape([entry])["top_logprobs"] == [{"b": -1.0, "a": -0.5}]


TEXT = "né\U0001f600!"


@pytest.fixture(scope="module", params=["byte-level", "bytes in a row"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Of both kinds that split characters, with a special token that begins texts."""
    if request.param == "byte-level":
        return AutoTokenizer.from_pretrained(default_model("target"))
    names = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"n!"]
    backend = Tokenizer(models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_bytes_of_parts_of_characters_make_the_text(tokenizer: Any) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    entries = [{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in tokens]
    assert any("\ufffd" in (entry[token].decoded_token or "") for entry, token in zip(entries, tokens, strict=True))
    told = chat_logprobs(entries, 1, tokenizer)["content"]
    assert b"".join(bytes(each["bytes"]) for each in told).decode() == TEXT
    assert [each["top_logprobs"][0]["bytes"] for each in told] == [each["bytes"] for each in told]


@pytest.mark.parametrize("echoed", [False, True])
def test_offsets_point_into_the_text(tokenizer: Any, echoed: bool) -> None:
    """Special tokens are no part of it, and a character that several tokens write begins where the first of them does."""
    special = tokenizer.all_special_ids[0]
    tokens = [special, *tokenizer.encode(TEXT, add_special_tokens=False)]
    entries: list[Any] = [{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in tokens]
    lists = CompletionLogprobs(0, tokenizer)
    start, prefix = 0, ""
    if echoed:
        prompt = Prompt((special, *tokens), "!" + TEXT[1:], "first")  # a text that reads a little otherwise than its tokens
        found = lists.shape_prompt(prompt, [None, *entries])
        assert (found["tokens"][0], found["token_logprobs"][0], max(found["text_offset"])) == ("first", None, 3)
        start, prefix = len(prompt.text), prompt.text
    offsets = [offset for entry in entries for offset in lists.shape([entry])["text_offset"]]
    text = prefix + tokenizer.decode(tokens, skip_special_tokens=True)
    assert offsets[:2] == [start, start]
    by_place = {offset: [entry for at, entry in zip(offsets, entries, strict=True) if at == offset] for offset in offsets}
    for place, group in by_place.items():
        written = b"".join(own_bytes(tokenizer, *entry) or b"" for entry in group if special not in entry)
        assert text[place:].encode().startswith(written)


def test_offsets_of_an_echo_count_special_tokens_that_the_prompt_was_given_with(tokenizer: Any) -> None:
    special = tokenizer.all_special_ids[0]
    name = tokenizer.decode([special])
    text = f"{name}{TEXT}{name}{name}n"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens.count(special) == 3
    for begun in ((), (special,)):  # what the tokenizer puts before each text is not in it
        entries: list[Any] = [{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in (*begun, *tokens)]
        prompt = Prompt((*begun, *tokens), text, name)
        lists = CompletionLogprobs(0, tokenizer)
        offsets = lists.shape_prompt(prompt, [None, *entries[1:]])["text_offset"][len(begun) :]
        assert offsets[0] == 0 or begun
        places = [offset for offset, token in zip(offsets, tokens, strict=True) if token == special]
        assert places[1:] == [len(name + TEXT), len(name + TEXT + name)]
        assert offsets[-1] == len(text) - 1


# -- what requests may hold ---------------------------------------------------------------------------------------------

_USER = {"role": "user", "content": "x"}


def refusal(kind: type[CompletionRequest] | type[ChatRequest], **fields: Any) -> InputError:
    body = {"prompt": "x", **fields} if kind is CompletionRequest else {"messages": [_USER], **fields}
    with pytest.raises(InputError) as caught:
        kind.read(json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    ("kind", "name", "value", "remedy"),
    [
        (CompletionRequest, "prompt_logprobs", 1, "Use echo=true with logprobs."),
        (ChatRequest, "prompt_logprobs", 1, "Use /v1/completions with echo=true and logprobs."),
        (CompletionRequest, "max_completion_tokens", 5, "Use max_tokens."),
        (CompletionRequest, "guided_decoding", {"regex": "a"}, "Use structured_outputs with json, regex, choice"),
        (CompletionRequest, "guided_decoding_backend", "xgrammar", "Leave it out."),
        (ChatRequest, "guided_whitespace_pattern", " ?", "x-guidance"),
        (ChatRequest, "logprobs_mode", "processed_logprobs", "Leave it out."),
        (CompletionRequest, "logprob_token_ids", [1], "Use logprobs"),
        (CompletionRequest, "truncate_prompt_tokens", 5, "/tokenize"),
        (CompletionRequest, "prompt_embeds", "x", "Use prompt."),
        (CompletionRequest, "request_id", "x", "x-request-id"),
        (ChatRequest, "include_reasoning", False, "Leave it out."),
        (ChatRequest, "chat_template", "x", "--chat-template FILE"),
        (ChatRequest, "continue_final_message", True, "Use /v1/completions"),
        (ChatRequest, "prompt", "x", "Use messages"),
        (CompletionRequest, "messages", [], "Use /v1/chat/completions."),
        (CompletionRequest, "top_logprobs", 3, "Use logprobs with a number."),
        (CompletionRequest, "n_predict", 3, "Use max_tokens."),
        (CompletionRequest, "vllm_xargs", {"a": 1}, "Leave it out."),
    ],
)
def test_a_field_of_another_server_is_refused_with_what_to_do_instead(
    kind: Any, name: str, value: Any, remedy: str
) -> None:
    error = refusal(kind, **{name: value})
    assert isinstance(error, UnsupportedParameterError)
    assert error.field == name
    assert remedy in error.remedy
    assert "no such setting" not in str(error)


def test_the_effort_of_reasoning_goes_to_the_template() -> None:
    class Prompts:
        tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=lambda conversation, tools=None: None)

        def encode_conversation(self, messages: Any, **settings: Any) -> tuple[None, tuple[str, ...]]:
            return None, (settings.get("reasoning_effort", "none"),)

    def told(**fields: Any) -> Any:
        return encode(ChatRequest.read(json.dumps({"messages": [_USER], **fields}).encode()), cast(Any, Prompts()))[0]

    assert (told(), told(reasoning_effort=None), told(reasoning_effort="high")) == ("none", "none", "high")
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert told(**both) == "high", "what is said to the template itself comes first"


@pytest.mark.parametrize(("kind", "refusals"), [(CompletionRequest, IN_COMPLETIONS), (ChatRequest, IN_CHATS)])
def test_values_that_ask_for_nothing_are_taken(kind: Any, refusals: dict[str, Refusal]) -> None:
    known = {"prompt": "x"} if kind is CompletionRequest else {"messages": [_USER]}
    neutral = {name: refusal.neutral[0] for name, refusal in refusals.items() if refusal.neutral}
    kind.read(json.dumps({**known, **neutral, **dict.fromkeys(refusals.keys() - neutral)}).encode())
    assert not refusals.keys() & kind.model_fields.keys(), "a field that is taken"
    for name, found in refusals.items():
        text = str(UnsupportedParameterError(name, 1, found.reason, found.remedy))
        assert found.remedy.endswith((".", "schema.")), text


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"messages": [{**_USER, "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "text only"),
        ({"messages": [{**_USER, "content": 5}]}, "messages.0.content", "a valid string or a valid array"),
        ({"prediction": "text"}, "prediction", '{"type": "content", "content": "..."}'),
        ({"speculation": 3}, "speculation", 'a valid string or an object. Use "off", the name of a method, or an object'),
        ({"stop": ["a", 3]}, "stop.1", "a valid string. Use a text or a list of texts"),
        ({"tool_choice": 3}, "tool_choice", '"required"'),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "a valid number"),
        ({"max_tokens": "2"}, "max_tokens", "Use 1 or more."),
        ({"temperature": "x"}, "temperature", "Use 0 (greedy) to 100."),
        ({"priority": 2.5}, "priority", "Use a whole number."),
        ({"user": 2}, "user", "Use a text."),
        ({"stream": 1}, "stream", "Use true or false."),
        ({"top_logprobs": "3"}, "top_logprobs", "Use 0 to 20."),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_kind_is_told_what_it_may_be(fields: dict[str, Any], field: str, said: str) -> None:
    error = refusal(ChatRequest, **fields)
    assert error.field == field
    assert said in str(error)


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"structured_outputs": {"rgex": "a"}}, "structured_outputs.rgex", "mean regex? structured_outputs knows: choice"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "stream_options knows: continuous_usage_stats, include_usage."),
        ({"response_format": {"type": "json_schema", "json_schema": {"scema": {}, "name": "a"}}},
         "response_format.json_schema.scema", "Did you mean schema?"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
         "tools.0.function.parameter", "Did you mean parameters?"),
        ({"dict": 1}, "dict", "A request knows: add_special_tokens"),
        ({"structured_outputs": {"int": 1}}, "structured_outputs.int", "structured_outputs knows: choice"),
    ],
)  # fmt: skip
def test_a_name_that_is_unknown_is_told_the_nearest_one_wherever_it_stands(
    fields: dict[str, Any], field: str, said: str
) -> None:
    error = refusal(ChatRequest, **fields)
    assert error.field == field
    assert said in str(error)


@pytest.mark.parametrize(
    ("kind", "body", "field", "text"),
    [
        (CompletionRequest, {"prompt": ["x", "\ud83d\ude00", "a\udc00"]}, "prompt.2", "a\udc00"),
        (ChatRequest, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content", "\ud800"),
        (MessagesRequest, {"system": [{"type": "text", "text": "\udfff"}], "messages": []}, "system.0.text", "\udfff"),
        (ResponsesRequest, {"input": "x", "metadata": {"\ud800": 1}}, "metadata.\\ud800", "\ud800"),
    ],
)
def test_half_of_a_surrogate_pair_is_told_where_it_stands(kind: Any, body: Any, field: str, text: str) -> None:
    """JSON can write one alone, but a whole pair is a character."""
    with pytest.raises(InvalidParameterError, match="not valid Unicode") as raised:
        kind.read(json.dumps(body).encode())
    assert (raised.value.field, raised.value.value) == (field, text)


@pytest.mark.parametrize(
    ("kind", "body", "field", "said"),
    [
        (CompletionRequest, {}, "prompt", "Use a text, a list of token ids"),
        (ChatRequest, {"messages": [{**_USER, "content": [{"type": "text"}]}]}, "messages.0.content.0.text", ""),
    ],
)
def test_a_field_that_is_missing_is_called_so_without_a_value(kind: Any, body: Any, field: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        kind.read(json.dumps(body).encode())
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, field, "missing_field")
    assert caught.value.message.startswith(f"{field}: the field is missing. {said}")


@pytest.mark.parametrize(
    ("structure", "field", "said"),
    [
        ({"guided_choice": []}, "guided_choice", "there is nothing to choose from. Use a list of one or more"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "there is nothing to choose from"),
        ({"structured_outputs": {}}, "structured_outputs", "0 kinds of structure at a time. Give exactly one of json, "),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "0 kinds of structure"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of json, json_object, regex,"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "Use a regular expression."),
    ],
)
def test_structures_that_are_none_are_told_in_the_words_of_the_request(structure: Any, field: str, said: str) -> None:
    asked = CompletionRequest.read(json.dumps({"prompt": "x", **structure}).encode())
    with pytest.raises(InputError) as caught:
        sampling(asked, SamplingParams(), 100, ServerSettings(model_name="m"))
    error = api_error(caught.value, field_names(asked))
    assert error.param == field
    assert error.message.startswith(f"{field}=")
    assert said in error.message
    assert "json_schema" not in error.message


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_minus_one_is_no_seed_and_no_limit(kind: Any) -> None:
    """As llama.cpp and its clients write it. The model's own values do not come in its place."""
    known = {"prompt": "x"} if kind is CompletionRequest else {"messages": [_USER]}
    own, settings = SamplingParams(seed=5, max_tokens=9), ServerSettings(model_name="m")

    def params(**fields: Any) -> tuple[int | None, int]:
        found = sampling(kind.read(json.dumps({**known, **fields}).encode()), own, 100, settings)
        return found.seed, found.max_tokens

    assert params() == (5, 9)
    assert params(seed=-1, max_tokens=-1) == (None, 100)
    if kind is ChatRequest:
        assert params(max_completion_tokens=-1, max_tokens=-1) == (5, 100)
    for name in ("seed", "max_tokens"):
        with pytest.raises(InputError, match=f"{name}=-2"):
            params(**{name: -2})


def test_a_conversation_without_a_message_is_refused_in_words_of_this_server() -> None:
    with pytest.raises(InvalidPromptError) as caught:
        conversation(ChatRequest.read(b'{"messages": []}').messages)
    assert "there is no message" in str(caught.value)
    assert "lists" not in str(caught.value)


def test_errors_of_one_request_show_no_number_of_the_engine() -> None:
    for error, code in (
        (NoTokenLeftError(33, "p", "R."), "no_token_left"),
        (ProcessingError(33, "p", "R."), "processing"),
        (NonFiniteLogitsError(33, "p", "R."), "non_finite_logits"),
    ):
        found = api_error(error)
        assert (found.message, found.code) == ("p. R.", code)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_who_asks_may_be_named(kind: Any) -> None:
    known = {"prompt": "x"} if kind is CompletionRequest else {"messages": [_USER], "functions": []}
    kind.read(json.dumps({**known, "user": "a", "safety_identifier": "b"}).encode())


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        ({"methd": "suffix"}, "speculation.methd", "Did you mean method? A request may change"),
        ({"min_match": 2}, "speculation.min_match", "not a setting of a request. A request may change"),
        ({"num_draft_tokens": 0}, "speculation.num_draft_tokens", '"speculation": "off" turns drafting off'),
        ({"tree": [3, 0]}, "speculation.tree", "like [3, 2, 1]"),
        ({"tree": [2, 2]}, "speculation.tree", "with a method that drafts trees"),
        ({"rule": "best"}, "speculation.rule", "Use auto, walk, token, block or coupled."),
        ({"method": 3}, "speculation.method", "Requests to this server may name: off, ngram, prediction."),
        ("suffix", "speculation", "Requests to this server may name: off, ngram, prediction."),
    ],
)
def test_errors_in_speculation_have_the_names_and_the_forms_of_the_request(asked: Any, field: str, said: str) -> None:
    allowed = AllowedMethods(SpeculationConfig.of("ngram"))
    with pytest.raises(InputError) as caught:
        allowed.of(asked, predicted=False)
    error = api_error(caught.value)
    assert error.param == field
    assert error.message.startswith(f"{field}=")
    assert said in error.message
    assert "(3, 2" not in error.message
    assert "method='none'" not in error.message


@pytest.mark.parametrize(
    ("parameters", "takes_any"),
    [
        ({}, False),
        ({"parameters": {}}, False),
        ({"parameters": {"type": "object", "properties": {}, "title": "none"}}, False),
        ({"parameters": {"type": "object"}}, True),
        ({"parameters": {"type": "object", "properties": {}, "additionalProperties": True}}, True),
    ],
)
def test_a_function_that_names_no_argument_takes_none(parameters: dict[str, Any], takes_any: bool) -> None:
    """Otherwise a model may write any object until its tokens are used up."""
    tools = [{"type": "function", "function": {"name": "now", **parameters}}]
    asked = ChatRequest.read(json.dumps({"messages": [_USER], "tools": tools, "tool_choice": "required"}).encode())
    use = ToolUse("hermes", {}, {}, only_calls=True, max_calls=1)
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))

    def taken(arguments: str) -> bool:
        state = compiler.start(StructuredOutputs(grammar=forced_calls(asked, use) or ""))
        text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
        try:
            for token in tokenizer.encode(text):
                state.advance(token)
        except GrammarError:
            return False
        return True

    assert taken("{}")
    assert taken('{"a": 1}') == takes_any


def test_tools_that_are_refused_together_are_told_by_their_names() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("walk", "fly")]
    asked = ChatRequest.read(json.dumps({"messages": [_USER], "tools": tools, "tool_choice": "required"}).encode())
    whole = InvalidParameterError("structured_outputs", "start: call", "it is too much for an automaton", "Use less.")
    compiled: list[StructuredOutputs] = []
    error = blamed(asked, whole, compiled.append)
    assert len(compiled) == 2
    assert (error.field, error.value) == ("tools", "walk, fly")
    assert "it is too much for an automaton" in str(error)
    assert "start:" not in str(error)


@pytest.mark.parametrize(
    ("prompts", "samples", "said"),
    [("x", 20, "1 prompt with 20 samples each make 20 in all"), (["x"] * 20, 1, "20 prompts with 1 sample each make 20")],
)
def test_too_many_texts_are_counted_in_words(prompts: Any, samples: int, said: str) -> None:
    nothing: Any = None
    maker = JobMaker(nothing, SamplingParams(), 100, nothing, ServerSettings(model_name="m"), 10)
    with pytest.raises(InvalidParameterError, match=said):
        maker.check_size(CompletionRequest(prompt=prompts, n=samples))


def test_what_a_structure_forces_is_predicted_by_nobody() -> None:
    stats = RequestStats(num_draft_tokens=9, num_accepted_tokens=6)
    stats.observe_method("forced", 5, 4)
    stats.observe_method("prediction", 4, 2)
    output = CompletionOutput(0, "", (1, 2), (TokenOrigin.ACCEPTED,) * 2, "length", None, stats)
    details = usage(3, [output], predicted=True)["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 2}
