"""The text that each next token adds, in whole characters."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class TextPieces:
    """Decodes tokens one by one.

    A vocabulary with byte tokens may take text back: bytes that were a character are none any more if the run of byte
    tokens that they stand in turns out to be no UTF-8. What was handed out stays then, and the tokens behind it are
    decoded on their own.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []  # tokens behind the last piece

    def add(self, token_id: int) -> str:
        """What this token adds; "" while a character is incomplete."""
        self._waiting.append(token_id)
        try:
            piece: str | None = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        except Exception:  # the stream's only fault: what it has handed out is no longer the beginning of the text
            piece = self.rest()
            self._stream = DecodeStream(ids=self._waiting, skip_special_tokens=True)
        if piece:
            self._waiting = []
        return piece or ""

    def rest(self) -> str:
        """The text of the tokens behind the last piece; a character that never became whole shows as U+FFFD."""
        text: str = self._tokenizer.decode(self._waiting, skip_special_tokens=True)
        return text
