"""How long a batch takes, learned from those that came back."""

from __future__ import annotations

from collections.abc import Mapping

WEIGHT = 0.2  # of the newest batch in the moving averages
# Of the mean deviation, as in TCP's estimate of a round trip (Jacobson, 1988).
DEVIATIONS = 4.0


class BatchTimes:
    """Moving averages by batch size, in buckets of powers of two."""

    def __init__(self, measured_s: Mapping[int, float] | None = None) -> None:
        """`measured_s`: rows → seconds, from the replica's warm-up."""
        self._mean_s = {bucket(rows): seconds for rows, seconds in (measured_s or {}).items()}
        self._deviation_s = dict.fromkeys(self._mean_s, 0.0)

    def learn(self, rows: int, seconds: float) -> None:
        key = bucket(rows)
        before = self._mean_s.get(key, seconds)
        error_s = seconds - before
        self._mean_s[key] = before + WEIGHT * error_s
        deviation_s = self._deviation_s.get(key, 0.0)
        self._deviation_s[key] = deviation_s + WEIGHT * (abs(error_s) - deviation_s)

    def copy(self) -> BatchTimes:
        """What is known now, to go on learning from other measurements."""
        return BatchTimes(self._mean_s)

    def expected_s(self, rows: int) -> float:
        """What a batch of so many rows takes; where that size was never seen, what the next smaller one known takes, so
        that the estimate is rather too low. 0 while nothing is known."""
        known = self._known(rows)
        return self._mean_s[known] if known else 0.0

    def bound_s(self, rows: int) -> float:
        """What hardly any takes longer than: the same with `DEVIATIONS` mean deviations more."""
        known = self._known(rows)
        return self._mean_s[known] + DEVIATIONS * self._deviation_s[known] if known else 0.0

    def _known(self, rows: int) -> int:
        wanted = bucket(rows)
        if wanted in self._mean_s:
            return wanted
        return max((size for size in self._mean_s if size < wanted), default=0)


def bucket(rows: int) -> int:
    """The power of two at or above `rows`."""
    return 1 << (rows - 1).bit_length()


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to warm: the powers of two below `max_rows`, and `max_rows` itself."""
    return [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]
