"""Log probabilities in the two shapes of OpenAI's API: parallel lists for completions, a list of entries for chats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.params import Logprob, PositionLogprobs

#: JSON has no infinity; vLLM writes this number for a token that was ruled out.
_LEAST = -9999.0


class CompletionLogprobs:
    """The parallel lists of /v1/completions, whose offsets go on from piece to piece of a stream.

    Args:
        count: How many of the likeliest tokens are told at each position.
        offset: Where the first token stands in the text.
    """

    def __init__(self, count: int, offset: int = 0) -> None:
        self._count = count
        self._offset = offset

    def shape(self, positions: Iterable[PositionLogprobs | None], first: str = "") -> dict[str, Any]:
        """The lists of some positions. None stands for a prompt's first token, which reads `first`."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entry in positions:
            own = None if entry is None else next(iter(entry.values()))
            token = first if own is None else own.decoded_token or ""
            found["text_offset"].append(self._offset)
            found["token_logprobs"].append(None if own is None else _number(own.logprob))
            found["tokens"].append(token)
            found["top_logprobs"].append(None if entry is None else _likeliest_by_text(entry, self._count))
            self._offset += len(token)
        return found


def chat_logprobs(positions: Iterable[PositionLogprobs], count: int) -> dict[str, Any]:
    """The entries of /v1/chat/completions.

    Args:
        positions: Of the tokens.
        count: How many of the likeliest tokens are told at each.
    """
    content = []
    for entry in positions:
        own = next(iter(entry.values()))
        content.append({**_entry(own), "top_logprobs": [_entry(other) for other in _likeliest(entry, count)]})
    return {"content": content, "refusal": None}


def _likeliest(entry: PositionLogprobs, count: int) -> list[Logprob]:
    """The `count` likeliest of a position; the token that stands there comes first in it, whatever its rank."""
    return sorted(entry.values(), key=lambda found: found.rank)[:count]


def _likeliest_by_text(entry: PositionLogprobs, count: int) -> dict[str, float]:
    """The token that stands there and the likeliest ones, as in vLLM; of tokens that read alike the likelier one."""
    found: dict[str, float] = {}
    own = next(iter(entry.values()))
    for other in (own, *_likeliest(entry, count)):
        found.setdefault(other.decoded_token or "", _number(other.logprob))
    return found


def _entry(found: Logprob) -> dict[str, Any]:
    token = found.decoded_token or ""
    # A token that holds part of a character has no text of its own, and its text does not tell its bytes.
    return {
        "token": token,
        "logprob": _number(found.logprob),
        "bytes": None if "\ufffd" in token else list(token.encode()),
    }


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)
