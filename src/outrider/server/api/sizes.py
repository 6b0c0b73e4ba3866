"""Refuses parts of a request that are larger than this server takes, before they cost work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.errors import InvalidParameterError
from outrider.server.api.schemas import CommonRequest
from outrider.server.errors import ApiError
from outrider.server.settings import ServerSettings

#: Bytes of the headers of a request, with its path.
MAX_HEADERS = 64 * 2**10
#: Lists whose entries each cost work, when a request is prepared or in every step.
_LISTS = ("logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids")
#: Lists of texts.
_TEXTS = ("stop", "bad_words")


def check_lists(asked: CommonRequest, settings: ServerSettings) -> None:
    """Raise InvalidParameterError where a list of a request has more entries, or longer ones, than the server takes."""
    limits = {**dict.fromkeys(_LISTS, settings.max_list_items), "stop": settings.max_stops}
    for name, most in limits.items():
        entries = getattr(asked, name)
        if entries is not None and not isinstance(entries, str) and len(entries) > most:
            raise _too_large(name, len(entries), "entries", most)
    for name in _TEXTS:
        size = _num_characters(getattr(asked, name))
        if size > settings.max_list_characters:
            raise _too_large(name, size, "characters in all", settings.max_list_characters)


def check_headers(path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ApiError where the headers of a request, with its path, are larger than any server takes."""
    if len(path) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADERS:
        raise ApiError(431, "the headers of the request are too large", code="headers_too_large")


def check_values(body: bytes, most: int) -> None:
    """Raise ApiError where a body of JSON has more names and values than the server takes.

    They are counted without reading them: a comma or a colon stands before each of them but for the first of all and the
    first of a list or an object. Whatever stands in texts does not count. The C code that reads JSON lets no other thread
    run, and takes time for each value, but hardly any for the length of texts.
    """
    if body.count(b",") + body.count(b":") < most:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now a quotation mark is the beginning or the end of a text
    if plain.count(b'"') <= 2 * most:  # or the texts alone are too many, and need not be told apart
        outside = plain.split(b'"')[::2]
        found = 1 + sum(part.count(b",") + part.count(b":") for part in outside)
        if found <= most:
            return
    problem = f"the body holds more than {most:,} names and values. Send fewer of them; the length of texts does not count"
    raise ApiError(413, problem, code="body_too_large")


def _num_characters(texts: str | Sequence[str] | None) -> int:
    return sum(map(len, [texts] if isinstance(texts, str) else texts or ()))


def _too_large(name: str, size: int, of_what: str, most: int) -> InvalidParameterError:
    return InvalidParameterError(name, f"{size:,} {of_what}", "too many", f"Use {most:,} or fewer.")
