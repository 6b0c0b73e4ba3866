"""Texts to write in a measurement: built-in workloads, prompts and questions from files, recorded texts, long prompts."""

from __future__ import annotations

import difflib
import inspect
import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from outrider.errors import InvalidParameterError

#: The built-in workloads. Each has a file in the folder `workloads`.
WORKLOADS = ("code_completion", "copy_editing", "summarisation", "passage_question", "json", "free_text")
#: What the eight categories of MT-bench (Zheng and others, 2023) count as beside others, as Spec-Bench reports them.
_MT_BENCH, MULTI_TURN = (
    frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}),
    "multi_turn",
)
#: The workloads with long prompts, which `outrider.lab.measure.tasks` makes, and the name that stands for all of them.
LONG_WORKLOADS, LONG = ("long_files", "long_passages", "long_diffs"), "long"


@dataclass(frozen=True)
class Task:
    """A prompt and, for a replay, the recorded text that follows it."""

    name: str  # a name that is unique within its workload
    workload: str  # the workload by which figures are grouped
    prompt: str  # the text of the prompt. It is empty where there are messages that hold more than one question.
    answer: str | None = None  # the text that is forced as the target's choice. None where the target itself chooses.
    # The prompt as a conversation, for models with a chat template. Empty for texts that models go on from.
    messages: tuple[Mapping[str, Any], ...] = ()


def built_in(workload: str) -> list[Task]:
    """The prompts of one of WORKLOADS."""
    text = (files("outrider.lab.bench") / "workloads" / f"{workload}.jsonl").read_text("utf-8")
    lines = (json.loads(line) for line in text.split("\n") if line)
    return [Task(f"{workload}-{i}", workload, line["prompt"]) for i, line in enumerate(lines, 1)]


def read_prompts(path: Path) -> list[Task]:
    """Read prompts from a file in JSONL or Parquet, one a line. A line is {"prompt": ...}, a text to go on from; or
    {"messages": [...]}, a conversation; or a question as Spec-Bench (Xia and others, 2024), MT-bench and SPEED-Bench have
    it, {"question_id": ..., "category": ..., "turns": [...]}: its first turn is asked. "name" and "workload" may stand
    beside any of them."""
    tasks = [_task(i, where, line, path.stem) for i, where, line in _lines("prompts", path)]
    if {task.workload for task in tasks} <= _MT_BENCH:
        return tasks
    return [replace(task, workload=MULTI_TURN) if task.workload in _MT_BENCH else task for task in tasks]


def _task(number: int, where: tuple[str, str], line: dict[str, Any], workload: str) -> Task:
    messages = messages_in(line, where)
    prompt = _text(line, "prompt", where) if messages is None else _only_question(messages)
    name = str(line.get("question_id", f"line-{number}"))
    workload = _text(line, "workload", where, _text(line, "category", where, workload))
    return Task(_text(line, "name", where, name), workload, prompt, messages=tuple(messages or ()))


def messages_in(line: Mapping[str, Any], where: tuple[str, str]) -> list[Mapping[str, Any]] | None:
    """The conversation that a line of a file asks to be answered. None where it holds none."""
    if "messages" in line:
        messages = line["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise _bad(where, "'messages' are no conversation", 'Give [{"role": "user", "content": "..."}].')
        return messages
    if "turns" not in line:
        return None
    turns = line["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise _bad(where, "'turns' are no texts", 'Give "turns" as a list of strings; the first one is asked.')
    return [{"role": "user", "content": turns[0]}]


def _only_question(messages: Sequence[Mapping[str, Any]]) -> str:
    content = messages[0].get("content") if len(messages) == 1 else None
    return content if isinstance(content, str) else ""


def read_replay(path: Path) -> list[Task]:
    """Read recorded texts from lines of {"prompt": ..., "answer": ...}."""
    return [
        Task(f"line-{i}", f"replay/{path.stem}", _text(line, "prompt", where), _text(line, "answer", where))
        for i, where, line in _lines("replay", path)
    ]


def _lines(field: str, path: Path) -> Iterator[tuple[int, tuple[str, str], dict[str, Any]]]:
    """(line number, (field, place) for errors, object) of each line. A file without lines is refused."""
    found = False
    for number, read in _parquet(field, path) if path.suffix.lower() == ".parquet" else _jsonl(field, path):
        where = (field, f"{path.name}:{number}")
        try:
            value = read()
        except ValueError as error:
            raise _bad(where, f"not JSON ({error})", "Give one JSON object a line.") from None
        if not isinstance(value, dict):
            raise _bad(where, "not an object", "Give one JSON object a line.")
        found = True
        yield number, where, value
    if not found:
        raise InvalidParameterError(field, str(path), "it has no lines", "Give one JSON object a line.")


def _jsonl(field: str, path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(field, str(path), f"cannot be read ({error})", "Give a JSONL file in UTF-8.") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, partial(json.loads, line)


def _parquet(field: str, path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    if find_spec("pyarrow") is None:
        remedy = "Run: pip install 'outrider[bench]'; or give a JSONL file."
        raise InvalidParameterError(field, str(path), "pyarrow, which reads Parquet files, is not installed", remedy)
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise InvalidParameterError(field, str(path), f"cannot be read ({error})", "Give a Parquet file.") from None
    for number, row in enumerate(rows, 1):
        yield number, partial(dict, {name: value for name, value in row.items() if value is not None})


def _text(line: dict[str, Any], key: str, where: tuple[str, str], default: str | None = None) -> str:
    value = line.get(key, default)
    if not isinstance(value, str) or not value:
        raise _bad(where, f"{key!r} is {'missing' if value is None else 'no text'}", f'Give "{key}" as a non-empty string.')
    return value


def _bad(where: tuple[str, str], problem: str, remedy: str) -> InvalidParameterError:
    return InvalidParameterError(*where, problem, remedy)


# --- Makes long prompts: files to continue, passages to answer a question from, and diffs to apply.
#
# The files are modules of Python's standard library as they are installed. The passages come from a generator with a
# fixed seed. So nobody's text is kept in this project, and the same release of Python gives the same prompts.


#: The fewest and the most tokens of a prompt, for the tokenizer of the embedded target.
LEAST, MOST = 1_000, 1_900
#: Modules that are long enough.
_MODULES = (
    "argparse", "configparser", "difflib", "mailbox", "textwrap", "tarfile", "zipfile", "statistics", "shutil", "ast",
    "calendar", "gzip", "heapq", "pprint", "random", "shlex",
)  # fmt: skip
#: The prompts are from this size on and grow by equal steps up to MOST. A few tokens are lost where a text is cut.
_SHORTEST = 1_060
_NUM_EDITS = 4
_NAMES = ("Mara", "Olin", "Teska", "Bram", "Ivo", "Senna", "Karel", "Dunja", "Pell", "Runa", "Aldo", "Nils", "Vera", "Jost")
_SURNAMES = ("Lind", "Harrow", "Voss", "Tamm", "Greel", "Okar", "Brandt", "Sorel", "Quist", "Maas", "Dorn", "Vale")
_PLACES = ("Velmo", "Karsund", "Ostra", "Tilde Bay", "Renholm", "Marrick", "Sandhook", "Uvale", "Brenna", "Coldwater")
_GOODS = ("copper", "dried fish", "salt", "lamp oil", "wool", "roof tiles", "apples", "paper", "rope", "barley", "glass")
_MONTHS = ("March", "April", "May", "June", "July", "August", "September")


def long_tasks(workload: str) -> list[Task]:
    """The prompts of one of the workloads that have long prompts, from LEAST to MOST tokens each."""
    make = {"long_files": _file, "long_passages": _passage, "long_diffs": _diff}[workload]
    return [Task(f"{workload}-{i + 1}", workload, make(i, _size(i))) for i in range(len(_MODULES))]


def _size(number: int) -> int:
    """The most tokens of a prompt. The sizes come in a mixed order, so that the first few are near the middle together."""
    count = len(_MODULES)
    return _SHORTEST + (MOST - _SHORTEST) * ((7 * number + 8) % count) // (count - 1)


def _file(number: int, size: int) -> str:
    """The beginning of a module."""
    lines = _source_lines(number)
    return _longest(lambda n: "".join(lines[:n]), len(lines), size)


def _diff(number: int, size: int) -> str:
    """The beginning of a module, a diff for it, and the heading of the file that is to be written."""
    name, lines = f"{_MODULES[number]}.py", _source_lines(number)

    def prompt(n: int) -> str:
        before = lines[:n]
        diff = "".join(difflib.unified_diff(before, _edited(before), f"a/{name}", f"b/{name}", n=2))
        return f"# {name}\n{''.join(before)}\n\n# A diff for {name}:\n{diff}\n\n# {name} with the diff applied:\n"

    return _longest(prompt, len(lines), size)


def _source_lines(number: int) -> list[str]:
    return inspect.getsource(import_module(_MODULES[number])).splitlines(keepends=True)


def _edited(lines: list[str]) -> list[str]:
    """The lines with a few names changed, at places that are spread over them."""
    found = list(lines)
    for edit in range(_NUM_EDITS):
        first = len(lines) * (2 * edit + 1) // (2 * _NUM_EDITS)
        for place in range(first, len(lines)):
            names = [name for name in re.findall(r"\b[a-z_]{4,}\b", lines[place]) if not keyword.iskeyword(name)]
            if names:
                found[place] = re.sub(rf"\b{names[0]}\b", f"new_{names[0]}", lines[place])
                break
    return found


def _passage(number: int, size: int) -> str:
    """Entries of a harbour book, and a question about one of them."""
    chance = Random(number)
    entries = [_entry(chance) for _ in range(MOST // 10)]
    asked = chance.random()

    def prompt(n: int) -> str:
        paragraphs = [" ".join(entry["text"] for entry in entries[i : min(n, i + 5)]) for i in range(0, n, 5)]
        about = entries[int(asked * n)]
        question = "Question: On {day}, what did {who} bring to {to}, from where, and what was {who} paid?".format(**about)
        return "\n\n".join(["The harbour book", *paragraphs, f"{question}\nAnswer: On {about['day']}, {about['who']}"])

    return _longest(prompt, len(entries), size)


def _entry(chance: Random) -> dict[str, Any]:
    """One entry: what its question names, and its text."""
    day = f"{chance.randint(1, 30)} {chance.choice(_MONTHS)}"
    who = f"{chance.choice(_NAMES)} {chance.choice(_SURNAMES)}"
    origin, to = chance.sample(_PLACES, 2)
    goods = f"{chance.randint(3, 90)} crates of {chance.choice(_GOODS)}"
    text = f"On {day}, {who} brought {goods} from {origin} to {to} and was paid {chance.randint(12, 400)} crowns."
    return {"day": day, "who": who, "to": to, "text": text}


def _longest(make: Callable[[int], str], most: int, size: int) -> str:
    """The text of as many parts, from 1 to `most`, as have at most `size` tokens."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if num_tokens(make(middle)) <= size else (low, middle - 1)
    return make(low)


def num_tokens(text: str) -> int:
    """The number of tokens for the tokenizer of the embedded target."""
    return len(_tokenizer().encode(text).ids)


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str((files("outrider") / "assets" / "target" / "tokenizer.json").read_text("utf-8"))
