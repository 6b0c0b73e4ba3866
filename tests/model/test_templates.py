"""Chat templates are programs of strangers: they render as ever, in a process of their own, and end there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.cli.app import app
from outrider.config import default_model
from outrider.errors import InvalidPromptError, ModelLoadError
from outrider.loading import templates
from outrider.loading.templates import TemplateError, TemplateLimits, render
from outrider.loading.tokenizers import given_tokenizer
from outrider.prompts import PromptEncoder

HI = [{"role": "user", "content": "hi"}]
LIMITS = TemplateLimits(seconds=0.5, mebibytes=64)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}a"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
FLOOD = "{% for a in range(99999) %}{{ 'ab' * 99999 }}{% endfor %}"
DOUBLES = "{% set n = namespace(x='ab') %}{% for a in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
RICH = (
    "{{ bos }}{% for m in messages %}{% if loop.last %}# {% endif %}{{ m | tojson }}"
    "{% if m.content is undefined %}-{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}{% generation %}{{ extra }}{% endgeneration %}"
    "{% if add_generation_prompt %}:{% endif %}{{ namespace(a=1).a }}{{ dict(b=2) }}"
)


FAHRENHEIT = {"type": "function", "function": {"name": "fahrenheit", "parameters": {"type": "object", "properties": {}}}}


def test_texts_are_those_of_transformers() -> None:
    messages: Any = [
        {"role": "user", "content": "é\ud83d \u2028"},
        {"role": "assistant", "content": None, "tool_calls": [{"a": (1, 2.5)}]},
    ]
    settings = {"bos": "<s>", "extra": [True, None, 10**30]}
    ours = render(RICH, messages, [FAHRENHEIT, {"name": "g"}], settings, LIMITS)
    whole = [{name: value for name, value in each.items() if value is not None} for each in messages]
    (theirs,), _ = render_jinja_template(
        [whole], [FAHRENHEIT, {"name": "g"}], None, RICH, add_generation_prompt=True, **settings
    )
    assert ours == theirs.replace("(1, 2.5)", "[1, 2.5]")


def test_what_is_no_json_is_shown_as_by_transformers() -> None:
    messages: Any = [{"role": "user", "content": [{"type": "image", "image": object()}]}]
    template = "{{ messages[0].content[0].image }}"
    (theirs,), _ = render_jinja_template([messages], None, None, template)
    assert render(template, messages, None, {}, LIMITS) == theirs == "<object>"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP, r"more than 0\.5 seconds of CPU.*--template-seconds"),
        (CALLS, r"more than 0\.5 seconds of CPU.*--template-seconds"),
        (FLOOD, "more than 64 MiB of memory.*--template-mib"),
        (DOUBLES, "more than 64 MiB of memory.*--template-mib"),
        ("{{ raise_exception('no roles here') }}", "no roles here"),
        ("{% for %}", "Expected"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it calls itself too often"),
    ],
    ids=["loop", "calls", "flood", "doubles", "refusal", "no template", "recursion"],
)
def test_what_ends_never_or_fills_the_memory_is_ended(template: str, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        render(template, HI, None, {}, LIMITS)
    assert render("{{ messages[0].content }}", HI, None, {}, LIMITS) == "hi", "the next one is served"


def test_neighbours_go_on_meanwhile() -> None:
    with ThreadPoolExecutor(3) as pool:
        endless = pool.submit(render, LOOP, HI, None, {}, TemplateLimits(seconds=3))
        numbers = [render(f"{{{{ {n} }}}}", HI, None, {}, LIMITS) for n in range(20)]
        assert not endless.done()
        assert numbers == [str(n) for n in range(20)]
        with pytest.raises(TemplateError):
            endless.result(60)


def test_the_first_conversation_is_written_by_the_process_that_was_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[templates._Process]()
    stock = templates._Process
    monkeypatch.setattr(templates, "_idle", [])
    monkeypatch.setattr(templates, "_Process", lambda: started.append(stock()) or started[-1])
    templates.start_renderer()
    templates.start_renderer()  # there is one already
    assert len(started) == 1
    assert render("{{ messages[0].content }}", HI, None, {}, LIMITS) == "hi"
    assert len(started) == 1
    started[0].close()


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        (["generate", "MODEL", "-p", "hi"], True),
        (["generate", "MODEL", "-p", "hi", "--raw"], False),
        (["generate", "-p", "hi"], False),
    ],
    ids=["answers", "goes on", "embedded"],
)
def test_the_command_starts_it_before_it_loads_a_model(
    arguments: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    def load(*args: Any, **kwargs: Any) -> Any:
        done.append("loads")
        raise ModelLoadError("MODEL", "it is none", "Give one.")

    monkeypatch.setattr(templates, "start_renderer", lambda: done.append("starts"))
    monkeypatch.setattr("outrider.llm.LLM", load)
    with pytest.raises(ModelLoadError):
        app(arguments, standalone_mode=False)
    assert done == ["starts", "loads"][not starts :]


def test_a_fork_has_processes_of_its_own() -> None:
    render("a", HI, None, {}, LIMITS)
    child = os.fork()
    if not child:
        try:
            good = render("b", HI, None, {}, LIMITS) == "b"
        finally:
            os._exit(0 if good else 1)
    assert [render("a", HI, None, {}, LIMITS) for _ in range(20)] == ["a"] * 20
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def encoder() -> PromptEncoder:
    found = PromptEncoder(given_tokenizer(default_model("target")), "the model", 1536)
    found.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"  # type: ignore[union-attr]
    return found


def test_an_error_names_the_template_and_its_model(encoder: PromptEncoder) -> None:
    encoder.template_limits = LIMITS
    encoder.tokenizer.chat_template = LOOP  # type: ignore[union-attr]
    with pytest.raises(
        InvalidPromptError, match=r"the chat template of the model refuses them \(it takes more than 0\.5 sec"
    ):
        encoder.encode_conversation(HI)


def test_settings_that_a_template_does_not_take_are_named(encoder: PromptEncoder) -> None:
    encoder.tokenizer.chat_template = "{% if no %}{{ raise_exception('no') }}{% endif %}a"  # type: ignore[union-attr]
    with pytest.raises(InvalidPromptError) as caught:
        encoder.encode_conversation(HI, no=True)
    assert (caught.value.field, caught.value.value) == ("chat_template_kwargs", {"no": True})


LONG = "word " * 780_000


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("messages", lambda: ([{"role": "user", "content": LONG}], {})),
        ("messages", lambda: ([{"role": "user", "content": [{"type": "text", "text": LONG}]}], {})),
        (
            "messages",
            lambda: ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {LONG: 1}}}]}], {}),
        ),
        ("tools", lambda: (HI, {"tools": [{"function": {"name": "f", "description": LONG}}]})),
        ("chat_template_kwargs", lambda: (HI, {"documents": [{"text": LONG}]})),
        ("chat_template_kwargs", lambda: (HI, {"x": [LONG[:2_000_000], LONG[:1_900_000]]})),
    ],
    ids=["text", "parts", "calls", "tools", "documents", "kwargs"],
)
def test_all_that_a_template_is_given_counts_before_it_is_rendered(
    encoder: PromptEncoder, field: str, given: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.prompts.render_conversation", None)
    messages, more = given()
    start = time.process_time()
    with pytest.raises(InvalidPromptError, match="no room in the context") as raised:
        encoder.encode_conversation(messages, **more)
    assert raised.value.field == field
    assert time.process_time() - start < 2


def test_a_text_whose_beginning_fills_the_context_is_not_encoded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token of a thousand characters in the vocabulary, four million characters might fit."""
    tokenizer, sizes = given_tokenizer(default_model("target")), []
    assert tokenizer.add_tokens(["=" * 4000])
    encoder = PromptEncoder(tokenizer, "the model", 1024)
    encode = type(tokenizer).__call__

    def watched(self: Any, text: str, **more: Any) -> Any:
        sizes.append(len(text))
        return encode(self, text, **more)

    monkeypatch.setattr(type(tokenizer), "__call__", watched)
    tokenizer.chat_template = "{{ tools[0].function.description }}"
    tool = {"function": {"name": "f", "description": LONG}}
    for call in (
        lambda: encoder.encode(LONG),
        lambda: encoder.encode_prediction(LONG),
        lambda: encoder.encode_conversation(HI, tools=[tool]),
    ):
        sizes.clear()
        with pytest.raises(InvalidPromptError, match="no room in the context of 1,024 tokens, which its first"):
            call()
        assert sum(sizes) < len(LONG) / 10
    assert len(encoder.encode("=" * 4000 * 500)[1]) == 500, "what fits is taken, however long it is"


def test_what_a_template_makes_of_it_counts_before_it_is_encoded(encoder: PromptEncoder) -> None:
    encoder.tokenizer.chat_template = "{{ 'ab' * 1000000 }}"  # type: ignore[union-attr]
    with pytest.raises(InvalidPromptError, match="no room in the context"):
        encoder.encode_conversation(HI)
