"""The user's texts: prompts to replay, or prompts with the answers that were served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InputError, InvalidParameterError
from outrider.lab.measure.tasks import built_in, messages_in
from outrider.lab.measure.writing import EncodedTask
from outrider.prompts import PromptEncoder
from outrider.records import read_manifest, read_records

#: Workloads whose prompts stand for traffic where none is given.
_WORKLOADS = ("code_completion", "json", "free_text", "copy_editing", "summarisation")
#: Fields that may hold an answer.
_ANSWERS = ("answer", "output", "completion")
_FORM = 'Give {"prompt": "..."} or {"messages": [...]} a line'
_LOG_FORM = f'{_FORM}, with what was answered as "answer".'
_LEAST_ANSWER = 8


@dataclass(frozen=True)
class Traffic:
    """Texts in the target's tokens."""

    source: str  # where they come from, to show
    texts: tuple[EncodedTask, ...]  # the texts; `answer_ids` of those that were recorded
    bad: tuple[str, ...] = ()  # the lines that could not be used, each with the reason

    def rounds(self, batch: int, most: int) -> list[list[EncodedTask]]:
        """At most so many texts, spread evenly over all of them, in two batches at least. They begin again from the first
        where there are too few, and the last batch is filled up."""
        count = min(len(self.texts), max(most, 1))
        chosen = [self.texts[place * len(self.texts) // count] for place in range(count)]
        return [
            [chosen[(start + place) % count] for place in range(batch)] for start in range(0, max(count, 2 * batch), batch)
        ]


def sample_traffic(encoder: PromptEncoder, limit: int, max_tokens: int) -> Traffic:
    """The prompts of the benchmark, where the user gives none. A text has `limit` tokens at most, with its prompt."""
    together = zip(*(built_in(name) for name in _WORKLOADS), strict=False)
    texts = [(task.name, encoder.encode(task.prompt)[1]) for tasks in together for task in tasks]
    fitting = [EncodedTask(name, ids, max_tokens) for name, ids in texts if len(ids) + max_tokens <= limit]
    if not fitting:
        remedy = "Lower --max-tokens, or give texts of your own."
        raise InvalidParameterError("max_tokens", max_tokens, f"no sample fits into the context of {limit} tokens", remedy)
    return Traffic("prompts of the benchmark", tuple(fitting))


def recorded_traffic(folder: Path, limit: int, max_tokens: int) -> Traffic:
    """The held-out prompts of a folder of data, which no training has learnt from, within `limit` tokens."""
    texts = []
    for place, record in enumerate(read_records(folder, read_manifest(folder))):
        count = record.num_prompt_tokens
        length = min(max_tokens, len(record.token_ids) - count)
        if record.held_out and length >= _LEAST_ANSWER and count + length <= limit:
            texts.append(EncodedTask(f"text {place}", tuple(record.token_ids[:count].tolist()), length))
    if not texts:
        problem = f"no held-out text of it has {_LEAST_ANSWER} written tokens and fits into the context of {limit}"
        raise InvalidParameterError("data", str(folder), problem, "Record more texts.")
    return Traffic(f"held-out prompts of {folder.name}", tuple(texts))


def read_traffic(path: Path, encoder: PromptEncoder, limit: int, max_tokens: int, *, recorded: bool) -> Traffic:
    """Read a JSONL file: {"prompt": "..."} or {"messages": [...]} a line, and "max_tokens" may stand beside it. Lines that
    cannot be used are named, and the others are used. A text has `limit` tokens at most, with its prompt."""
    field = "log" if recorded else "traffic"
    texts: list[EncodedTask] = []
    bad: list[str] = []
    for number, line in _lines(field, path):
        try:
            texts.append(_text(f"line {number}", line, encoder, limit, max_tokens, recorded=recorded))
        except InputError as error:
            bad.append(f"line {number}: {error}")
    if not texts:
        reason = f"none of its lines can be used ({bad[0]})" if bad else "it has no lines"
        raise InvalidParameterError(field, str(path), reason, _LOG_FORM if recorded else f"{_FORM}.")
    return Traffic(path.name, tuple(texts), tuple(bad))


def _lines(field: str, path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        raise InvalidParameterError(field, str(path), problem, "Give a JSONL file.") from None
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield number, line


def _text(name: str, line: bytes, encoder: PromptEncoder, limit: int, max_tokens: int, *, recorded: bool) -> EncodedTask:
    given = _object(line)
    prompt = _prompt_ids(given, encoder)
    answer = _answer_ids(given, encoder) if recorded else None
    asked = given.get("max_tokens", max_tokens)
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 2:
        raise InvalidParameterError("max_tokens", asked, "no number of tokens", "Use 2 or more, or leave it out.")
    length = min(asked, max_tokens) if answer is None else len(answer)
    if len(prompt) + length > limit:
        problem = f"{len(prompt)} tokens and {length} to be written, in a context of {limit}"
        raise InvalidParameterError("prompt", given.get("prompt"), problem, "Shorten it.")
    return EncodedTask(name, prompt, length, answer)


def _object(line: bytes) -> dict[str, Any]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        text = line[:40].decode(errors="replace")
        raise InvalidParameterError("line", text, f"it is not JSON ({error})", "Give one object a line.") from None
    if not isinstance(given, dict):
        raise InvalidParameterError("line", given, "it is no object", "Give one object a line.")
    return given


def _prompt_ids(given: dict[str, Any], encoder: PromptEncoder) -> tuple[int, ...]:
    messages = messages_in(given, ("line", json.dumps(given)[:40]))
    if messages is not None:
        return encoder.encode_conversation(messages, tools=given.get("tools"))[1]
    if "prompt" not in given:
        raise InvalidParameterError("prompt", None, "it is missing", f"{_FORM}.")
    return encoder.encode(given["prompt"])[1]


def _answer_ids(given: dict[str, Any], encoder: PromptEncoder) -> tuple[int, ...]:
    found = next((given[name] for name in _ANSWERS if name in given), None)
    if not isinstance(found, str):
        raise InvalidParameterError("answer", found, "it is missing or no text", _LOG_FORM)
    answer = encoder.encode_prediction(found)
    if len(answer) < _LEAST_ANSWER:
        problem = f"it has {len(answer)} tokens, too few to predict from"
        raise InvalidParameterError("answer", found, problem, f"Leave out answers of fewer than {_LEAST_ANSWER} tokens.")
    return answer
