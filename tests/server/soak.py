"""Hundreds of clients for minutes, on a real server.

Every text must be right, nobody may starve, memory must stay flat, and everything must be given back at the end.

    python -m tests.server.soak                                   200 clients for 5 minutes, as `make soak` does
    python -m tests.server.soak --clients 40 --seconds 20

A third of the clients leaves in the middle of each answer or before it begins. Others read slowly. Requests choose among
methods, one of which fails now and then. The KV memory is so small that texts lose theirs for a while. What was found is
written as a table and a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider import LLM, SamplingParams
from tests.server.running import Server, running
from tests.server.soak_report import write_report
from tests.server.wire import Connection

PROMPTS = [
    "def parse(line):\n", "class Reader:\n", "import os\n", "for name in names:\n", "if __name__ ==",
    "with open(path) as f:\n", "def main():\n    parser =", "    return [", "try:\n    import",
    "@dataclass\nclass", "# read the file\n", "print(",
]  # fmt: skip
MODES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 4},
    {"temperature": 1, "seed": 5, "presence_penalty": 1, "stop": "return"},
]
METHODS = [None, None, "off", "suffix", "ngram", "token_recycling", "faulty"]
#: So little that texts of 32 requests do not fit all at a time.
KV_TOKENS = 3072
#: Shorter runs tell nothing about memory, since there is less of it at the beginning.
_LONG = 60.0
ALLOWED = ["suffix", "ngram", "token_recycling", "tests.server.faulty:Faulty"]
COMMAND = ["--kv-cache-tokens", str(KV_TOKENS), *(part for name in ALLOWED for part in ("--allow", name))]


@dataclass(frozen=True)
class Load:
    """How much is asked of the server.

    Attributes:
        clients: At a time. One after another, each asks for one text at a time.
        seconds: After so long they ask for no more.
        most_tokens: Of a text.
        seed: Of all that clients choose.
    """

    clients: int = 200
    seconds: float = 300.0
    most_tokens: int = 320
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """A request, and the text that the offline API writes for it."""

    fields: dict[str, Any]
    text: str
    token_ids: tuple[int, ...]


@dataclass
class CommonRequest:
    """What became of a request; times in seconds since the beginning.

    Attributes:
        method: Who drafted.
        kind: What the client is like: "steady", "slow" or "leaving".
        asked, ended: When.
        first: When its first piece came.
        num_tokens: That the client has seen.
    """

    method: str
    kind: str
    asked: float
    first: float | None = None
    ended: float | None = None
    num_tokens: int = 0


@dataclass
class Findings:
    """What a run has shown.

    Attributes:
        load: What was asked for.
        asked: Every request.
        seen: Values of metrics over time, by name.
        wrong: Errors and wrong texts, in words.
        before, after: Metrics before anything was asked, and when all had ended.
    """

    load: Load
    asked: list[CommonRequest] = field(default_factory=list)
    seen: list[dict[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    @property
    def overtaken(self) -> int:
        """The most requests that came later than another one and had their first piece before it."""
        began = [(request.asked, request.first) for request in self.asked if request.first is not None]
        asked, first = np.array(began).reshape(-1, 2).T
        return max((int(((asked > a) & (first < f)).sum()) for a, f in began), default=0)

    def memory(self, begin: float, end: float) -> float:
        """Mean bytes in memory during a part of the run, which lasts from 0 to 1."""
        rows = self.seen[int(begin * len(self.seen)) : max(1, int(end * len(self.seen)))]
        return float(np.mean([row["process_resident_memory_bytes"] for row in rows]))

    @property
    def growth(self) -> float:
        """Memory at the end by that after a third of the time."""
        return self.memory(0.9, 1.0) / self.memory(0.33, 0.43)

    def problems(self) -> list[str]:
        """What must not be, in words."""
        found = list(self.wrong)
        if self.overtaken > self.load.clients:
            found.append(f"{self.overtaken} later requests were served before another one")
        unended = sum(request.ended is None for request in self.asked)
        if unended:
            found.append(f"{unended} requests never ended")
        for name in _ZERO:
            if self.after[name]:
                found.append(f"{name} is {self.after[name]:g} when all have ended")
        if self.after["process_open_fds"] > self.before["process_open_fds"]:
            found.append(f"{self.after['process_open_fds']:g} files are open, {self.before['process_open_fds']:g} at first")
        if self.load.seconds >= _LONG and self.growth > 1.1:
            found.append(f"memory grew by a factor of {self.growth:.2f}")
        return found


#: The metrics that are read while the clients ask, by the names that they have here.
WATCHED = {
    "num_requests_running": "vllm:num_requests_running",
    "num_requests_waiting": "vllm:num_requests_waiting",
    "kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "proposer_users": "outrider:proposer_users",
    "generation_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "proposer_faults": "outrider:proposer_faults_total",
    "broken_steps": "outrider:broken_steps_total",
    "process_resident_memory_bytes": "process_resident_memory_bytes",
    "process_cpu_seconds": "process_cpu_seconds_total",
    "process_open_fds": "process_open_fds",
}


#: Those that must be zero when all have ended.
_ZERO = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "proposer_users", "broken_steps")


def make_tasks(load: Load) -> list[Task]:
    """Requests of all modes, and their texts."""
    chance = random.Random(load.seed)
    with LLM(kv_cache_tokens=KV_TOKENS) as llm:
        return [_task(llm, {"prompt": p, **m}, chance.randint(8, load.most_tokens)) for p in PROMPTS for m in MODES]


def _task(llm: LLM, fields: dict[str, Any], max_tokens: int) -> Task:
    params = {name: value for name, value in fields.items() if name != "prompt"}
    (output,) = llm.generate(fields["prompt"], SamplingParams(**params, max_tokens=max_tokens))
    return Task({**fields, "max_tokens": max_tokens}, output.text, tuple(output.token_ids))


class Crowd:
    """The clients.

    Args:
        url: Of the server.
        load: How many there are, and for how long.
        tasks: What they ask for.
    """

    def __init__(self, url: str, load: Load, tasks: Sequence[Task]) -> None:
        self._url, self._tasks = url, tasks
        self.found = Findings(load)
        self._start = time.monotonic()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._start

    async def run(self) -> Findings:
        """Let all of them ask until the time is over, and have their last answers."""
        watcher = asyncio.create_task(self._watch())
        await asyncio.gather(*(self._client(number) for number in range(self.found.load.clients)))
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        return self.found

    async def _watch(self) -> None:
        async with Connection(self._url) as connection:
            while True:
                values = await read_metrics(connection)
                self.found.seen.append({"seconds": self._now, **values})
                await asyncio.sleep(min(1.0, self.found.load.seconds / 40))

    async def _client(self, number: int) -> None:
        kind = ("leaving", "slow", "steady", "leaving", "steady", "steady")[number % 6]
        chance = random.Random(f"{self.found.load.seed} {number}")
        while self._now < self.found.load.seconds:
            task, method = chance.choice(self._tasks), chance.choice(METHODS)
            asked = CommonRequest(method or "draft_model", kind, self._now)
            self.found.asked.append(asked)
            try:
                await self._ask(task, method, asked, chance)
            except Exception as error:
                self.found.wrong.append(f"{task.fields} with {method}: {error!r}")
            asked.ended = self._now

    async def _ask(self, task: Task, method: str | None, asked: CommonRequest, chance: random.Random) -> None:
        more = {"stream": True, "speculation": method, "return_token_ids": True, "stream_options": {"include_usage": True}}
        body = json.dumps({**task.fields, **more}).encode()
        patience = chance.randint(0, len(task.token_ids)) if asked.kind == "leaving" else None
        async with Connection(self._url) as connection:
            if patience == 0:
                await _impatient(connection, body, chance.random())
                return
            answer = await connection.ask("/v1/completions", body)
            if answer.status != 200:
                raise AssertionError(f"status {answer.status}: {(await answer.body()).decode()}")
            reader = _Reader(task)
            async for event in answer.events():
                asked.first = self._now if asked.first is None else asked.first
                reader.read(event)
                asked.num_tokens = len(reader.token_ids)
                if patience is not None and asked.num_tokens >= patience:
                    connection.leave()
                    return
                if asked.kind == "slow":
                    await asyncio.sleep(chance.random() * 0.2)
            reader.finish()


async def _impatient(connection: Connection, body: bytes, seconds: float) -> None:
    """Leave before the answer begins, most of the time."""
    with suppress(TimeoutError):
        await asyncio.wait_for(connection.ask("/v1/completions", body), seconds)
    connection.leave()


class _Reader:
    """What a client has read of a text, compared with what it must be."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.text, self.token_ids, self._told, self._done = "", list[int](), -1, False

    def read(self, event: bytes) -> None:
        assert not self._done, "an event behind the last one"
        if event == b"[DONE]":
            self._done = True
            return
        chunk = json.loads(event)
        assert "error" not in chunk, chunk
        if chunk.get("usage"):
            self._told = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.token_ids += choice["token_ids"]
        assert self._task.text.startswith(self.text), f"read {self.text!r} of {self._task.text!r}"

    def finish(self) -> None:
        assert self._done, "the stream ended early"
        assert self.text == self._task.text, f"read {self.text!r} instead of {self._task.text!r}"
        assert tuple(self.token_ids) == self._task.token_ids, "other tokens with the same text"
        assert self._told == len(self._task.token_ids), f"{self._told} tokens were counted"


async def read_metrics(connection: Connection) -> dict[str, float]:
    """The values of WATCHED, each the sum over all of its series."""
    text = (await (await connection.ask("/metrics")).body()).decode()
    sums: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            sums[name.partition("{")[0]] += float(value)
    return {name: sums[told] for name, told in WATCHED.items()}


def soak(server: Server, load: Load, tasks: Sequence[Task]) -> Findings:
    """Run the clients on a server, and end it in good order."""
    before = asyncio.run(_once(server.url))
    found = asyncio.run(Crowd(server.url, load, tasks).run())
    found.before = before
    try:
        server.rests(60)
    except AssertionError as error:
        found.wrong.append(str(error))
    found.after = asyncio.run(_once(server.url))
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(60)
    if code:
        found.wrong.append(f"the server ended with code {code}")
    books = [line["books"] for line in server.ended() if line["event"] == "ended"]
    if books != ["agree"]:
        found.wrong.append(f"what the server says of its books at the end: {books}")
    found.wrong += [str(line) for line in server.lines if line.get("level") in ("error", "critical")]
    return found


async def _once(url: str) -> dict[str, float]:
    async with Connection(url) as connection:
        return await read_metrics(connection)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/soak"))
    chosen = parser.parse_args()
    load = Load(chosen.clients, chosen.seconds, seed=chosen.seed)
    tasks = make_tasks(load)
    with running(*COMMAND) as server:
        found = soak(server, load, tasks)
    report(found, chosen.out)
    sys.exit(1 if found.problems() else 0)


def report(found: Findings, folder: Path) -> None:
    """Print what was found, and write it."""
    told = {"overtaken": found.overtaken, "growth": found.growth, "problems": found.problems()}
    write_report(folder, asdict(found), told)


if __name__ == "__main__":
    main()
