"""Reads prompts: JSON lines, logs of conversations, texts, and folders of all these."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameterError, InvalidPromptError
from outrider.prompts import PromptEncoder
from outrider.records import EncodedPrompt, prompt_of

logger = logging.getLogger(__name__)
_FORM = 'Give {"prompt": text}, {"prompt_token_ids": [...]}, {"messages": [...]} or {"text": a long text} a line.'


@dataclass(frozen=True)
class Source:
    """Holds what was read of one place, before any tokenizer has seen it."""

    where: str  # file and line, for errors
    # "prompt" is one prompt; "text" is cut into prompts; "messages" is a conversation, in which every turn of the user ends
    # a prompt.
    kind: str
    content: Any  # a text, token ids, or messages
    tools: Any = None  # the functions that a conversation may call


def read_sources(path: Path, *, without: Path | None = None) -> list[Source]:
    """Read a file, or every file of a folder.

    Files that end in .jsonl hold one object a line; all others are texts. In a folder, hidden files and files that are no
    text in UTF-8 are left out.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        files = [file for file in files if without is None or not file.resolve().is_relative_to(without.resolve())]
        found = [source for file in files for source in _read_file(file, required=False)]
    else:
        found = list(_read_file(path, required=True))
    if not found:
        raise InvalidParameterError("prompts", str(path), "it holds no prompts", _FORM)
    return found


def encode_prompts(sources: Sequence[Source], encoder: PromptEncoder, num_tokens: int) -> list[EncodedPrompt]:
    """Prompts in the target's tokens, each once, in the order of their digests: any first so many are a fair sample."""
    prompts = {prompt.digest: prompt for source in sources for prompt in _encoded(source, encoder, num_tokens)}
    return [prompts[digest] for digest in sorted(prompts)]


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _read_file(path: Path, *, required: bool) -> Iterator[Source]:
    """Returns what a file holds; one that cannot be read as text yields nothing unless it is required."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        if required:
            reason = error.strerror if isinstance(error, OSError) else error
            remedy = "Give a file in UTF-8, or a folder of such files."
            raise InvalidParameterError("prompts", str(path), f"it cannot be read ({reason})", remedy) from None
        logger.info("%s is left out: it is no text in UTF-8", path)
        return
    if path.suffix == ".jsonl":
        yield from _read_lines(path, text)
    elif text.strip():
        yield Source(path.name, "text", text)


def _read_lines(path: Path, text: str) -> Iterator[Source]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _read_line(f"{path.name}:{number}", line)


def _read_line(where: str, line: str) -> Source:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError("prompts", where, f"not JSON ({error})", _FORM) from None
    if not isinstance(value, dict):
        raise InvalidParameterError("prompts", where, "not an object", _FORM)
    given = [key for key in ("prompt", "prompt_token_ids", "messages", "text") if key in value]
    if len(given) != 1:
        problem = f"it holds {' and '.join(given)}" if given else "it holds no prompt"
        raise InvalidParameterError("prompts", where, problem, _FORM)
    content = value[given[0]]
    if given[0] in ("prompt", "text") and not (isinstance(content, str) and content.strip()):
        raise InvalidParameterError("prompts", where, f"its {given[0]!r} is no text", _FORM)
    if given[0] == "prompt_token_ids" and not _are_token_ids(content):
        raise InvalidParameterError("prompts", where, "its 'prompt_token_ids' are no list of token ids", _FORM)
    if given[0] == "messages":
        _check_messages(where, content)
        return Source(where, "messages", content, value.get("tools"))
    return Source(where, "prompt" if given[0] == "prompt_token_ids" else given[0], content)


def _are_token_ids(content: Any) -> bool:
    """Tells whether it is a list of numbers of which each may be a token's."""
    return isinstance(content, list) and all(type(token) is int and 0 <= token < 2**31 for token in content)


def _check_messages(where: str, messages: Any) -> None:
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_list or not any(message.get("role") == "user" for message in messages):
        remedy = 'Give "messages" as a list of {"role": ..., "content": ...} with a turn of the user.'
        raise InvalidParameterError("prompts", where, "it holds no conversation", remedy)


def _encoded(source: Source, encoder: PromptEncoder, num_tokens: int) -> Iterator[EncodedPrompt]:
    try:
        if source.kind == "messages":
            yield from _turns(source, encoder)
        elif source.kind == "text":
            yield from _pieces(source, encoder, num_tokens)
        else:
            tokens = encoder.encode(source.content)[1]
            yield prompt_of(source.where, tokens, tokens)
    except InvalidPromptError as error:
        raise InvalidParameterError("prompts", source.where, error.problem, error.remedy) from error


def _turns(source: Source, encoder: PromptEncoder) -> Iterator[EncodedPrompt]:
    """One prompt for each turn of the user: the conversation up to there. They stand on one side of the split."""
    messages, first = source.content, None
    for place, message in enumerate(messages):
        if message.get("role") == "user":
            tokens = encoder.encode_conversation(messages[: place + 1], tools=source.tools)[1]
            first = tokens if first is None else first
            yield prompt_of(source.where, tokens, first)


def _pieces(source: Source, encoder: PromptEncoder, num_tokens: int) -> Iterator[EncodedPrompt]:
    """The text cut into prompts of so many tokens, each behind the tokens that begin a text; a short rest is left out
    unless it is all there is."""
    whole = encoder.encode(source.content)[1]
    body = encoder.encode(source.content, add_special_tokens=False)[1]
    extra = len(whole) - len(body)
    prefix = whole[:extra] if extra > 0 and whole[extra:] == body else ()
    for start in range(0, len(body), num_tokens):
        piece = body[start : start + num_tokens]
        if start == 0 or 2 * len(piece) >= num_tokens:
            yield prompt_of(source.where, (*prefix, *piece), piece)
