"""How long a batch takes, learned from those that came back."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Of the newest batch in the moving averages: of the way, and of the deviation; of what computing takes, by how much all
# sizes are slower than they were, and by how much this size is.
WEIGHT = 0.2
# The deviation falls more slowly than it rises, so that a spell in which all take the same is not trusted too soon; and
# what it is at first, before anybody knows.
CALMING_WEIGHT, FIRST_DEVIATION = 0.05, 0.25
PACE_WEIGHT, SHAPE_WEIGHT = 0.15, 0.05
# Of the newest pace in the usual one, which passing spells are to change little.
USUAL_WEIGHT = 0.02
# Of the mean deviation, as in TCP's estimate of a round trip (Jacobson, 1988), which takes 4.
DEVIATIONS = 3.0
# A batch that took many times as long as expected tells of a hiccup, not of what batches take.
MAX_DEVIATION = 1.0


class BatchTimes:
    """A batch takes its way to the model and back, with any wait there for the one before it, which is thought to be
    the same for all sizes; and what the model computes, by size in buckets of powers of two.

    What makes one size slower, such as a busy machine, makes most others so. Hence sizes share a pace beside what each
    is seen to take, and the deviation; and none is thought to take longer than a larger one. What is refused because of
    an estimate never runs, so it could not put that estimate right by itself: others do.
    """

    def __init__(self, measured_s: Mapping[int, float] | None = None) -> None:
        """`measured_s`: rows → seconds of computing, from the replica's warm-up."""
        self._shape_s = {bucket(rows): seconds for rows, seconds in (measured_s or {}).items()}
        self._pace = self._usual_pace = 1.0
        self._way_s: float | None = None
        self._deviation = FIRST_DEVIATION  # relative to what was expected

    def learn(self, rows: int, seconds: float, computed_s: float | None = None) -> None:
        """Of a batch that was back after `seconds`, of which the model computed for `computed_s`: by default all."""
        key = bucket(rows)
        computed_s = seconds if computed_s is None else min(computed_s, seconds)
        way_s = seconds - computed_s
        if self._way_s is None:
            self._way_s = way_s
        if key not in self._shape_s:
            self._shape_s[key] = computed_s / self._pace
        before_s = self._way_s + self._shape_s[key] * self._pace
        deviation = min(abs(seconds - before_s) / before_s, MAX_DEVIATION) if before_s else 0.0
        weight = WEIGHT if deviation > self._deviation else CALMING_WEIGHT
        self._deviation += weight * (deviation - self._deviation)
        # The largest size has no larger one to put it right: one hiccup must not make it look too slow to be tried.
        most_s = before_s * (1 + MAX_DEVIATION)
        self._way_s += WEIGHT * (min(way_s, most_s) - self._way_s)
        expected_s = self._shape_s[key] * self._pace
        if expected_s:
            change = min(computed_s / expected_s - 1, MAX_DEVIATION)
            # Both in one ratio, whatever the changes are: of two averages that follow a product each by itself, one
            # would rise for ever and the other fall.
            self._pace *= math.exp(PACE_WEIGHT * change)
            self._usual_pace += USUAL_WEIGHT * (self._pace - self._usual_pace)
            self._shape_s[key] *= math.exp(SHAPE_WEIGHT * change)

    def expected_s(self, rows: int) -> float:
        """What a batch of so many rows takes from here and back. 0 while nothing is known."""
        return self.computing_s(rows) + (self._way_s or 0.0)

    def computing_s(self, rows: int) -> float:
        """What the model computes for; where that size was never seen, what the next smaller one known takes, so that
        the estimate is rather too low."""
        wanted = bucket(rows)
        if wanted not in self._shape_s:
            wanted = max((size for size in self._shape_s if size < wanted), default=0)
        shape_s = min((seconds for size, seconds in self._shape_s.items() if size >= wanted > 0), default=0.0)
        return shape_s * self._pace

    def usually_s(self, rows: int) -> float:
        """What the model computes for apart from spells in which all batches are faster or slower."""
        return self.computing_s(rows) / self._pace * self._usual_pace

    def at_most_s(self, seconds: float, deviations: float = DEVIATIONS) -> float:
        """What is expected to take so long, with so many mean deviations more."""
        return seconds * (1 + deviations * self._deviation)

    def bound_s(self, rows: int) -> float:
        """What hardly any batch of so many rows takes longer than, from here and back."""
        return self.at_most_s(self.expected_s(rows))


def bucket(rows: int) -> int:
    """The power of two at or above `rows`."""
    return 1 << (rows - 1).bit_length()


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to warm: the powers of two below `max_rows`, and `max_rows` itself."""
    return [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]
