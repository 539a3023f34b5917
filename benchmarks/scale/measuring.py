"""The cost of one operation: processor time, requests, bytes and memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.scale.simulated_store import SimulatedStore


@dataclass
class Cost:
    """The cost of an operation.

    `units` is the amount of work of a bulk operation, and 1 for one that must cost the same at every size. `cpu_s` is
    processor time, which other work on the machine affects less than wall time; `store_s` is the time that a real store
    would have taken.
    """

    units: float = 1
    cpu_s: float = 0.0
    requests: int = 0
    bytes: int = 0
    store_s: float = 0.0
    # The peak of the process so far, above its memory after the imports.
    peak_mib: float = 0.0

    @property
    def per_unit_s(self) -> float:
        return (self.cpu_s + self.store_s) / self.units


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass
class Costs:
    """Reports the cost of each operation as soon as it is done, since a later one may exceed a limit."""

    report: Callable[[str, dict[str, Any]], None]
    start_mib: float = field(default_factory=_peak_mib)

    @contextmanager
    def measured(self, name: str, store: SimulatedStore | None = None, units: float = 1) -> Iterator[Cost]:
        cost = Cost(units)
        requests, size_bytes, waited_s = (store.requests, store.bytes, store.waited_s) if store else (0, 0, 0.0)
        began = time.process_time()
        yield cost
        cost.cpu_s = time.process_time() - began
        if store:
            cost.requests, cost.bytes = store.requests - requests, store.bytes - size_bytes
            cost.store_s = store.waited_s - waited_s
        cost.peak_mib = _peak_mib() - self.start_mib
        self.report(name, {**asdict(cost), "per_unit_s": cost.per_unit_s})
