"""Curves as SVG paths: many points, drawn as what the eye can tell apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace_client.report.wording import number_text

WIDTH, HEIGHT = 600, 160
# Columns of points drawn; of each its mean, lowest and highest.
_COLUMNS = 300
# Above so many points the line is their mean within a column, and the band what lies around it.
_DENSE = 2 * _COLUMNS

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """One figure: `line` and `dots` in a box of `WIDTH` by `HEIGHT`, the origin at the upper left.

    `band` is the area between the lowest and highest values where there are too many for a line; else empty.
    """

    name: str
    line: str
    band: str
    dots: Sequence[tuple[float, float]]
    least: str
    most: str
    last: str
    first_step: str
    last_step: str
    omitted: int


def curve(name: str, points: Points) -> Curve | None:
    """(step, value) each, in the order of steps; values that are not finite are left out and counted. None of none."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    first, last = finite[0][0], finite[-1][0]
    width, height = (last - first) or 1.0, (high - low) or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        # A curve that never moves lies in the middle.
        share = (value - low) / height if high > low else 0.5
        return round((step - first) / width * WIDTH, 1), round(HEIGHT - 4 - share * (HEIGHT - 8), 1)

    columns = _columns(finite, first, width)
    dense = len(finite) > _DENSE
    upper = [place(step, most) for step, _, _, most in columns]
    lower = [place(step, least) for step, _, least, _ in reversed(columns)]
    return Curve(
        name=name,
        line=_path([place(step, mean) for step, mean, _, _ in columns]),
        band=_path([*upper, *lower]) + "Z" if dense else "",
        dots=[place(*one) for one in finite] if len(finite) <= 40 else [],
        least=number_text(low),
        most=number_text(high),
        last=number_text(finite[-1][1]),
        first_step=number_text(first),
        last_step=number_text(last),
        omitted=len(points) - len(finite),
    )


def _columns(points: Points, first: float, width: float) -> list[tuple[float, float, float, float]]:
    """(step, mean, least, most) of each column that has points; of few points each is a column of its own."""
    if len(points) <= _DENSE:
        return [(step, value, value, value) for step, value in points]
    held: dict[int, list[tuple[float, float]]] = {}
    for step, value in points:
        held.setdefault(min(_COLUMNS - 1, int((step - first) / width * _COLUMNS)), []).append((step, value))
    found = []
    for column in sorted(held):
        steps, values = zip(*held[column], strict=True)
        found.append((sum(steps) / len(steps), math.fsum(values) / len(values), min(values), max(values)))
    return found


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in places)
