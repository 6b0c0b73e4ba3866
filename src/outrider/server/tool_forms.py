"""The forms in which families of models write calls of tools: a short description of each, read by `tool_reader`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from outrider.errors import UnsupportedParameterError
from outrider.server.tool_reader import MOST, Reader, Steps, loads, no_call
from outrider.server.tool_values import from_python, kinds_of, member_of, resolved, typed

#: What the arguments of functions look like, by name.
Schemas = Mapping[str, dict[str, Any]]
#: hermes: Hermes, Qwen 2.5 and 3. qwen: Qwen3-Coder and Qwen3.5. llama, pythonic: Llama. harmony: gpt-oss.
ToolForm = Literal["hermes", "llama", "pythonic", "qwen", "mistral", "gemma", "harmony", "deepseek", "glm"]


# --- Calls that are objects of JSON.


def _json_call(read: Reader, known: Schemas | None = None) -> Steps[None]:
    """{"name": ..., "arguments": {...}}, with "parameters" for the second name, and others beside them. Where no mark says
    that it is a call, `known` has the functions, and the name of one of them comes first."""
    yield from read.expect("{")
    name, arguments, told = "", "{}", False
    separator = ","
    while separator:
        yield from read.space()
        key = yield from read.string()
        yield from read.space()
        yield from read.expect(":")
        yield from read.space()
        if known is not None and not name and key != "name":
            no_call()
        if key == "name":
            name = yield from read.string()
            if known is not None and name not in known:
                no_call()
        elif key in ("arguments", "parameters"):
            if name and (yield from read.peek()) == "{":
                yield from read.arguments(name)
                told = True
            else:
                arguments = yield from read.value()
        else:
            yield from read.value()
        yield from read.space()
        separator = yield from read.takes(",")
    yield from read.takes("}") if told else read.expect("}")
    if told:
        read.settle()
    elif name:
        given = loads(arguments)
        read.call(name, given if isinstance(given, str) else arguments)
    else:
        no_call()


def _hermes(read: Reader, schemas: Schemas) -> Steps[None]:
    """<tool_call>{...}</tool_call>, anywhere in the text. Small models leave the marks out where a text begins, and write
    the objects alone or between code fences."""
    yield from read.space()
    if not (yield from read.takes("<tool_call>")):
        while (yield from read.peek()):
            fence = yield from read.takes("```json", "```")
            yield from read.space()
            yield from _json_call(read, schemas)
            if fence:
                yield from read.space()
                yield from read.takes("```")
                read.settle()
            yield from read.space()
        return
    yield from read.space()
    yield from _json_call(read)
    yield from read.space()
    yield from read.takes("</tool_call>")
    read.settle()


def _llama(read: Reader, schemas: Schemas) -> Steps[None]:
    """The whole text is {...}, or several of them with ";" between them."""
    while True:
        yield from read.space()
        yield from read.takes("<|python_tag|>")
        yield from read.space()
        yield from _json_call(read)
        yield from read.space()
        separated = yield from read.takes(";")
        yield from read.space()
        if not (yield from read.peek()):
            return
        if not separated:
            no_call()


def _mistral(read: Reader, schemas: Schemas) -> Steps[None]:
    """[TOOL_CALLS] [{...}, {...}], or [TOOL_CALLS]name[CALL_ID]...[ARGS]{...} for each call."""
    yield from read.expect("[TOOL_CALLS]")
    yield from read.space()
    if not (yield from read.takes("[")):
        name = yield from read.name()
        if (yield from read.takes("[CALL_ID]")):
            yield from read.name()
        yield from read.takes("[ARGS]")
        yield from read.space()
        yield from read.arguments(name)
        return
    while True:
        yield from read.space()
        yield from _json_call(read)
        yield from read.space()
        if not (yield from read.takes(",")):
            break
    yield from read.takes("]")
    read.settle()


def _deepseek(read: Reader, schemas: Schemas) -> Steps[None]:
    """<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, with a type before the name and a fence around the
    arguments in older models; V3.2 writes tags."""
    if (yield from read.takes("<｜DSML｜function_calls>")):
        yield from _tagged(DSML, read, schemas)
        return
    yield from read.takes("<｜tool▁calls▁begin｜>")
    yield from read.space()
    while (yield from read.expect("<｜tool▁call▁begin｜>")):
        name = yield from read.name()
        yield from read.expect("<｜tool▁sep｜>")
        if (yield from read.peek()) not in ("{", ""):
            name = yield from read.name()
            yield from read.space()
            yield from read.takes("```json")
        yield from read.space()
        yield from read.arguments(name)
        yield from read.space()
        yield from read.takes("```")
        yield from read.space()
        yield from read.takes("<｜tool▁call▁end｜>")
        read.settle()
        yield from read.space()
        if (yield from read.takes("<｜tool▁calls▁end｜>")):
            break
    read.settle()


def _harmony(read: Reader, schemas: Schemas) -> Steps[None]:
    """<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>; the channel may come second. Other
    heads say of the message behind them for whom it is: <|start|>assistant<|channel|>final<|message|>."""
    mark = yield from read.takes("<|start|>", "<|channel|>")
    if not mark:
        yield from read.space()
        yield from read.expect("to=functions.")
        read.at -= len("to=functions.")
    head, _ = yield from read.until(_MESSAGE, most=2 * MOST)
    head = mark + head
    found = _CALL_HEAD.fullmatch(head) and _RECIPIENT.search(head)
    if found:
        yield from read.space()
        yield from read.arguments(found[1])
        yield from read.space()
        yield from read.takes("<|call|>", "<|end|>")
        read.settle()
        return
    channel = _HEAD.fullmatch(head) or no_call()
    # What is for tools that nobody gave (to=browser.search) is no more for the reader than thoughts are.
    read.told.append(("thoughts" if channel[1] == "analysis" or " to=" in head else "words", ""))
    read.settle()


_MESSAGE = re.compile(re.escape("<|message|>"))
_CALL_HEAD = re.compile(r"(<\|start\|>)?[^<\n]*(<\|channel\|>[^<\n]*)?(<\|constrain\|>[^<\n]*)?")
_RECIPIENT = re.compile(r"to=functions\.([\w.\-:/]+)")
_HEAD = re.compile(
    r"(?:<\|start\|>assistant(?: to=[\w.]+)? ?)?(?:<\|channel\|>(analysis|commentary|final))?(?: to=[\w.]+)?(?: ?\w+)? ?"
    r"(?:<\|constrain\|>[^<\n]*)?"
)
#: What a text may end with where it is cut off, and which is part of a head and no text.
_BEGUN_HEAD = re.compile(r"<\|(?:start|channel)\|>[^<\n]*(?:<\|(?:channel|constrain)\|>[^<\n]*)*")


# --- Calls whose arguments stand between tags: texts as they are, and other values as JSON.


@dataclass(frozen=True)
class Tags:
    """Says how such calls are written."""

    before_name: str  # what stands before the name of a function
    behind_name: str  # and behind it
    key: str  # what stands before the name of an argument
    behind_key: re.Pattern[str]  # and behind it; it may say in a group whether the value is a text
    behind_value: re.Pattern[str]  # what stands behind a value, with what comes next: a value may hold the same signs
    end: str  # the end of a call
    close: str  # the end of all of them
    lines: bool = False  # whether a value has lines of its own


QWEN = Tags(
    before_name="<function=",
    behind_name=">",
    key="<parameter=",
    behind_key=re.compile(">"),
    behind_value=re.compile(r"</parameter>\s*(?=<parameter=|</function>)"),
    end="</function>",
    close="</tool_call>",
    lines=True,
)
GLM = Tags(
    before_name="",
    behind_name="",
    key="<arg_key>",
    behind_key=re.compile(r"</arg_key>\s*<arg_value>"),
    behind_value=re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)"),
    end="</tool_call>",
    close="",
)
DSML = Tags(
    before_name='<｜DSML｜invoke name="',
    behind_name='">',
    key='<｜DSML｜parameter name="',
    behind_key=re.compile(r'" string="(true|false)">'),
    behind_value=re.compile(r"</｜DSML｜parameter>\s*(?=<｜DSML｜parameter name=|</｜DSML｜invoke>)"),
    end="</｜DSML｜invoke>",
    close="</｜DSML｜function_calls>",
)


def _tagged(tags: Tags, read: Reader, schemas: Schemas) -> Steps[None]:
    yield from read.takes("<tool_call>")
    while True:
        yield from read.space()
        yield from read.expect(tags.before_name)
        name = yield from read.name()
        yield from read.expect(tags.behind_name)
        schema = schemas.get(name)
        arguments: dict[str, Any] = {}
        yield from read.space()
        while (yield from read.expect(tags.key, tags.end)) == tags.key:
            key, behind_key = yield from read.until(tags.behind_key, most=MOST)
            value, _ = yield from read.until(tags.behind_value)
            value = value.removeprefix("\n").removesuffix("\n") if tags.lines else value
            kinds = kinds_of(member_of(resolved(schema, schema), key), schema)
            if behind_key.re.groups:  # the call itself says whether it is a text
                kinds = {"string"} if behind_key[1] == "true" else set()
            arguments[key] = typed(value, kinds)
        read.call(name, arguments)
        if not tags.close:
            return
        yield from read.space()
        if (yield from read.takes(tags.close, tags.before_name)) != tags.before_name:
            read.settle()
            return
        read.at -= len(tags.before_name)


# --- Calls in other notations.


def _gemma(read: Reader, schemas: Schemas) -> Steps[None]:
    """<|tool_call>call:name{key:value,...}<tool_call|>, with texts between marks; those of FunctionGemma are others."""
    yield from read.expect("<|tool_call>", "<start_function_call>")
    yield from read.space()
    yield from read.expect("call:")
    name = yield from read.name()
    if (yield from read.peek()) != "{":
        no_call()
    read.call(name, (yield from _gemma_value(read)))
    yield from read.space()
    yield from read.takes("<tool_call|>", "<end_function_call>")
    read.settle()


def _gemma_value(read: Reader) -> Steps[Any]:
    yield from read.space()
    if (yield from read.peek()) == '"':
        return (yield from read.string())
    quote = yield from read.takes(*_GEMMA_QUOTES)
    if quote:
        return (yield from read.until(_GEMMA_QUOTES[quote]))[0]
    if (yield from read.takes("[")):
        items: list[Any] = []
        while not (yield from _gemma_end(read, "]", is_first=not items)):
            items.append((yield from _gemma_value(read)))
        return items
    if not (yield from read.takes("{")):
        bare, _ = yield from read.until(_GEMMA_BARE)
        return typed(bare.strip() or no_call(), set())
    found: dict[str, Any] = {}
    while not (yield from _gemma_end(read, "}", is_first=not found)):
        yield from read.space()
        quote = yield from read.takes(*_GEMMA_QUOTES)
        key, _ = yield from read.until(_GEMMA_QUOTES[quote] if quote else _COLON, most=MOST)
        if quote:
            yield from read.expect(":")
        found[key.strip()] = yield from _gemma_value(read)
    return found


def _gemma_end(read: Reader, end: str, *, is_first: bool) -> Steps[bool]:
    """Tells whether a list or an object ends here; behind a value comes another one otherwise."""
    yield from read.space()
    if is_first:
        return bool((yield from read.takes(end)))
    return (yield from read.expect(",", end)) == end


_GEMMA_QUOTES = {mark: re.compile(re.escape(mark)) for mark in ('<|"|>', "<escape>")}
_GEMMA_BARE = re.compile(r"(?=[,}\]])")
_COLON = re.compile(":")


def _pythonic(read: Reader, schemas: Schemas) -> Steps[None]:
    """The whole text is [name(key=value, ...), ...], a list of calls as Python writes them. Names need not be Python's:
    `from` and `my-key` are names of arguments, too."""
    calls: list[tuple[str, dict[str, Any]]] = []
    yield from read.space()
    yield from read.takes("<|python_start|>", "<|python_tag|>")
    yield from read.space()
    yield from read.expect("[")
    while not calls or (yield from read.expect(",", "]")) == ",":
        yield from read.space()
        if calls and (yield from read.takes("]")):  # behind a comma
            break
        name = yield from read.name()
        yield from read.expect("(")
        calls.append((name, (yield from _python_arguments(read))))
        yield from read.space()
    yield from read.space()
    yield from read.takes("<|python_end|>")
    yield from read.space()
    if (yield from read.peek()):
        no_call()
    for name, arguments in calls:
        read.call(name, arguments)


def _python_arguments(read: Reader) -> Steps[dict[str, Any]]:
    """The arguments of a call whose bracket is open."""
    found: dict[str, Any] = {}
    while True:
        yield from read.space()
        if (yield from read.takes(")")):
            return found
        if found:
            yield from read.expect(",")
            yield from read.space()
            if (yield from read.takes(")")):
                return found
        start = read.at
        while _PYTHON_KEY.match((yield from read.peek())):
            read.at += 1
        key = read.text[start : read.at] or no_call()
        yield from read.space()
        yield from read.expect("=")
        found[key] = yield from _python_value(read)


def _python_value(read: Reader) -> Steps[Any]:
    """A value up to the comma or the bracket behind it."""
    start, depth, quote = read.at, 0, ""
    while True:
        sign = (yield from read.peek()) or no_call()
        if not (quote or depth) and sign in ",)":
            break
        read.at += 1
        if quote and sign == "\\":
            yield from read.more()
            read.at += 1
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += (sign in "([{") - (sign in ")]}")
    try:
        return from_python(read.text[start : read.at])
    except ValueError:
        no_call()


_PYTHON_KEY = re.compile(r"[^\s=()\[\]{},'\"]")


# --- The forms, and which of them a chat template teaches.


@dataclass(frozen=True)
class Form:
    """Says how a family of models writes calls."""

    call: Callable[[Reader, Schemas], Steps[None]]  # reads them, from a mark on
    opens: tuple[str, ...] = ()  # the marks that they begin with
    marks: tuple[str, ...] = ()  # further signs of the form, which a tokenizer may have as special tokens
    at_start: bool = False  # whether a text may begin with a call that has no mark
    is_whole: bool = False  # whether a text with calls is nothing but calls
    is_raw: bool = False  # whether texts among the arguments are written as they are, and not as JSON or Python write them
    # What a text may end with which is no text then, where the marks in it are special tokens.
    begun: re.Pattern[str] | None = None
    # What a chat template that teaches this form holds: one of these, each a part or several of them.
    taught: tuple[tuple[str, ...], ...] = ()


_TOOL_CALL = ("<tool_call>", "</tool_call>")
#: In the order in which templates are asked.
FORMS: dict[ToolForm, Form] = {
    "harmony": Form(
        _harmony,
        opens=("<|start|>", "<|channel|>"),
        marks=("<|message|>", "<|constrain|>", "<|call|>", "<|end|>"),
        at_start=True,
        begun=_BEGUN_HEAD,
        taught=(("<|channel|>", "to=functions."), ("<|channel|>", "functions", "<|call|>")),
    ),
    "mistral": Form(_mistral, opens=("[TOOL_CALLS]",), marks=("[ARGS]", "[CALL_ID]"), taught=(("[TOOL_CALLS]",),)),
    "deepseek": Form(
        _deepseek,
        opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜DSML｜function_calls>"),
        marks=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "｜DSML｜"),
        taught=(("<｜tool▁call▁begin｜>",), ("｜DSML｜",)),
    ),
    "gemma": Form(
        _gemma,
        opens=("<|tool_call>", "<start_function_call>"),
        marks=("<tool_call|>", "<end_function_call>", '<|"|>', "<escape>"),
        is_raw=True,
        taught=(("<|tool_call>call:",), ("<start_function_call>call:",)),
    ),
    "glm": Form(partial(_tagged, GLM), opens=_TOOL_CALL[:1], marks=_TOOL_CALL, is_raw=True, taught=(("<arg_key>",),)),
    "qwen": Form(
        partial(_tagged, QWEN),
        opens=("<tool_call>", "<function="),
        marks=_TOOL_CALL,
        is_raw=True,
        taught=(("<tool_call>", "<function=", "<parameter="),),
    ),
    "hermes": Form(
        _hermes, opens=_TOOL_CALL[:1], marks=_TOOL_CALL, at_start=True, taught=(("<tool_call>", '"arguments"'),)
    ),
    "pythonic": Form(
        _pythonic,
        marks=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
        at_start=True,
        is_whole=True,
        taught=(("[func_name1(",), ("<|python_start|>",)),
    ),
    "llama": Form(
        _llama,
        marks=("<|python_tag|>",),
        at_start=True,
        is_whole=True,
        taught=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
    ),
}
#: Templates with these teach another form, which has signs of one of these.
_OTHERS = ("<tool_calls>", "<seed:tool_call>")


def tells_thoughts(template: str) -> bool:
    """Tells whether a model with this chat template says of each message for whom it is."""
    return all(sign in template for sign in ("<|channel|>", "<|message|>", "analysis"))


def tool_form(template: str | None) -> ToolForm:
    """The form in which a model with this chat template calls tools."""
    if not template or "tools" not in template:
        raise UnsupportedParameterError("tools", "...", "the model's chat template knows no tools", "Leave them out.")
    plain = template.replace("\\", "").replace("'", '"')
    known = {} if any(sign in template for sign in _OTHERS) else FORMS
    for name, form in known.items():
        if any(all(part.replace("'", '"') in plain for part in parts) for parts in form.taught):
            return name
    problem = "the model's chat template writes calls in a form that this server does not know"
    remedy = f"Start the server with --tool-parser, which knows {', '.join(sorted(FORMS))}."
    raise UnsupportedParameterError("tools", "...", problem, remedy)
