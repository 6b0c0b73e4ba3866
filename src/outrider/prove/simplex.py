"""Shared exponential-race noise over three tokens, as polygons.

A race picks argmax p_i / E_i with E_i independent Exp(1) variables (Gumbel-max; Maddison et al. 2014). Only the direction
of E matters, and it is uniform on the simplex. That token y wins under law p confines it to the convex cell
{E_y * p_k <= E_k * p_y for every k}, whose share of the simplex is p_y. So what a second law makes of the *same* noise,
given who won under the first, is a ratio of areas. Works on floats and, exactly, on fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: A point of the simplex, three coordinates; floats or fractions.
Point = tuple[Any, Any, Any]
#: Corners in order; fewer than three mean an empty cell.
Polygon = tuple[Point, ...]

#: Noise of which nothing is known.
WHOLE: Polygon = ((1, 0, 0), (0, 1, 0), (0, 0, 1))


def area(polygon: Polygon) -> Any:
    """Share of the whole simplex, from 0 to 1."""
    twice: Any = 0
    for a, b in zip(polygon, (*polygon[1:], *polygon[:1]), strict=True):
        twice = twice + a[0] * b[1] - b[0] * a[1]
    return abs(twice)


def cell(polygon: Polygon, law: Sequence[Any], winner: int) -> Polygon:
    """The part of `polygon` in which `winner` wins under `law` (three entries, at any scale)."""
    for rival in range(3):
        if rival != winner:
            polygon = _clip(polygon, law, winner, rival)
    return polygon


def _clip(polygon: Polygon, law: Sequence[Any], winner: int, rival: int) -> Polygon:
    """Sutherland and Hodgman 1974, by the half-plane in which `winner` beats `rival`."""
    lead = [e[rival] * law[winner] - e[winner] * law[rival] for e in polygon]
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
