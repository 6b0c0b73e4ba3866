"""The recorder of a server: keeps prompts and answers of the namespaces that allow it, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from outrider.errors import StorageError
from outrider.params import CompletionOutput
from outrider.server.api.jobs import Job
from outrider.server.api.schemas import ChatRequest
from outrider.server.logs import log
from outrider.server.metrics import ServerMetrics
from outrider.server.records.folder import RecordFolder
from outrider.server.records.namespace import NamespaceRecords
from outrider.server.records.origin import Origin
from outrider.train.prompts import prompt_of
from outrider.train.records import Record

T = TypeVar("T")

#: So many texts are written at once, and fewer after so many seconds.
_AT_ONCE, _SECONDS = 64, 5.0


@dataclass(frozen=True)
class Kept:
    """What is kept of a namespace.

    Attributes:
        namespace: Whose texts these are.
        texts: How many.
        tokens: Theirs, prompts included.
        bytes: That they take on the disk.
        budget_bytes: That they may take; 0 where nothing more is kept.
    """

    namespace: str
    texts: int
    tokens: int
    bytes: int
    budget_bytes: int


class Recorder:
    """Keeps texts of namespaces, each in a folder of its own.

    Args:
        folder: Of all of them.
        budgets: Of the namespaces of the keys, in bytes; 0 keeps nothing more.
        origin: Where the texts come from.
        metrics: Where they are counted.

    Raises:
        ContradictionError, InvalidParameterError, StorageError: As NamespaceRecords does.
    """

    def __init__(self, folder: RecordFolder, budgets: Mapping[str, int], origin: Origin, metrics: ServerMetrics) -> None:
        self._folder, self._budgets, self._metrics = folder, budgets, metrics
        there = [name for name, budget in budgets.items() if budget or folder.of(name).exists()]
        self._kept = {name: NamespaceRecords(folder.of(name), origin, budgets[name] or sys.maxsize) for name in there}
        self._waiting: dict[str, list[Record]] = {name: [] for name in there}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._thread = ThreadPoolExecutor(1, "outrider-records")

    def keep(self, job: Job, outputs: Mapping[int, CompletionOutput]) -> None:
        """Keep what was written for a request, if its namespace and the request allow it. It never waits.

        Args:
            job: The request.
            outputs: By number of the choice.
        """
        name = job.namespace
        if name is None or not self._budgets.get(name) or job.is_silent or job.asked.store is False:
            return
        whole = {number: output for number, output in outputs.items() if output.finish_reason != "cancelled"}
        texts = [self._record(name, job, number, output) for number, output in whole.items()]
        self._thread.submit(self._add, name, texts)
        if name not in self._timers:
            self._timers[name] = asyncio.get_running_loop().call_later(_SECONDS, self._flush_later, name)

    async def tell(self, namespace: str) -> Kept:
        """What is kept of a namespace, what waits to be written included.

        Raises:
            StorageError: It cannot be written.
        """
        return await self._call(lambda: self._told(namespace))

    async def delete(self, namespace: str) -> int:
        """Delete all that is kept of a namespace; returns how many texts that were.

        Raises:
            StorageError: The folder takes no file.
        """
        return await self._call(lambda: self._delete(namespace))

    async def close(self) -> None:
        """Write what waits, and let other servers have the folder."""
        for timer in self._timers.values():
            timer.cancel()
        await self._call(self._flush_all)
        self._thread.shutdown()
        self._folder.close()

    async def _call(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(call))

    def _record(self, name: str, job: Job, number: int, output: CompletionOutput) -> Record:
        place, sample = divmod(number, job.params.n)
        tokens = job.prompts[place].token_ids
        prompt = prompt_of("", tokens, _group(job, tokens))
        held_out = prompt.held_out(self._kept[name].held_out)
        return Record(prompt.digest, sample, held_out, len(tokens), torch.tensor([*tokens, *output.token_ids]))

    def _flush_later(self, name: str) -> None:
        del self._timers[name]
        self._thread.submit(self._flush, name)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _add(self, name: str, texts: list[Record]) -> None:
        self._waiting[name] += texts
        if len(self._waiting[name]) >= _AT_ONCE:
            self._flush(name)

    def _flush(self, name: str) -> None:
        """Write what waits. What cannot be written is given up, and said: a full disk must not fill the memory too."""
        texts, self._waiting[name] = self._waiting[name], []
        if not texts:
            return
        try:
            self._kept[name].add(texts)
        except StorageError as error:
            self._metrics.not_recorded(name, len(texts))
            log("texts could not be kept", {"tenant": name, "texts": len(texts), "problem": str(error)}, logging.ERROR)
        else:
            self._metrics.recorded(name, len(texts))

    def _flush_all(self) -> None:
        for name in self._waiting:
            self._flush(name)

    def _told(self, name: str) -> Kept:
        if name not in self._kept:
            return Kept(name, 0, 0, 0, 0)
        self._flush(name)
        kept = self._kept[name]
        return Kept(name, kept.num_texts, kept.num_tokens, kept.num_bytes, self._budgets[name])

    def _delete(self, name: str) -> int:
        if name not in self._kept:
            return 0
        count, self._waiting[name] = len(self._waiting[name]), []
        count += self._kept[name].delete()
        log("records were deleted", {"tenant": name, "texts": count})
        return count


def _group(job: Job, tokens: Sequence[int]) -> Sequence[int]:
    """What stands on one side of the split: the prompt, or the conversation that begins with the same turn of the user."""
    messages = job.asked.messages if isinstance(job.asked, ChatRequest) else []
    first = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        return tokens
    return list(json.dumps([message.model_dump(mode="json") for message in messages[: first + 1]]).encode())
