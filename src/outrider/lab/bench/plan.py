"""Plans the cells of a run: a cell is a workload in one precision, with one kind of sampling and one batch size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from outrider.errors import InvalidParameterError
from outrider.lab.bench.settings import BenchSettings, PrecisionName
from outrider.lab.measure import decoding_config
from outrider.lab.measure.decoding_config import DecodingConfig, parse_ways
from outrider.lab.measure.tasks import (
    LONG,
    LONG_WORKLOADS,
    WORKLOADS,
    Task,
    built_in,
    long_tasks,
    read_prompts,
    read_replay,
)
from outrider.lab.measure.writing import copy_tasks

T = TypeVar("T")
_ALL_BATCHES = (1, 2, 4, 8, 16, 32, 64)
#: A usual run samples every workload one text at a time, and a single workload in this batch.
_USUAL_BATCH, _USUAL_NUM_PROMPTS, _USUAL_MAX_TOKENS = 8, 3, 32
_FULL_NUM_PROMPTS, _FULL_MAX_TOKENS = 16, 96
_QUICK_NUM_PROMPTS, _QUICK_MAX_TOKENS = 2, 16


class Cell(BaseModel):
    """One comparison, in which every way writes the same prompts in the same rounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # folder, hub id, "embedded" or "wide"
    dtype: str  # the type of the weights
    workload: str  # the name of the workload. It is "replay/..." for forced texts.
    sampling: str  # "greedy", "T=1" or "replay"
    batch: int  # the number of texts at a time
    num_prompts: int  # the prompts that every way writes, in rounds of `batch`. The last round is filled up.
    max_tokens: int  # the output tokens of a text. A replay has its own lengths.
    ways: tuple[str, ...]  # the names of the ways, plain decoding first
    peers: tuple[str, ...] = ()  # the peers beside them, with their versions
    tasks: str  # a digest of the prompts

    @property
    def key(self) -> str:
        """A key that is equal for cells that measure the same thing."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @property
    def replay(self) -> bool:
        return self.sampling == "replay"

    @property
    def temperature(self) -> float:
        return 1.0 if self.sampling == "T=1" else 0.0

    @property
    def num_rounds(self) -> int:
        return -(-self.num_prompts // self.batch)

    @property
    def group(self) -> str:
        """The cells that get one advice together: the load without its workload, in one phrase."""
        return f"{self.model}, {self.dtype}, {self.sampling}, batch {self.batch}"

    @property
    def load(self) -> str:
        """The cell in one phrase, for tables."""
        return f"{self.model}, {self.dtype}, {self.workload}, {self.sampling}, batch {self.batch}"

    def rounds(self, tasks: Sequence[T]) -> Iterator[list[T]]:
        """The prompts of each round. They begin again from the first where there are too few."""
        for turn in range(self.num_rounds):
            yield [tasks[(turn * self.batch + i) % len(tasks)] for i in range(self.batch)]


class CellPlan:
    """Everything that a run will measure: tasks by workload, and ways to decode, plain decoding first. It is known before a
    model is loaded."""

    def __init__(self, settings: BenchSettings, model: str, draft_model: str | None) -> None:
        self._settings = settings
        self._model = model
        self.tasks = tasks_of(settings)
        usual = decoding_config.ALL if settings.full else decoding_config.USUAL
        names = settings.ways or tuple(n for n in usual if draft_model or not n.startswith("draft_model"))
        self.ways = parse_ways(names, draft_model)

    @property
    def dtypes(self) -> tuple[PrecisionName, ...]:
        """The precisions, which are measured one after another. A full run takes both common ones."""
        return self._settings.dtypes or (("float32", "bfloat16") if self._settings.full else ("auto",))

    @property
    def max_tokens(self) -> int:
        """The output tokens of a text that is not replayed."""
        return self._settings.max_tokens or self._sized(_QUICK_MAX_TOKENS, _USUAL_MAX_TOKENS, _FULL_MAX_TOKENS)

    def _sized(self, quick: int, usual: int, full: int) -> int:
        return full if self._settings.full else quick if self._settings.quick else usual

    def ways_of(self, cell: Cell) -> list[DecodingConfig]:
        """The ways that take part in a cell."""
        return [way for way in self.ways if way.name in cell.ways]

    def cells(self, dtype: str, peers: Sequence[str] = ()) -> list[Cell]:
        """The cells of one precision."""
        return [self._cell(dtype, *load, peers) for load in self._loads()]

    def _loads(self) -> Iterator[tuple[str, str, int]]:
        """(workload, sampling, batch): all combinations that were asked for, or a small choice where none were."""
        settings, first = self._settings, next(iter(self.tasks))
        full = settings.full
        samplings = settings.samplings or (("T=1", "greedy") if full else ("T=1",))
        batches = settings.batches or (_ALL_BATCHES if full else (1,))
        for workload in self.tasks:
            if workload.startswith("replay/"):
                yield workload, "replay", 1
                continue
            yield from ((workload, sampling, batch) for sampling in samplings for batch in batches)
        if not first.startswith("replay/") and not settings.quick:
            if not settings.samplings and not full:
                yield first, "greedy", batches[0]
            if not settings.batches and not full:
                yield first, samplings[0], _USUAL_BATCH

    def _cell(self, dtype: str, workload: str, sampling: str, batch: int, peers: Sequence[str]) -> Cell:
        settings, tasks, replay = self._settings, self.tasks[workload], sampling == "replay"
        num_prompts = settings.num_prompts or self._sized(_QUICK_NUM_PROMPTS, _USUAL_NUM_PROMPTS, _FULL_NUM_PROMPTS)
        return Cell(
            model=self._model,
            dtype=dtype,
            workload=workload,
            sampling=sampling,
            batch=batch,
            num_prompts=min(num_prompts, len(tasks)) if batch == 1 else max(2 * batch, num_prompts),  # at least two rounds
            max_tokens=self.max_tokens,
            ways=tuple(way.name for way in self.ways if way.replays or not replay),
            peers=() if replay else tuple(peers),
            tasks=digest(tasks),
        )


def digest(tasks: Sequence[Task]) -> str:
    """Tells prompts from others."""
    content = json.dumps([[task.prompt, task.answer, task.messages] for task in tasks])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def tasks_of(settings: BenchSettings) -> dict[str, list[Task]]:
    """The tasks by workload, in the order of their sources."""
    usual = WORKLOADS[:1] if settings.quick else WORKLOADS
    names = settings.workloads if settings.chooses_tasks else usual
    replay = settings.replay if settings.chooses_tasks or settings.quick else "copy"
    whole = dict.fromkeys(each for name in names for each in (LONG_WORKLOADS if name == LONG else (name,)))
    found = [task for name in whole for task in (long_tasks(name) if name in LONG_WORKLOADS else built_in(name))]
    if settings.prompts is not None:
        found += read_prompts(settings.prompts)
    if replay is not None:
        found += copy_tasks() if replay == "copy" else read_replay(Path(replay))
    tasks: dict[str, list[Task]] = {}
    for task in found:
        if task.answer is None and task.workload.startswith("replay/"):
            raise InvalidParameterError(
                "workload", task.workload, "the name of a replay, but nothing is recorded", "Call it otherwise."
            )
        tasks.setdefault(task.workload, []).append(task)
    return tasks
