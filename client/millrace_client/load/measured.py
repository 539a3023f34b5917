"""What became of a load: every call with its times, and the figures that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

OK = "OK"
# The server had neither answered nor refused by its deadline: the client's own timer ended it, or the answer was later.
LATE = "LATE"
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


class Outcome(NamedTuple):
    """One call. `status` is gRPC's, or `LATE`. `due_s`: when it was to be sent; all on one monotonic clock."""

    status: str
    due_s: float
    sent_s: float
    ended_s: float


@dataclass(frozen=True)
class Measured:
    """The calls that were due within `seconds`, after the warm-up, each followed to its end."""

    seconds: float
    rows_per_request: int
    outcomes: Sequence[Outcome]

    def of(self, *statuses: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.status in statuses]

    @property
    def answered_per_s(self) -> float:
        """Answers, not refusals nor errors, a second."""
        return len(self.of(OK)) / self.seconds

    @property
    def statuses(self) -> dict[str, int]:
        """Calls by status, the most frequent first."""
        return dict(Counter(one.status for one in self.outcomes).most_common())

    def share(self, *statuses: str) -> float:
        """Of all calls; 0 where there was none."""
        return len(self.of(*statuses)) / len(self.outcomes) if self.outcomes else 0.0

    def latency_ms(self, *statuses: str) -> dict[str, float]:
        """Percentiles of the time from when a call was due to its end, of calls with these statuses; empty where there
        is none. A client that falls behind makes them longer, not fewer."""
        return _percentiles([one.ended_s - one.due_s for one in self.of(*statuses)])

    def behind_ms(self) -> dict[str, float]:
        """Percentiles of how much later than due the client itself sent."""
        return _percentiles([one.sent_s - one.due_s for one in self.outcomes])

    def as_dict(self) -> dict[str, Any]:
        """All figures, as JSON-able values."""
        return {
            "seconds": round(self.seconds, 3),
            "calls": len(self.outcomes),
            "answered_per_s": round(self.answered_per_s, 2),
            "rows_per_s": round(self.answered_per_s * self.rows_per_request, 2),
            "statuses": self.statuses,
            "latency_ms": {status: self.latency_ms(status) for status in self.statuses},
            "client_behind_ms": self.behind_ms(),
        }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values_ms = np.sort(np.asarray(seconds)) * 1000
    found = np.percentile(values_ms, PERCENTILES)
    named = {f"p{which:g}": round(float(value), 3) for which, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "max": round(float(values_ms[-1]), 3)}
