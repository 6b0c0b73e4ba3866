"""Compiles structures (JSON schema, regex, choice, Lark, GBNF) to automata.

No torch: a process that tries structures starts with this module alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

#: What an automaton may spend until its first mask is there, and then on each mask. The library counts the expressions that
#: it makes of regular expressions. `((((a{100}){100}){100}){100})` is given up after 0.1 s at the beginning of a text, and
#: after 0.03 s in the middle of one. With the library's own limits it held a text up for 1.4 s and 0.2 s. A text may then
#: begin with a literal of some 100,000 characters, and one behind something else may have 20,000.
#: It also counts the items of its parser, whose number explodes where a grammar is ambiguous. `e: e e e e e e | /./ |` with
#: a rule `start: e` is given up when a mask takes 0.05 s. With the library's own limit of 50,000 masks took 1.1 s. A small
#: programming language needs some 5,000 items in a vocabulary of 120,000 tokens.
_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
    "step_max_items": 15_000,
    "verbose_errors": False,
}
#: White space between the parts of a JSON text, where a schema does not say otherwise with "x-guidance": one blank or none,
#: as json.dumps writes it. The library's own has no end, and a model that likes blanks would fill its text with them.
_WHITESPACE = " "
#: How a rule begins in GBNF. Lark may have the same signs in a text or a schema, but not behind a name that starts a line.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]*[ \t]*::=", re.MULTILINE)

#: A byte in a vocabulary of pieces of text.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: The letters of byte-level vocabularies that stand for another byte: bytes that are not printed have letters from 256 on.
_LETTERS = {
    256 + place: byte
    for place, byte in enumerate(
        byte for byte in range(256) if not (33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255)
    )
}

Language = Literal["schema", "regex", "lark", "gbnf"]


class StructureError(Exception):
    """No automaton can be made; the message is the library's reason."""


@dataclass(frozen=True)
class Written:
    """A structure as text."""

    language: Language  # in which it is written; a schema is JSON
    text: str  # the whole of it

    @classmethod
    def choices(cls, choices: Sequence[str]) -> Self:
        """The structure that a text has which is one of these."""
        return cls("lark", "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices))

    @classmethod
    def grammar(cls, text: str) -> Self:
        """A grammar, in Lark or in GBNF."""
        return cls("lark" if _GBNF_RULE.search(text) is None else "gbnf", text)


@dataclass(frozen=True)
class StructureVocabulary:
    """The tokens that structures are followed in."""

    tokenizer: str  # a fast tokenizer, in its own JSON form
    size: int  # width of the target's logits
    ends: tuple[int, ...]  # tokens that end a text

    @classmethod
    def of(cls, tokenizer: Any, size: int, ends: Sequence[int]) -> Self:
        """Returns the vocabulary of a fast tokenizer of transformers. Raises StructureError where what its tokens write is
        not known."""
        plain = copy(tokenizer.backend_tokenizer)
        _reader(plain, frozenset())
        plain.no_padding()
        plain.no_truncation()
        return cls(plain.to_str(), size, tuple(ends))

    def wrapped(self, library: Any) -> Any:
        """Returns the vocabulary for llguidance; it takes a second or two where the vocabulary is large."""
        encoder = library.TokenizerWrapper(_Encoder(self))
        return library.LLTokenizer(encoder, n_vocab=self.size, eos_token=list(self.ends))


class _Encoder:
    """Holds the tokens and what a tokenizer makes of the text of a structure, in the form that llguidance asks for.

    The library could read the tokenizer itself. But it lets no other thread compute while it does, for two seconds where
    there are 262,144 tokens, and it takes every added token that looks like `<tool_call>` for one that has no text. The
    text of a token that is not a special one is part of what is written, so structures have to match it, and where they
    leave no choice it is to be written by that token, as the model has learned. The text of a special token is in no
    answer. Where a structure has such a text it is written in pieces; Lark names the token itself without quotes.

    Args:
        vocabulary: The tokens.
    """

    def __init__(self, vocabulary: StructureVocabulary) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
        self._tokenizer.encode_special_tokens = True  # to pieces
        added = self._tokenizer.get_added_tokens_decoder()
        said = _reader(self._tokenizer, {token.content for token in added.values()})
        written = map(self._tokenizer.id_to_token, range(vocabulary.size))
        self.tokens = [b"" if token is None else said(token) for token in written]
        # The library takes a first byte of 255 for the mark of a token without a text. No text in UTF-8 has this byte.
        bare = [number for number, text in enumerate(self.tokens) if text[:1] == b"\xff"]
        for number in bare:
            self.tokens[number] = b""
        self.special_token_ids = sorted(
            {*bare, *(number for number, token in added.items() if token.special and number < vocabulary.size)}
        )
        self.eos_token_id, self.bos_token_id = vocabulary.ends[0], None

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text."""
        if not isinstance(text, str):
            raise TypeError("bytes")  # so the library finds out that it has to ask with texts
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found


def _reader(tokenizer: Any, added: Set[str]) -> Callable[[str], bytes]:
    """What makes the bytes of a text out of a token; `added` are those that stand beside the vocabulary."""
    steps = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    steps = steps.get("decoders", [steps])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" not in kinds and "ByteFallback" not in kinds:
        raise StructureError(f"its tokens become text by {kinds[0]}, and ByteLevel and ByteFallback are known")
    replaced = [step["pattern"] for step in steps if step["type"] == "Replace" and step["content"] == " "]
    blanks = [pattern["String"] for pattern in replaced if "String" in pattern]

    def of_letters(token: str) -> bytes:
        try:
            return token.encode() if token in added else token.translate(_LETTERS).encode("latin-1")
        except UnicodeEncodeError:  # no letter that stands for a byte
            return token.encode()

    def of_pieces(token: str) -> bytes:
        if _BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        for blank in blanks:
            token = token.replace(blank, " ")
        return token.encode()

    return of_letters if "ByteLevel" in kinds else of_pieces


def compiled(written: Written, vocabulary: Any, library: Any) -> tuple[Any, bytes]:
    """An automaton at the beginning of a text, and its first mask; a token of it can be taken."""
    try:
        limits = library.LLParserLimits(**_LIMITS)
        matcher = library.LLMatcher(vocabulary, _source(written, library), log_level=0, limits=limits)
    except MemoryError:
        raise
    except RecursionError as error:
        raise StructureError("recursion limit reached") from error
    except Exception as error:  # the library's readers raise whatever happened to them
        raise StructureError(str(error)) from error
    if matcher.is_error():
        raise StructureError(matcher.get_error())
    bits: bytes = matcher.compute_bitmask()
    if matcher.is_error():
        raise StructureError(matcher.get_error())
    ahead = matcher.deep_copy()  # a matcher that has failed once has failed for ever
    if not ahead.consume_token(_first_token(bits)):
        raise StructureError(ahead.get_error())
    return matcher, bits


def _first_token(bits: bytes) -> int:
    place, byte = next((place, byte) for place, byte in enumerate(bits) if byte)
    return 8 * place + (byte & -byte).bit_length() - 1


def _source(written: Written, library: Any) -> str:
    """The structure in llguidance's own form."""
    if written.language == "schema":
        return _from_schema(written.text, library)
    if written.language == "regex":
        return str(library.LLMatcher.grammar_from_regex(written.text))
    if written.language == "lark":
        return str(library.LLMatcher.grammar_from_lark(written.text))
    from llguidance.gbnf_to_lark import any_to_lark

    return str(library.LLMatcher.grammar_from_lark(any_to_lark(written.text)))


def schema_in_lark(schema: dict[str, Any]) -> str:
    """What stands for a value with a schema in a grammar."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': _WHITESPACE}, **followed(schema)})}"


@lru_cache(maxsize=64)
def _from_schema(schema: str, library: Any) -> str:
    written = json.loads(schema)
    read = followed(written)
    own = read.get("x-guidance") if isinstance(read, dict) else None
    defaults = None if own else {"whitespace_pattern": _WHITESPACE}
    text = schema if read == written else json.dumps(read)
    grammar: str = library.LLMatcher.grammar_from_json_schema(text, defaults=defaults)
    return grammar


#: Formats that texts are held to. All others only annotate, as JSON Schema has it: `path`, `password`, `binary`.
FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
#: Keywords that the library does not know, with values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
#: Keywords whose value is a schema for each name in it, and those whose value is no schema, whatever it looks like.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "default", "examples", "required", "x-guidance"})


def followed(schema: Any) -> Any:
    """Returns what a schema asks of a text: without what only annotates, and without keywords that ask for nothing. One
    that is nested too deeply for this is left to the library, which says so."""
    try:
        return _followed(schema)
    except RecursionError:
        return schema


def _followed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_followed(each) for each in schema]
    if not isinstance(schema, dict):
        return {} if schema is True else schema
    found = {}
    for name, value in schema.items():
        if name == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if name in _NEUTRAL and any(type(value) is type(each) and value == each for each in _NEUTRAL[name]):
            continue
        if name in _BY_NAME and isinstance(value, dict):
            found[name] = {inner: _followed(each) for inner, each in value.items()}
        else:
            found[name] = _followed(value) if isinstance(value, dict | list) and name not in _VALUES else value
    return found
