"""The noise of an exponential race over three tokens, as polygons, so that two draws can share it.

A race picks argmax p_i / E_i, where the E_i are independent Exp(1) variables (Gumbel-max; Maddison et al. 2014). Only the
direction of E matters, and it is uniform on the simplex. If token y wins under the probabilities p, then E lies in the
convex cell {E_y * p_k <= E_k * p_y for every k}, whose share of the simplex is p_y. The probability that a token wins a
second race with the *same* noise, given the winner of the first, is therefore a ratio of areas. The functions take floats
and, exactly, fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: A point of the simplex: three coordinates, floats or fractions.
Point = tuple[Any, Any, Any]
#: The corners in order. A cell with fewer than three corners is empty.
Polygon = tuple[Point, ...]

#: The whole simplex: nothing is known of the noise.
WHOLE: Polygon = ((1, 0, 0), (0, 1, 0), (0, 0, 1))


def area(polygon: Polygon) -> Any:
    """The share of the whole simplex that a polygon covers, from 0 to 1."""
    twice: Any = 0
    for a, b in zip(polygon, (*polygon[1:], *polygon[:1]), strict=True):
        twice = twice + a[0] * b[1] - b[0] * a[1]
    return abs(twice)


def cell(polygon: Polygon, probs: Sequence[Any], winner: int) -> Polygon:
    """The part of `polygon` in which `winner` wins under `probs` (three entries, at any scale)."""
    for rival in range(3):
        if rival != winner:
            polygon = _clip(polygon, probs, winner, rival)
    return polygon


def _clip(polygon: Polygon, probs: Sequence[Any], winner: int, rival: int) -> Polygon:
    """Clip by the half-plane in which `winner` beats `rival` (Sutherland and Hodgman 1974)."""
    lead = [e[rival] * probs[winner] - e[winner] * probs[rival] for e in polygon]
    kept: list[Point] = []
    for i, point in enumerate(polygon):
        before = polygon[i - 1]
        if (lead[i] > 0 and lead[i - 1] < 0) or (lead[i] < 0 and lead[i - 1] > 0):
            share = lead[i - 1] / (lead[i - 1] - lead[i])
            kept.append(_between(before, point, share))
        if lead[i] >= 0:
            kept.append(point)
    return tuple(kept)


def _between(a: Point, b: Point, share: Any) -> Point:
    return (a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share, a[2] + (b[2] - a[2]) * share)
