"""Request and response types: sampling parameters, outputs, completions. Frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from outrider.config import Asked, Elsewhere, Flag, Frozen, Refusal
from outrider.errors import ContradictionError, InvalidParameterError, OutriderError
from outrider.results import RequestStats, RoundTrace

FinishReason = Literal["stop", "length", "cancelled"]

LogprobsMode = Literal["raw", "processed"]

#: Like a transformers LogitsProcessor: (token ids [1, num_tokens], scores [1, vocab_size]) -> scores [1, vocab_size].
#: Must be a pure function of the two; called once for every row of a draft, each with the tokens of its own path.
LogitsProcessor = Callable[[Any, Any], Any]

#: The verbs to which a user says how texts are drawn.
_TALKING = ("generate", "chat")
_GENERATE = ("generate",)
_SEARCHES = ("best_of", "use_beam_search", "num_beams", "length_penalty", "early_stopping")
_OTHERWISE = "there is no setting of that name; transformers' own processor for it runs exactly along every draft path"
#: Parameters of transformers, and its processors for them.
_PROCESSORS = {
    "no_repeat_ngram_size": "NoRepeatNGramLogitsProcessor(n)",
    "typical_p": "TypicalLogitsWarper(mass)",
    "epsilon_cutoff": "EpsilonLogitsWarper(epsilon)",
    "eta_cutoff": "EtaLogitsWarper(epsilon)",
}


def _as_tuple(value: object) -> object:
    if isinstance(value, str | int):
        return (value,)
    if isinstance(value, bytes | bytearray):
        return value  # a sequence of integers to Python, and not what anyone means
    return tuple(value) if isinstance(value, Sequence | set | frozenset) else value


def _as_tuples(value: object) -> object:
    """A list of lists of token ids as tuples of tuples."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value


def _as_biases(value: object) -> object:
    """Token ids to biases in the order of ids; JSON writes ids as strings."""
    if not isinstance(value, Mapping):
        return value
    biases = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
    numbers = {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in biases.items()}
    return numbers if not all(isinstance(k, int) for k in numbers) else dict(sorted(numbers.items()))


def _all_callable(value: tuple[Any, ...]) -> tuple[Any, ...]:
    for item in value:
        if not callable(item):
            raise ValueError(f"{item!r} cannot be called")
    return value


TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)]


class StructuredOutputs(Frozen):
    """Says what the output must look like; exactly one field. Needs the extra `grammar` and a tokenizer.

    Attributes:
        json_schema: A JSON schema, as a dict or as JSON text.
        json_object: Any JSON object.
        regex: A regular expression that the whole output matches.
        choice: The output is one of these strings.
        grammar: A context-free grammar: Lark, or the EBNF dialect of llama.cpp (GBNF, which has rules `name ::= ...`).

    Raises:
        ContradictionError: None or several are given.
        InvalidParameterError: There is no choice.
    """

    json_schema: Annotated[
        dict[str, Any] | str | None, Flag("The output follows this JSON schema: a file, or the schema itself.", _GENERATE)
    ] = None
    json_object: bool = False
    regex: Annotated[str | None, Flag("The output matches this regular expression.", _GENERATE)] = Field(
        default=None, min_length=1, description="Use a regular expression."
    )
    choice: Strings = Field(default=(), description="Use a list of non-empty strings.")
    grammar: Annotated[
        str | None, Flag("The output follows this grammar (Lark or GBNF): a file, or itself.", _GENERATE)
    ] = Field(default=None, min_length=1, description="Use Lark or GBNF.")

    refused: ClassVar[dict[str, Refusal]] = {
        "json": Refusal("its name here is json_schema", "Use StructuredOutputs(json_schema=...).")
    }

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False, ())]
        if not given and "choice" in self.model_fields_set:
            remedy = "Use a list of one or more non-empty strings."
            raise InvalidParameterError("choice", list(self.choice), "there is nothing to choose from", remedy)
        if len(given) != 1:
            raise ContradictionError(
                "structured_outputs",
                given,
                f"{len(given)} kinds of structure at a time",
                "Give exactly one of json_schema, json_object, regex, choice, grammar.",
            )
        return self


#: Fields of StructuredOutputs, and what they are called elsewhere, that people give as parameters.
_STRUCTURES = {name: name for name in StructuredOutputs.model_fields}
_STRUCTURES |= {"json": "json_schema", "guided_json": "json_schema"}
_STRUCTURES |= {f"guided_{name}": name for name in ("regex", "choice", "grammar")}


class SamplingParams(Frozen):
    """Says how to choose tokens and when to stop; names and meanings follow vLLM and transformers.

    Each token's logits pass, in this order: logit_bias; repetition, frequency and presence penalties; logits_processors;
    what is forbidden (allowed_token_ids, bad_words, min_tokens, structured_outputs); then temperature, top_k, top_p, min_p,
    each on the renormalised survivors of the one before. All of it is computed along each draft path.

    Raises:
        InvalidParameterError: A value is outside its range or a name is unknown.
        UnsupportedParameterError: A parameter is known but is not exact, or searches instead of drawing.
        ContradictionError: min_tokens exceeds max_tokens; ignore_eos with structured_outputs.
    """

    refused: ClassVar[dict[str, Refusal]] = {
        **dict.fromkeys(
            _SEARCHES, Refusal("it searches over whole texts instead of drawing from the model's probabilities")
        ),
        **{
            name: Refusal(_OTHERWISE, f"Use logits_processors=[transformers.{each}].") for name, each in _PROCESSORS.items()
        },
        "encoder_repetition_penalty": Refusal(_OTHERWISE),
        **dict.fromkeys(
            ("guided_decoding", "response_format"),
            Refusal("its name here is structured_outputs", "Use structured_outputs=StructuredOutputs(...)."),
        ),
        **{
            name: Refusal("it stands in structured_outputs", f"Use structured_outputs=StructuredOutputs({ours}=...).")
            for name, ours in _STRUCTURES.items()
        },
    }

    max_tokens: Annotated[
        int,
        Flag("Most tokens to write.", _TALKING),
        Elsewhere("max_new_tokens", llama_cpp="n_predict", options=("--n-predict", "--predict", "-n")),
    ] = Field(default=128, ge=1, description="Use 1 or more.")
    temperature: Annotated[
        float,
        Flag("0 is greedy.", _TALKING, ("--temperature", "-t")),
        Asked(float),
        Elsewhere("temperature", "temp", options=("--temp",)),
    ] = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False, description="Use 0 (greedy) to 100.")
    top_k: Annotated[
        int, Flag("Keep the k most likely tokens; 0 keeps all.", _TALKING), Asked(int), Elsewhere("top_k", "top_k")
    ] = Field(default=0, ge=-1, lt=2**31, description="Use 1 to 2147483647; 0 or -1 keeps every token.")
    top_p: Annotated[
        float, Flag("Keep the most likely tokens up to this mass.", _TALKING), Asked(float), Elsewhere("top_p", "top_p")
    ] = Field(default=1.0, gt=0.0, le=1.0, description="Use a value above 0 and up to 1.")
    min_p: Annotated[
        float,
        Flag("Keep tokens at least this likely, relative to the best.", _TALKING),
        Asked(float),
        Elsewhere("min_p", "min_p"),
    ] = Field(default=0.0, ge=0.0, le=1.0, description="Use a value from 0 to 1.")
    repetition_penalty: Annotated[
        float,
        Flag("Above 1 discourages tokens of prompt and output.", _TALKING),
        Asked(float),
        Elsewhere("repetition_penalty", "penalty_repeat", "repeat_penalty", options=("--repeat-penalty",)),
    ] = Field(
        default=1.0, ge=0.01, le=100.0, description="Use 0.01 to 100; above 1 discourages tokens of prompt and output."
    )
    presence_penalty: Annotated[float, Flag("Taken from tokens the output holds, -2 to 2.", _TALKING), Asked(float)] = (
        Field(default=0.0, ge=-2.0, le=2.0, description="Use a value from -2 to 2.")
    )
    frequency_penalty: Annotated[float, Flag("The same for each time it holds them.", _TALKING), Asked(float)] = Field(
        default=0.0, ge=-2.0, le=2.0, description="Use a value from -2 to 2."
    )
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100.0, le=100.0)]],
        BeforeValidator(_as_biases),
        Asked(dict[str, float]),
    ] = Field(default_factory=dict, description="Use token ids with biases from -100 to 100.")
    bad_words: Annotated[Strings, Asked(list[str])] = Field(default=(), description="Use a list of non-empty strings.")
    bad_words_ids: Annotated[tuple[Annotated[TokenIds, Field(min_length=1)], ...], BeforeValidator(_as_tuples)] = Field(
        default=(), description="Use a list of non-empty lists of token ids."
    )
    allowed_token_ids: Annotated[TokenIds | None, Asked(list[int])] = Field(
        default=None, min_length=1, description="Use a non-empty list of token ids, or None."
    )
    structured_outputs: StructuredOutputs | None = None  # whose fields have options of their own
    logits_processors: Annotated[tuple[Any, ...], BeforeValidator(_as_tuple), AfterValidator(_all_callable)] = Field(
        default=(), description="Use functions of (token ids [1, n], scores [1, vocab_size]) that return scores."
    )
    logprobs: Annotated[int | None, Flag("Also show how likely each token and the k best were.", _GENERATE)] = Field(
        default=None,
        ge=-1,
        description="Use the number of most likely tokens to report beside the chosen one; -1 reports all.",
    )
    prompt_logprobs: int | None = Field(default=None, ge=-1, description="Use a number of tokens; -1 reports all.")
    logprobs_mode: LogprobsMode = Field(default="raw", description="Use raw or processed.")
    seed: Annotated[
        int | None,
        Flag("Same seed, same text, with any method or none; to the bit in batch-invariant mode.", _TALKING),
        Asked(int),
    ] = Field(default=None, ge=0, lt=2**63, description="Use an integer from 0 to 2**63 - 1, or None.")
    n: Annotated[int, Flag("Samples of each prompt.", _GENERATE, ("-n",)), Asked(int)] = Field(
        default=1, ge=1, description="Use 1 or more samples."
    )
    stop: Annotated[
        Strings,
        Flag("A string that ends the text; may be repeated.", _GENERATE),
        Asked(str | list[str], "Use a text or a list of texts."),
    ] = Field(default=(), description="Use one non-empty string or a list of them.")
    stop_token_ids: Annotated[TokenIds, Asked(list[int])] = Field(default=(), description="Use a list of token ids.")
    min_tokens: Annotated[int, Asked(int)] = Field(default=0, ge=0, description="Use 0 or more, up to max_tokens.")
    ignore_eos: Annotated[bool, Flag("Write on past the end of the text.", _GENERATE), Asked(bool)] = False

    def __hash__(self) -> int:
        return hash((self.temperature, self.top_k, self.top_p, self.min_p, self.max_tokens, self.seed, self.stop))

    @model_validator(mode="after")
    def _lengths_agree(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ContradictionError(
                "min_tokens", self.min_tokens, f"a text has {self.max_tokens} tokens at most", "Lower it, or allow more."
            )
        return self

    @model_validator(mode="after")
    def _structure_may_end(self) -> SamplingParams:
        if self.structured_outputs is not None and self.ignore_eos:
            raise ContradictionError(
                "ignore_eos", True, "a structured output ends where its structure is complete", "Leave one of them out."
            )
        return self

    @property
    def greedy(self) -> bool:
        """Tells whether the target's choice is certain, so that no random number is needed."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Tells whether the logits of a token depend on how often it was written before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenOrigin(StrEnum):
    """Says how a token came to be committed."""

    PLAIN = "plain"  # sampled by the target with no draft to check
    ACCEPTED = "accepted"  # a draft token that the target let stand
    RECOVERED = "recovered"  # written by the target in place of a rejected draft token
    BONUS = "bonus"  # the extra token after a fully accepted draft


@dataclass(frozen=True)
class Logprob:
    """Says how likely a token was.

    Attributes:
        logprob: Natural logarithm of its probability; minus infinity where processing ruled it out.
        rank: 1 for the most likely token; equals share the best rank.
        decoded_token: Its text; None where the model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


#: One position: the token that stands there first, then the most likely ones, by token id.
PositionLogprobs = dict[int, Logprob]


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
        logprobs: One entry a token, where `SamplingParams.logprobs` asked for them.
        rounds: What happened in each verify pass, where a trace was asked for.
        texts: The text that each token added, where a trace was asked for; "" where a later token completes its character.
        members: The method that drafted each token, or "forced" where the structure of the output did, aligned with
            token_ids; None where the target wrote it. Where several methods drafted it, the first of them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    stats: RequestStats
    logprobs: tuple[PositionLogprobs, ...] | None = None
    rounds: tuple[RoundTrace, ...] | None = None
    texts: tuple[str, ...] | None = None
    members: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt: `outputs` holds its n samples, or `error` says why there are none.

    `prompt_logprobs` has one entry a prompt token, None for the first, where `SamplingParams.prompt_logprobs` asked.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: OutriderError | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

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

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        return self.first.logprobs


@dataclass(frozen=True)
class StreamPiece:
    """Says what one engine step added to a stream.

    Attributes:
        index: Sample index.
        text: Text released by this step; text that may still turn into a stop string, or half a character, is held back.
        spans: The same text cut by the token origin that wrote it, for colouring.
        token_ids: Tokens committed by this step.
        origins: Where each token came from, aligned with token_ids.
        output: The finished completion, on the last piece of a sample only.
        logprobs: Of `token_ids`, where they were asked for.
        prompt_logprobs: Those of the prompt, as in RequestOutput, on the first piece of a sample.
        span_members: Who drafted each span, as in `CompletionOutput.members`.
    """

    index: int
    text: str
    spans: tuple[tuple[str, TokenOrigin], ...]
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    output: CompletionOutput | None = field(default=None)
    logprobs: tuple[PositionLogprobs, ...] | None = field(default=None)
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = field(default=None)
    span_members: tuple[str | None, ...] = field(default=())
