"""Sampled texts against a law that is known only along the texts: a chi-square over cells, and its power.

A cell is a beginning that all its texts share, or, at a branching, "any other token". Where to branch is decided by the
law (a token is a branch of its own where enough texts are expected to take it) and not by how many did, so that the
statistic keeps its distribution. One exception errs on the side of the engine: behind a beginning on which a text ended,
tokens that nobody drew count with the rest, since one of them is the end of text under a name that is not told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outrider.prove.report import Finding
from outrider.prove.sampled import SIGNIFICANCE, chi_square

Text = tuple[Any, ...]
#: Law of the next token behind a beginning; the most likely tokens suffice. None where nothing is known.
LawOf = Callable[[Text], Mapping[Any, float] | None]

#: Texts that must be expected in a cell of its own; and the share of all texts, since many cells see little.
LEAST, LEAST_SHARE = 20.0, 1 / 200
#: How sure the stated power is.
_CHANCE = 0.99


@dataclass(frozen=True)
class Verdict:
    """What sampling says of a law.

    Attributes:
        p_value: Of the chi-square; small means that the texts do not come from the law.
        num_cells: Cells compared.
        distance: Total variation between shares and law over the cells; noise alone gives about sqrt(cells / texts) / 3.
        detectable: The smallest total variation over these cells that would be noticed with 99 % chance, at the least.
    """

    p_value: float
    num_cells: int
    distance: float
    detectable: float


def judge(texts: Iterable[Text], law_of: LawOf, length: int) -> Verdict:
    """Compare sampled texts with a law.

    Args:
        texts: Drawn independently, `length` tokens each; fewer where one ended.
        law_of: The law that they ought to have.
        length: Tokens compared.
    """
    drawn = [text[:length] for text in texts]
    least = max(LEAST, LEAST_SHARE * len(drawn))
    expected, counts = _merged(_expected(law_of, length, drawn, least), drawn, least)
    p_value = chi_square(counts, expected) if len(counts) > 1 else 1.0
    distance = float((counts - expected).abs().sum() / 2 / len(drawn))
    return Verdict(p_value, len(counts), distance, detectable(len(counts), len(drawn)))


def finding(verdict: Verdict, num_texts: int, length: int) -> Finding:
    """A verdict for the report; measured is the p-value, which must stay above the bound."""
    detail = (
        f"p-value must exceed the bound: {num_texts:,} texts of {length} tokens in {verdict.num_cells} cells, "
        f"total variation {verdict.distance:.3f} seen, {verdict.detectable:.3f} would be noticed (99 %)"
    )
    return Finding(verdict.p_value, SIGNIFICANCE, detail, verdict.p_value > SIGNIFICANCE and verdict.num_cells > 1)


def detectable(num_cells: int, num_texts: int) -> float:
    """Total variation from which on a chi-square at `SIGNIFICANCE` notices with 99 % chance.

    A shift of total variation t has a noncentrality of at least 4 * num_texts * t**2, whatever cells it moves between
    (Cauchy and Schwarz), so this holds for every shift; most are noticed earlier.
    """
    return min(1.0, float((_noncentrality(max(1, num_cells - 1)) / (4 * num_texts)) ** 0.5))


def _expected(law_of: LawOf, length: int, drawn: list[Text], least: float) -> dict[Text, float]:
    """Expected texts by cell; a cell that ends in None holds all other tokens."""
    ended = {text for text in drawn if len(text) < length}
    cells: dict[Text, float] = {}
    open_nodes: list[tuple[Text, float]] = [((), float(len(drawn)))]
    seen = {text[:n] for text in drawn for n in range(length + 1)}
    while open_nodes:
        start, mass = open_nodes.pop()
        law = law_of(start) if len(start) < length else None
        if law is None:
            cells[start] = mass
            continue
        branches = {token: mass * p for token, p in law.items() if mass * p >= least}
        if start in ended:  # the end of a text has a token too, whose name is not told
            branches = {token: m for token, m in branches.items() if (*start, token) in seen}
        open_nodes += [((*start, token), m) for token, m in branches.items()]
        cells[(*start, None)] = max(0.0, mass - sum(branches.values()))
    return cells


def _merged(expected: dict[Text, float], drawn: list[Text], least: float) -> tuple[Tensor, Tensor]:
    """Expected and counted texts [num_cells] each, small cells together; both sum to the number of texts."""
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
    """The longest beginning of `text` that is a cell, or the "other" of the branching that it leaves."""
    for n in range(len(text), -1, -1):
        if text[:n] in cells:
            return text[:n]
        if (*text[:n], None) in cells:
            return (*text[:n], None)
    raise AssertionError("the empty beginning is always a cell or a branching")


@cache
def _noncentrality(freedom: int) -> float:
    """Noncentrality at which a chi-square exceeds its critical value with 99 % chance."""
    critical = _bisect(lambda x: 1.0 - SIGNIFICANCE - _chi_square_cdf(freedom, x, 0.0), 4.0 * freedom + 200.0)
    return _bisect(lambda x: _chi_square_cdf(freedom, critical, x) - (1.0 - _CHANCE), 4.0 * freedom + 400.0)


def _chi_square_cdf(freedom: int, x: float, noncentrality: float) -> float:
    """Mixture of central chi-squares over a Poisson number of extra pairs of degrees."""
    extra = torch.arange(0, int(noncentrality + 20 * (noncentrality + 1) ** 0.5) + 20, dtype=torch.float64)
    half = torch.tensor(noncentrality / 2, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(extra, half) - half - torch.lgamma(extra + 1))
    central = torch.special.gammainc(freedom / 2 + extra, torch.full_like(extra, x / 2))
    return float((weights * central).sum())


def _bisect(falling: Callable[[float], float], high: float) -> float:
    """Where a falling function that starts above 0 crosses it."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
