"""What a caller asks for and what comes back: frozen request and response types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from outrider.errors import ContradictionError, OutriderError
from outrider.validation import Frozen

FinishReason = Literal["stop", "length", "cancelled"]

_LATER = "it is not yet computed exactly along a draft path, and this engine does not approximate"


def _as_tuple(value: object) -> object:
    if isinstance(value, str | int):
        return (value,)
    if isinstance(value, bytes | bytearray):
        return value  # a sequence of integers to Python, and not what anyone means
    return tuple(value) if isinstance(value, Sequence | set | frozenset) else value


class SamplingParams(Frozen):
    """How to choose tokens and when to stop; names and meanings follow vLLM and transformers.

    The filters apply in the order temperature, top_k, top_p, min_p, each on the renormalised survivors of the one before.

    Raises:
        InvalidParameterError: A value is outside its range or a name is unknown.
        UnsupportedParameterError: A parameter is known but would not be exact.
        ContradictionError: min_tokens exceeds max_tokens.
    """

    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        [
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "bad_words",
            "allowed_token_ids",
            "logprobs",
            "prompt_logprobs",
            "structured_outputs",
            "guided_decoding",
            "response_format",
            "logits_processors",
            "best_of",
            "use_beam_search",
            "num_beams",
            "length_penalty",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
            "no_repeat_ngram_size",
        ],
        _LATER,
    )

    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False, description="Use 0 (greedy) to 100.")
    top_k: int = Field(0, ge=-1, description="Use 1 or more; 0 or -1 keeps every token.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Use a value above 0 and up to 1.")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="Use a value from 0 to 1.")
    max_tokens: int = Field(128, ge=1, description="Use 1 or more.")
    min_tokens: int = Field(0, ge=0, description="Use 0 or more, up to max_tokens.")
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Use one non-empty string or a list of them."
    )
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Use a list of token ids."
    )
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=0, lt=2**63, description="Use an integer from 0 to 2**63 - 1, or None.")
    n: int = Field(1, ge=1, description="Use 1 or more samples.")

    @model_validator(mode="after")
    def _lengths_agree(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ContradictionError(
                "min_tokens",
                self.min_tokens,
                f"more than max_tokens={self.max_tokens}",
                "Lower it or raise max_tokens.",
            )
        return self

    @property
    def greedy(self) -> bool:
        """Whether the target's law is a point mass, so that no random number is needed."""
        return self.temperature == 0.0


class TokenOrigin(StrEnum):
    """How a token came to be committed."""

    PLAIN = "plain"  # sampled by the target with no draft to check
    ACCEPTED = "accepted"  # a draft token that the target let stand
    RECOVERED = "recovered"  # written by the target in place of a rejected draft token
    BONUS = "bonus"  # the extra token after a fully accepted draft


@dataclass(frozen=True)
class RequestStats:
    """What speculation did for one completion; definitions as in vLLM.

    Attributes:
        num_target_passes: Target passes in which this completion committed a token.
        num_drafts: Of these, the passes that verified a draft of at least one token.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens accepted.
        drafted_per_position: Drafts that reached position i (0-based).
        accepted_per_position: Drafts whose token at position i was accepted.
        acceptance_histogram: Number of drafts by how many of their tokens were accepted.
        num_proposer_faults: Rounds in which the proposer misbehaved and its draft was cut or dropped.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache.
        num_preemptions: How often the sequence lost its KV and was recomputed.
    """

    num_target_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    acceptance_histogram: tuple[int, ...] = ()
    num_proposer_faults: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, without the bonus token; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens a verified draft yields, the target's own included (tau); 1 without drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
        index: Sample index, 0 to n - 1.
        text: Decoded text without special tokens, cut before a stop string; empty where the model has no tokenizer.
        token_ids: Every committed token, a final end-of-sequence or stop token included.
        origins: Where each token came from, aligned with token_ids.
        finish_reason: "stop" (end of sequence, stop token or stop string), "length" or "cancelled".
        stop_reason: The stop string or stop token id that ended it, if one did.
        stats: What speculation did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    stats: RequestStats


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt: `outputs` holds its n samples, or `error` says why there are none."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: OutriderError | None = None

    @property
    def first(self) -> CompletionOutput:
        """The first sample; raises the request's own error if it failed."""
        if self.error is not None:
            raise self.error
        return self.outputs[0]

    @property
    def text(self) -> str:
        return self.first.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.first.token_ids

    @property
    def origins(self) -> tuple[TokenOrigin, ...]:
        return self.first.origins

    @property
    def finish_reason(self) -> FinishReason:
        return self.first.finish_reason

    @property
    def stats(self) -> RequestStats:
        return self.first.stats


@dataclass(frozen=True)
class StreamPiece:
    """What one engine step added to a stream.

    Attributes:
        index: Sample index.
        text: Text released by this step; text that may still turn into a stop string, or half a character, is held back.
        spans: The same text cut by the token origin that wrote it, for colouring.
        token_ids: Tokens committed by this step.
        origins: Where each token came from, aligned with token_ids.
        output: The finished completion, on the last piece of a sample only.
    """

    index: int
    text: str
    spans: tuple[tuple[str, TokenOrigin], ...]
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    output: CompletionOutput | None = field(default=None)
