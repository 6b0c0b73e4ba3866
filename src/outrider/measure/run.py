"""Writes a batch of texts with one configuration and measures the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter

from outrider.engine.sequence import Request
from outrider.llm import LLM
from outrider.measure.decoding_config import DecodingConfig
from outrider.measure.machine import MemoryWatch, PeakMemory
from outrider.measure.replay import Replay
from outrider.params import SamplingParams, StreamPiece
from outrider.request_options import RequestOptions
from outrider.stats import RequestStats


@dataclass(frozen=True)
class EncodedTask:
    """A task in the target's tokens.

    Attributes:
        name: The name of the task.
        prompt_ids: The tokens of its prompt.
        max_tokens: The number of output tokens, which every contestant writes exactly.
        answer_ids: The tokens that are replayed. None where the target chooses.
    """

    name: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    answer_ids: tuple[int, ...] | None = None

    def shortened(self, max_tokens: int) -> EncodedTask:
        """The same task with fewer output tokens, for warming up."""
        answer = None if self.answer_ids is None else self.answer_ids[:max_tokens]
        return replace(self, max_tokens=min(max_tokens, self.max_tokens), answer_ids=answer)


@dataclass(frozen=True)
class Run:
    """The measurements of one turn. They are None or empty where a peer does not tell them.

    Attributes:
        token_ids: The output of each text.
        seconds: Wall time from the request to the last token, prompts included.
        first_token_seconds: Seconds until the first token of each text.
        decode_tokens: The tokens after the first step that committed any.
        decode_seconds: Wall time after that step.
        gaps: Seconds between arrivals within a text. The tokens of a step arrive together.
        num_passes: The passes of the target that committed tokens, summed over texts.
        drafts: The counts of draft tokens.
        shares: The shares of the time by phase: propose, forward, verify, host.
        peak: The peak of memory.
    """

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    first_token_seconds: tuple[float, ...]
    decode_tokens: int
    decode_seconds: float | None
    gaps: tuple[float, ...] = ()
    num_passes: int | None = None
    drafts: RequestStats | None = None
    shares: dict[str, float] = field(default_factory=dict)
    peak: PeakMemory | None = None

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
    """Write all `tasks` in one batch, each to its full length.

    Raises:
        OutriderError: A prompt or a setting is not possible, or a request failed.
    """
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
