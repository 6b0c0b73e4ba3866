"""Vocabulary: the bytes that every token of a tokenizer writes, and the tokens that write given bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from re import compile as pattern
from typing import Any

from outrider.errors import ContradictionError

#: A piece of a decoder that stands for one byte.
_BYTE = pattern("<0x([0-9A-Fa-f]{2})>")
#: Some decoders treat the first token of a text in a way of its own. This text stands there instead.
_FIRST = "a"
#: What a text is encoded behind. Some tokenizers put a space before a text, and then the second way writes what was asked.
_ANCHORS = ("", "\n")


class ModelVocabulary:
    """The tokens of one model as the bytes that they write.

    Args:
        size: How many ids the model's logits have; None takes those of the tokenizer.
        eos_token_ids: The tokens that end a text; None takes the tokenizer's.

    Attributes:
        name: The model's name.
        size: How many ids there are.
        pieces: The bytes that each token writes; None for special tokens and for ids that stand for nothing.
        special: The text of each special token.
        writer: For bytes that a token writes, that token. Where several write the same, it is the one that the tokenizer
            itself would take.
        bos: The token that begins a text, if there is one.
        eos: The token that ends a text, if there is one.
        opening: What the tokenizer puts before every text: the token that begins a text, or nothing.
    """

    def __init__(
        self, tokenizer: Any, name: str, size: int | None = None, eos_token_ids: Iterable[int] | None = None
    ) -> None:
        self._backend = backend = _backend(tokenizer, name)
        known = backend.get_vocab(with_added_tokens=True)
        self.name = name
        self.size = max(known.values(), default=-1) + 1 if size is None else size
        self.bos: int | None = tokenizer.bos_token_id
        ends = {tokenizer.eos_token_id} if eos_token_ids is None else set(eos_token_ids)
        self.eos: int | None = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else min(ends, default=None)
        added = backend.get_added_tokens_decoder()
        special = {id for id, token in added.items() if token.special} | ends | {tokenizer.unk_token_id}
        texts = {id: text for text, id in known.items() if id < self.size}
        self.special = {id: text for id, text in texts.items() if id in special}
        ordinary = {id: text for id, text in texts.items() if id not in special and id not in added}
        self.pieces: list[bytes | None] = [None] * self.size
        for id in texts.keys() & added.keys() - special:
            self.pieces[id] = texts[id].encode()  # added tokens stand in the tokenizer's file as they are written
        for id, piece in zip(ordinary, _written(backend.decoder, ordinary.values()), strict=True):
            self.pieces[id] = piece
        self.writer = self._writers()
        self._longest = max(map(len, self.writer), default=0)
        self._unknown: int | None = tokenizer.unk_token_id
        begins = backend.encode("", add_special_tokens=True).ids
        self.opening = [self.bos] if self.bos is not None and self.bos in begins else []

    def spell(self, data: bytes) -> list[int]:
        """Tokens that write these bytes: the tokenizer's own where they write them exactly, else the longest that fit.

        What no token writes becomes the unknown token, and nothing where there is none.
        """
        start, end = whole_characters(data)
        middle = self._encoded(data[start:end])
        if middle is None:
            return list(self._fitted(data))
        return [*self._fitted(data[:start]), *middle, *self._fitted(data[end:])]

    def can_write(self, data: bytes) -> bool:
        """Tells whether some tokens write these bytes and nothing else."""
        return self.written(self.spell(data)) == data

    def written(self, token_ids: Sequence[int]) -> bytes:
        """The bytes that these tokens write; special tokens write nothing."""
        return b"".join(map(self._piece, token_ids))

    def _encoded(self, data: bytes) -> list[int] | None:
        """The tokenizer's own tokens of a text, where they write it exactly; None where they do not."""
        if not data:
            return []
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        for anchor in _ANCHORS:
            tokens = self._behind(anchor, text, len(data))
            if tokens is not None and self.written(tokens) == data:
                return tokens
        return None

    def _behind(self, anchor: str, text: str, size: int) -> list[int] | None:
        """The tokens that write the last `size` bytes of both texts together; None where a token begins before these."""
        tokens: list[int] = self._backend.encode(anchor + text, add_special_tokens=False).ids
        first = len(tokens)
        while size > 0 and first > 0:
            first -= 1
            size -= len(self._piece(tokens[first]))
        return tokens[first:] if size == 0 else None

    def _piece(self, token: int) -> bytes:
        """Returns what a token writes. Some tokenizers know tokens that their model has no logits for; these write
        nothing."""
        return self.pieces[token] or b"" if token < self.size else b""

    def _fitted(self, data: bytes) -> Iterator[int]:
        """At each place the token that writes the most of what follows."""
        place = 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in self.writer), None)
            if end is not None:
                yield self.writer[data[place:end]]
            elif self._unknown is not None and self._unknown < self.size:
                yield self._unknown
            place = end or place + 1

    def _writers(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        rivals: dict[bytes, list[int]] = {}
        for id, piece in enumerate(self.pieces):
            if piece and found.setdefault(piece, id) != id:
                rivals.setdefault(piece, [found[piece]]).append(id)
        for piece, ids in rivals.items():
            found[piece] = self._own_choice(piece, ids)
        return found

    def _own_choice(self, piece: bytes, ids: list[int]) -> int:
        """Which of several tokens that write the same the tokenizer takes; the first where it takes none of them."""
        tokens = self._encoded(piece)
        return tokens[0] if tokens is not None and len(tokens) == 1 and tokens[0] in ids else ids[0]


def own_bytes(tokenizer: Any, token_id: int) -> bytes | None:
    """Returns what one token writes in the middle of a text; None where the tokenizer does not tell."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    token: str | None = None if backend is None else backend.id_to_token(token_id)
    if token is None:
        return None
    added = backend.get_added_tokens_decoder()
    return token.encode() if token_id in added else next(_written(backend.decoder, [token]))


def whole_characters(data: bytes) -> tuple[int, int]:
    """Returns where whole UTF-8 characters begin and end in these bytes: behind the rest of one that began earlier, and
    before one that is not complete yet."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    for back in range(1, min(4, len(data) - start) + 1):
        lead = data[-back]
        if lead & 0xC0 != 0x80:
            wanted = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
            return start, len(data) - back if wanted > back else len(data)
    return start, len(data)


def _backend(tokenizer: Any, name: str) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        lacks = (
            "it has no tokenizer" if tokenizer is None else f"{type(tokenizer).__name__} does not tell its tokens' bytes"
        )
        problem = f"{lacks}, and vocabularies are compared by what their tokens write"
        raise ContradictionError("model", name, problem, "Use a model that has a tokenizer.json.")
    return backend


def _written(decoder: Any, tokens: Iterable[str]) -> Iterator[bytes]:
    """The bytes that each ordinary token writes in the middle of a text."""
    kinds = set() if decoder is None else set(_kinds(json.loads(decoder.__getstate__())))
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        for token in tokens:
            yield b"".join([alphabet.get(character) or character.encode() for character in token])
        return
    for token in tokens:
        byte = _BYTE.fullmatch(token) if "ByteFallback" in kinds else None
        if byte is not None:
            yield bytes.fromhex(byte[1])
        elif decoder is None:
            yield f" {token}".encode()  # such tokens are words
        else:
            yield decoder.decode([_FIRST, token]).removeprefix(_FIRST).encode()


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _byte_alphabet() -> dict[str, bytes]:
    """The characters that byte-level tokenizers write for bytes (Radford et al. 2019)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}
