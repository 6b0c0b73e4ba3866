"""Structured outputs: what is malformed or too large is refused with a typed error; a refusal for size costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.errors import InvalidParameterError
from outrider.llm import default_model
from outrider.params import StructuredOutputs
from outrider.verify import grammar
from outrider.verify.grammar import GrammarCompiler

llguidance = pytest.importorskip("llguidance")


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


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_structure_is_refused_with_its_reason(compiler: GrammarCompiler, name: str) -> None:
    structure = StructuredOutputs(**MALFORMED[name])
    with pytest.raises(InvalidParameterError) as caught:
        compiler.start(structure)
    error = caught.value
    assert error.field == "structured_outputs"
    assert error.value == next(iter(MALFORMED[name].values()))
    assert "malformed" in error.problem
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
        {"choice": ["a" * grammar.MAX_CHARACTERS]},
        {"regex": "a" * grammar.MAX_CHARACTERS},
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


def test_a_structure_that_no_text_has_says_so_in_a_line(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutputs(grammar="root ::= root"))
    with pytest.raises(grammar.GrammarError) as caught:
        state.allowed((), 4096)
    assert "\n" not in str(caught.value)
    assert 0 < len(str(caught.value)) < 300
