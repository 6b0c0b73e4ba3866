"""Constrains calls of tools: a grammar for each form in which families of models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import UnsupportedParameterError
from outrider.server.tool_forms import Schemas, ToolForm
from outrider.server.tool_reader import MOST
from outrider.server.tool_values import kinds_of, plain_text, resolved
from outrider.structured.structures import followed

#: Calls that a text may have where some are required. A text would otherwise go on with calls until its length is reached.
MAX_CALLS = 16
#: White space as json.dumps writes it, and as models were shown it; otherwise a model may write spaces for ever.
_SPACES = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
#: What a schema may ask of values. Whatever else it says only annotates.
_ASKS = frozenset({
    "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "enum", "const", "items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems",
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef",
})  # fmt: skip
#: The names of arguments that no schema names: without the signs that end a name in one form or another.
_ANY_NAME = rf"""/[^\s<>{{}}()\[\]"',:=]{{1,{MOST}}}/"""
#: What of it may be asked of a text that has no quotes, and of an object whose members are written one by one.
_OF_TEXTS = frozenset({"minLength", "maxLength"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})


def calls_grammar(
    form: ToolForm, schemas: Schemas, *, several: bool, special: Mapping[int, str] | None = None, template: str = ""
) -> str:
    """A grammar, in Lark, of a text that is nothing but calls, with arguments of the right shape.

    Args:
        special: Marks of the form that are special tokens, by token id: they are written as these.
    """
    book = Book({mark: number for number, mark in (special or {}).items()})
    frame = _frame(form, template)
    calls = [book.rule(_call(frame, book, name, schema)) for name, schema in schemas.items()]
    call = book.rule(" | ".join(calls))
    more = f" ({book.text(frame.between)} {call}){{0,{MAX_CALLS - 1}}}" if several and frame.between is not None else ""
    return "\n".join([f"start: {book.text(frame.before)} {call}{more} {book.text(frame.behind)}", *book.rules])


class Book:
    """The rules of a grammar while it is written.

    Args:
        special: Token ids of the marks that are special tokens.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.special = special
        self._marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._known: dict[str, str] = {}

    def rule(self, body: str, *, is_terminal: bool = False) -> str:
        """The name of a rule."""
        name = f"{'T' if is_terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def text(self, text: str | None) -> str:
        """Returns what matches a text; marks that are special tokens are these."""
        parts, at = [], 0
        for found in self._marks.finditer(text or ""):
            parts += [json.dumps(text[at : found.start()]), f"<[{self.special[found[0]]}]>"]  # type: ignore[index]
            at = found.end()
        kept = [part for part in (*parts, json.dumps((text or "")[at:])) if part != '""']
        return " ".join(kept) or '""'

    def json(self, schema: Any, root: Any = None) -> str:
        """Returns what matches a value of JSON; definitions are those of the root."""
        shared = {name: root[name] for name in ("$defs", "definitions") if isinstance(root, dict) and name in root}
        return self.rule(f"%json {json.dumps({**shared, **followed(schema), **_SPACES})}")

    def free(self, behind: str, schema: Mapping[str, Any]) -> str:
        """A text without quotes up to what stands behind it, which it does not contain."""
        least, most = _lengths(schema)
        any_text, mark = f"/(?s:.{{{least},{most}}})/", behind.strip()
        special = self._marks.search(behind) if self.special else None
        if special is not None:  # what stands before that token belongs to the terminal
            before = f" {json.dumps(behind[: special.start()])}" if special.start() else ""
            text = self.rule(f"({any_text}{before}) & ~/(?s:.*{_escaped(mark)}.*)/", is_terminal=True)
            return f"{text} {self.text(behind[special.start() :])}"
        # One terminal with its end: it would otherwise run over the end, and what follows could not begin.
        rest = len(behind) - behind.index(mark) - len(mark)
        inside = f"/(?s:.*{_escaped(mark)}.{{{rest + 1},}})/"
        return self.rule(f"({any_text} {json.dumps(behind)}) & ~{inside}", is_terminal=True)

    def once(self, key: str, make: Callable[[str], str]) -> str:
        """The rule of a definition, which may hold itself."""
        if key not in self._known:
            self._known[key] = name = f"d{len(self._known)}"
            self.rules.append(f"{name}: {make(name)}")
        return self._known[key]

    def members(self, schema: Any, separator: str, member: Callable[[str | None, Any], str]) -> str:
        """The properties of an object in their order; those that are not required may be left out. Where a schema names
        none, there may be any, with names of the model's own: `member` is asked for one without a name."""
        properties = list((schema.get("properties") or {}).items()) if isinstance(schema, dict) else []
        required = set(schema.get("required") or ()) if isinstance(schema, dict) else set()
        asked = sorted(_ASKS & {*followed(schema)} - _OF_OBJECTS) if isinstance(schema, dict) else []
        unknown = sorted(required - {key for key, _ in properties})
        if asked or unknown:
            raise _refused(f"{asked[0]!r} of an object" if asked else f"{unknown[0]!r}, which has no schema,", schema)
        others = schema.get("additionalProperties", True) if isinstance(schema, dict) else False
        if not properties and others is not False:
            one = self.rule(member(None, {} if others is True else others))
            return self.rule(f"({one} ({self.text(separator)} {one})*)?")
        first, later = '""', '""'
        for key, value in reversed(properties):
            one = self.rule(member(key, value))
            with_one = f"{one} {later}"
            behind_others = f"{self.text(separator)} {with_one}"
            if key not in required:
                with_one, behind_others = f"{with_one} | {first}", f"{behind_others} | {later}"
            first, later = self.rule(with_one), self.rule(behind_others)
        return first


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace(r"\<", "<").replace(r"\>", ">").replace('\\"', '"')


def _refused(what: str, schema: Any) -> UnsupportedParameterError:
    remedy = 'Leave it out, or use "auto", which hears calls in this form, too.'
    problem = f"the model writes arguments without quotes, and {what} cannot be required of them"
    return UnsupportedParameterError("tools", schema, problem, remedy)


def _lengths(schema: Mapping[str, Any], what: str = "Length") -> tuple[int, int | str]:
    """The least and the most characters or items; "" for no limit. Raises TypeError where they are no numbers."""
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", "")
    if type(least) is not int or (most != "" and type(most) is not int):
        raise TypeError(what)
    return least, most


def _named(argument: str, unfit: str) -> str:
    """The name of an argument, if it has none of the signs that would end it."""
    if not argument or any(sign in argument for sign in unfit):
        raise _refused(f"an argument of the name {argument!r}", argument)
    return argument


# --- The forms. In most of them arguments are JSON.


@dataclass(frozen=True)
class Frame:
    """Holds what stands around calls."""

    call: Callable[[Book, str, Any], str]  # writes the rule of a call of a function
    before: str = ""  # what stands before the first call
    between: str | None = ""  # between two; None where there can be one alone
    behind: str = ""  # behind the last one


def _call(frame: Frame, book: Book, name: str, schema: Any) -> str:
    """The rule of a call of a function. A malformed schema is left to the library, which says what is wrong with it."""
    try:
        return frame.call(book, name, schema)
    except UnsupportedParameterError:
        raise
    except (TypeError, AttributeError, ValueError, RecursionError):
        return book.json(schema)


def _json_call(before: str, between: str, behind: str, *, quoted: bool = False) -> Callable[[Book, str, Any], str]:
    """Calls whose arguments are JSON, with the name as JSON writes it or as it is."""

    def call(book: Book, name: str, schema: Any) -> str:
        head = book.text(before + (json.dumps(name) if quoted else name) + between)
        return f"{head} {book.json(schema)} {book.text(behind)}"

    return call


def _with_id(book: Book, name: str, schema: Any) -> str:
    head = f"{book.text(f'[TOOL_CALLS]{name}[CALL_ID]')} /[a-zA-Z0-9]{{9}}/ {book.text('[ARGS]')}"
    return f"{head} {book.json(schema)}"


def _frame(form: ToolForm, template: str) -> Frame:
    if form == "mistral" and "[CALL_ID]" in template:
        return Frame(_with_id)
    if form == "mistral" and "[ARGS]" in template:
        return Frame(_json_call("[TOOL_CALLS]", "[ARGS]", ""))
    if form == "deepseek" and "｜DSML｜" in template:
        return Frame(_dsml_call, "<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>")
    if form == "deepseek" and "```json" in template:
        call = _json_call("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>")
        return Frame(call, "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>")
    if form == "gemma" and "<start_function_call>" in template:
        return Frame(_gemma_call("<start_function_call>", "<end_function_call>", "<escape>"))
    return _FRAMES[form]


# --- Arguments between tags: texts as they are, other values as JSON.


def _tag_value(book: Book, schema: Any, root: Any, behind: str) -> str:
    """A value and what stands behind it."""
    schema = followed(resolved(schema, root))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
    if values is not None:
        return "(" + " | ".join(book.text(plain_text(value) + behind) for value in values) + ")"
    kinds = kinds_of(schema)
    if _says_nothing(schema):  # whatever it is, it is heard as that
        return book.free(behind, {})
    if not kinds and not (isinstance(schema, dict) and schema.keys() & {"anyOf", "oneOf", "allOf"}):
        return f"{book.json(schema, root)} {book.text(behind)}"
    if kinds and "string" not in kinds:
        return f"{book.json(schema, root)} {book.text(behind)}"
    more = sorted(_ASKS & {*schema} - _OF_TEXTS) if kinds == {"string"} else sorted(_bounds(schema))
    if more or not kinds:
        raise _refused(f"{more[0]!r} of a text" if more else "a text beside other values", schema)
    return book.free(behind, schema)


def _bounds(schema: Mapping[str, Any]) -> set[str]:
    """Returns what the parts of a union ask of their values, beside their types."""
    parts = [part for name in ("anyOf", "oneOf") for part in schema.get(name, ())]
    found = {*schema} & _ASKS - {"anyOf", "oneOf"}
    return found.union(*(_ASKS & {*part} for part in parts if isinstance(part, dict)))


def _says_nothing(schema: Any) -> bool:
    """Tells whether a schema takes any value."""
    return isinstance(schema, dict) and not {*schema} & (_ASKS | {"type"})


def _tagged_call(open_: str, key: str, behind_key: str, behind_value: str, close: str) -> Callable[[Book, str, Any], str]:
    def call(book: Book, name: str, schema: Any) -> str:
        root = schema

        def member(argument: str | None, each: Any) -> str:
            if argument is None:
                head = f"{book.text(key)} {_ANY_NAME} {book.text(behind_key)}"
            else:
                head = book.text(f"{key}{_named(argument, behind_key[0])}{behind_key}")
            return f"{head} {_tag_value(book, each, root, behind_value)}"

        return f"{book.text(open_.format(name))} {book.members(resolved(schema, root), '', member)} {book.text(close)}"

    return call


def _dsml_call(book: Book, name: str, schema: Any) -> str:
    """Each argument says whether it is a text."""
    end = "</｜DSML｜parameter>\n"

    def member(argument: str | None, each: Any) -> str:
        def head(kind: str) -> str:
            before, behind = '<｜DSML｜parameter name="', f'" string="{kind}">'
            if argument is None:
                return f"{book.text(before)} {_ANY_NAME} {book.text(behind)}"
            return book.text(f"{before}{_named(argument, chr(34))}{behind}")

        kinds = kinds_of(resolved(each, schema))
        text, other = kinds == {"string"}, f"{head('false')} {book.json(each, schema)} {book.text(end)}"
        if text or _says_nothing(each) or ("string" in kinds and not _bounds(followed(each))):
            written = f"{head('true')} {_tag_value(book, each, schema, end)}"
            return written if text else f"{written} | {other}"
        return other

    head = book.text(f'<｜DSML｜invoke name="{name}">\n')
    return f"{head} {book.members(resolved(schema, schema), '', member)} {book.text('</｜DSML｜invoke>' + chr(10))}"


# --- Other notations of values, whose parts are written by rules of their own.


@dataclass(frozen=True)
class Notation:
    """Says how values are written."""

    text: Callable[[Book, Mapping[str, Any]], str]  # writes the rule of a text with its quotes
    literal: Callable[[Any], str]  # a value of an enumeration
    separator: str  # between the parts of lists and objects
    unfit: str  # signs that the name of an argument may not have
    behind_key: str  # what stands behind it
    # What stands for true, false and null.
    constants: Mapping[Any, str] = field(default_factory=lambda: {True: "true", False: "false", None: "null"})

    def value(self, book: Book, schema: Any, root: Any) -> str:
        """The rule of a value."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return book.once(schema["$ref"], lambda _: self.value(book, resolved(schema, root), root))
        schema = followed(schema)
        if not isinstance(schema, dict):
            raise TypeError(schema)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return "(" + " | ".join(book.text(self.literal(value)) for value in values) + ")"
        if _says_nothing(schema):
            return book.once("", lambda name: self._any(book, name))
        parts = [part for name in ("anyOf", "oneOf") for part in schema.get(name, ())]
        parts = parts or [{**schema, "type": kind} for kind in _types(schema)]
        return "(" + " | ".join(self._one(book, part, root) for part in parts) + ")"

    def _one(self, book: Book, schema: Any, root: Any) -> str:
        kind = schema.get("type") if isinstance(schema, dict) else None
        if not isinstance(kind, str):
            return self.value(book, schema, root)
        if kind == "string":
            return self.text(book, schema)
        if kind in ("integer", "number"):
            return book.json(schema, root)
        if kind in ("boolean", "null"):
            names = [self.constants[each] for each in ((True, False) if kind == "boolean" else (None,))]
            return "(" + " | ".join(map(book.text, names)) + ")"
        if kind == "object":
            return self.mapping(book, schema, root, "{", "}", lambda key: self._nested(book, key))
        item, (least, most) = self.value(book, schema.get("items", {}), root), _lengths(schema, "Items")
        if most == 0:
            return '"[]"'
        rest = f"({book.text(self.separator)} {item}){{{max(0, least - 1)},{most - 1 if isinstance(most, int) else most}}}"
        return f'"[" ({item} {rest}){"" if least else "?"} "]"'

    def _any(self, book: Book, name: str) -> str:
        """Returns what matches any value; it has this name in itself."""
        constants = " | ".join(map(book.text, self.constants.values()))
        plain = f"{self.text(book, {})} | {book.json({'type': 'number'})} | {constants}"
        member, separator = f"{self._nested(book, None)} {name}", book.text(self.separator)
        listed = f'"[" ({name} ({separator} {name})*)? "]"'
        return f'{plain} | {listed} | "{{" ({member} ({separator} {member})*)? "}}"'

    def _nested(self, book: Book, key: str | None) -> str:
        """Returns what matches the name of a member of an object within an argument; any name for None."""
        behind = ": " if self.separator.endswith(" ") else ":"
        return f"{self.text(book, {})} {book.text(behind)}" if key is None else book.text(self.literal(key) + behind)

    def arguments(self, book: Book, schema: Any, open_: str, close: str) -> str:
        """The rule of all arguments of a call, whose names have no quotes."""

        def name(key: str | None) -> str:
            if key is None:
                return f"{_ANY_NAME} {book.text(self.behind_key)}"
            return book.text(_named(key, self.unfit) + self.behind_key)

        return self.mapping(book, schema, schema, open_, close, name)

    def mapping(self, book: Book, schema: Any, root: Any, open_: str, close: str, name: Callable[[str | None], str]) -> str:
        """The members of an object between two signs."""

        def member(key: str | None, each: Any) -> str:
            return f"{name(key)} {self.value(book, each, root)}"

        return f"{book.text(open_)} {book.members(resolved(schema, root), self.separator, member)} {book.text(close)}"


def _types(schema: Mapping[str, Any]) -> list[str]:
    inferred = "object" if {*schema} & _OF_OBJECTS else "array" if "items" in schema else "string"
    kind = schema.get("type", inferred)
    return [kind] if isinstance(kind, str) else list(kind)


def _gemma_call(open_: str, close: str, quote: str) -> Callable[[Book, str, Any], str]:
    def text(book: Book, schema: Mapping[str, Any]) -> str:
        more = sorted(_ASKS & {*schema} - _OF_TEXTS)
        if more:
            raise _refused(f"{more[0]!r} of a text", schema)
        return f"{book.text(quote)} {book.free(quote, schema)}"

    def literal(value: Any) -> str:
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)

    notation = Notation(text, literal, ",", ":", ":")

    def call(book: Book, name: str, schema: Any) -> str:
        return f"{book.text(f'{open_}call:{name}')} {notation.arguments(book, schema, '{', '}')} {book.text(close)}"

    return call


def _python_text(book: Book, schema: Mapping[str, Any]) -> str:
    """Between quotes, with the escapes that Python and JSON share."""
    more = sorted(_ASKS & {*schema} - _OF_TEXTS)
    if more:
        raise _refused(f"{more[0]!r} of a text", schema)
    sign, (least, most) = r'([^"\\\x00-\x1f]|\\["\\nrt])', _lengths(schema)
    return book.rule(f'/"{sign}{{{least},{most}}}"/', is_terminal=True)


def _python_literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


_NOT_IN_NAMES = " \t\n\r=()[]{},'\""
_CONSTANTS = {True: "True", False: "False", None: "None"}
_PYTHON = Notation(_python_text, _python_literal, ", ", _NOT_IN_NAMES, "=", _CONSTANTS)


def _python_call(book: Book, name: str, schema: Any) -> str:
    return _PYTHON.arguments(book, schema, f"{name}(", ")")


_FRAMES: dict[ToolForm, Frame] = {
    "hermes": Frame(_json_call('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", quoted=True), between="\n"),
    "llama": Frame(_json_call('{"name": ', ', "parameters": ', "}", quoted=True), between="; "),
    "mistral": Frame(_json_call('{"name": ', ', "arguments": ', "}", quoted=True), "[TOOL_CALLS] [", ", ", "]"),
    "deepseek": Frame(
        _json_call("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    # One alone, and without <|call|> at its end: that ends the text.
    "harmony": Frame(_json_call("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""), between=None),
    "qwen": Frame(
        _tagged_call("<tool_call>\n<function={}>\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n</tool_call>"),
        between="\n",
    ),
    "glm": Frame(
        _tagged_call("<tool_call>{}\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        between="\n",
    ),
    "gemma": Frame(_gemma_call("<|tool_call>", "<tool_call|>", '<|"|>')),
    "pythonic": Frame(_python_call, "[", ", ", "]"),
}
