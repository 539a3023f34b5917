"""The real batcher before one simulated replica, on a virtual clock: hours of traffic in seconds, without noise.

Arrivals are Poisson's, of one row each with a deadline of `DEADLINE_S`. The replica computes one batch after the other.
How long a batch takes varies as on a busy machine: in spells of some 0.2 s in which all are slower or faster, by a
log-normal factor of the `spread` asked for, and in 1.2 stalls a second of 20 to 60 ms, which no estimate can foresee.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inference_service.domain.batch_policy import BatchTimes, Limits
from inference_service.domain.signature import Outputs, Rows
from inference_service.domain.statistics import Statistics
from inference_service.serve.batcher import Batcher
from shared.errors import MillraceError

DEADLINE_S = 0.2
MAX_ROWS = 32
# What batches of so many rows take a ResNet-18 on one thread, in seconds.
COMPUTING_S = {1: 0.006, 2: 0.008, 4: 0.010, 8: 0.012, 16: 0.018, 32: 0.034}
CAPACITY = MAX_ROWS / COMPUTING_S[MAX_ROWS]  # rows/s, where no batch takes longer
WAY_S = 0.0015  # from the frontend to the replica, and as long back
# A request's mean wait before the frontend reads it, and an answer's way from there: some milliseconds each.
UNREAD_S, ANSWER_S = 0.004, 0.002
TICK_S, SPELL_S = 0.01, 0.2
STALLS_PER_S, STALL_S = 1.2, (0.02, 0.06)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer once nothing else is left to run."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        self._virtual_s += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing is left that could ever happen")
        self._loop.jump(timeout)
        return []


def on_a_virtual_clock(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario())


class Weather:
    """By how much batches are slower at each moment, with a mean of 1; when the machine stalls, and for how long."""

    def __init__(self, rng: np.random.Generator, spread: float, seconds: float) -> None:
        ticks = int(seconds / TICK_S)
        kept = math.exp(-TICK_S / SPELL_S)
        log_factor = np.zeros(ticks)
        for tick in range(1, ticks):
            log_factor[tick] = kept * log_factor[tick - 1] + math.sqrt(1 - kept**2) * rng.normal(0, spread)
        self._factor = np.exp(log_factor - spread**2 / 2)
        stalls = int(STALLS_PER_S * seconds)
        self._stalls_s = np.sort(rng.uniform(0, seconds, stalls))
        self._stalled_s = rng.uniform(*STALL_S, stalls)

    def takes_s(self, start_s: float, seconds: float) -> float:
        """What would take so long in fair weather, if it begins then."""
        slowed_s = seconds * float(self._factor[min(int(start_s / TICK_S), len(self._factor) - 1)])
        first, last = np.searchsorted(self._stalls_s, (start_s, start_s + slowed_s))
        return slowed_s + float(self._stalled_s[first:last].sum())


FAIR = Weather(np.random.default_rng(0), 0.0, TICK_S)


class Replica:
    """Computes batches one after the other, in the order in which they come."""

    def __init__(self, weather: Weather = FAIR) -> None:
        self._weather = weather
        self._free_s = 0.0
        self.batches: list[int] = []
        self.busy_s = 0.0

    async def forward(self, rows: Rows) -> Outputs:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(WAY_S)
        start_s = max(loop.time(), self._free_s)
        fair_s = float(np.interp(len(rows), list(COMPUTING_S), list(COMPUTING_S.values())))
        took_s = self._weather.takes_s(start_s, fair_s)
        self._free_s = start_s + took_s
        self.batches.append(len(rows))
        self.busy_s += took_s
        await asyncio.sleep(self._free_s - loop.time() + WAY_S)
        return Outputs([rows.values["x"]], input_s=0.0005, infer_s=took_s - 0.0005)


def batcher_before(replica: Replica) -> Batcher:
    """One that knows what batches take, as after a replica's warm-up."""
    limits = Limits(max_rows=MAX_ROWS, max_delay_s=0.002, max_queued_rows=4096, max_in_flight=2)
    return Batcher(replica, limits, BatchTimes(COMPUTING_S), Statistics())


@dataclass
class Outcome:
    """Of requests that came: how many were answered in time, were late or refused, and what refusals took."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals_s: list[float] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return self.counts["answered"]

    @property
    def late_share(self) -> float:
        return self.counts["late"] / self.counts.total()

    @property
    def refusal_p99_s(self) -> float:
        return float(np.percentile(self.refusals_s, 99)) if self.refusals_s else 0.0


def serve(load: float, spread: float, *, seeds: Iterable[int], seconds: float) -> Outcome:
    """What becomes of `load` times as many requests as the replica has capacity for, `seconds` of each seed's."""
    outcome = Outcome()
    for seed in seeds:
        on_a_virtual_clock(lambda seed=seed: _arriving(load, spread, seed, seconds, outcome))  # type: ignore[misc]
    return outcome


async def _arriving(load: float, spread: float, seed: int, seconds: float, outcome: Outcome) -> None:
    rng = np.random.default_rng(seed)
    batcher = batcher_before(Replica(Weather(rng, spread, seconds + 2 * DEADLINE_S)))
    requests = rng.poisson(load * CAPACITY * seconds)
    arrivals_s = np.sort(rng.uniform(0, seconds, requests))
    unread_s, answers_s = rng.exponential(UNREAD_S, requests), ANSWER_S + rng.exponential(ANSWER_S, requests)
    loop, row = asyncio.get_running_loop(), np.zeros((1, 1), np.uint8)

    def refuse(arrived_s: float) -> None:
        outcome.counts["refused"] += 1
        outcome.refusals_s.append(loop.time() - arrived_s)

    async def ask(arrived_s: float, answer_s: float) -> None:
        deadline_s = arrived_s + DEADLINE_S
        try:
            async with asyncio.timeout_at(deadline_s):
                await batcher.submit(Rows("raw", {"x": row}), deadline_s - loop.time(), admitted=True)
            outcome.counts["answered" if loop.time() + answer_s <= deadline_s else "late"] += 1
        except TimeoutError:
            outcome.counts["late"] += 1
        except MillraceError:
            refuse(arrived_s)

    # In the order in which the frontend reads them. Each takes one timer of the loop, which sets that of the next.
    read_s = arrivals_s + unread_s
    order = np.argsort(read_s, kind="stable")
    unread = zip(*(times[order].tolist() for times in (read_s, arrivals_s, answers_s)), strict=True)
    all_read = asyncio.Event()
    async with asyncio.TaskGroup() as asking:

        def read_next() -> None:
            for at_s, arrived_s, answer_s in unread:
                loop.call_at(at_s, read_one, arrived_s, answer_s)
                return
            all_read.set()

        def read_one(arrived_s: float, answer_s: float) -> None:
            try:
                # As the frontend does, before it decodes any tensor: most refusals need no task.
                batcher.admit(1, "raw", arrived_s + DEADLINE_S - loop.time())
            except MillraceError:
                refuse(arrived_s)
            else:
                asking.create_task(ask(arrived_s, answer_s))
            read_next()

        read_next()
        await all_read.wait()
