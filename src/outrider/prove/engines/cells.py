"""Compares sampled texts with probabilities that are known only along the texts: a chi-square over cells, and its power.

The texts of a cell have the same first tokens. At a branching, one cell holds the texts that go on with any other token.
The probabilities decide where to branch, and not the counts: a token gets a branch of its own where enough texts are
expected to take it. So the statistic keeps its distribution. There is one exception, which favours the engine. Where a
text has ended, tokens that no text has drawn count with the rest, since one of them is the end of text and the server does
not name it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outrider.prove.findings import Finding
from outrider.prove.sampled import SIGNIFICANCE, chi_square

Text = tuple[Any, ...]
#: The probabilities of the next token behind the first tokens of a text, at least those of the likeliest tokens.
#: None where nothing is known.
ProbsOf = Callable[[Text], Mapping[Any, float] | None]

#: A cell needs at least so many expected texts, and at least this share of all texts. With many cells a test sees little.
LEAST, LEAST_SHARE = 20.0, 1 / 200
#: The probability with which the reported shift is noticed.
_CHANCE = 0.99


@dataclass(frozen=True)
class Judgement:
    """What a sample says about the distribution of texts.

    Attributes:
        p_value: The p-value of the chi-square. If it is small, the texts have another distribution.
        num_cells: The number of cells that were compared.
        distance: The total variation over the cells between measured and expected shares. Noise alone gives about
            sqrt(cells / texts) / 3.
        detectable: A total variation over these cells that would be noticed with a probability of 99 % or more.
    """

    p_value: float
    num_cells: int
    distance: float
    detectable: float


def judge(texts: Iterable[Text], probs_of: ProbsOf, length: int) -> Judgement:
    """Compare sampled texts with the probabilities that they ought to follow.

    Args:
        texts: Texts that were drawn independently, with `length` tokens each, or fewer where a text ended.
        probs_of: The probabilities that they ought to follow.
        length: The number of tokens that are compared.
    """
    drawn = [text[:length] for text in texts]
    least = max(LEAST, LEAST_SHARE * len(drawn))
    expected, counts = _merged(_expected(probs_of, length, drawn, least), drawn, least)
    p_value = chi_square(counts, expected) if len(counts) > 1 else 1.0
    distance = float((counts - expected).abs().sum() / 2 / len(drawn))
    return Judgement(p_value, len(counts), distance, detectable(len(counts), len(drawn)))


def finding(judgement: Judgement, num_texts: int, length: int) -> Finding:
    """A judgement as a finding. It measures the p-value, which must stay above the bound."""
    detail = (
        f"p-value must exceed the bound: {num_texts:,} texts of {length} tokens in {judgement.num_cells} cells, "
        f"total variation {judgement.distance:.3f} seen, {judgement.detectable:.3f} would be noticed (99 %)"
    )
    return Finding(judgement.p_value, SIGNIFICANCE, detail, judgement.p_value > SIGNIFICANCE and judgement.num_cells > 1)


def detectable(num_cells: int, num_texts: int) -> float:
    """The total variation that a chi-square at `SIGNIFICANCE` notices with a probability of 99 %.

    A shift of total variation t has a noncentrality of at least 4 * num_texts * t**2, whichever cells it moves between
    (Cauchy and Schwarz). So this holds for every shift, and most shifts are noticed earlier.
    """
    return min(1.0, float((_noncentrality(max(1, num_cells - 1)) / (4 * num_texts)) ** 0.5))


def _expected(probs_of: ProbsOf, length: int, drawn: list[Text], least: float) -> dict[Text, float]:
    """The expected number of texts by cell. A cell that ends in None holds all other tokens."""
    ended = {text for text in drawn if len(text) < length}
    cells: dict[Text, float] = {}
    open_nodes: list[tuple[Text, float]] = [((), float(len(drawn)))]
    seen = {text[:n] for text in drawn for n in range(length + 1)}
    while open_nodes:
        start, mass = open_nodes.pop()
        probs = probs_of(start) if len(start) < length else None
        if probs is None:
            cells[start] = mass
            continue
        branches = {token: mass * p for token, p in probs.items() if mass * p >= least}
        if start in ended:  # the end of a text has a token too, and the server does not name it
            branches = {token: m for token, m in branches.items() if (*start, token) in seen}
        open_nodes += [((*start, token), m) for token, m in branches.items()]
        cells[(*start, None)] = max(0.0, mass - sum(branches.values()))
    return cells


def _merged(expected: dict[Text, float], drawn: list[Text], least: float) -> tuple[Tensor, Tensor]:
    """Expected and counted texts, both [num_cells], with small cells put together. Both sum to the number of texts."""
    counts = Counter(_cell(text, expected) for text in drawn)
    large = [cell for cell, mass in expected.items() if mass >= least]
    rest = sum(mass for mass in expected.values() if mass < least)
    rest_count = len(drawn) - sum(counts[cell] for cell in large)
    masses, numbers = [expected[cell] for cell in large], [float(counts[cell]) for cell in large]
    if rest >= least or not large:
        masses, numbers = [*masses, rest], [*numbers, float(rest_count)]
    else:  # too few for a cell of their own
        smallest = min(range(len(masses)), key=masses.__getitem__)
        masses[smallest] += rest
        numbers[smallest] += rest_count
    return torch.tensor(masses, dtype=torch.float64), torch.tensor(numbers, dtype=torch.float64)


def _cell(text: Text, cells: Mapping[Text, float]) -> Text:
    """The cell of a text: the longest prefix that is a cell, or the cell of other tokens where it leaves a branching."""
    for n in range(len(text), -1, -1):
        if text[:n] in cells:
            return text[:n]
        if (*text[:n], None) in cells:
            return (*text[:n], None)
    raise AssertionError("the empty beginning is always a cell or a branching")


@cache
def _noncentrality(freedom: int) -> float:
    """The noncentrality at which a chi-square exceeds its critical value with a probability of 99 %."""
    critical = _bisect(lambda x: 1.0 - SIGNIFICANCE - _chi_square_cdf(freedom, x, 0.0), 4.0 * freedom + 200.0)
    return _bisect(lambda x: _chi_square_cdf(freedom, critical, x) - (1.0 - _CHANCE), 4.0 * freedom + 400.0)


def _chi_square_cdf(freedom: int, x: float, noncentrality: float) -> float:
    """A noncentral chi-square, as a mixture of central ones over a Poisson number of extra pairs of degrees of freedom."""
    extra = torch.arange(0, int(noncentrality + 20 * (noncentrality + 1) ** 0.5) + 20, dtype=torch.float64)
    half = torch.tensor(noncentrality / 2, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(extra, half) - half - torch.lgamma(extra + 1))
    central = torch.special.gammainc(freedom / 2 + extra, torch.full_like(extra, x / 2))
    return float((weights * central).sum())


def _bisect(falling: Callable[[float], float], high: float) -> float:
    """Where a falling function that starts above 0 crosses 0."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
