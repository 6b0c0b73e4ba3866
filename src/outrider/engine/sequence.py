"""Request and Sequence: all state of a text that is being written. No torch."""

from __future__ import annotations

from enum import Enum, auto
from time import perf_counter

from outrider.cache.state import KVView, SequenceState
from outrider.engine.detokenizer import TextStream
from outrider.engine.proposing.drafter import Drafter
from outrider.errors import OutriderError
from outrider.params import FinishReason, PositionLogprobs, SamplingParams, StreamPiece, TokenOrigin
from outrider.propose.base import ProposerSequence, Tokens
from outrider.propose.method import Method, same_method
from outrider.propose.speculation import SpeculationConfig
from outrider.request_options import NO_OPTIONS, RequestOptions
from outrider.stats import RequestStats
from outrider.structured.grammar import GrammarState
from outrider.trace import RoundTrace
from outrider.verify.processing import Processing


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()  # holds no memory
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """One prompt and its parameters; owns the sequences of its n samples.

    Args:
        request_id: Unique while the engine lives.
        prompt: As given, or None for token ids.
        prompt_token_ids: What its texts begin with; never empty.
        params: Sampling parameters.
        speculation: Who drafts for it and how, unless a planner decides otherwise.
        seed: Of its noise: the caller's, or one drawn from the operating system.
        eos_token_ids: Tokens that end a text of this model.
        bad_words: Token sequences that may not be completed, strings resolved.
        options: Its namespace, priority, prediction and trace, and whether it is streamed.
        source_token_ids: The prompt, where the model has an encoder that reads it; None for a decoder alone, whose texts
            begin with their prompt.

    Attributes:
        arrival: Its place among all requests that were queued; None before.
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        speculation: SpeculationConfig,
        seed: int,
        eos_token_ids: frozenset[int],
        bad_words: tuple[tuple[int, ...], ...] = (),
        options: RequestOptions = NO_OPTIONS,
        source_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.speculation = speculation
        self.seed = seed
        self.stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.bad_words = bad_words
        self.options = options
        self.source_token_ids = source_token_ids
        self.arrival: int | None = None
        self.begun = perf_counter()
        self.prompt_logprobs: list[PositionLogprobs | None] = [None]
        self.sequences: list[Sequence] = []
        self.error: OutriderError | None = None
        #: Pieces not yet fetched; None where nobody streams.
        self.outbox: list[StreamPiece] | None = [] if options.streaming else None

    @property
    def given_token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt as the caller knows it."""
        return self.prompt_token_ids if self.source_token_ids is None else self.source_token_ids

    @property
    def finished(self) -> bool:
        return self.error is not None or all(seq.status is Status.FINISHED for seq in self.sequences)


class Sequence:
    """One sample of a request.

    Attributes:
        seq_id: Unique while the engine lives.
        token_ids: Prompt and committed output.
        state: What the target keeps of it.
        retired: Whether it has ended and given everything back.
        view: What proposers see of it.
        drafters: The proposers that work for it, by the order of their first use.
        num_drafters: How many it has had; the next one's number.
        refused: Methods whose proposers cannot be had.
        num_prompt_charged: Up to where its tenant has been charged for its prompt.
        reads_every_row: Whether one of them must be shown every row of the text, so that no prefix may come from a cache.
        added_layers: The numbers of layers of proposers that must hold whatever it begins with.
        coupled: Whether a draft has guessed with the target's noise. A guess shows noise of places that the text has yet to
            come to. So this noise decides there, whatever rule is asked for later: if it were left unused by what the guess
            showed, the text would have another distribution.
        rounds: Traces, where they were asked for.
        logprobs: Of the output so far, where they were asked for.

    Args:
        state: Empty.
        grammar: Where its output stands in the structure it must have, if any.
    """

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
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.text = text
        self.status = Status.WAITING
        self.retired = False
        self.token_ids = list(request.prompt_token_ids)
        self.origins: list[TokenOrigin] = []
        self.members: list[str | None] = []
        self.state = state
        self.drafters: list[Drafter] = []
        self.num_drafters = 0
        self.refused: list[Method] = []
        self.num_prompt_charged = 0
        self.reads_every_row = False
        self.added_layers: frozenset[int] = frozenset()
        self.coupled = False
        self.forked = request.params.n == 1 or index > 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.stats = RequestStats()
        self.logprobs: list[PositionLogprobs] = []
        self.rounds: list[RoundTrace] = []
        tokens, num_prompt_tokens = Tokens(self.token_ids), len(request.prompt_token_ids)
        self.view = ProposerSequence(
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
