"""Turns logits into probabilities and logprobs; the only place, for the target and for model proposers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.kernels import sampling
from outrider.kernels.library import kernel_library
from outrider.params import Logprob, PositionLogprobs, SamplingParams

# --- Turns logits into probabilities; the only place, for the target and for model proposers.


def target_probs(logits: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """The probabilities that each row's token is drawn from: [n, vocab_size], in the dtype of `logits`.

    Temperature, then top_k, then top_p, then min_p, each on what the one before left (transformers' order). A greedy row
    is a point mass on its largest logit, the lowest id among equals. Among tokens tied at the edge of top_k all stay; at
    the edge of top_p as many as the mass needs, lowest ids first.

    Args:
        logits: [n, vocab_size] as `Processing.apply` left them: finite or minus infinity, float32 or wider.
    """
    if sampling.usable(logits):
        return sampling.target_probs(
            logits,
            [0.0 if params.greedy else params.temperature for params in rows],
            [params.top_k for params in rows],
            [params.top_p for params in rows],
            [params.min_p for params in rows],
        )
    greedy = [row for row, params in enumerate(rows) if params.greedy]
    if len(greedy) == len(rows):
        return _point_masses(logits)
    column = _column([params.temperature or 1.0 for params in rows], logits)
    # The largest logit moves to 0 first, so that no temperature, however small, makes an infinity of it.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(column.clamp_(min=torch.finfo(logits.dtype).tiny))
    scaled = _keep_top_k(scaled, [params.top_k for params in rows])
    probs = scaled.softmax(-1)
    probs = _keep_top_p(probs, [params.top_p for params in rows])
    probs = _keep_min_p(probs, [params.min_p for params in rows])
    if greedy:
        index = torch.tensor(greedy, device=logits.device)
        probs[index] = _point_masses(logits[index])
    return probs


def argmax(logits: Tensor) -> Tensor:
    """Largest entry of each row [n] of logits [n, vocab_size], the lowest id among equals on every device."""
    if logits.device.type == "cpu" and kernel_library() is not None and sampling.usable(logits):
        return sampling.likeliest(logits)
    return (logits == logits.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def finite_argmax(logits: Tensor) -> list[int]:
    """As `argmax`, and -1 for a row from which no token can be chosen: its largest entry is infinite, or one is NaN."""
    if logits.device.type == "cpu" and kernel_library() is not None and sampling.usable(logits):
        return sampling.likeliest_finite(logits)
    if not len(logits):
        return []
    largest = logits.amax(-1, keepdim=True)  # NaN where an entry is
    places = (logits == largest).to(torch.uint8).argmax(-1)
    found: list[int] = places.where(largest[:, 0].isfinite(), -1).tolist()
    return found


def largest_chances(logits: Tensor) -> list[float]:
    """The probability of the most likely token of each row of logits [n, vocab_size], at temperature 1."""
    if logits.device.type == "cpu" and kernel_library() is not None and sampling.usable(logits):
        return sampling.largest_chances(logits)
    found: list[float] = (logits - logits.amax(-1, keepdim=True)).exp().sum(-1).reciprocal().tolist()
    return found


def _point_masses(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, argmax(logits)[:, None], 1.0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _keep_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    vocab_size = logits.shape[-1]
    active = [row for row, k in enumerate(top_k) if 0 < k < vocab_size]
    if not active:
        return logits
    ranks = torch.tensor([top_k[row] - 1 for row in active], device=logits.device)
    index = torch.tensor(active, device=logits.device)
    best = logits[index].topk(max(top_k[row] for row in active), -1).values
    edge = best.gather(-1, ranks[:, None])
    kept = logits.clone()
    kept[index] = logits[index].masked_fill(logits[index] < edge, float("-inf"))
    return kept


def _keep_top_p(probs: Tensor, top_p: Sequence[float]) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches top_p, renormalised; without sorting the vocabulary."""
    active = [row for row, p in enumerate(top_p) if p < 1.0]
    if not active:
        return probs
    index = torch.tensor(active, device=probs.device)
    chosen = probs[index]
    limit = _column([top_p[row] for row in active], probs)
    best = _enough_of_the_top(chosen, limit)
    before = best.cumsum(-1) - best
    inside = before < limit  # a token stays while the mass above it falls short
    count = inside.sum(-1, keepdim=True).clamp_(min=1)
    edge = best.gather(-1, count - 1)
    ties_wanted = count - (chosen > edge).sum(-1, keepdim=True)
    tied = chosen == edge
    keep = (chosen > edge) | (tied & (tied.cumsum(-1) <= ties_wanted))
    result = probs.clone()
    result[index] = _normalised(chosen * keep)
    return result


def _enough_of_the_top(probs: Tensor, limit: Tensor) -> Tensor:
    """The largest entries of each row in descending order, as many as it takes for every row's mass to reach its limit."""
    vocab_size, count = probs.shape[-1], 256
    while count < vocab_size:
        best = probs.topk(count, -1).values
        if bool((best.sum(-1, keepdim=True) >= limit).all()):
            return best
        count *= 4
    return probs.sort(-1, descending=True).values


def _keep_min_p(probs: Tensor, min_p: Sequence[float]) -> Tensor:
    active = [row for row, p in enumerate(min_p) if p > 0.0]
    if not active:
        return probs
    index = torch.tensor(active, device=probs.device)
    chosen = probs[index]
    limit = _column([min_p[row] for row in active], probs) * chosen.amax(-1, keepdim=True)
    result = probs.clone()
    result[index] = _normalised(chosen * (chosen >= limit))
    return result


def _normalised(weights: Tensor) -> Tensor:
    """Rows [n, vocab_size] that sum to 1. A single long row is summed by several threads, in another order than the same
    row among others; so it is never single."""
    rows = weights.expand(2, -1) if len(weights) == 1 else weights
    return weights / rows.sum(-1, keepdim=True)[: len(weights)]


# --- Logprobs as vLLM and the OpenAI client define them.


Decode = Callable[[int], str | None]


def raw_logprobs(logits: Tensor) -> Tensor:
    """Log-softmax [n, vocab_size] of the target's own logits, before any parameter."""
    return logits.log_softmax(-1)


def processed_logprobs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Logarithms [n, vocab_size] of what tokens were drawn from; of the logits at temperature 1 where greedy.

    Args:
        logits: [n, vocab_size] as `Processing.apply` left them.
    """
    if sampling.greedy:
        return logits.log_softmax(-1)
    return target_probs(logits, [sampling] * len(logits)).log()


def positions(logprobs: Tensor, token_ids: Sequence[int], count: int, decode: Decode) -> list[PositionLogprobs]:
    """One entry a row: the token that stands there, then the `count` most likely ones.

    Args:
        logprobs: [n, vocab_size]
        token_ids: [n] tokens that stand there.
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
