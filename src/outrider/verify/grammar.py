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
            raise GrammarError(f"the structure refuses token {token_id}: {self._matcher.get_error()}")

    def allowed(self, path: tuple[int, ...], vocab_size: int) -> Tensor | None:
        """Tokens [vocab_size] bool that may follow the committed text and `path`; None where the path itself may not.

        Raises:
            GrammarError: The automaton gave up (its limits on complexity).
        """
        taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        try:
            bits = self._matcher.compute_bitmask() if taken == len(path) else None
            if self._matcher.is_error():
                raise GrammarError(self._matcher.get_error())
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
            InvalidParameterError: The structure is malformed.
        """
        library = _library()
        if self._vocabulary is None:
            self._vocabulary = self._wrap(library)
        matcher = library.LLMatcher(self._vocabulary, _source(structure, library), log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise InvalidParameterError(_FIELD, _given(structure), f"it is malformed ({reason})", "Correct it.")
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


@lru_cache(maxsize=64)
def _from_schema(schema: str, library: Any) -> str:
    try:
        grammar: str = library.LLMatcher.grammar_from_json_schema(schema)
    except ValueError as error:
        raise InvalidParameterError(_FIELD, schema, f"it is no JSON schema ({error})", "Correct it.") from error
    return grammar


def _source(structure: StructuredOutputs, library: Any) -> str:
    """The structure in llguidance's own form."""
    if structure.json_object:
        return _from_schema('{"type": "object"}', library)
    if structure.json_schema is not None:
        schema = structure.json_schema
        return _from_schema(schema if isinstance(schema, str) else json.dumps(schema), library)
    if structure.regex is not None:
        return str(library.LLMatcher.grammar_from_regex(structure.regex))
    if structure.choice:
        return "start: " + " | ".join(json.dumps(choice) for choice in structure.choice)
    assert structure.grammar is not None
    if "::=" not in structure.grammar:
        return str(library.LLMatcher.grammar_from_lark(structure.grammar))
    from llguidance.gbnf_to_lark import any_to_lark

    return str(library.LLMatcher.grammar_from_lark(any_to_lark(structure.grammar)))
