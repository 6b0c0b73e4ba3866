"""Recorded text forced as the target's choice, at full target cost; and a set of such texts that copy much.

The target computes everything it would compute otherwise; only what it says is decided beforehand, so that a model that
cannot edit stands for one that can. A draft model's rows pass the same processor and would all be right: it takes no part.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module

from torch import Tensor

from outrider.bench.tasks import Task

#: The built-in set: functions of these modules, given back with their first parameter renamed.
_MODULES = (
    "argparse", "ast", "bisect", "calendar", "cmd", "code", "codecs", "configparser", "copy", "csv", "difflib", "fnmatch",
    "fractions", "getopt", "gettext", "glob", "gzip", "heapq", "inspect", "json.decoder", "locale", "mailbox", "netrc",
    "pprint", "queue", "random", "sched", "shlex", "shutil", "statistics", "string", "textwrap",
)  # fmt: skip
#: Characters of a function: long enough to copy, short enough for a context of 1024 tokens with any tokenizer.
_LEAST, _MOST = 350, 700


class Replay:
    """A logits processor that makes a recorded text the target's choice; every other token falls far behind.

    Args:
        num_prompt_tokens: Where the text begins.
        answer: Its tokens.
    """

    def __init__(self, num_prompt_tokens: int, answer: tuple[int, ...]) -> None:
        self._start, self._answer = num_prompt_tokens, answer

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids [1, num_tokens], scores [1, vocab_size]."""
        place = ids.shape[1] - self._start
        if place < len(self._answer):
            scores[:, self._answer[place]] = scores.max() + 100.0
        return scores


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self._names.get(node.arg, node.arg)
        return node


def copy_tasks() -> list[Task]:
    """The first fitting function of every module that has one."""
    return [task for module in _MODULES if (task := next(_edits(module), None)) is not None]


def _edits(module: str) -> Iterator[Task]:
    for function in ast.walk(ast.parse(inspect.getsource(import_module(module)))):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = [node.arg for node in ast.walk(function) if isinstance(node, ast.arg) and node.arg != "self"]
        before = ast.unparse(function)
        if arguments and _LEAST <= len(before) <= _MOST:
            after = ast.unparse(_Renamed({arguments[0]: f"the_{arguments[0]}"}).visit(function))
            prompt = f"{before}\n\n\n# The same with another name for its first parameter:\n\n"
            yield Task(module, "replay/copy", prompt, after)
