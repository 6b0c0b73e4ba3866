"""The benchmark against a server that speaks OpenAI's API: the same questions and tables, as its users meet them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from itertools import pairwise
from time import perf_counter
from typing import Any

from outrider.errors import EngineAnswerError, InvalidParameterError, OtherEngineError
from outrider.lab.bench.plan import Cell, digest, tasks_of
from outrider.lab.bench.report import advise
from outrider.lab.bench.results import PLAIN, CellResult, Results, summarise
from outrider.lab.bench.session import Store
from outrider.lab.bench.settings import BenchSettings
from outrider.lab.measure import machine
from outrider.lab.measure.progress import Progress
from outrider.lab.measure.tasks import Task
from outrider.lab.measure.writing import Contestant, Run, interleave
from outrider.lab.peers.base import asked
from outrider.loading.sources import usable_device
from outrider.results import RequestStats

#: What is measured where nobody says otherwise: a few prompts of each workload, one at a time.
_NUM_PROMPTS, _MAX_TOKENS = 5, 128
#: Seconds in which something must come from the server.
_TIMEOUT = 600.0
#: What a server is asked for where no way is named: what it does by itself.
AS_SERVED = "as served"


class ClientSession:
    """One run against one server. `measured` holds its cells, in their order."""

    def __init__(self, settings: BenchSettings, progress: Progress | None = None) -> None:
        assert settings.bench_client is not None
        self._settings = settings
        self._progress = progress or Progress()
        self._root = settings.bench_client.rstrip("/").removesuffix("/v1")
        self._tasks = tasks_of(settings)
        self._ways = dict(map(_asked_way, settings.ways))
        self.measured: list[CellResult] = []

    def run(self) -> Results:
        """Measure every cell. The results of this run replace what `out` held."""
        store, results = Store(self._settings.out), Results(machine=machine.describe(usable_device(None)))
        model = self._settings.model or self._first_model()
        ways = self._requested(model)
        results.note(
            f"measured against {self._root}, with texts as long as they come; every prompt was sent once before, so that "
            "a server that keeps prompts has them for all ways; whether texts repeat is not known"
        )
        for cell in self._cells(model, tuple(ways)):
            contestants = [
                Contestant(name, partial(self._write, cell, body), plain=name == PLAIN) for name, body in ways.items()
            ]
            self.measured.append(self._measure(cell, contestants))
            results.cells[cell.key] = self.measured[-1]
            results.advice = advise(results.cells.values())
            store.save(results)
        return results

    def _requested(self, model: str) -> dict[str, dict[str, Any]]:
        """The fields that ask for each way. One of our own servers is also asked to decode plainly."""
        first = next(iter(self._tasks.values()))[0]
        is_ours = self._ask(first, {"model": model, "max_tokens": 1}).drafts is not None
        ways = self._ways or {AS_SERVED: {}}
        return {PLAIN: {"speculation": "off"}, **ways} if is_ours else ways

    def _cells(self, model: str, ways: tuple[str, ...]) -> Iterator[Cell]:
        settings = self._settings
        for workload, tasks in self._tasks.items():
            for sampling in settings.samplings or ("greedy",):
                for batch in settings.batches or (1,):
                    count = min(settings.num_prompts or _NUM_PROMPTS, len(tasks))
                    yield Cell(
                        model=model,
                        dtype="as served",
                        workload=workload,
                        sampling=sampling,
                        batch=batch,
                        num_prompts=count if batch == 1 else max(2 * batch, count),
                        max_tokens=settings.max_tokens or _MAX_TOKENS,
                        ways=ways,
                        tasks=digest(tasks),
                    )

    def _measure(self, cell: Cell, contestants: list[Contestant[Run]]) -> CellResult:
        rounds = list(cell.rounds(self._tasks[cell.workload]))
        self._progress.expect(cell.load, len(contestants) * len(rounds) + 1)
        for task in {task.name: task for tasks in rounds for task in tasks}.values():
            self._ask(task, {"model": cell.model, "max_tokens": 1})
        self._progress.advance()
        runs = interleave(rounds, contestants, lambda _: self._progress.advance(), _fail)
        return CellResult(cell=cell, ways=summarise(contestants, runs, cell.batch))

    def _write(self, cell: Cell, body: Mapping[str, Any], tasks: Sequence[Task]) -> Run:
        """The texts of one round, all at once."""
        fields = {"model": cell.model, "max_tokens": cell.max_tokens, "temperature": cell.temperature, **body}
        start = perf_counter()
        with ThreadPoolExecutor(len(tasks)) as pool:
            return _run(list(pool.map(lambda task: self._ask(task, fields), tasks)), start)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _first_model(self) -> str:
        with asked(self._root, "models", None, _TIMEOUT) as answer:
            try:
                return str(json.load(answer)["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise EngineAnswerError(self._root, "lists no model", "Name one as MODEL.") from error

    def _ask(self, task: Task, fields: Mapping[str, Any]) -> Answer:
        """One text, as it arrives."""
        question = {"messages": list(task.messages)} if task.messages else {"prompt": task.prompt}
        path = "chat/completions" if task.messages else "completions"
        body = {**question, "stream": True, "stream_options": {"include_usage": True}, **fields}
        answer = Answer()
        try:
            with asked(self._root, path, body, _TIMEOUT) as lines:
                for line in lines:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        answer.take(json.loads(line[5:]), perf_counter())
        except (ValueError, KeyError, TypeError, AttributeError, HTTPException, OSError) as error:
            problem = f"its answer to {task.name} cannot be read ({error!r})"
            raise EngineAnswerError(self._root, problem, "Is it a server that speaks OpenAI's API?") from error
        if not answer.arrivals:
            raise EngineAnswerError(self._root, f"it wrote nothing for {task.name}: {answer.said}", "See its log.")
        return answer


def _fail(_: Contestant[Run], error: OtherEngineError) -> None:
    raise error


def _asked_way(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a way, and the field that asks one of our own servers for it."""
    form = re.fullmatch(r"([\w-]+)(?::([1-9]\d{0,2}))?", text)
    if form is None or form[1] in ("plain", "none", "off"):
        remedy = "Use NAME or NAME:LENGTH, like auto, suffix:16. Plain decoding takes part without being named."
        raise InvalidParameterError("way", text, "a server cannot be asked for it", remedy)
    name, length = form.groups()
    own = {} if length is None else {"num_draft_tokens": int(length)}
    return name if length is None else f"{name} k={length}", {"speculation": {"method": name, **own}}


@dataclass
class Answer:
    """One streamed text."""

    arrivals: list[float] = field(default_factory=list)  # when parts of it came
    num_tokens: int = 0  # its tokens, as the server counts them; else its parts
    drafts: RequestStats | None = None  # what one of our own servers says of its drafts
    num_passes: int | None = None  # passes of the target, as one of our own servers counts them
    said: str = ""  # the last thing that was no part of the text

    def take(self, chunk: Mapping[str, Any], now: float) -> None:
        """One event of the stream."""
        choices = chunk.get("choices") or [{}]
        delta = choices[0].get("delta", choices[0])
        if any(delta.get(name) for name in ("content", "text", "reasoning_content", "tool_calls")):
            self.arrivals.append(now)
            self.num_tokens += 1
        elif "error" in chunk:
            self.said = json.dumps(chunk["error"])
        elif choices[0].get("finish_reason") and not self.arrivals:  # its tokens show no text, or it has none
            self.arrivals.append(now)
        if chunk.get("usage"):
            self.num_tokens = chunk["usage"]["completion_tokens"]
        if "speculation" in chunk:
            told = chunk["speculation"]
            self.num_passes = told["target_passes"]
            self.drafts = RequestStats(
                num_drafts=told["drafts"],
                num_draft_tokens=told["draft_tokens"],
                num_accepted_tokens=told["accepted_tokens"],
                drafted_per_position=told["drafted_per_position"],
                accepted_per_position=told["accepted_per_position"],
            )


def _run(answers: Sequence[Answer], start: float) -> Run:
    """The round as a Run. The first part of a text is taken to be one token. The tokens themselves are not told, so they
    are numbered, and none of them repeats."""
    first = min(answer.arrivals[0] for answer in answers)
    last = max(answer.arrivals[-1] for answer in answers)
    counts = RequestStats()
    for answer in answers:
        counts.add(answer.drafts or RequestStats())
    passes = [answer.num_passes for answer in answers if answer.num_passes is not None]
    return Run(
        token_ids=tuple(tuple(range(answer.num_tokens)) for answer in answers),
        seconds=last - start,
        first_token_seconds=tuple(answer.arrivals[0] - start for answer in answers),
        decode_tokens=sum(max(answer.num_tokens - 1, 0) for answer in answers),
        decode_seconds=last - first or None,
        gaps=tuple(later - earlier for answer in answers for earlier, later in pairwise(answer.arrivals)),
        num_passes=sum(passes) if len(passes) == len(answers) else None,
        drafts=counts,
    )
