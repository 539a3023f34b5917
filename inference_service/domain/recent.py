"""The requests of the last minutes of one model version: how many, how many failed, how long they took."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from inference_service.domain.roll_out import MAX_WINDOW_S, RollOutLimits

# 5 % apart, from 0.1 ms to an hour: a percentile is told as the bound above it.
BOUNDS_S = [0.0001 * 1.05**power for power in range(357)]
# What is the client's fault, and what it left, says nothing about the version.
FAULTS = frozenset({"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "DATA_LOSS"})
P99 = 0.99


@dataclass(frozen=True)
class Seen:
    """`p99_s` is of the answered ones, 0 where there are none."""

    requests: int
    faults: int
    p99_s: float


class _Second:
    def __init__(self, second: int) -> None:
        self.second = second
        self.faults = 0
        self.answered: dict[int, int] = {}  # by place in BOUNDS_S


class Recent:
    """A count for each second, so that its size does not depend on the load."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()

    def answered(self, now_s: float, total_s: float) -> None:
        counts, place = self._second(now_s).answered, bisect_left(BOUNDS_S, total_s)
        counts[place] = counts.get(place, 0) + 1

    def failed(self, now_s: float, status: str) -> None:
        """`status` is the name of what the request ended with."""
        if status in FAULTS:
            self._second(now_s).faults += 1

    def seen(self, now_s: float, window_s: float) -> Seen:
        """The last `window_s`, to a second."""
        counts: dict[int, int] = {}
        faults = 0
        for one in self._seconds:
            if now_s - window_s <= one.second <= now_s:
                faults += one.faults
                for place, count in one.answered.items():
                    counts[place] = counts.get(place, 0) + count
        answered = sum(counts.values())
        left = P99 * answered
        p99_s = 0.0
        for place in sorted(counts):
            left -= counts[place]
            if left <= 0:
                p99_s = BOUNDS_S[min(place, len(BOUNDS_S) - 1)]
                break
        return Seen(answered + faults, faults, p99_s)

    def _second(self, now_s: float) -> _Second:
        second = int(now_s)
        if not self._seconds or self._seconds[-1].second != second:
            self._seconds.append(_Second(second))
            while self._seconds[0].second < second - MAX_WINDOW_S:
                self._seconds.popleft()
        return self._seconds[-1]


def passed_limit(limits: RollOutLimits, new: Seen, old: Seen) -> str:
    """Which of the limits the new version has passed, in words; empty: none."""
    if new.requests < limits.min_requests:
        return ""
    share = new.faults / new.requests
    if limits.max_error_share is not None and share > limits.max_error_share:
        return f"{share:.1%} of its last {new.requests} requests failed, at most {limits.max_error_share:.1%} may"
    if limits.max_p99_s is not None and new.p99_s > limits.max_p99_s:
        return (
            f"1 % of its answers took {new.p99_s * 1000:.4g} ms or longer, at most {limits.max_p99_s * 1000:.4g} ms may"
        )
    if limits.max_p99_ratio and old.requests >= limits.min_requests and old.p99_s:
        ratio = new.p99_s / old.p99_s
        if ratio > limits.max_p99_ratio:
            return (
                f"1 % of its answers took {new.p99_s * 1000:.4g} ms or longer, {ratio:.3g} times as long as the old "
                f"version's; at most {limits.max_p99_ratio:g} times is allowed"
            )
    return ""
