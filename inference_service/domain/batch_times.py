"""How long a batch takes, learned from those that came back."""

from __future__ import annotations

from collections.abc import Mapping

WEIGHT = 0.2  # of the newest batch in the moving averages
# Of the mean deviation, as in TCP's estimate of a round trip (Jacobson, 1988), which takes 4.
DEVIATIONS = 3.0
# A batch that took many times as long as expected tells of a hiccup, not of what batches take.
MAX_DEVIATION = 1.0


class BatchTimes:
    """Moving averages by batch size, in buckets of powers of two, and how far batches of all sizes are from them.

    Sizes share the deviation, and none is thought to take longer than a larger one: what is refused because of an
    estimate never runs, so it could not put that estimate right by itself.
    """

    def __init__(self, measured_s: Mapping[int, float] | None = None) -> None:
        """`measured_s`: rows → seconds, from the replica's warm-up."""
        self._mean_s = {bucket(rows): seconds for rows, seconds in (measured_s or {}).items()}
        self._deviation = 0.0  # relative to the mean

    def learn(self, rows: int, seconds: float) -> None:
        key = bucket(rows)
        before = self._mean_s.get(key, seconds)
        # The largest size has no larger one to put it right: one hiccup must not make it look too slow to be tried.
        seconds = min(seconds, before * (1 + MAX_DEVIATION)) if before else seconds
        self._mean_s[key] = before + WEIGHT * (seconds - before)
        deviation = abs(seconds - before) / before if before else 0.0
        self._deviation += WEIGHT * (deviation - self._deviation)

    def copy(self) -> BatchTimes:
        """What is known now, to go on learning from other measurements."""
        return BatchTimes(self._mean_s)

    def expected_s(self, rows: int) -> float:
        """What a batch of so many rows takes; where that size was never seen, what the next smaller one known takes, so
        that the estimate is rather too low. 0 while nothing is known."""
        wanted = bucket(rows)
        if wanted not in self._mean_s:
            wanted = max((size for size in self._mean_s if size < wanted), default=0)
        return min((seconds for size, seconds in self._mean_s.items() if size >= wanted > 0), default=0.0)

    def bound_s(self, rows: int) -> float:
        """What hardly any takes longer than: the same with `DEVIATIONS` mean deviations more."""
        return self.expected_s(rows) * (1 + DEVIATIONS * self._deviation)


def bucket(rows: int) -> int:
    """The power of two at or above `rows`."""
    return 1 << (rows - 1).bit_length()


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to warm: the powers of two below `max_rows`, and `max_rows` itself."""
    return [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]
