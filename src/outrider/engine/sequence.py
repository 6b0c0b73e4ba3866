"""The state of a text that is being written: request, samples, drafters, and what its caller gets. No torch."""

from __future__ import annotations

import logging
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from time import perf_counter

from outrider.cache.state import KVView, SequenceState
from outrider.config import NO_OPTIONS, RequestOptions
from outrider.engine.text import TextStream
from outrider.errors import Contained, OutriderError
from outrider.params import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    SamplingParams,
    StreamPiece,
    TokenOrigin,
)
from outrider.propose.base import Proposer, ProposerSequence, Requirements, Tokens
from outrider.propose.host import ProposerHost, blaming
from outrider.propose.settings import Method, SpeculationConfig, same_method
from outrider.propose.tree import TreeBuilder
from outrider.results import RequestStats, RoundTrace
from outrider.structured.grammar import GrammarState
from outrider.verify.processing import Processing

# --- Request and Sequence: all state of a text that is being written. No torch.


class Status(Enum):
    """Says where a sequence is in its life."""

    WAITING = auto()  # holds no memory
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, repr=False)
class Request:
    """One prompt and its parameters; owns the sequences of its n samples."""

    request_id: int  # unique while the engine lives
    prompt: str | None  # as given, or None for token ids
    prompt_token_ids: tuple[int, ...]  # what its texts begin with; never empty
    params: SamplingParams
    speculation: SpeculationConfig  # who drafts for it and how, unless a planner decides otherwise
    seed: int  # of its noise: the caller's, or one drawn from the operating system
    eos_token_ids: InitVar[frozenset[int]]  # that end a text of this model
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not be completed, strings resolved
    options: RequestOptions = NO_OPTIONS
    #: The prompt, where the model has an encoder that reads it; None for a decoder alone, whose texts begin with it.
    source_token_ids: tuple[int, ...] | None = None
    arrival: int | None = None  # its place among all requests that were queued
    begun: float = field(default_factory=perf_counter)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=lambda: [None])
    sequences: list[Sequence] = field(default_factory=list)
    error: OutriderError | None = None
    outbox: list[StreamPiece] | None = None  # pieces not yet fetched; None where nobody streams

    def __post_init__(self, eos_token_ids: frozenset[int]) -> None:
        ends = frozenset() if self.params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(self.params.stop_token_ids) | ends
        self.outbox = [] if self.options.streaming else None

    @property
    def given_token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt as the caller knows it."""
        return self.prompt_token_ids if self.source_token_ids is None else self.source_token_ids

    @property
    def comes_again(self) -> bool:
        """Tells whether the same request is to have the same text, which no clock may change."""
        return self.params.greedy or self.params.seed is not None

    @property
    def finished(self) -> bool:
        return self.error is not None or all(seq.status is Status.FINISHED for seq in self.sequences)


class Sequence:
    """One sample of a request. It begins with an empty state, and where the structure of its output begins, if any."""

    def __init__(
        self,
        seq_id: int,
        request: Request,
        index: int,
        text: TextStream[tuple[TokenOrigin, str | None]],
        max_model_len: int,
        state: SequenceState,
        grammar: GrammarState | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.seq_id = seq_id  # unique while the engine lives
        self.request = request
        self.index = index
        self.text = text
        self.status = Status.WAITING
        self.retired = False  # whether it has ended and given everything back
        self.token_ids = list(request.prompt_token_ids)  # prompt and committed output
        self.origins: list[TokenOrigin] = []
        self.members: list[str | None] = []
        self.state = state  # what the target keeps of it
        self.drafters: list[Drafter] = []  # the proposers that work for it, by the order of their first use
        self.num_drafters = 0  # that it has had; the next one's number
        self.refused: list[Method] = []  # whose proposers cannot be had
        self.num_prompt_charged = 0  # up to where its tenant has been charged for its prompt
        #: Whether a proposer must be shown every row of the text, so that no prefix may come from a cache.
        self.reads_every_row = False
        self.added_layers: frozenset[int] = frozenset()  # of proposers, which must hold whatever it begins with
        #: Whether a draft has guessed with the target's noise. A guess shows noise of places that the text has yet to come
        #: to. So this noise decides there, whatever rule is asked for later: if it were left unused by what the guess
        #: showed, the text would have another distribution.
        self.coupled = False
        self.forked = request.params.n == 1 or index > 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.stats = RequestStats()
        self.logprobs: list[PositionLogprobs] = []  # of the output so far, where they were asked for
        self.rounds: list[RoundTrace] = []  # where traces were asked for
        tokens, num_prompt_tokens = Tokens(self.token_ids), len(request.prompt_token_ids)
        self.view = ProposerSequence(  # as proposers see it
            seq_id=seq_id,
            token_ids=tokens,
            num_prompt_tokens=num_prompt_tokens,
            sampling=request.params,
            processing=Processing(
                request.params, tokens, num_prompt_tokens, sorted(request.stop_token_ids), request.bad_words, grammar
            ),
            seed=request.seed,
            sample=index,
            kv=KVView(state),
            namespace=request.options.namespace,
            prediction=request.options.prediction,
            references=request.options.references,
            source=request.source_token_ids,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_missing(self) -> int:
        """Rows the target has yet to compute; 1 while decoding."""
        return len(self.token_ids) - self.state.num_computed

    @property
    def num_seats(self) -> int:
        """Seats that it takes: those of the samples that it has yet to fork are its own."""
        return 1 if self.forked else self.request.params.n

    @property
    def useful_depth(self) -> int:
        """Longest path of draft tokens that may enter the text, the target's own next token left room for."""
        if not self.view.processing.follows_drafts:
            return 0
        num_tokens = len(self.token_ids)
        depth = min(self.request.params.max_tokens - self.num_output_tokens, self.max_model_len - num_tokens) - 1
        longest = self.state.longest_draft(num_tokens)
        return depth if longest is None else min(depth, longest)

    def drafter(self, method: Method) -> Drafter | None:
        """The one with these settings, if it has worked for this sequence."""
        return next((drafter for drafter in self.drafters if same_method(drafter.method, method)), None)

    def append(self, token_id: int, origin: TokenOrigin, member: str | None = None) -> None:
        """Commit one token, which `member` drafted if it was drafted, and finish the sequence if it ends the text."""
        self.token_ids.append(token_id)
        self.origins.append(origin)
        self.members.append(member)
        watch = self.num_output_tokens >= self.request.params.min_tokens
        stop_string = self.text.push(token_id, (origin, member), watch=watch)
        if token_id in self.request.stop_token_ids:
            explicit = token_id in self.request.params.stop_token_ids
            self.finish("stop", token_id if explicit else None)
        elif stop_string is not None:
            self.finish("stop", stop_string)
        elif self.num_output_tokens >= self.request.params.max_tokens or len(self.token_ids) >= self.max_model_len:
            self.finish("length")
        else:
            self.view.processing.advance(token_id)

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.text.finish()


# --- Builds what callers get: finished completions, and the pieces of a stream.


def request_output(request: Request) -> RequestOutput:
    """The result of a finished request, or its error."""
    outputs = () if request.error is not None else tuple(completion(seq) for seq in request.sequences)
    scores = _prompt_logprobs(request)
    return RequestOutput(request.request_id, request.prompt, request.given_token_ids, outputs, request.error, scores)


def completion(seq: Sequence) -> CompletionOutput:
    """The result of a finished sequence."""
    assert seq.finish_reason is not None
    return CompletionOutput(
        index=seq.index,
        text=seq.text.text,
        token_ids=tuple(seq.output_token_ids),
        origins=tuple(seq.origins),
        members=tuple(seq.members),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        stats=seq.stats.copy(),
        logprobs=_logprobs(seq, 0),
        rounds=tuple(seq.rounds) if seq.request.options.trace else None,
        texts=tuple(seq.text.texts()) if seq.request.options.trace else None,
    )


def piece(seq: Sequence, before: int) -> StreamPiece:
    """The piece that a step added to a text that had `before` output tokens."""
    released = seq.text.release()
    return StreamPiece(
        index=seq.index,
        text="".join(text for text, _ in released),
        spans=tuple((text, origin) for text, (origin, _) in released),
        span_members=tuple(member for _, (_, member) in released),
        token_ids=tuple(seq.output_token_ids[before:]),
        origins=tuple(seq.origins[before:]),
        output=completion(seq) if seq.status is Status.FINISHED else None,
        logprobs=_logprobs(seq, before),
        prompt_logprobs=_prompt_logprobs(seq.request) if before == 0 else None,
    )


def _prompt_logprobs(request: Request) -> tuple[PositionLogprobs | None, ...] | None:
    return None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)


def _logprobs(seq: Sequence, start: int) -> tuple[PositionLogprobs, ...] | None:
    """Logprobs of the output tokens from `start` on; None where nobody asked."""
    return None if seq.request.params.logprobs is None else tuple(seq.logprobs[start:])


# --- Circuit breaker for proposers: one that brings nothing but faults is switched off for a while. No torch.


#: Steps in a row in which a proposer brought nothing but faults, after which it is switched off.
PATIENCE = 8
#: Steps for which it is switched off at first. Each time that its next try fails too, they double.
FIRST_PAUSE = 256


@dataclass
class ProposerBreaker:
    """Counts the faults of one proposer over all its sequences, and switches it off for a number of steps.

    A step counts against it only where every request that it worked for met a fault, so that a single request that makes it
    stumble does not take it from all others.
    """

    num_faults: int = 0  # requests that met a fault, step by step
    num_pauses: int = 0  # how often it was switched off
    _served: set[int] = field(default_factory=set)
    _failed: set[int] = field(default_factory=set)
    _num_bad_steps: int = 0
    _on_trial: bool = False
    _next_pause: int = FIRST_PAUSE
    _steps_left: int = 0

    @property
    def steps_left(self) -> int:
        """For how many steps more it is switched off."""
        return self._steps_left

    def served(self, request_id: int) -> None:
        """It was asked for a draft in this step."""
        self._served.add(request_id)

    def failed(self, request_id: int) -> None:
        """It brought a request nothing but a fault."""
        self._failed.add(request_id)

    def end_step(self) -> bool:
        """The step is over; returns whether it is switched off from now on."""
        if self._steps_left:
            self._steps_left -= 1
            self._on_trial = not self._steps_left
            return False
        sound, failed = self._served - self._failed, self._failed
        self.num_faults += len(failed)
        self._served, self._failed = set(), set()
        if sound:
            self._num_bad_steps, self._on_trial, self._next_pause = 0, False, FIRST_PAUSE
        elif failed:
            self._num_bad_steps += 1
        if not failed or (self._num_bad_steps < PATIENCE and not (self._on_trial and not sound)):
            return False
        self._steps_left, self._next_pause = self._next_pause, 2 * self._next_pause
        self._num_bad_steps, self._on_trial = 0, False
        self.num_pauses += 1
        return True


# --- A proposer that sequences share, and its state for one of them.


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SharedProposer(ProposerHost):
    """The proposer of a method, with what is known of it beyond any one sequence."""

    method: Method
    breaker: ProposerBreaker = field(default_factory=ProposerBreaker)
    num_users: int = 0
    trees: dict[str, TreeBuilder] = field(default_factory=dict)  # that adapt to its drafts, by shape
    leaves: bool = False  # as soon as no sequence uses it


@dataclass(eq=False)
class Drafter:
    """Says how a proposer stands with a sequence. A sequence may have several, each with its own faults."""

    index: int  # among those that the sequence has had, from 0; part of the keys of its shadows
    method: Method
    host: SharedProposer
    request_id: int
    stats: RequestStats  # of the sequence
    requires: Requirements | None = None  # as it said when it was first used; what it says later changes nothing
    believed: bool = True  # until a fault happens; from then on its drafts are verified as opaque
    num_faults: int = 0
    last_round: int = 0  # verify pass of the sequence in which it was last asked

    @property
    def proposer(self) -> Proposer:
        return self.host.proposer

    def blaming(self, doing: str) -> Contained:
        """A block in which it works for the sequence: if it raises, it has a fault."""
        return blaming([self], doing)

    def served(self) -> None:
        """It is asked for a draft in this step."""
        self.host.breaker.served(self.request_id)

    def report_fault(self, problem: str, *, useless: bool = True) -> None:
        """Count a fault, and stop believing what the proposer says of its laws for the rest of this sequence. A proposer
        that brings only useless faults, which leave nothing of a draft, is switched off."""
        self.num_faults += 1
        self.believed = False
        if useless:
            self.host.breaker.failed(self.request_id)
        self.report_inner_fault(problem)

    def report_inner_fault(self, problem: str) -> None:
        """Count a fault of a proposer inside this one, which cost the inner one's guesses alone."""
        self.stats.num_proposer_faults += 1
        logger.warning("method %s, request %d: %s", self.method.name, self.request_id, problem)

    def count_stage(self, stage: str, num_drafted: int, num_accepted: int) -> None:
        """Count one pass of a stage of this proposer for the text."""
        self.stats.observe_stage(f"{self.method.name}.{stage}", num_drafted, num_accepted)
