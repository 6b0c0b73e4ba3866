"""Writes batches of texts with engines and settings in turns, measures the time, and doubts what cannot be true."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from statistics import fmean
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from outrider.config import ModelConfig, RequestOptions
from outrider.conversations import template_of
from outrider.engine.sequence import Request
from outrider.errors import InvalidPromptError, OtherEngineError
from outrider.lab.measure.decoding_config import DecodingConfig
from outrider.lab.measure.figures import Spread
from outrider.lab.measure.machine import Load, MemoryWatch, PeakMemory
from outrider.lab.measure.tasks import Task
from outrider.llm import LLM
from outrider.loading.tokenizers import read_tokenizer
from outrider.params import SamplingParams, StreamPiece
from outrider.prompts import PromptEncoder, encode_text
from outrider.propose.compositions import parts_of
from outrider.results import RequestStats


@dataclass(frozen=True)
class EncodedTask:
    """A task in the target's tokens."""

    name: str  # the name of the task
    prompt_ids: tuple[int, ...]  # the tokens of its prompt
    max_tokens: int  # the number of output tokens, which every contestant writes exactly
    answer_ids: tuple[int, ...] | None = None  # the tokens that are replayed. None where the target chooses.

    def shortened(self, max_tokens: int) -> EncodedTask:
        """Returns the same task with fewer output tokens, for warming up."""
        answer = None if self.answer_ids is None else self.answer_ids[:max_tokens]
        return replace(self, max_tokens=min(max_tokens, self.max_tokens), answer_ids=answer)


def mean_length(tasks: Sequence[EncodedTask]) -> float:
    """The mean length of texts while they are written."""
    return fmean(len(task.prompt_ids) + task.max_tokens / 2 for task in tasks)


@dataclass(frozen=True)
class Run:
    """The measurements of one turn. They are None or empty where a peer does not tell them."""

    token_ids: tuple[tuple[int, ...], ...]  # the output of each text
    seconds: float  # wall time from the request to the last token, prompts included
    first_token_seconds: tuple[float, ...]  # seconds until the first token of each text
    decode_tokens: int  # the tokens after the first step that committed any
    decode_seconds: float | None  # wall time after that step
    gaps: tuple[float, ...] = ()  # seconds between arrivals within a text. The tokens of a step arrive together.
    num_passes: int | None = None  # the passes of the target that committed tokens, summed over texts
    drafts: RequestStats | None = None  # the counts of draft tokens
    # The shares of the time by phase: propose, forward, verify, host.
    shares: dict[str, float] = field(default_factory=dict)
    peak: PeakMemory | None = None  # the peak of memory

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of decoding. None where all tokens came in the first step, or where the time is not known."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else None

    @property
    def tokens_per_pass(self) -> float | None:
        """The tokens that a text gained in a pass behind its prompt. None where the passes are not known."""
        if self.num_passes is None:
            return None
        prompts = len(self.token_ids)  # the first token of each text comes with its prompt
        return (self.num_tokens - prompts) / max(self.num_passes - prompts, 1)

    @property
    def whole_tokens_per_second(self) -> float:
        """The speed with prompts included."""
        return self.num_tokens / self.seconds


def write(llm: LLM, tasks: Sequence[EncodedTask], way: DecodingConfig, temperature: float) -> Run:
    """Write all `tasks` in one batch, each to its full length."""
    engine = llm.engine
    engine.load_method(llm.resolve(way.config))  # before the clock starts
    watch = MemoryWatch(engine.runner.loaded.device)
    llm.stats.reset()
    requests: list[Request] = []
    arrivals: list[_Arrivals] = [_Arrivals() for _ in tasks]
    start = perf_counter()
    try:
        for task in tasks:
            params = _params(task, temperature)
            requests.append(engine.add_request(task.prompt_ids, params, way.config, RequestOptions(streaming=True)))
        while not all(request.finished for request in requests):
            engine.step()
            now = perf_counter() - start
            for request, arrived in zip(requests, arrivals, strict=True):
                arrived.take(request, now)
    finally:
        for request in requests:
            engine.cancel(request)
    for task, arrived in zip(tasks, arrivals, strict=True):
        assert task.answer_ids in (None, arrived.token_ids), f"the replay of {task.name} was not followed"
    return _run(arrivals, llm, watch)


def _params(task: EncodedTask, temperature: float) -> SamplingParams:
    if task.answer_ids is None:
        return SamplingParams(temperature=temperature, max_tokens=task.max_tokens, ignore_eos=True)
    replay = Replay(len(task.prompt_ids), task.answer_ids)
    return SamplingParams(temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True, logits_processors=(replay,))


class _Arrivals:
    """The tokens of one text, with the times at which they came."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, StreamPiece]] = []

    def take(self, request: Request, now: float) -> None:
        """Fetch what the last step added. Raises the error of the request where it failed."""
        if request.error is not None:
            raise request.error
        assert request.outbox is not None
        self.pieces += [(now, piece) for piece in request.outbox]
        request.outbox.clear()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for _, piece in self.pieces for token in piece.token_ids)

    @property
    def gaps(self) -> list[float]:
        times = [time for time, _ in self.pieces]
        return [later - earlier for earlier, later in pairwise(times)]


def _run(arrivals: list[_Arrivals], llm: LLM, watch: MemoryWatch) -> Run:
    pieces = [found for arrived in arrivals for found in arrived.pieces]
    first, last = min(time for time, _ in pieces), max(time for time, _ in pieces)
    return Run(
        token_ids=tuple(arrived.token_ids for arrived in arrivals),
        seconds=last,
        first_token_seconds=tuple(arrived.pieces[0][0] for arrived in arrivals),
        decode_tokens=sum(len(piece.token_ids) for time, piece in pieces if time > first),
        decode_seconds=last - first or None,
        gaps=tuple(gap for arrived in arrivals for gap in arrived.gaps),
        num_passes=len(pieces),
        drafts=_drafts(arrivals),
        shares=llm.stats.shares(),
        peak=watch.peak(),
    )


def _drafts(arrivals: list[_Arrivals]) -> RequestStats:
    counts = RequestStats()
    for arrived in arrivals:
        output = arrived.pieces[-1][1].output
        assert output is not None
        counts.add(output.stats)
    return counts


# --- Replays a recorded text as the target's choice, at the full cost of the target; with a set of texts that copy much.
#
# The target computes everything that it would compute otherwise, and only its choice of tokens is fixed. So a model
# that cannot edit code stands for one that can. A draft model takes no part: its logits would pass through the same
# processor, and all its draft tokens would be right.


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
    """A logits processor that makes a recorded text the target's choice. Every other token becomes far less likely."""

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


# --- Contestants: the engines and settings that write the texts of a round, in turns.


class Timed(Protocol):
    """A turn that was measured: how fast it decoded, and the tokens that a text gained in a pass."""

    @property
    def tokens_per_second(self) -> float | None: ...

    @property
    def tokens_per_pass(self) -> float | None: ...


T = TypeVar("T", bound=Timed)


@dataclass(frozen=True)
class Contestant(Generic[T]):
    """One way to write the texts of a round."""

    name: str  # the name in reports
    write: Callable[[Sequence[Any]], T]  # writes the texts of one round, from tasks or from encoded tasks
    peer: str | None = None  # the name of the peer to which it belongs. None for a way of our own.
    plain: bool = False  # whether it is our own plain decoding, against which the others are measured


def ours(llm: LLM, way: DecodingConfig, temperature: float) -> Contestant[Run]:
    """A contestant for one of our own ways. Its proposers stay loaded from now on, with what their trees learn."""
    config = llm.resolve(way.config)
    for member in (part.method for each in config.candidates for part in parts_of(each)):
        if member is not None:
            llm.proposers.acquire(member)  # an engine lets go those of many methods that nobody uses for the moment
    return Contestant(way.name, lambda tasks: write(llm, tasks, way, temperature), plain=way.plain)


def interleave(
    rounds: Iterable[Sequence[Any]],
    contestants: Sequence[Contestant[T]],
    on_turn: Callable[[Contestant[T]], None] = lambda _: None,
    on_dropout: Callable[[Contestant[T], OtherEngineError], None] = lambda *_: None,
    who_goes_on: Callable[[Mapping[str, list[T]]], Collection[str]] | None = None,
    on_again: Callable[[int], None] = lambda _: None,
) -> dict[str, list[T]]:
    """The runs of each contestant, by its name.

    All contestants write the prompts of a round before the next round begins, so that a slow moment of the machine affects
    all of them. Every other round they write in the opposite order, so that a machine that becomes slower favours nobody. A
    round in which one of our own ways was faster than it can be is measured again, in the opposite order, and the last try
    counts. After every round `who_goes_on` names the contestants of the next one. The others keep their runs, and where it
    names nobody there is no next round.
    """
    writing = {contestant.name for contestant in contestants}
    runs: dict[str, list[T]] = {contestant.name: [] for contestant in contestants}

    def once(tasks: Sequence[Any], turn: int) -> dict[str, T]:
        found = {}
        for contestant in reversed(contestants) if turn % 2 else contestants:
            if contestant.name not in runs or contestant.name not in writing:
                continue
            try:
                found[contestant.name] = contestant.write(tasks)
            except OtherEngineError as error:
                del runs[contestant.name]
                on_dropout(contestant, error)
            on_turn(contestant)
        return found

    for number, tasks in enumerate(rounds):
        found = once(tasks, number)
        for attempt in range(1, 1 + AGAIN):
            if _is_possible(found, contestants):
                break
            on_again(len(writing & runs.keys()))
            found = once(tasks, number + attempt)
        for name, run in found.items():
            if name in runs:
                runs[name].append(run)
        if who_goes_on is not None:
            writing &= {*who_goes_on(runs)}
            if not writing:
                break
    return runs


def _is_possible(found: Mapping[str, T], contestants: Sequence[Contestant[T]]) -> bool:
    """Tells whether each of our own ways may have been as fast as it was in a round."""
    plain = next((found[c.name] for c in contestants if c.plain and c.name in found), None)
    ours = [found[c.name] for c in contestants if c.peer is None and c.name in found]
    return plain is None or all(possible_run(run, plain) for run in ours)


# --- Encodes tasks with the target's tokenizer; needs no weights.


def encoded_tasks(
    model: str, limit: int, tasks: Mapping[str, Sequence[Task]], max_tokens: int
) -> dict[str, list[EncodedTask]]:
    """The tasks of each workload in the tokens of a model. Questions go through its chat template, if it has one. A text
    has `limit` tokens at most, with its prompt."""
    encoder = PromptEncoder(read_tokenizer(ModelConfig(model=model)), model)
    return {name: [_encoded(task, encoder, limit, max_tokens) for task in found] for name, found in tasks.items()}


def _encoded(task: Task, encoder: PromptEncoder, limit: int, max_tokens: int) -> EncodedTask:
    tokenizer: Any = encoder.tokenizer
    if task.messages and (template_of(tokenizer) or not task.prompt):
        prompt = encoder.encode_conversation(task.messages)[1]
    else:
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


# --- Tells measured figures that cannot be true from those that can.


#: How far beyond its bound chance alone may carry a figure.
SLACK = 1.05
#: How often that which cannot be true is measured again.
AGAIN = 2
#: A single row that takes so many times as long as several ones was disturbed.
_FASTER = 1.1
#: So many rows are noticed by a processor, even where it waits for memory.
_NOTICEABLE = 8


def possible_speedup(speedup: float | None, tokens_per_pass: float | None) -> bool:
    """Tells whether a way to draft may have been so much faster than plain decoding. A pass with drafts takes at least the
    time of one without. So nothing is faster by more than its tokens a pass. What is not known is None."""
    return speedup is None or tokens_per_pass is None or speedup <= SLACK * tokens_per_pass


def possible_run(run: Timed, plain: Timed) -> bool:
    """Tells whether a run of our own may have been so much faster than a plain one in the same round."""
    return possible_speedup(speed_ratio(run, plain), run.tokens_per_pass)


def speed_ratio(run: Timed, plain: Timed) -> float | None:
    """Returns how much faster a run decoded than a plain one. None where one of the two speeds is not known."""
    if run.tokens_per_second is None or plain.tokens_per_second is None:
        return None
    return run.tokens_per_second / plain.tokens_per_second


def believed_rounds(runs: Sequence[T], plain: Sequence[T]) -> list[tuple[T, T]]:
    """The rounds of a way of our own that may be true, each with its plain run. There are none where more than half of the
    rounds cannot be true: then the others cannot be trusted either."""
    rounds = list(zip(runs, plain, strict=True))
    good = [pair for pair in rounds if possible_run(*pair)]
    return good if 2 * len(good) >= len(rounds) else []


def believed_speedup(runs: Sequence[Run], plain: Sequence[Run]) -> Spread | None:
    """The speedup of a way of our own over plain decoding, in the rounds that may be true."""
    ratios = [speed_ratio(*pair) for pair in believed_rounds(runs, plain)]
    return Spread.of([ratio for ratio in ratios if ratio is not None])


def doubt_about_rows(seconds: Mapping[int, float], load: Load, *, on_processor: bool) -> str | None:
    """Why the seconds of passes by their number of rows cannot be believed. None where they can."""
    one = seconds.get(1)
    if one is None:
        return None
    faster = [rows for rows, time in seconds.items() if one > _FASTER * time]
    if faster:
        return f"a pass of {faster[-1]} rows was faster than one of a single row ({load})"
    free = [rows for rows, time in seconds.items() if rows >= _NOTICEABLE and time < SLACK * one]
    if free and on_processor and load.disturbs:
        return f"{free[-1]} rows seemed to cost no more than one while {load}"
    return None
