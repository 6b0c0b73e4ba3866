"""Tests the production random numbers: a chi-square over millions of drafts against the target's distribution.

Enumeration proves the rules, and this proves the random numbers that drive them. Only this test sees correlated keys,
biased uniform numbers, or a generator that repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outrider.prove.findings import Finding
from outrider.verify.noise import Stream, gumbel_max, invert_cdf, mix_fields, uniform
from outrider.verify.rules import block_acceptance, residual, token_acceptance

VOCAB, NUM_DRAFT, NUM_TOKENS = 4, 2, 3
_SLICE = 250_000

#: Returns random bits [n] int64 for a stream and a position of the requests with the given seeds. Tests pass faulty ones.
Bits = Callable[[np.ndarray, Stream, int], Tensor]


def production_bits(seeds: np.ndarray, stream: Stream, position: int) -> Tensor:
    """The bits that KeyedNoise uses in the first round of requests with these seeds."""
    fields = np.zeros((len(seeds), 5), np.uint64)
    fields[:, 0], fields[:, 2], fields[:, 3] = seeds, int(stream), position
    return torch.from_numpy(mix_fields(fields))


#: A correct engine fails the chi-square once in a million runs.
SIGNIFICANCE = 1e-6


def prove_sampled(rule: str, num_samples: int) -> Finding:
    """`sample_p_value` as a finding. It measures the p-value, which must stay above the bound."""
    p_value = sample_p_value(rule, num_samples)
    detail = f"p-value must exceed the bound: {num_samples:,} samples of three tokens, production random numbers"
    return Finding(p_value, SIGNIFICANCE, detail, p_value > SIGNIFICANCE)


def sample_p_value(rule: str, num_samples: int, bits: Bits = production_bits) -> float:
    """The p-value of the first three tokens of many requests under the joint distribution of the target.

    The tokens are drafted and verified.

    Args:
        rule: "token", "block", "walk" or "coupled".
        num_samples: The number of requests. Their seeds are 0 to num_samples - 1.
        bits: The source of random bits.
    """
    generator = torch.Generator().manual_seed(1)
    target = torch.rand(VOCAB, VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64) + 0.05
    draft = torch.rand(VOCAB, VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64) + 0.05
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    counts = torch.zeros(VOCAB**NUM_TOKENS, dtype=torch.float64)
    for first in range(0, num_samples, _SLICE):
        seeds = np.arange(first, min(first + _SLICE, num_samples), dtype=np.uint64)
        text = _texts(rule, seeds, target, draft, bits)
        index = (text * torch.tensor([VOCAB**2, VOCAB, 1])).sum(-1)
        counts += torch.bincount(index, minlength=VOCAB**NUM_TOKENS)
    return chi_square(counts, _joint(target).flatten() * num_samples)


def _probs(table: Tensor, text: Tensor, position: int) -> Tensor:
    """The probabilities [n, VOCAB] of the token at `position`, given up to two tokens before it."""
    empty = torch.zeros(len(text), dtype=torch.long)
    before = [text[:, i] if i < position else empty for i in range(2)]
    return table[before[0], before[1], position % VOCAB]


def _joint(table: Tensor) -> Tensor:
    """The joint distribution [VOCAB, VOCAB, VOCAB] of three tokens that the target writes alone."""
    a = table[0, 0, 0]
    b = table[:, 0, 1]
    c = table[:, :, 2]
    return a[:, None, None] * b[:, :, None] * c


def _texts(rule: str, seeds: np.ndarray, target: Tensor, draft: Tensor, bits: Bits) -> Tensor:
    """The three tokens [n, 3] that each request writes."""
    guess, q = _drafts(seeds, draft, bits, coupled=rule == "coupled")
    p = torch.stack([_probs(target, guess, i) for i in range(NUM_DRAFT + 1)], 1)
    accepted, following = _verify(rule, seeds, p, q, guess, bits)
    text = torch.cat([guess, guess[:, :1]], 1)
    lane = torch.arange(len(seeds))
    if following is None:  # a walk draws at every row, and the first token that differs ends the draft
        drawn = [gumbel_max(p[:, i], bits(seeds, Stream.TARGET, i)) for i in range(NUM_DRAFT + 1)]
        stays = torch.stack([drawn[i] == guess[:, i] for i in range(NUM_DRAFT)], 1)
        accepted = stays.long().cumprod(1).sum(1)
        text[lane, accepted] = torch.stack(drawn, 1)[lane, accepted]
    else:
        recovered = invert_cdf(following, _select(accepted, lambda i: bits(seeds, Stream.RECOVER, i)))
        bonus = gumbel_max(following, bits(seeds, Stream.TARGET, NUM_DRAFT))
        text[lane, accepted] = torch.where(accepted == NUM_DRAFT, bonus, recovered)
    for position in range(1, NUM_TOKENS):  # later rounds are decoded plainly
        due = position > accepted
        plain = gumbel_max(_probs(target, text, position), bits(seeds, Stream.TARGET, position))
        text[:, position] = torch.where(due, plain, text[:, position])
    return text


def _drafts(seeds: np.ndarray, draft: Tensor, bits: Bits, *, coupled: bool) -> tuple[Tensor, Tensor]:
    guess, rows = torch.zeros(len(seeds), NUM_DRAFT, dtype=torch.long), []
    for i in range(NUM_DRAFT):
        probs = _probs(draft, guess, i)
        stream = Stream.TARGET if coupled else Stream.DRAFT
        guess[:, i] = (gumbel_max if coupled else invert_cdf)(probs, bits(seeds, stream, i))
        rows.append(probs)
    return guess, torch.stack(rows, 1)


def _verify(rule: str, seeds: np.ndarray, p: Tensor, q: Tensor, guess: Tensor, bits: Bits) -> tuple[Tensor, Tensor | None]:
    """Accepted lengths [n] and the probabilities of the next token [n, VOCAB]; None for the walk."""
    lane = torch.arange(len(seeds))
    if rule in ("walk", "coupled"):
        return torch.zeros(len(seeds), dtype=torch.long), None
    u = torch.stack([uniform(bits(seeds, Stream.ACCEPT, i)) for i in range(NUM_DRAFT)], 1)
    if rule == "token":
        accepted = (u < token_acceptance(p, q, guess)).long().cumprod(1).sum(1)
        weights = torch.ones(len(seeds), NUM_DRAFT + 1, dtype=p.dtype)
    else:
        chances, weights = block_acceptance(p, q, guess)
        accepted = ((u < chances) * torch.arange(1, NUM_DRAFT + 1)).amax(1)
    q_next = torch.cat([q, torch.zeros_like(q[:, :1])], 1)[lane, accepted]
    return accepted, residual(p[lane, accepted], q_next, weights[lane, accepted])


def _select(index: Tensor, column: Callable[[int], Tensor]) -> Tensor:
    table = torch.stack([column(i) for i in range(NUM_DRAFT + 1)], 1)
    return table[torch.arange(len(index)), index]


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The p-value of Pearson's statistic for `counts` against `expected`, both [num_cells] and with the same sum."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
