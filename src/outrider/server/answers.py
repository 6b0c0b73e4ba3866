"""Builds the answers to completions and chats: texts, log probabilities and costs, whole or as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from outrider.engine.text import TextPieces
from outrider.model.vocabulary import own_bytes
from outrider.params import CompletionOutput, Logprob, PositionLogprobs, RequestOutput, StreamPiece, TokenOrigin
from outrider.propose.settings import SpeculationConfig
from outrider.results import FORCED, RequestStats
from outrider.server.errors import ApiError
from outrider.server.requests import Job, Prompt
from outrider.server.schemas import ChatRequest, CompletionRequest
from outrider.server.thoughts import ThoughtCounter, ThoughtListener
from outrider.server.tools import Heard, Piece, ToolListener, ToolUse
from outrider.server.wire import DONE, event

# --- Builds the answers to completions and chats, whole or as chunks of a stream.


class Answer(ABC):
    """The answer to one request. Choices are numbered prompt by prompt, the samples of a prompt in a row.

    Args:
        tokenizer: The model's; None where it has none.
    """

    prefix: str
    kind: str
    chunk_kind: str
    #: What a stream ends with, and what it tells each time that nothing else was told for so many seconds; None for never.
    last = DONE
    pause = b""
    pause_seconds: float | None = None

    def __init__(self, job: Job, model: str, tokenizer: Any | None) -> None:
        self.job = job
        self.model = model
        self.tokenizer = tokenizer
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.outputs: dict[int, CompletionOutput] = {}  # by number of the choice, as they end
        self.num_told = 0  # tokens that the client was told
        self.has_begun = False  # whether a stream has told a text, a thought or a call

    def whole(self, found: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer at once."""
        choices = []
        for place, request in enumerate(found):
            for output in map(self._told, request.outputs):
                number = self.number(place, output.index)
                self.outputs[number] = output
                self.num_told += len(output.token_ids)
                choices.append({**self._choice(number, request, output), **self._extras(place, output)})
        body = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**body, "choices": choices, "usage": self.usage(), "speculation": self.speculation()}

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks that come before the first piece."""
        return iter(())

    def chunk(self, place: int, piece: StreamPiece) -> dict[str, Any] | None:
        """The chunk for a piece of a prompt's text; None where there is nothing to tell yet."""
        piece = self._told_piece(piece)
        number = self.number(place, piece.index)
        self.num_told += len(piece.token_ids)
        if piece.output is not None:
            self.outputs[number] = piece.output
        choice = self._delta(number, piece)
        if choice is None:
            return None
        last = len(self.outputs) == self.job.num_sequences
        return self._chunk([choice], **({"speculation": self.speculation()} if last else {}))

    def _told(self, output: CompletionOutput) -> CompletionOutput:
        """A completion as the client sees it: without its tokens where he wants none."""
        if not self.job.is_silent:
            return output
        silent = replace(output, text="", token_ids=(), origins=(), finish_reason="length", stop_reason=None)
        return replace(silent, logprobs=None if output.logprobs is None else (), rounds=None)

    def _told_piece(self, piece: StreamPiece) -> StreamPiece:
        if not self.job.is_silent:
            return piece
        output = None if piece.output is None else self._told(piece.output)
        logprobs = None if piece.logprobs is None else ()
        return replace(piece, text="", spans=(), token_ids=(), origins=(), output=output, logprobs=logprobs)

    def closing(self) -> Iterator[dict[str, Any]]:
        """The chunks that come behind the last piece."""
        if self.job.asked.includes_usage:
            yield self._chunk([], usage=self.usage())

    def event(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as it is sent."""
        return event(chunk)

    def failure(self, error: ApiError) -> bytes:
        """The event of an error that came too late for a status."""
        return event(error.body)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        predicted = self.job.asked.prediction is not None
        return usage(self.job.num_prompt_tokens, self.outputs.values(), predicted=predicted)

    def speculation(self) -> dict[str, Any]:
        """Returns what speculation did for this answer."""
        return speculation(self.job.speculation, self.outputs.values())

    def number(self, place: int, index: int) -> int:
        """The number of a choice, from its prompt and its sample."""
        return place * self.job.params.n + index

    @abstractmethod
    def _choice(self, number: int, request: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    def _delta(self, number: int, piece: StreamPiece) -> dict[str, Any] | None:
        """A choice of a chunk; None where there is nothing to tell yet."""

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body = {"id": self.id, "object": self.chunk_kind, "created": self.created, "model": self.model}
        so_far = {"usage": self._usage_so_far()} if self.job.asked.includes_usage else {}
        return {**body, "choices": choices, **so_far, **more}

    def _usage_so_far(self) -> dict[str, int] | None:
        """Returns what is told before the end; None where only the end is asked for."""
        if not self.job.asked.includes_usage_so_far:
            return None
        num_prompt, num_told = self.job.num_prompt_tokens, self.num_told
        return {"prompt_tokens": num_prompt, "completion_tokens": num_told, "total_tokens": num_prompt + num_told}

    def _extras(self, place: int, output: CompletionOutput) -> dict[str, Any]:
        """Returns what the request asked to be told beside the text."""
        found: dict[str, Any] = {}
        if self.job.asked.return_token_ids:
            found["prompt_token_ids"] = list(self.job.prompts[place].token_ids)
            found["token_ids"] = list(output.token_ids)
        if self.job.asked.trace:
            found["trace"] = _trace(output.token_ids, output.origins, output)
        return found

    def _piece_extras(self, piece: StreamPiece) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.job.asked.return_token_ids:
            found["token_ids"] = list(piece.token_ids)
        if self.job.asked.trace:
            found["trace"] = _trace(piece.token_ids, piece.origins, piece.output)
        return found


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, job: Job, model: str, tokenizer: Any | None) -> None:
        super().__init__(job, model, tokenizer)
        assert isinstance(job.asked, CompletionRequest)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoes, self._count = bool(job.asked.echo), job.asked.logprobs

    def _choice(self, number: int, request: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        text = (self._prompt(number).text if self._echoes else "") + output.text
        logprobs = self._shape(number, request.prompt_logprobs, output.logprobs)
        return {"index": number, "text": text, "logprobs": logprobs, **_end(output)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Echoes; but where log probabilities are asked for, those of the prompt come with the first piece."""
        for number in range(self.job.num_sequences if self._echoes and self._count is None else 0):
            text = self._prompt(number).text
            yield self._chunk([{"index": number, "text": text, "logprobs": None, **_end(None)}])

    def _delta(self, number: int, piece: StreamPiece) -> dict[str, Any] | None:
        extras = self._piece_extras(piece)
        if not (piece.text or piece.output or piece.logprobs or piece.prompt_logprobs or extras):
            return None
        text = piece.text if piece.prompt_logprobs is None else self._prompt(number).text + piece.text
        logprobs = self._shape(number, piece.prompt_logprobs, piece.logprobs)
        self.has_begun |= bool(piece.text)
        return {"index": number, "text": text, "logprobs": logprobs, **_end(piece.output), **extras}

    def _shape(
        self,
        number: int,
        of_prompt: Sequence[PositionLogprobs | None] | None,
        of_text: Sequence[PositionLogprobs] | None,
    ) -> dict[str, Any] | None:
        if self._count is None:
            return None
        begun = self._logprobs.setdefault(number, CompletionLogprobs(self._count, self.tokenizer))
        before = None if of_prompt is None else begun.shape_prompt(self._prompt(number), of_prompt)
        found = begun.shape(of_text or ())
        return found if before is None else {name: values + found[name] for name, values in before.items()}

    def _prompt(self, number: int) -> Prompt:
        return self.job.prompts[number // self.job.params.n]


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions.

    Args:
        tokenizer: The model's; None where it has none.
    """

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, job: Job, model: str, tokenizer: Any | None) -> None:
        super().__init__(job, model, tokenizer)
        assert isinstance(job.asked, ChatRequest)
        self._listeners: dict[int, ToolListener] = {}
        self._thoughts: dict[int, ThoughtListener] = {}
        self._counters: dict[int, ThoughtCounter] = {}  # where thoughts are heard
        self._count = job.params.logprobs

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, with the tokens of thoughts where they are heard."""
        found = super().usage()
        if self._counters:
            num_tokens = sum(counter.num_tokens for counter in self._counters.values())
            found.setdefault("completion_tokens_details", {})["reasoning_tokens"] = num_tokens
        return found

    def _choice(self, number: int, request: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        self._count_thoughts(number, output.token_ids)
        told = self._content(self._hear(number, output.text, last=True), is_whole=True)
        logprobs = self._scores(output.logprobs)
        return {"index": number, **told, "logprobs": logprobs, **_end(output, called=self._called(number))}

    def opening(self) -> Iterator[dict[str, Any]]:
        for number in range(self.job.num_sequences):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": number, "delta": delta, "logprobs": None, **_end(None)}])

    def _delta(self, number: int, piece: StreamPiece) -> dict[str, Any] | None:
        self._count_thoughts(number, piece.token_ids)
        heard = self._hear(number, piece.text, last=piece.output is not None)
        extras = self._piece_extras(piece)
        if not (heard.pieces or piece.output or piece.logprobs or extras):
            return None
        self.has_begun |= bool(heard.pieces)
        told, logprobs = self._content(heard, is_whole=False), self._scores(piece.logprobs)
        return {"index": number, **told, "logprobs": logprobs, **_end(piece.output, called=self._called(number)), **extras}

    def _content(self, heard: Heard, *, is_whole: bool) -> dict[str, Any]:
        """The fields of a choice that tell what was heard in its text, or in a piece of it."""
        calls = list(heard.calls)
        told: dict[str, Any] = {"content": heard.content} if heard.content else {}
        if is_whole:
            calls = [{name: part for name, part in call.items() if name != "index"} for call in calls]
            told = {"role": "assistant", "content": heard.content or (None if calls else ""), "refusal": None}
        if heard.thoughts:
            told["reasoning_content"] = heard.thoughts
        if calls:
            told["tool_calls"] = calls
        return {"message" if is_whole else "delta": told}

    def _called(self, number: int) -> bool:
        """Tells whether a choice ends with calls to carry out. One that a stop string has cut off is none."""
        listener = self._listeners.get(number)
        return listener is not None and listener.num_calls > 0 and not listener.is_cut_off

    def _scores(self, logprobs: Sequence[PositionLogprobs] | None) -> dict[str, Any] | None:
        return None if self._count is None else chat_logprobs(logprobs or (), self._count, self.tokenizer)

    def _count_thoughts(self, number: int, token_ids: Sequence[int]) -> None:
        """More tokens of a choice were written."""
        use = self.job.thoughts or self.job.tools
        if self.tokenizer is None or use is None or (isinstance(use, ToolUse) and use.form != "harmony"):
            return
        if number not in self._counters:
            self._counters[number] = ThoughtCounter(use, TextPieces(self.tokenizer, frozenset(use.shown)))
        self._counters[number].add(token_ids)

    def _hear(self, number: int, text: str, *, last: bool) -> Heard:
        """The text for the reader, the thoughts and the calls, in more of a choice's text."""
        before = ""
        if self.job.thoughts is not None:
            if number not in self._thoughts:
                self._thoughts[number] = self.job.thoughts.listener()
            before, text = self._thoughts[number].hear(text, last=last)
        thoughts: tuple[Piece, ...] = (("thoughts", before),) if before else ()
        if self.job.tools is None:
            return Heard((*thoughts, ("content", text)) if text else thoughts)
        if number not in self._listeners:
            self._listeners[number] = self.job.tools.listener(in_parts=bool(self.job.asked.stream))
        listener = self._listeners[number]
        found = [listener.hear(text), *([listener.finish()] if last else [])]
        return Heard((*thoughts, *(piece for heard in found for piece in heard.pieces)))


def _end(output: CompletionOutput | None, *, called: bool = False) -> dict[str, Any]:
    """Returns how a text ended; nothing where it goes on."""
    if output is None:
        return {"finish_reason": None, "stop_reason": None}
    reason = {"cancelled": "abort"}.get(output.finish_reason, output.finish_reason)
    return {"finish_reason": "tool_calls" if called and reason == "stop" else reason, "stop_reason": output.stop_reason}


def _trace(tokens: Sequence[int], origins: Sequence[TokenOrigin], output: CompletionOutput | None) -> dict[str, Any]:
    """Returns where tokens came from; at the end of a text also what happened in each round, and what each of its tokens
    added."""
    found: dict[str, Any] = {"token_ids": list(tokens), "origins": [str(origin) for origin in origins]}
    if output is not None:
        found["rounds"] = [asdict(each) for each in output.rounds or ()]
        found["texts"] = list(output.texts or ())
    return found


# --- Log probabilities in the two shapes of OpenAI's API: parallel lists for completions, a list of entries for chats.


#: JSON has no infinity; vLLM writes this number for a token that was ruled out.
_LEAST = -9999.0


class CompletionLogprobs:
    """The parallel lists of /v1/completions, whose offsets go on from piece to piece of a stream.

    Args:
        tokenizer: The model's; None where it has none.
    """

    def __init__(self, count: int, tokenizer: Any | None) -> None:
        self._count = count
        self._tokenizer = tokenizer
        self._offset = 0
        self._pieces = self._begun()

    def shape_prompt(self, prompt: Prompt, positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """The lists of a prompt's tokens, which come before all others; the first of them has no log probability."""
        found = self.shape(())
        for token, entry in zip(prompt.token_ids, positions, strict=True):
            self._add(found, token, prompt.first, entry, prompt.text)
        self._offset, self._pieces = len(prompt.text), self._begun()
        return found

    def shape(self, positions: Iterable[PositionLogprobs]) -> dict[str, Any]:
        """The lists of the next tokens of the text."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entry in positions:
            self._add(found, next(iter(entry)), "", entry)
        return found

    def _add(
        self, found: dict[str, Any], token: int, first: str, entry: PositionLogprobs | None, prompt: str | None = None
    ) -> None:
        own = None if entry is None else next(iter(entry.values()))
        found["text_offset"].append(self._offset)
        found["token_logprobs"].append(None if own is None else _number(own.logprob))
        read = first if own is None else own.decoded_token or ""
        found["tokens"].append(read)
        found["top_logprobs"].append(None if entry is None else _likeliest_by_text(entry, self._count))
        # What it adds to the text: nothing where it is special, or where a later one completes its character.
        added = "" if self._pieces is None else self._pieces.add(token)
        if prompt is not None and not added and prompt.startswith(read, self._offset):
            added = read  # special, and in a prompt that was given with it
        self._offset += len(added)
        self._offset = self._offset if prompt is None else min(self._offset, len(prompt))

    def _begun(self) -> TextPieces | None:
        return None if self._tokenizer is None else TextPieces(self._tokenizer)


def chat_logprobs(positions: Iterable[PositionLogprobs], count: int, tokenizer: Any | None) -> dict[str, Any]:
    """The entries of /v1/chat/completions.

    Args:
        positions: Of the tokens.
        tokenizer: The model's, which knows the bytes of tokens; None where it has none.
    """
    content = []
    for entry in positions:
        told = [next(iter(entry.items())), *_likeliest(entry, count)]
        own, *others = [_entry(token, found, tokenizer) for token, found in told]
        content.append({**own, "top_logprobs": others})
    return {"content": content, "refusal": None}


def _likeliest(entry: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest of a position; the token that stands there comes first in it, whatever its rank."""
    return sorted(entry.items(), key=lambda found: found[1].rank)[:count]


def _likeliest_by_text(entry: PositionLogprobs, count: int) -> dict[str, float]:
    """The token that stands there and the likeliest ones, as in vLLM; of tokens that read alike the likelier one."""
    found: dict[str, float] = {}
    own = next(iter(entry.values()))
    for other in (own, *(likely for _, likely in _likeliest(entry, count))):
        found.setdefault(other.decoded_token or "", _number(other.logprob))
    return found


def _entry(token_id: int, found: Logprob, tokenizer: Any | None) -> dict[str, Any]:
    token = found.decoded_token or ""
    # The text of a token that holds part of a character does not tell its bytes, which its reader puts together.
    written = own_bytes(tokenizer, token_id) if "\ufffd" in token else token.encode()
    return {"token": token, "logprob": _number(found.logprob), "bytes": None if written is None else list(written)}


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)


# --- Reports the cost of a response, and what speculation did for it.


def usage(num_prompt_tokens: int, outputs: Iterable[CompletionOutput], *, predicted: bool) -> dict[str, Any]:
    """OpenAI's usage object. Drafts count in it only where the caller predicted the text."""
    found = tuple(outputs)
    num_tokens, stats = sum(len(output.token_ids) for output in found), total(found)
    answer: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
    }
    if predicted:  # and what a structure forces is predicted by nobody
        drafted = stats.num_draft_tokens - stats.drafted_by_method.get(FORCED, 0)
        accepted = stats.num_accepted_tokens - stats.accepted_by_method.get(FORCED, 0)
        answer["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return answer


def speculation(config: SpeculationConfig, outputs: Iterable[CompletionOutput]) -> dict[str, Any]:
    """Returns what was drafted for a response and what stood: by position of a draft, by method, and inside stages."""
    stats = total(outputs)
    return {
        "method": config.name,
        "target_passes": stats.num_target_passes,
        "drafts": stats.num_drafts,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "drafted_per_position": stats.drafted_per_position,
        "accepted_per_position": stats.accepted_per_position,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "by_method": {
            name: {"draft_tokens": drafted, "accepted_tokens": stats.accepted_by_method[name]}
            for name, drafted in stats.drafted_by_method.items()
        },
        "stages": {
            name: {
                "passes": passes,
                "draft_tokens": stats.drafted_by_stage[name],
                "accepted_tokens": stats.accepted_by_stage[name],
            }
            for name, passes in stats.passes_by_stage.items()
        },
        "proposer_faults": stats.num_proposer_faults,
    }


def total(outputs: Iterable[CompletionOutput]) -> RequestStats:
    """The counts of several samples together."""
    found = RequestStats()
    for output in outputs:
        found.add(output.stats)
    return found
