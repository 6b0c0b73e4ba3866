"""Replays a recorded text as the target's choice, at the full cost of the target; with a set of texts that copy much.

The target computes everything that it would compute otherwise, and only its choice of tokens is fixed. So a model that
cannot edit code stands for one that can. A draft model takes no part: its logits would pass through the same processor,
and all its draft tokens would be right.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module

from torch import Tensor

from outrider.measure.tasks import Task

#: The built-in set: functions of these modules. The recorded answer is the function with its first parameter renamed.
_MODULES = (
    "argparse", "ast", "bisect", "calendar", "cmd", "code", "codecs", "configparser", "copy", "csv", "difflib", "fnmatch",
    "fractions", "getopt", "gettext", "glob", "gzip", "heapq", "inspect", "json.decoder", "locale", "mailbox", "netrc",
    "pprint", "queue", "random", "sched", "shlex", "shutil", "statistics", "string", "textwrap",
)  # fmt: skip
#: The fewest and the most characters of a function: enough to copy, and short enough for a context of 1024 tokens with any
#: tokenizer.
_LEAST, _MOST = 350, 700


class Replay:
    """A logits processor that makes a recorded text the target's choice. Every other token becomes far less likely.

    Args:
        num_prompt_tokens: The position at which the text begins.
        answer: The tokens of the text.
    """

    def __init__(self, num_prompt_tokens: int, answer: tuple[int, ...]) -> None:
        self._start, self._answer = num_prompt_tokens, answer

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Takes ids [1, num_tokens] and scores [1, vocab_size]; returns the changed scores."""
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
    """One task for each module: its first function that fits."""
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
