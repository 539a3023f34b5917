"""Histograms as bars: of Unicode blocks for a terminal, as rectangles for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 240, 56
_GAP = 1.5


@dataclass(frozen=True)
class Bar:
    """In the units of a box of `WIDTH` by `HEIGHT`, its origin at the upper left."""

    x: float
    y: float
    width: float
    height: float
    count: int


def block_bars(counts: Sequence[int]) -> str:
    """A character for each count; nothing for 0, and never nothing for more."""
    most = max(counts, default=0)
    return "".join(_BLOCKS[math.ceil(count / most * len(_BLOCKS)) - 1] if count else " " for count in counts)


def box_bars(counts: Sequence[int]) -> list[Bar]:
    """Bars that stand on the lower edge, the tallest as high as the box; one of few rows is still seen."""
    most = max(counts, default=0)
    if not most:
        return []
    step = WIDTH / len(counts)
    gap = min(_GAP, step / 4)
    bars = []
    for index, count in enumerate(counts):
        height = max(1.5, count / most * HEIGHT) if count else 0.0
        bars.append(
            Bar(round(index * step, 2), round(HEIGHT - height, 2), round(step - gap, 2), round(height, 2), count)
        )
    return bars
