"""Workloads: built-in prompts, prompts of the user, questions of Spec-Bench, and recorded texts to replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameterError

#: The built-in workloads. Each has a file in the folder `workloads`.
WORKLOADS = ("code_completion", "copy_editing", "summarisation", "passage_question", "json", "free_text")
#: The workloads with long prompts, which `outrider.measure.long_prompts` makes, and the name that stands for all of them.
LONG_WORKLOADS, LONG = ("long_files", "long_passages", "long_diffs"), "long"


@dataclass(frozen=True)
class Task:
    """A prompt and, for a replay, the recorded text that follows it.

    Attributes:
        name: A name that is unique within its workload.
        workload: The workload by which figures are grouped.
        prompt: The text of the prompt.
        answer: The text that is forced as the target's choice. None where the target itself chooses.
    """

    name: str
    workload: str
    prompt: str
    answer: str | None = None


def built_in(workload: str) -> list[Task]:
    """The prompts of one of WORKLOADS."""
    text = (files("outrider.bench") / "workloads" / f"{workload}.jsonl").read_text("utf-8")
    lines = (json.loads(line) for line in text.split("\n") if line)
    return [Task(f"{workload}-{i}", workload, line["prompt"]) for i, line in enumerate(lines, 1)]


def read_prompts(path: Path) -> list[Task]:
    """Read lines of {"prompt": ...} with an optional "name" and "workload".

    Raises:
        InvalidParameterError: The file cannot be read or is not JSON, or a line has no prompt.
    """
    return [
        Task(
            _text(line, "name", where, f"line-{i}"), _text(line, "workload", where, path.stem), _text(line, "prompt", where)
        )
        for i, where, line in _lines("prompts", path)
    ]


def read_spec_bench(path: Path) -> list[Task]:
    """Read questions in the format of Spec-Bench, {"question_id": ..., "category": ..., "turns": [...]}.

    The first turn of each question becomes a task, and its category the workload.

    Raises:
        InvalidParameterError: The file cannot be read or is not JSON, or a line is not a question.
    """
    tasks = []
    for _, where, line in _lines("spec_bench", path):
        turns = line.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise _bad(where, "no turns", 'Give {"question_id": ..., "category": ..., "turns": ["..."]} a line.')
        if "question_id" not in line:
            raise _bad(where, "no question_id", "Give every question its own.")
        category = _text(line, "category", where)
        tasks.append(Task(f"{category}-{line['question_id']}", f"spec_bench/{category}", turns[0]))
    return tasks


def read_replay(path: Path) -> list[Task]:
    """Read recorded texts from lines of {"prompt": ..., "answer": ...}.

    Raises:
        InvalidParameterError: The file cannot be read or is not JSON, or a line lacks one of the two.
    """
    return [
        Task(f"line-{i}", f"replay/{path.stem}", _text(line, "prompt", where), _text(line, "answer", where))
        for i, where, line in _lines("replay", path)
    ]


def _lines(field: str, path: Path) -> Iterator[tuple[int, tuple[str, str], dict[str, Any]]]:
    """(line number, (field, place) for errors, object) of each line. A file without lines is refused."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(field, str(path), f"cannot be read ({error})", "Give a JSONL file in UTF-8.") from None
    found = False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = (field, f"{path.name}:{number}")
        try:
            value = json.loads(line)
        except ValueError as error:
            raise _bad(where, f"not JSON ({error})", "Give one JSON object a line.") from None
        if not isinstance(value, dict):
            raise _bad(where, "not an object", "Give one JSON object a line.")
        found = True
        yield number, where, value
    if not found:
        raise InvalidParameterError(field, str(path), "it has no lines", "Give one JSON object a line.")


def _text(line: dict[str, Any], key: str, where: tuple[str, str], default: str | None = None) -> str:
    value = line.get(key, default)
    if not isinstance(value, str) or not value:
        raise _bad(where, f"{key!r} is {'missing' if value is None else 'no text'}", f'Give "{key}" as a non-empty string.')
    return value


def _bad(where: tuple[str, str], problem: str, remedy: str) -> InvalidParameterError:
    return InvalidParameterError(*where, problem, remedy)
