"""Keeps prompts and answers of the tenants that allow it, in folders of training data within a budget."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import torch

from outrider.errors import InvalidParameterError, StorageError, UnsupportedModelError
from outrider.files import storing
from outrider.heads.checkpoint import Witness
from outrider.llm import LLM
from outrider.model.target import Target
from outrider.params import CompletionOutput
from outrider.records import (
    MANIFEST,
    DataSettings,
    Record,
    Shard,
    TargetFacts,
    keep_witness,
    open_manifest,
    prompt_of,
    read_manifest,
    read_records,
    target_facts,
    target_witness,
    write_shard,
)
from outrider.server.errors import log
from outrider.server.metrics import ServerMetrics
from outrider.server.requests import Job
from outrider.server.schemas import ChatRequest

# --- The recorder of a server: keeps prompts and answers of the namespaces that allow it, in a thread of its own.


T = TypeVar("T")

#: So many texts are written at once, and fewer after so many seconds.
_AT_ONCE, _SECONDS = 64, 5.0


@dataclass(frozen=True)
class KeptRecords:
    """Holds what is kept of a namespace."""

    namespace: str  # whose texts these are
    texts: int  # how many
    tokens: int  # theirs, prompts included
    bytes: int  # that they take on the disk
    budget_bytes: int  # that they may take; 0 where nothing more is kept


class Recorder:
    """Keeps texts of namespaces, each in a folder of its own.

    Args:
        budgets: Of the namespaces of the keys, in bytes; 0 keeps nothing more.
    """

    def __init__(self, folder: RecordFolder, budgets: Mapping[str, int], origin: Origin, metrics: ServerMetrics) -> None:
        self._folder, self._budgets, self._metrics = folder, budgets, metrics
        there = [name for name, budget in budgets.items() if budget or folder.of(name).exists()]
        self._kept = {name: NamespaceRecords(folder.of(name), origin, budgets[name] or sys.maxsize) for name in there}
        self._waiting: dict[str, list[Record]] = {name: [] for name in there}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._thread = ThreadPoolExecutor(1, "outrider-records")

    def keep(self, job: Job, outputs: Mapping[int, CompletionOutput]) -> None:
        """Keep what was written for a request, if its namespace and the request allow it. It never waits."""
        name = job.namespace
        if name is None or not self._budgets.get(name) or job.is_silent or job.asked.store is False:
            return
        whole = {number: output for number, output in outputs.items() if output.finish_reason != "cancelled"}
        texts = [self._record(name, job, number, output) for number, output in whole.items()]
        self._thread.submit(self._add, name, texts)
        if name not in self._timers:
            self._timers[name] = asyncio.get_running_loop().call_later(_SECONDS, self._flush_later, name)

    async def tell(self, namespace: str) -> KeptRecords:
        """Returns what is kept of a namespace, what waits to be written included."""
        return await self._call(lambda: self._told(namespace))

    async def delete(self, namespace: str) -> int:
        """Delete all that is kept of a namespace; returns how many texts that were."""
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
            too_large = self._kept[name].add(texts)
        except StorageError as error:
            self._metrics.not_recorded(name, len(texts))
            log("texts could not be kept", {"tenant": name, "texts": len(texts), "problem": str(error)}, logging.ERROR)
        else:
            self._metrics.recorded(name, len(texts) - too_large)
            if too_large:
                self._metrics.not_recorded(name, too_large)
                problem = "they are larger than record_mib"
                log("texts could not be kept", {"tenant": name, "texts": too_large, "problem": problem}, logging.ERROR)

    def _flush_all(self) -> None:
        for name in self._waiting:
            self._flush(name)

    def _told(self, name: str) -> KeptRecords:
        if name not in self._kept:
            return KeptRecords(name, 0, 0, 0, 0)
        self._flush(name)
        kept = self._kept[name]
        return KeptRecords(name, kept.num_texts, kept.num_tokens, kept.num_bytes, self._budgets[name])

    def _delete(self, name: str) -> int:
        if name not in self._kept:
            return 0
        count, self._waiting[name] = len(self._waiting[name]), []
        count += self._kept[name].delete()
        log("records were deleted", {"tenant": name, "texts": count})
        return count


def _group(job: Job, tokens: Sequence[int]) -> Sequence[int]:
    """Returns what stands on one side of the split: the prompt, or the conversation that begins with the same turn of the
    user."""
    messages = job.asked.messages if isinstance(job.asked, ChatRequest) else []
    first = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        return tokens
    return list(json.dumps([message.model_dump(mode="json") for message in messages[: first + 1]]).encode())


# --- The folder of a server's records: one folder of data for each namespace, and a lock that keeps other servers out.


_LOCK = ".lock"
#: What the folder of texts that are being deleted is called, behind its own name. Names of tenants' folders have no dot.
_DELETED = ".deleted"
#: Bytes that the name of a file may have, with room for what stands behind it.
_LONGEST = 200


class RecordFolder:
    """A folder that belongs to this process until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storing(path):
            path.mkdir(0o700, parents=True, exist_ok=True)
            self._close_to_others()
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            remedy = "Give each server a folder of its own."
            raise InvalidParameterError("record", str(path), "another server writes to it", remedy) from None

        for deleted in path.glob(f"*{_DELETED}"):  # which a break has left
            shutil.rmtree(deleted, ignore_errors=True)

    def _close_to_others(self) -> None:
        mode = self.path.stat().st_mode & 0o777
        if not mode & 0o077:
            return
        try:
            self.path.chmod(0o700)
        except OSError as error:
            problem = f"other users may read it (mode {mode:o}), and that cannot be changed ({error.strerror})"
            raise InvalidParameterError("record", str(self.path), problem, "Give a folder of your own.") from None
        facts = {"folder": str(self.path), "mode": f"{mode:o}"}
        log("other users could read the folder of records, and now they cannot", facts, logging.WARNING)

    def of(self, namespace: str) -> Path:
        """The folder of a namespace. Names that differ have folders that differ, also where a system holds capital letters
        and small ones for the same."""
        name = re.sub(rb"[^a-z0-9_-]", lambda found: b"%%%02x" % found[0][0], namespace.encode()).decode()
        if len(name) > _LONGEST:
            problem = "its name is too long for a folder of records"
            raise InvalidParameterError("record", namespace, problem, "Give the tenant a shorter name.")
        return self.path / name

    def close(self) -> None:
        """Let other servers have it."""
        os.close(self._lock)


# --- The records of one namespace: a folder of training data that never grows beyond a budget.


#: Texts in a file, and the share of the budget that a file takes at most.
_TEXTS, _SHARE = 64, 8
#: Bytes of a token and of a text in a file, and of what stands before all texts, at most.
_BYTES_OF_TOKEN, _BYTES_OF_TEXT, _BYTES_OF_HEADER = 4, 29, 1024
_NAME = "shard-{:08d}.safetensors"


class NamespaceRecords:
    """Texts on the disk. Each change is a new manifest, so that a break leaves what was there before or what is there now.
    What this object says of them changes when the disk has changed, and not before.

    Args:
        budget: Bytes that its texts may take; when they take more, the oldest file is deleted.
    """

    def __init__(self, folder: Path, origin: Origin, budget: int) -> None:
        self._folder, self._budget, self._origin = folder, budget, origin
        settings = read_manifest(folder).settings if (folder / MANIFEST).exists() else origin.settings
        self._manifest = open_manifest(folder, origin.facts, settings)
        self._sizes = {shard.file: self._size(shard) for shard in self._manifest.shards}
        last = self._manifest.shards[-1:]
        self._number = 1 + max((int(shard.file[6:14]) for shard in last), default=-1)
        self._begun = self._texts_of(last) if self._has_room(last) else []
        try:
            self._clear()
            self._put(self._within_budget(self._manifest.shards, self._budget))
        except StorageError as error:  # a full disk; texts that come are counted as long as it is
            log("the folder of records cannot be written", {"problem": str(error)}, logging.WARNING)

    @property
    def num_texts(self) -> int:
        return self._manifest.num_records

    @property
    def num_tokens(self) -> int:
        return self._manifest.num_tokens

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def held_out(self) -> float:
        """The share of the prompts that is never trained on."""
        return self._manifest.settings.held_out

    def add(self, texts: Sequence[Record]) -> int:
        """Keep texts. The last file is written anew with them as long as it has room. Before each file, the oldest ones are
        deleted as far as there would be more on the disk than the budget and its share. Returns how many texts are larger
        than the budget, and so are not kept."""
        fit = [text for text in texts if _size_of([text]) + _BYTES_OF_HEADER <= self._budget]
        replaces = bool(self._begun)
        for part in self._parts([*self._begun, *fit]):
            self._write(part, replaces=replaces)
            replaces, self._begun = False, []
        if fit:
            self._begun = part if self._has_room(self._manifest.shards[-1:]) else []
        return len(texts) - len(fit)

    def delete(self) -> int:
        """Delete all texts; returns how many there were. It takes no space on the disk: the folder gets another name, by
        which all texts are gone at once, and is then deleted."""
        count = self.num_texts
        doomed = self._folder.with_name(self._folder.name + _DELETED)
        with storing(self._folder):
            if doomed.exists():
                shutil.rmtree(doomed)
            if self._folder.exists():
                self._folder.rename(doomed)
        self._begun, self._sizes = [], {}
        self._manifest = self._manifest.model_copy(update={"shards": ()})
        with storing(doomed):
            if doomed.exists():
                shutil.rmtree(doomed)
        return count

    def _parts(self, texts: Sequence[Record]) -> Iterator[list[Record]]:
        """The texts, file by file."""
        part, size = list[Record](), 0
        for text in texts:
            more = _size_of([text])
            if part and (len(part) == _TEXTS or size + more > self._budget // _SHARE):
                yield part
                part, size = [], 0
            part.append(text)
            size += more
        if part:
            yield part

    def _has_room(self, last: Sequence[Shard]) -> bool:
        return any(shard.num_records < _TEXTS and self._sizes[shard.file] < self._budget // _SHARE for shard in last)

    def _write(self, part: list[Record], *, replaces: bool) -> None:
        """Write a file, in place of the last one where its texts are among these."""
        room = self._budget + self._budget // _SHARE - _size_of(part) - _BYTES_OF_HEADER
        kept = self._within_budget(self._manifest.shards, min(room, self._budget))
        if len(kept) < len(self._manifest.shards):
            self._put(kept)
        shard = write_shard(self._folder, _NAME.format(self._number), part)
        self._number += 1
        self._sizes[shard.file] = self._size(shard)
        kept = kept[:-1] if replaces else kept
        self._put(self._within_budget([*kept, shard], self._budget))

    def _within_budget(self, shards: Sequence[Shard], left: int) -> list[Shard]:
        """The newest files that fit into so many bytes."""
        kept = list[Shard]()
        for shard in reversed(shards):
            left -= self._sizes[shard.file]
            if left < 0:
                break
            kept.insert(0, shard)
        return kept

    def _put(self, shards: Sequence[Shard]) -> None:
        """These files are the texts from now on; others are deleted. Raises StorageError, and then nothing has changed."""
        manifest = self._manifest.model_copy(update={"shards": tuple(shards)})
        try:
            keep_witness(self._folder, self._manifest, self._origin.witness)  # which writes it where there are no texts yet
            manifest.save(self._folder)
            self._manifest = manifest
        finally:
            named = {shard.file for shard in self._manifest.shards}
            self._sizes = {name: size for name, size in self._sizes.items() if name in named}
            self._clear()

    def _clear(self) -> None:
        """Delete the files of texts that the manifest does not name, also those that a break has left."""
        named = {shard.file for shard in self._manifest.shards}
        with storing(self._folder):
            for file in self._folder.glob("shard-*"):
                if file.name not in named:
                    file.unlink(missing_ok=True)

    def _size(self, shard: Shard) -> int:
        file = self._folder / shard.file
        try:
            return os.stat(file).st_size
        except OSError as error:
            problem = f"it cannot be read ({error.strerror})"
            raise InvalidParameterError("record", str(file), problem, "Put it back, or delete its folder.") from None

    def _texts_of(self, shards: tuple[Shard, ...]) -> list[Record]:
        return read_records(self._folder, self._manifest.model_copy(update={"shards": shards}))


def _size_of(texts: Sequence[Record]) -> int:
    """Bytes that texts take in a file."""
    return sum(_BYTES_OF_TEXT + _BYTES_OF_TOKEN * len(text.token_ids) for text in texts)


# --- Where a server's texts come from: its target, and the parameters of requests that bring none.


#: The share of the prompts that trainings keep for measurements: more than of data that are made, since there may be few.
_HELD_OUT = 0.1


@dataclass(frozen=True)
class Origin:
    """Says where texts come from."""

    facts: TargetFacts  # of the target
    witness: Witness  # its hidden states for a fixed text
    settings: DataSettings  # how it writes where a request does not say

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """The origin of what a target writes."""
        loaded, usual = llm.engine.runner.loaded, llm.default_params
        if loaded.encoder is not None:
            problem = "its texts cannot be recorded, since an encoder reads the prompts"
            raise UnsupportedModelError(loaded.name, problem, "Leave --record out.")
        settings = DataSettings(
            max_tokens=loaded.max_model_len,
            temperature=usual.temperature,
            top_k=max(0, usual.top_k),
            top_p=usual.top_p,
            held_out=_HELD_OUT,
        )
        witness = llm.between_steps(lambda engine: target_witness(Target(engine.runner)))
        return cls(target_facts(loaded), witness, settings)
