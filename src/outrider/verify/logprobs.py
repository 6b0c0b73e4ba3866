"""Logprobs as vLLM and the OpenAI client define them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.params import Logprob, PositionLogprobs, SamplingParams
from outrider.verify.logits import target_probs

Decode = Callable[[int], str | None]


def raw_logprobs(logits: Tensor) -> Tensor:
    """Log-softmax [n, vocab_size] of the target's own logits, before any parameter."""
    return logits.log_softmax(-1)


def processed_logprobs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Logarithms [n, vocab_size] of what tokens were drawn from; of the logits at temperature 1 where greedy.

    Args:
        logits: [n, vocab_size] as `Processing.apply` left them.
        sampling: The request's parameters.
    """
    if sampling.greedy:
        return logits.log_softmax(-1)
    return target_probs(logits, [sampling] * len(logits)).log()


def positions(logprobs: Tensor, token_ids: Sequence[int], count: int, decode: Decode) -> list[PositionLogprobs]:
    """One entry a row: the token that stands there, then the `count` most likely ones.

    Args:
        logprobs: [n, vocab_size]
        token_ids: [n] tokens that stand there.
        count: How many others; -1 for all.
        decode: Text of a token.
    """
    vocab_size = logprobs.shape[-1]
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logprobs.device)[:, None])
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    top = logprobs.topk(vocab_size if count < 0 else min(count, vocab_size), -1)
    found = []
    rows = zip(token_ids, chosen[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True)
    for token, logprob, rank, others, values in rows:
        entry = {token: Logprob(logprob, rank, decode(token))}
        best = 1
        for place, (other, value) in enumerate(zip(others, values, strict=True), 1):
            best = best if place > 1 and value == values[place - 2] else place
            if other != token:
                entry[other] = Logprob(value, best, decode(other))
        found.append(entry)
    return found
