"""Structured outputs: what is malformed or too large is refused with a typed error; a refusal for size costs nothing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import UUID4, BaseModel, SecretStr
from transformers import AutoTokenizer

from outrider.config import default_model
from outrider.errors import InvalidParameterError, UnsupportedParameterError
from outrider.params import StructuredOutputs
from outrider.structured import grammar
from outrider.structured.grammar import GrammarCompiler
from outrider.structured.structures import FORMATS
from outrider.structured.trials import Trials

llguidance = pytest.importorskip("llguidance")
BY_CHANGE = pytest.mark.by_change("src/outrider/structured/")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def circular() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    schema["additionalProperties"] = schema
    return schema


MALFORMED: dict[str, dict[str, Any]] = {
    "GBNF, literal without an end": {"grammar": 'root ::= "a'},
    "GBNF, set without an end": {"grammar": "root ::= [a"},
    "GBNF, group without an end": {"grammar": "root ::= ("},
    "GBNF, no name": {"grammar": "::="},
    "GBNF, rule that is missing": {"grammar": "root ::= missing"},
    "GBNF, no root": {"grammar": 'x ::= "a"'},
    "GBNF, escape without an end": {"grammar": 'root ::= "\\'},
    "GBNF, unknown escape": {"grammar": 'root ::= "\\q"'},
    "GBNF, count without an end": {"grammar": 'root ::= "a"{3'},
    "GBNF, count beyond all numbers": {"grammar": 'root ::= "a"{99999999999}'},
    "GBNF, no such character": {"grammar": 'root ::= "\\U00110000"'},
    "GBNF, too deep": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "GBNF, a long name that is missing": {"grammar": "root ::= " + "x" * 5000},
    "Lark, rule that is missing": {"grammar": "start: missing"},
    "Lark, no colon": {"grammar": "start"},
    "Lark, literal without an end": {"grammar": 'start: "a'},
    "Lark, too deep": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "regex, group without an end": {"regex": "(("},
    "regex, set without an end": {"regex": "["},
    "regex, more at least than at most": {"regex": "a{5,2}"},
    "regex, too deep": {"regex": "(" * 5000 + ")" * 5000},
    "schema, no JSON": {"json_schema": "{"},
    "schema, a list": {"json_schema": "[]"},
    "schema, half a character": {"json_schema": '"\ud800"'},
    "schema, a set in it": {"json_schema": {"enum": {1, 2}}},
    "schema, an object of Python in it": {"json_schema": {"enum": [object()]}},
    "schema, not a number": {"json_schema": {"minimum": float("nan")}},
    "schema, too deep": {"json_schema": nested(5000)},
    "schema, inside itself": {"json_schema": circular()},
    "schema, unknown type": {"json_schema": {"type": "nothing"}},
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which parts of the library are used from here on."""
    used: list[str] = []
    real = grammar._library

    def counted() -> Any:
        used.append("library")
        return real()

    monkeypatch.setattr(grammar, "_library", counted)
    return used


def test_a_malformed_regex_is_refused_with_what_is_wrong_with_it(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        compiler.start(StructuredOutputs(regex="a("))
    assert "unclosed group" in caught.value.problem


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_structure_is_refused_with_its_reason(compiler: GrammarCompiler, name: str) -> None:
    structure = StructuredOutputs(**MALFORMED[name])
    with pytest.raises(InvalidParameterError) as caught:
        compiler.start(structure)
    error = caught.value
    assert error.field == "structured_outputs"
    assert error.value == next(iter(MALFORMED[name].values()))
    assert "malformed" in error.problem or "too much" in error.problem
    assert error.remedy
    assert len(str(error)) < 500
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "given",
    [
        {"choice": [str(i) for i in range(grammar.MAX_CHOICES + 1)]},
        {"choice": [str(i) for i in range(1_000_000)]},
        {"choice": ["a", "b" * grammar.MAX_CHARACTERS]},
        {"regex": "a" * (grammar.MAX_CHARACTERS + 1)},
        {"grammar": 'start: "' + "a" * grammar.MAX_CHARACTERS + '"'},
        {"grammar": 'root ::= "' + "a" * grammar.MAX_CHARACTERS + '"'},
        {"json_schema": '{"const": "' + "a" * grammar.MAX_CHARACTERS + '"}'},
        {"json_schema": {"const": "a" * grammar.MAX_CHARACTERS}},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_structure_that_is_too_large_is_refused_before_the_library_sees_it(
    compiler: GrammarCompiler, calls: list[str], given: dict[str, Any]
) -> None:
    structure = StructuredOutputs(**given)
    with pytest.raises(InvalidParameterError, match="too large") as caught:
        compiler.start(structure)
    assert calls == []
    assert caught.value.field == "structured_outputs"
    limits = (f"{grammar.MAX_CHOICES:,} choices", f"{grammar.MAX_CHARACTERS:,} characters")
    assert any(limit in caught.value.remedy for limit in limits)


@pytest.mark.parametrize(
    "given",
    [
        {"choice": [f"option {i}" for i in range(grammar.MAX_CHOICES)]},
        {"choice": [f"{i:04}" + "a" * 96 for i in range(grammar.MAX_CHARACTERS // 100)]},
        {"choice": ["a" * 64 * 1024]},
        {"regex": "a" * 64 * 1024},
        {"json_schema": {"enum": [f"option {i}" for i in range(grammar.MAX_CHOICES)]}},
    ],
    ids=lambda given: next(iter(given)),
)
def test_the_largest_structures_are_followed(compiler: GrammarCompiler, calls: list[str], given: dict[str, Any]) -> None:
    state = compiler.start(StructuredOutputs(**given))
    assert calls == ["library"]
    allowed = state.allowed((), 4096)
    assert allowed is not None
    assert allowed.any()


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('start: "a ::= b"', "a ::= b"),
        ('start: %json {"const": "x ::= y"}', '"x ::= y"'),
        ('# a grammar\nroot ::= "a" rest\n rest-2 ::= "c"\nrest ::= "b" rest-2', "abc"),
    ],
)
def test_gbnf_is_known_by_its_rules(compiler: GrammarCompiler, written: str, text: str) -> None:
    assert _takes(compiler.start(StructuredOutputs(grammar=written)), compiler._tokenizer, text)


@pytest.mark.parametrize(
    "given",
    [
        {"grammar": "root ::= root"},
        {"grammar": r"start: /[^\s\S]/"},
        {"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    ],
    ids=str,
)
def test_a_structure_that_no_text_has_is_refused_in_a_line(compiler: GrammarCompiler, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match="no text can have it") as caught:
        compiler.start(StructuredOutputs(**given))
    assert "\n" not in str(caught.value)


class Fields(BaseModel):
    """What Pydantic writes with formats that no text is held to."""

    place: Path
    secret: SecretStr
    raw: bytes
    key: UUID4


@pytest.mark.parametrize("embed", [json.dumps, lambda schema: schema], ids=["text", "dict"])
def test_formats_that_only_annotate_are_passed_over(compiler: GrammarCompiler, embed: Callable[[Any], Any]) -> None:
    state = compiler.start(StructuredOutputs(json_schema=embed(Fields.model_json_schema())))
    assert _takes(state, compiler._tokenizer, '{"place": "/x", "secret": "s", "raw": "r", "key": "k"}')


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_the_library_knows_hold(compiler: GrammarCompiler, name: str) -> None:
    state = compiler.start(StructuredOutputs(json_schema={"type": "string", "format": name}))
    assert not _takes(state, compiler._tokenizer, '"!"')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]"),
        ({"properties": {"format": {"enum": ["path"]}}, "required": ["format"], "type": "object"}, '{"format": "path"}'),
        ({"const": {"format": "path", "not": False}}, '{"format": "path", "not": false}'),
        ({"properties": {"enum": {"format": "path", "type": "string"}}, "type": "object"}, '{"enum": "x"}'),
        ({"anyOf": [{"format": "path", "type": "string"}, True], "propertyNames": {}}, "3"),
    ],
)
def test_what_asks_for_nothing_is_taken_and_what_is_a_value_stays(
    compiler: GrammarCompiler, schema: dict[str, Any], text: str
) -> None:
    assert _takes(compiler.start(StructuredOutputs(json_schema=schema)), compiler._tokenizer, text)
    if "const" in schema or "required" in schema:
        state = compiler.start(StructuredOutputs(json_schema=schema))
        assert not _takes(state, compiler._tokenizer, '{"format": "x"}')


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "the keyword uniqueItems)"),
        ({"json_schema": {"not": {"type": "string"}}}, "the keyword not)"),
        ({"json_schema": {"$ref": "https://example.com/x"}}, "Default retriever does not fetch"),
        ({"json_schema": {"pattern": "(?=a)b"}}, "look-around"),
        ({"regex": "(?=a)b"}, "look-around"),
    ],
)
def test_what_is_sound_and_not_supported_is_called_so(compiler: GrammarCompiler, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedParameterError, match="not supported here") as caught:
        compiler.start(StructuredOutputs(**given))
    assert said in caught.value.problem
    assert "malformed" not in str(caught.value)


# -- what is small to write, and much work ------------------------------------------------------------------------------

_MANY = "((((a{100}){100}){100}){100})"
_PRIME = 4_294_967_291

_CHOICES = [[{"type": "string", "pattern": f"x{i}y{j}"} for j in range(5)] for i in range(6)]
_COMBINED = {"allOf": [{"anyOf": each} for each in _CHOICES]}

TOO_MUCH: dict[str, dict[str, Any]] = {
    "regex, repeated repetitions": {"regex": _MANY},
    "regex, a billion": {"regex": "a{1000000000}"},
    "Lark, repeated repetitions": {"grammar": f"start: /{_MANY}/"},
    "GBNF, repeated repetitions": {"grammar": "root ::= [a]{1000000}"},
    "choice, a long literal": {"choice": ["a" * grammar.MAX_CHARACTERS]},
    "schema, pattern": {"json_schema": {"type": "string", "pattern": f"^{_MANY}$"}},
    "schema, a pattern that is long in any case": {
        "json_schema": {"type": "string", "minLength": 100_000, "pattern": "^(ab|.)*$"}
    },
}


def chained(length: int) -> dict[str, Any]:
    """A schema whose meaning doubles with every reference."""
    links = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string", "pattern": "^a+$"}}}


_STEPS = {f"p{i}": {"type": "integer", "multipleOf": 99_991 - i} for i in range(100)}
_LENGTHS = [[{"type": "string", "pattern": f"^[a-z]{{{5 * i + j},90}}$"} for j in range(5)] for i in range(6)]
_HIDDEN = {f"d{i}": {"$anchor": f"x{i}", "anyOf": each} for i, each in enumerate(_LENGTHS)}

#: What the library has no limit of its own for: it would take minutes, or all memory.
ENDLESS: dict[str, dict[str, Any]] = {
    "references, 18 links": {"json_schema": chained(18)},
    "references, 60 links": {"json_schema": chained(60)},
    "multiples, a large one": {"json_schema": {"type": "number", "multipleOf": 0.123456789}},
    "multiples, as text": {"json_schema": json.dumps({"type": "integer", "multipleOf": _PRIME})},
    "multiples, a hundred": {"json_schema": {"type": "object", "properties": _STEPS, "required": list(_STEPS)}},
    "multiples, together": {"json_schema": {"multipleOf": 997, "allOf": [{"multipleOf": 991}, {"multipleOf": 983}]}},
    "multiples in Lark": {"grammar": f"start: %json {json.dumps({'prefixItems': list(_STEPS.values()), 'minItems': 100})}"},
    "alternatives": {"json_schema": _COMBINED},
    "alternatives in Lark": {"grammar": f"start: %json {json.dumps(_COMBINED)}"},
    "alternatives by anchors": {"json_schema": {"allOf": [{"$ref": f"#x{i}"} for i in range(6)], "$defs": _HIDDEN}},
    "alternatives of items": {"json_schema": {"allOf": [{"items": {"anyOf": each}, "minItems": 1} for each in _LENGTHS]}},
}


@pytest.fixture(scope="module")
def careful(compiler: GrammarCompiler) -> Iterator[GrammarCompiler]:
    """One that tries structures in another process first."""
    found = GrammarCompiler(compiler._tokenizer, compiler._vocab_size, frozenset(compiler._eos_token_ids))
    found.trials = Trials()
    yield found
    found.trials.close()


#: One of each kind; the others where structures change.
_ONE_OF_EACH = ("references, 18 links", "multiples, a large one", "alternatives")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in _ONE_OF_EACH else BY_CHANGE) for name in ENDLESS])
def test_what_would_never_end_is_refused_after_a_trial(careful: GrammarCompiler, name: str) -> None:
    before = time.process_time()
    with pytest.raises(InvalidParameterError, match="structured_outputs=") as caught:
        careful.start(StructuredOutputs(**ENDLESS[name]))
    assert time.process_time() - before < 5  # in this process, where it would never end
    assert "too much for an automaton" in caught.value.problem or "malformed" in caught.value.problem
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MALFORMED)
def test_a_trial_gives_the_same_reasons(careful: GrammarCompiler, compiler: GrammarCompiler, name: str) -> None:
    found = []
    for each in (careful, compiler):
        with pytest.raises(InvalidParameterError) as caught:
            each.start(StructuredOutputs(**MALFORMED[name]))
        found.append((caught.value.problem, caught.value.remedy))
    assert found[0] == found[1]


@BY_CHANGE
@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_explodes_is_refused_at_once(compiler: GrammarCompiler, name: str) -> None:
    """The processor's own time is bounded, whoever else uses the machine."""
    before = time.thread_time()
    with pytest.raises(InvalidParameterError, match="too much for an automaton") as caught:
        compiler.start(StructuredOutputs(**TOO_MUCH[name]))
    assert time.thread_time() - before < 1
    assert caught.value.field == "structured_outputs"
    assert caught.value.remedy.startswith("Use ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written", ['{"multipleOf": 4294967291}', '%json{"multipleOf": 4294967291}'])
def test_what_looks_like_a_schema_and_is_none_is_text(compiler: GrammarCompiler, written: str) -> None:
    assert _takes(compiler.start(StructuredOutputs(choice=[written])), compiler._tokenizer, written)
    assert compiler.start(StructuredOutputs(regex=written.replace("{", r"\{").replace("}", r"\}")))


def test_combinations_are_followed(compiler: GrammarCompiler) -> None:
    names = [[f"p{part}{choice}" for choice in range(3)] for part in "ab"]
    objects = [[{"type": "object", "properties": {name: {}}, "required": [name]} for name in each] for each in names]
    schema = {"allOf": [{"anyOf": each} for each in objects]}
    state = compiler.start(StructuredOutputs(json_schema=schema))
    assert _takes(state, compiler._tokenizer, '{"pa1": 1, "pb2": 2}')


# -- what is done when ---------------------------------------------------------------------------------------------------


class Spent:
    """A matcher that computes no mask."""

    def compute_bitmask(self) -> bytes:
        raise AssertionError("the mask was computed in a step")


def _forced(state: grammar.GrammarState) -> int:
    allowed = state.allowed((), 4096)
    assert allowed is not None
    return int(allowed.nonzero()[0])


@pytest.mark.parametrize("structure", [{"regex": "[ab]{5}"}, {"json_object": True}, {"choice": ["yes", "no"]}])
def test_a_text_starts_with_its_first_mask(compiler: GrammarCompiler, structure: dict[str, Any]) -> None:
    state = compiler.start(StructuredOutputs(**structure))
    want = compiler.start(StructuredOutputs(**structure)).allowed((), 4096)
    other = state.copy()
    for each in (state, other):
        each._matcher = Spent()
        found = each.allowed((), 4096)
        assert found is not None
        assert want is not None
        assert torch.equal(found, want)


def test_samples_of_a_request_compile_once_and_go_their_own_ways(compiler: GrammarCompiler, calls: list[str]) -> None:
    first = compiler.start(StructuredOutputs(regex="x(a|y)"))
    second = first.copy()
    assert calls == ["library"]
    x, y, a = (compiler._tokenizer.encode(text)[0] for text in "xya")
    first.advance(x)
    first.advance(a)
    second.advance(x)
    allowed = second.allowed((), 4096)
    assert allowed is not None
    assert sorted(allowed.nonzero().flatten().tolist()) == sorted([a, y])


class Clock:
    """Masks take so many milliseconds, and nothing else takes any time."""

    def __init__(self, milliseconds: float) -> None:
        self._now, self._step = 0.0, milliseconds / 1000

    def __call__(self) -> float:
        self._now += self._step
        return self._now


@pytest.mark.parametrize(("milliseconds", "num_masks"), [(4.9, None), (6.5, 134), (50.0, 5), (600.0, 1)])
def test_masks_that_take_long_end_their_own_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, milliseconds: float, num_masks: int | None
) -> None:
    texts = [compiler.start(StructuredOutputs(regex="[ab]*"))]
    texts.append(texts[0].copy())
    other = compiler.start(StructuredOutputs(regex="[ab]*"))
    token = compiler._tokenizer.encode("a")[0]
    monkeypatch.setattr(grammar, "thread_time", Clock(milliseconds))
    for count in range(1, num_masks or 2000):
        texts[count % 2]._masks.clear()
        texts[count % 2].allowed((), 4096)
    if num_masks is not None:
        texts[0]._masks.clear()
        with pytest.raises(grammar.GrammarError, match=f"too much work: its {num_masks} masks took {milliseconds} ms each"):
            texts[0].allowed((), 4096)
    monkeypatch.undo()
    assert other.allowed((token,), 4096) is not None


def test_what_it_takes_to_come_to_a_mask_counts_too(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    state = compiler.start(StructuredOutputs(regex="[ab]*"))
    other = state.copy()
    token = compiler._tokenizer.encode("a")[0]
    monkeypatch.setattr(grammar, "thread_time", Clock(10.1))
    _repeat(19, lambda: state.advance(token))
    with pytest.raises(grammar.GrammarError, match="too much work: its 0 masks"):
        state.advance(token)
    other._matcher = Spent()  # the other texts of the request end without more work
    other._masks.clear()
    with pytest.raises(grammar.GrammarError, match="too much work: its 0 masks"):
        other.allowed((), 4096)


def test_looks_along_drafts_count_where_the_text_comes_there(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = compiler.start(StructuredOutputs(regex="[ab]*"))
    token = compiler._tokenizer.encode("a")[0]
    monkeypatch.setattr(grammar, "thread_time", Clock(20.0))
    for count in range(1, 30):
        assert state.allowed((token,) * count, 4096) is not None
    assert not state.follows_drafts, "such looks take too long, and the text goes on without drafts"
    _repeat(5, lambda: state.advance(token))  # each of them takes 20 ms, and the look at its place took 20 ms
    with pytest.raises(grammar.GrammarError, match="too much work: its 6 masks"):
        state.advance(token)


def test_a_look_that_breaks_the_automaton_costs_the_draft(compiler: GrammarCompiler) -> None:
    """A literal of this size is too much in the middle of a text, and the text never comes to it."""
    rng = random.Random(1)
    literal = "".join(rng.choice("abcdefghijklmnop") for _ in range(60_000))
    state = compiler.start(StructuredOutputs(regex=f"([0-9]|{literal})*"))
    seven, draft = compiler._tokenizer.encode("7")[0], compiler._tokenizer.encode(literal[:40])
    others = [state.copy(), state.copy()]
    for each in (state, others[0]):
        each.advance(seven)
    with pytest.raises(grammar.GrammarError, match="too many expressions"):  # noqa: PT012
        for size in range(1, len(draft)):
            state.allowed(tuple(draft[:size]), 4096)
    assert [each.follows_drafts for each in (state, *others)] == [False, True, True]
    assert state.allowed((seven,), 4096) is not None, "another branch of the draft"
    assert others[0].allowed((), 4096) is not None, "another text, which shares what the automaton has computed"
    for each in (state, *others):
        _repeat(3, lambda each=each: each.advance(seven))  # type: ignore[misc]
        found = each.allowed((), 4096)
        assert found is not None
        assert found[seven]


def _repeat(times: int, act: Callable[[], object]) -> None:
    for _ in range(times):
        act()


def _advance(state: grammar.GrammarState, num_tokens: int) -> None:
    for _ in range(num_tokens):
        state.advance(_forced(state))


def test_what_explodes_later_ends_then_and_soon(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutputs(regex=f"[bc]{_MANY}"))
    state.advance(compiler._tokenizer.encode("b")[0])
    with pytest.raises(grammar.GrammarError, match="too much for its automaton"):
        _advance(state, 10)


def test_a_large_step_ends_where_it_is_come_to(compiler: GrammarCompiler) -> None:
    later = f'start: "x" %json {{"type": "integer", "multipleOf": {_PRIME}}} "y"'
    state = compiler.start(StructuredOutputs(grammar=later))
    with pytest.raises(grammar.GrammarError, match="too much for its automaton"):
        _advance(state, 3)


@BY_CHANGE
@pytest.mark.parametrize("rule", ["e e e e e e | /./ |", "e e e e | /./ |", 'e e | e e e | "a" | "b" | /[a-z]/'])
def test_an_ambiguous_grammar_ends_before_a_mask_takes_long(compiler: GrammarCompiler, rule: str) -> None:
    longest, before = 0.0, time.thread_time()
    with pytest.raises((grammar.GrammarError, InvalidParameterError), match=r"Too many items|too much work"):  # noqa: PT012
        state = compiler.start(StructuredOutputs(grammar=f"start: e\ne: {rule}"))
        for token in compiler._tokenizer.encode("def first(values): return values[0] if values else None") * 5:
            before = time.thread_time()
            state.advance(token)
            state.allowed((), 4096)
            longest = max(longest, time.thread_time() - before)
    assert max(longest, time.thread_time() - before) < 0.2  # about 0.05 on a machine with nothing else to do


_LANGUAGE = r"""
start: statement+
statement: "let " NAME " = " either ";\n" | "while (" either ") {\n" statement* "}\n" | either ";\n"
    | "fn " NAME "(" (NAME (", " NAME)*)? ") {\n" statement* "return " either ";\n}\n"
    | "if (" either ") {\n" statement* "}" (" else {\n" statement* "}")? "\n"
either: both (" || " both)*
both: compared (" && " compared)*
compared: sum ((" < " | " > " | " == " | " != " | " <= " | " >= ") sum)?
sum: product ((" + " | " - ") product)*
product: signed ((" * " | " / " | " % ") signed)*
signed: ("-" | "!")? called
called: value ("(" (either (", " either)*)? ")" | "[" either "]" | "." NAME)*
value: NAME | NUMBER | TEXT | "(" either ")" | "[" (either (", " either)*)? "]"
NAME: /[a-zA-Z_][a-zA-Z0-9_]*/
NUMBER: /[0-9]+(\.[0-9]+)?/
TEXT: /"[^"\n]*"/
"""
_PROGRAM = """fn largest(list, least) {
let found = least;
while (i < list.size() && (found != -1 || !done)) {
if (list[i] > found) {
found = list[i] * (2 + f(a, [1, 2.5])(3).b);
} else {
print("no " + list[i]);
}
}
return found;
}
"""


def test_a_programming_language_is_followed(compiler: GrammarCompiler) -> None:
    source = _PROGRAM.replace("found = list", "let found = list")
    assert _takes(compiler.start(StructuredOutputs(grammar=_LANGUAGE)), compiler._tokenizer, source)


@pytest.mark.parametrize(("num_characters", "fits"), [(15_000, True), (30_000, False)])
def test_a_step_has_a_limit_of_its_own(compiler: GrammarCompiler, num_characters: int, fits: bool) -> None:
    """The automaton looks ahead as far as a literal goes, which takes a step's time."""
    state = compiler.start(StructuredOutputs(regex="[bc]" + "a" * num_characters))
    assert state.allowed((), 4096) is not None  # spends what a step may, and no more
    state.advance(compiler._tokenizer.encode("b")[0])
    if fits:
        _advance(state, 3)
    else:
        with pytest.raises(grammar.GrammarError, match="too much for its automaton"):
            _advance(state, 3)


def test_a_choice_of_many_is_followed_to_its_end(compiler: GrammarCompiler) -> None:
    choices = [f"{i * 7919 % 10_007} option" for i in range(grammar.MAX_CHOICES)]
    start = compiler.start(StructuredOutputs(choice=choices))
    for written in choices[:3] + choices[-3:]:
        state = start.copy()
        for token in compiler._tokenizer.encode(written, add_special_tokens=False):
            state.advance(token)
        allowed = state.allowed((), 4096)
        assert allowed is not None
        assert allowed.nonzero().flatten().tolist() == [compiler._tokenizer.eos_token_id]


def test_a_choice_that_begins_another_may_end_or_go_on(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutputs(choice=["a", "ab"]))
    encode = compiler._tokenizer.encode
    state.advance(encode("a")[0])
    allowed = state.allowed((), 4096)
    assert allowed is not None
    assert allowed.nonzero().flatten().tolist() == sorted([compiler._tokenizer.eos_token_id, encode("b")[0]])


# -- white space --------------------------------------------------------------------------------------------------------

_VALUE = {"a": [1, {"b": [None, "  x"]}], "c": {}}


def _takes(state: grammar.GrammarState, tokenizer: Any, text: str) -> bool:
    try:
        for token in tokenizer.encode(text, add_special_tokens=False):
            state.advance(token)
    except grammar.GrammarError:
        return False
    allowed = state.allowed((), 4096)
    return allowed is not None and bool(allowed[tokenizer.eos_token_id])


@pytest.mark.parametrize(
    "structure", [{"json_object": True}, {"json_schema": {"type": "object"}}], ids=["object", "schema"]
)
def test_white_space_in_json_is_what_json_dumps_writes(compiler: GrammarCompiler, structure: dict[str, Any]) -> None:
    start, tokenizer = compiler.start(StructuredOutputs(**structure)), compiler._tokenizer
    for pair in ((", ", ": "), (",", ":"), (" , ", " : ")):
        text = json.dumps(_VALUE, separators=pair)
        assert _takes(start.copy(), tokenizer, text), text
    for blanks in ("  ", "\n", "\t", "\r\n", " \n", "\n  "):
        assert not _takes(start.copy(), tokenizer, '{"a":' + blanks + "1}"), blanks
        assert not _takes(start.copy(), tokenizer, "{" + blanks + "}"), blanks
        assert not _takes(start.copy(), tokenizer, '{"a": 1' + blanks + "}"), blanks


def test_a_schema_may_say_otherwise(compiler: GrammarCompiler) -> None:
    own = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    start, tokenizer = compiler.start(StructuredOutputs(json_schema=own)), compiler._tokenizer
    assert _takes(start.copy(), tokenizer, '{"a":1}')
    assert not _takes(start.copy(), tokenizer, '{"a": 1}')
    wide = {"type": "object", "x-guidance": {"whitespace_pattern": r"\s{1,8}"}}
    start = compiler.start(StructuredOutputs(json_schema=wide))
    assert _takes(start.copy(), tokenizer, json.dumps(_VALUE, indent=1))


# -- what is forced ------------------------------------------------------------------------------------------------------


def _chain(state: grammar.GrammarState) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while (token := state.only(path)) is not None:
        path = (*path, token)
        if token == 0:
            break
    return path


@pytest.mark.parametrize(
    ("before", "forces"), [("", True), ('{"name": "', False), ('{"name": "x", ', True), ('{"name": "x", "unit": "c', True)]
)
def test_what_is_forced_is_what_the_library_fast_forwards(compiler: GrammarCompiler, before: str, forces: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["name", "unit"],
        "additionalProperties": False,
    }
    state = compiler.start(StructuredOutputs(json_schema=schema))
    for token in compiler._tokenizer.encode(before, add_special_tokens=False):
        state.advance(token)
    fast = tuple(state._matcher.deep_copy().compute_ff_tokens())
    assert _chain(state) == fast
    assert bool(fast) == forces


def test_the_end_is_forced_where_nothing_else_may_follow(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutputs(choice=["yes"]))
    path = _chain(state)
    assert compiler._tokenizer.decode(path[:-1]) == "yes"
    assert path[-1] == compiler._tokenizer.eos_token_id


def test_masks_do_not_depend_on_what_was_looked_at_before(compiler: GrammarCompiler) -> None:
    """One automaton goes to and fro along the paths of a draft; a fresh one goes to each path alone."""
    rng, structure = random.Random(1), StructuredOutputs(regex="a(bc)?[xy]*(de|d)f")
    start = compiler.start(structure)
    state, written = start.copy(), list[int]()
    for _ in range(12):
        for _ in range(6):
            path = tuple(compiler._tokenizer.encode(rng.choice("abcxydef"))[0] for _ in range(rng.randrange(5)))
            fresh = start.copy()
            for token in written:
                fresh.advance(token)
            found, wanted = state.allowed(path, 4096), fresh.allowed(path, 4096)
            assert (found is None) == (wanted is None)
            assert found is None or wanted is None or torch.equal(found, wanted)
        allowed = state.allowed((), 4096)
        assert allowed is not None
        token = rng.choice(allowed.nonzero().flatten().tolist())
        if token == compiler._tokenizer.eos_token_id:
            break
        state.advance(token)
        written.append(token)
