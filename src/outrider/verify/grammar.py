"""Structured output: which tokens may follow, along any draft path, without moving from where the text stands.

The automaton is llguidance's, an optional extra. It advances by committed tokens only; a look along a draft path consumes
the path and takes it back. A text is started with its first mask, where most of the work may be. The library bounds
the work of later masks too, and a text that comes to a bound is ended alone. Some ambiguous grammars stay below the bounds
and still take seconds for a mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import ContradictionError, InvalidParameterError, OutriderError, UnsupportedParameterError
from outrider.params import StructuredOutputs
from outrider.verify.combinations import num_combinations
from outrider.verify.multiples import num_remainders

_FIELD = "structured_outputs"
#: The largest structures that the automaton begins with in a fraction of a second. Beyond them its time grows with the
#: square of the size, and all requests wait for it.
MAX_CHOICES = 10_000
MAX_CHARACTERS = 200_000
#: Numbers that a `multipleOf` tells apart. The library has no limit of its own here; 99,991 take it half a second.
MAX_REMAINDERS = 100_000
#: Combinations of alternatives that have to hold together: 625 of strings with a pattern take 0.2 s, 15,625 more than 15 s.
MAX_COMBINATIONS = 1_000
#: What an automaton may spend until its first mask is there, and then on each mask. The library counts the expressions that
#: it makes of regular expressions. `((((a{100}){100}){100}){100})` is given up after 0.1 s at the beginning of a text, and
#: after 0.03 s in the middle of one. With the library's own limits it held a text up for 1.4 s and 0.2 s. A text may then
#: begin with a literal of some 100,000 characters, and one behind something else may have 20,000.
_LIMITS = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000, "verbose_errors": False}
#: White space between the parts of a JSON text, where a schema does not say otherwise with "x-guidance": enough for what
#: people and json.dumps write. The library's own has no end, so that a model may write blanks for ever.
_WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,64}"
#: What the library says where a limit is reached, and not where something is wrong.
_TOO_MUCH = (
    "too big",
    "schema too large",
    "too deeply",
    "too many",
    "fuel",
    "max is",
    "recursion limit",
    "precomputation failed",
)
#: How a rule begins in GBNF. Lark may have the same signs in a text or a schema, but not behind a name that starts a line.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]*[ \t]*::=", re.MULTILINE)
#: And where nothing more may follow, although the structure is not complete.
_DEAD_END = "NoExtension"


class GrammarError(OutriderError):
    """The automaton refused a token or gave up; its request fails with a ProcessingError."""


class GrammarState:
    """Where one text stands in its structure.

    Args:
        matcher: An llguidance.LLMatcher.
        bits: Its mask; None where it is not known yet.
    """

    def __init__(self, matcher: Any, bits: bytes | None = None) -> None:
        self._matcher = matcher
        self._bits = bits  # of what may follow the committed text; asked for by the draft and by the target

    def copy(self) -> GrammarState:
        """Another text of the same request, at the same place. They share what the automaton has computed, so nothing is
        compiled anew, and where one has failed all have."""
        return GrammarState(self._matcher.deep_copy(), self._bits)

    def rehearse(self) -> None:
        """Do the work of the first mask, and see that a token of it can be taken.

        Raises:
            GrammarError: No text has the structure, or it is too much for the automaton.
        """
        bits = self._committed_bits()
        ahead = self._matcher.deep_copy()  # a matcher that has failed once has failed for ever
        if not ahead.consume_token(int(np.flatnonzero(_flags(bits))[0])):
            raise GrammarError(_gave_up(ahead.get_error()))

    def advance(self, token_id: int) -> None:
        """A token was committed; one that the structure allows.

        Raises:
            GrammarError: It does not allow it, or the automaton gave up.
        """
        self._bits = None
        if not self._matcher.consume_token(token_id):
            raise GrammarError(_gave_up(self._matcher.get_error()))

    def allowed(self, path: tuple[int, ...], vocab_size: int) -> Tensor | None:
        """Tokens [vocab_size] bool that may follow the committed text and `path`; None where the path itself may not.

        Raises:
            GrammarError: The automaton gave up (its limits on complexity).
        """
        bits = self._bits_behind(path) if path else self._committed_bits()
        if bits is None:
            return None
        flags = _flags(bits)[:vocab_size]
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[: len(flags)] = torch.from_numpy(flags)
        return mask

    def _committed_bits(self) -> bytes:
        if self._bits is None:
            self._bits = self._compute()
        return self._bits

    def _bits_behind(self, path: tuple[int, ...]) -> bytes | None:
        taken = self._matcher.try_consume_tokens(list(path))
        try:
            return self._compute() if taken == len(path) else None
        finally:
            if taken and not self._matcher.is_error():
                self._matcher.rollback(taken)

    def _compute(self) -> bytes:
        bits: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(_gave_up(self._matcher.get_error()))
        return bits


class GrammarCompiler:
    """Makes automata for one tokenizer.

    Args:
        tokenizer: Of the target; None where it has none.
        vocab_size: Width of the target's logits.
        eos_token_ids: Tokens that end a text.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: Any | None = None

    def start(self, structure: StructuredOutputs) -> GrammarState:
        """A text that has yet to begin, with its first mask. Any thread may call this, and it may take tenths of a second.

        Raises:
            UnsupportedParameterError: The extra is not installed.
            ContradictionError: The model has no tokenizer, or no token that ends a text.
            InvalidParameterError: The structure is malformed, no text has it, it is larger than one of the limits here, or
                it is too much for an automaton.
        """
        written = _written(structure)
        _check_size(structure, written)
        library = _library()
        if self._vocabulary is None:
            self._vocabulary = self._wrap(library)
        try:
            source = _source(structure, written, library)
            limits = library.LLParserLimits(**_LIMITS)
            matcher = library.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        except Exception as error:  # the library's readers raise whatever happened to them
            raise _refused(structure, error) from error
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        state = GrammarState(matcher)
        try:
            state.rehearse()
        except GrammarError as error:
            raise _refused(structure, error) from error
        return state

    def _wrap(self, library: Any) -> Any:
        if self._tokenizer is None or not self._eos_token_ids:
            lacks = "tokenizer" if self._tokenizer is None else "token that ends a text"
            raise ContradictionError(_FIELD, "...", f"the model has no {lacks}", "Use a model that has one.")
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedParameterError(
            _FIELD, "...", "the library that follows grammars is not installed", "Install outrider[grammar]."
        ) from error
    return llguidance


def _given(structure: StructuredOutputs) -> object:
    return next(v for v in dict(structure).values() if v not in (None, False, ()))


def _written(structure: StructuredOutputs) -> str:
    """The structure as text, in the language that it was given in; choices one after another."""
    if structure.json_object:
        return '{"type": "object"}'
    if structure.choice:
        return "".join(structure.choice)
    if isinstance(structure.json_schema, dict):
        try:
            return json.dumps(structure.json_schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(structure, error) from error
    return structure.json_schema or structure.regex or structure.grammar or ""


def _check_size(structure: StructuredOutputs, written: str) -> None:
    if len(structure.choice) > MAX_CHOICES:
        raise InvalidParameterError(
            _FIELD,
            structure.choice,
            f"it is too large: {len(structure.choice):,} choices",
            f"Use up to {MAX_CHOICES:,} choices; a regex or a grammar says many alike in one.",
        )
    if len(written) > MAX_CHARACTERS:
        raise InvalidParameterError(
            _FIELD,
            _given(structure),
            f"it is too large: {len(written):,} characters",
            f"Use up to {MAX_CHARACTERS:,} characters in all.",
        )
    for schema in () if structure.choice or structure.regex else _schemas(written):
        _check_schema(structure, schema)


def _check_schema(structure: StructuredOutputs, schema: object) -> None:
    """Refuse what the library has no limit of its own for."""
    remainders, combinations = num_remainders(schema), num_combinations(schema)
    if remainders > MAX_REMAINDERS:
        raise InvalidParameterError(
            _FIELD,
            _given(structure),
            f"it is too much for an automaton: its multipleOf leaves {remainders:,} remainders",
            f"Use steps with up to {MAX_REMAINDERS:,} remainders, counted in units of the last decimal place.",
        )
    if combinations > MAX_COMBINATIONS:
        raise InvalidParameterError(
            _FIELD,
            _given(structure),
            f"it is too much for an automaton: its alternatives have {combinations:,} combinations or more",
            f"Use up to {MAX_COMBINATIONS:,} combinations of anyOf and oneOf that have to hold together.",
        )


def _schemas(written: str) -> Iterator[object]:
    """The schemas in a text, where they can be read: itself, or what stands behind `%json` in a grammar. The library that
    reads the rest says what is wrong."""
    places = [found.end() for found in re.finditer(r"%json\s*", written)] or [0]
    decoder = json.JSONDecoder()
    for place in places:
        with suppress(ValueError, RecursionError):
            yield decoder.raw_decode(written, place)[0]


def _refused(structure: StructuredOutputs, reason: object) -> InvalidParameterError:
    """Why a structure cannot be followed: it is more than an automaton can do, nothing has it, or it is written wrongly."""
    line = _first_line(reason)
    if _is_too_much(line):
        remedy = "Use fewer or shorter repetitions, fewer alternatives, and less nesting."
        return InvalidParameterError(_FIELD, _given(structure), f"it is too much for an automaton ({line})", remedy)
    if _DEAD_END in line:
        return InvalidParameterError(_FIELD, _given(structure), "no text can have it", "Give one that a text can have.")
    return InvalidParameterError(_FIELD, _given(structure), f"it is malformed ({line})", "Correct it.")


def _flags(bits: bytes) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").astype(bool)


def _is_too_much(line: str) -> bool:
    return any(part in line.lower() for part in _TOO_MUCH)


def _gave_up(reason: object) -> str:
    """What is said of an automaton that cannot go on."""
    line = _first_line(reason)
    if _is_too_much(line):
        return f"the structure became too much for its automaton ({line})"
    return f"no token may follow in the structure ({line})" if _DEAD_END in line else line


def _first_line(reason: object, limit: int = 200) -> str:
    """What an error says, without the states and lists that may follow."""
    line = next(iter(str(reason).strip().splitlines()), "no reason was given")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


@lru_cache(maxsize=64)
def _from_schema(schema: str, library: Any) -> str:
    read = json.loads(schema)
    own = read.get("x-guidance") if isinstance(read, dict) else None
    defaults = None if own else {"whitespace_pattern": _WHITESPACE}
    grammar: str = library.LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    return grammar


def _source(structure: StructuredOutputs, written: str, library: Any) -> str:
    """The structure in llguidance's own form."""
    if structure.json_object or structure.json_schema is not None:
        return _from_schema(written, library)
    if structure.regex is not None:
        return str(library.LLMatcher.grammar_from_regex(written))
    if structure.choice:
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in structure.choice)
    if _GBNF_RULE.search(written) is None:
        return str(library.LLMatcher.grammar_from_lark(written))
    from llguidance.gbnf_to_lark import any_to_lark

    return str(library.LLMatcher.grammar_from_lark(any_to_lark(written)))
