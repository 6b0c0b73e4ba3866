"""Says in words why a text ended, and which structured outputs were cut off before they were complete."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outrider.llm import LLM
    from outrider.params import CompletionOutput, SamplingParams


def ending(completion: CompletionOutput, params: SamplingParams) -> str:
    """Like "stopped at its end", "stopped at 'xyz'", "cut off at 128 tokens (--max-tokens)"."""
    if completion.finish_reason == "length":
        reached = len(completion.token_ids)
        limit = "--max-tokens" if reached >= params.max_tokens else "the model's context is full"
        return f"cut off at {reached} tokens ({limit})"
    if completion.finish_reason == "stop":
        return "stopped at its end" if completion.stop_reason is None else f"stopped at {completion.stop_reason!r}"
    return completion.finish_reason


def endings(completions: Iterable[CompletionOutput], params: SamplingParams) -> str:
    """Of one text its ending; of several how many ended in which way."""
    counts = Counter(ending(completion, params) for completion in completions)
    if counts.total() == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {'text' if count == 1 else 'texts'} {said}" for said, count in counts.items())


def is_incomplete(llm: LLM, completion: CompletionOutput, params: SamplingParams) -> bool:
    """Whether a text that has to follow a structure was cut off where the structure may not end.

    Args:
        llm: Who wrote it.
        completion: The text.
        params: What it was written with.
    """
    structure = params.structured_outputs
    if structure is None or completion.finish_reason != "length":
        return False
    from outrider.structured.grammar import GrammarCompiler

    loaded = llm.engine.runner.loaded
    state = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids).start(structure)
    for token in completion.token_ids:
        state.advance(token)
    allowed = state.allowed((), loaded.vocab_size)
    assert allowed is not None  # only a path can be refused, and none was given
    return not any(bool(allowed[token]) for token in loaded.eos_token_ids)


def warning(completion: CompletionOutput, params: SamplingParams) -> str:
    """What to say of a text that is incomplete, with the remedy."""
    full = len(completion.token_ids) < params.max_tokens
    remedy = "Give a shorter prompt: the model's context is full." if full else "Raise --max-tokens."
    return f"the output is incomplete: it was cut off before its structure was complete. {remedy}"
