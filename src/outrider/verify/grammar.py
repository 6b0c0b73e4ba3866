"""Structured output: which tokens may follow, along any draft path, without moving from where the text stands.

The automaton is llguidance's, an optional extra. It advances by committed tokens only; a look along a draft path consumes
the path and takes it back.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ContradictionError, InvalidParameterError, OutriderError, UnsupportedParameterError
from outrider.params import StructuredOutputs

_FIELD = "structured_outputs"
#: The largest structures that the automaton begins with in a fraction of a second. Beyond them its time grows with the
#: square of the size, and all requests wait for it.
MAX_CHOICES = 10_000
MAX_CHARACTERS = 200_000


class GrammarError(OutriderError):
    """The automaton refused a token or gave up; its request fails with a ProcessingError."""


class GrammarState:
    """Where one text stands in its structure.

    Args:
        matcher: A fresh llguidance.LLMatcher.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def advance(self, token_id: int) -> None:
        """A token was committed; one that the structure allows.

        Raises:
            GrammarError: It does not allow it.
        """
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"the structure refuses token {token_id}: {_first_line(self._matcher.get_error())}")

    def allowed(self, path: tuple[int, ...], vocab_size: int) -> Tensor | None:
        """Tokens [vocab_size] bool that may follow the committed text and `path`; None where the path itself may not.

        Raises:
            GrammarError: The automaton gave up (its limits on complexity).
        """
        taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        try:
            bits = self._matcher.compute_bitmask() if taken == len(path) else None
            if self._matcher.is_error():
                raise GrammarError(_first_line(self._matcher.get_error()))
        finally:
            if taken and not self._matcher.is_error():
                self._matcher.rollback(taken)
        if bits is None:
            return None
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab_size]
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[: len(flags)] = torch.from_numpy(flags.astype(bool))
        return mask


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
        """A text that has yet to begin.

        Raises:
            UnsupportedParameterError: The extra is not installed.
            ContradictionError: The model has no tokenizer, or no token that ends a text.
            InvalidParameterError: The structure is malformed, or larger than MAX_CHOICES or MAX_CHARACTERS.
        """
        written = _written(structure)
        _check_size(structure, written)
        library = _library()
        if self._vocabulary is None:
            self._vocabulary = self._wrap(library)
        try:
            matcher = library.LLMatcher(self._vocabulary, _source(structure, written, library), log_level=0)
        except Exception as error:  # the library's readers raise whatever happened to them
            raise _malformed(structure, error) from error
        if matcher.is_error():
            raise _malformed(structure, matcher.get_error())
        return GrammarState(matcher)

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
            raise _malformed(structure, error) from error
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


def _malformed(structure: StructuredOutputs, reason: object) -> InvalidParameterError:
    return InvalidParameterError(_FIELD, _given(structure), f"it is malformed ({_first_line(reason)})", "Correct it.")


def _first_line(reason: object, limit: int = 200) -> str:
    """What an error says, without the states and lists that may follow."""
    line = next(iter(str(reason).strip().splitlines()), "no reason was given")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


@lru_cache(maxsize=64)
def _from_schema(schema: str, library: Any) -> str:
    grammar: str = library.LLMatcher.grammar_from_json_schema(schema)
    return grammar


def _source(structure: StructuredOutputs, written: str, library: Any) -> str:
    """The structure in llguidance's own form."""
    if structure.json_object or structure.json_schema is not None:
        return _from_schema(written, library)
    if structure.regex is not None:
        return str(library.LLMatcher.grammar_from_regex(written))
    if structure.choice:
        return "start: " + " | ".join(json.dumps(choice) for choice in structure.choice)
    if "::=" not in written:
        return str(library.LLMatcher.grammar_from_lark(written))
    from llguidance.gbnf_to_lark import any_to_lark

    return str(library.LLMatcher.grammar_from_lark(any_to_lark(written)))
