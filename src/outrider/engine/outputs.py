"""Builds what callers get: finished completions, and the pieces of a stream."""

from __future__ import annotations

from outrider.engine.sequence import Request, Sequence, Status
from outrider.params import CompletionOutput, PositionLogprobs, RequestOutput, StreamPiece


def request_output(request: Request) -> RequestOutput:
    """What a finished request came to, or its error."""
    outputs = () if request.error is not None else tuple(completion(seq) for seq in request.sequences)
    scores = _prompt_logprobs(request)
    return RequestOutput(request.request_id, request.prompt, request.given_token_ids, outputs, request.error, scores)


def completion(seq: Sequence) -> CompletionOutput:
    """What a finished sequence came to."""
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
    """What a step added to a text that had `before` output tokens."""
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
    """Of the output tokens from `start` on; None where nobody asked."""
    return None if seq.request.params.logprobs is None else tuple(seq.logprobs[start:])
