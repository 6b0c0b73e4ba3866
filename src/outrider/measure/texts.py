"""Encodes tasks with the target's tokenizer; needs no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.arguments import encode_text
from outrider.config import ModelConfig
from outrider.errors import InvalidPromptError
from outrider.measure.run import EncodedTask
from outrider.measure.tasks import Task
from outrider.model.loading.tokenizers import read_tokenizer


def encoded_tasks(
    model: str, limit: int, tasks: Mapping[str, Sequence[Task]], max_tokens: int
) -> dict[str, list[EncodedTask]]:
    """The tasks of each workload in the tokens of a model.

    Args:
        model: Folder or hub id.
        limit: The most tokens of a text, with its prompt.
        tasks: The tasks by workload.
        max_tokens: The output tokens of a task that is no replay.

    Raises:
        ModelLoadError: The tokenizer cannot be read.
        InvalidPromptError: A prompt is no text, or it does not fit into the context with its output.
    """
    tokenizer = read_tokenizer(ModelConfig(model=model))
    return {name: [_encoded(task, tokenizer, limit, max_tokens) for task in found] for name, found in tasks.items()}


def _encoded(task: Task, tokenizer: Any, limit: int, max_tokens: int) -> EncodedTask:
    prompt = encode_text(tokenizer, task.prompt)
    answer = None if task.answer is None else encode_text(tokenizer, task.answer)
    length = max_tokens if answer is None else len(answer)
    if len(prompt) + length > limit:
        raise InvalidPromptError(
            f"{task.workload}, {task.name}",
            task.prompt,
            f"{len(prompt)} tokens and {length} to be written, in a context of {limit}",
            "Shorten it, or lower --max-tokens.",
        )
    return EncodedTask(task.name, prompt, length, answer)
