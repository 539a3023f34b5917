"""Sends requests and times what becomes of them.

A closed loop keeps a number of calls in flight: it shows what a server can do, and slows down with it. An open loop
sends at its own times, whatever comes back, as the world does: only it shows what happens above that.
"""

from __future__ import annotations

import gc
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np

from millrace_client.calls import channel_options
from millrace_client.errors import DETAILS_KEY, REQUEST_ID_KEY
from millrace_client.load.measured import LATE, Measured, Outcome

METHOD = "/inference.GRPCInferenceService/ModelInfer"
# Beyond a call's own deadline, for gRPC to say that it has passed.
END_WITHIN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long, and what: `requests` are sent in turn, each with `deadline_s`; what is due within the first `warm_up_s`
    is sent, and not counted."""

    address: str
    requests: Sequence[bytes]
    rows_per_request: int = 1
    seconds: float = 10.0
    warm_up_s: float = 1.0
    deadline_s: float = 5.0
    metadata: Sequence[tuple[str, str]] = ()
    # For a connection; a server that is there takes milliseconds.
    ready_within_s: float = 10.0


def closed_loop(plan: Plan, in_flight: int) -> Measured:
    """Keeps so many calls in flight: each answer brings the next request. Raises `TimeoutError` for calls that do not
    end."""
    with _Calls(plan) as calls:
        end_s = calls.begin_s + plan.warm_up_s + plan.seconds
        ended = threading.Semaphore(0)

        def send_next() -> None:
            now_s = time.perf_counter()
            if now_s < end_s:
                calls.send(now_s, send_next)
            else:
                ended.release()

        for _ in range(in_flight):
            send_next()
        calls.wait(ended, in_flight, plan.warm_up_s + plan.seconds)
        return calls.measured()


def open_loop(plan: Plan, rate: float, seed: int = 0) -> Measured:
    """Sends `rate` calls a second on average, at times of a Poisson process that is fixed beforehand. A client that
    falls behind sends at once what is due, and `Measured` says by how much: deadlines count from when calls were due,
    and an answer that comes later is `LATE`. Raises `TimeoutError` like `closed_loop`.
    """
    with _Calls(plan) as calls:
        ended = threading.Semaphore(0)
        sent = 0
        for due_s in calls.begin_s + arrivals(rate, plan.warm_up_s + plan.seconds, seed):
            pause_s = due_s - time.perf_counter()
            if pause_s > 0:
                time.sleep(pause_s)
            calls.send(float(due_s), ended.release, due_s + plan.deadline_s)
            sent += 1
        calls.wait(ended, sent, 0.0)
        return calls.measured()


def arrivals(rate: float, seconds: float, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Times within `seconds`, in order, of a Poisson process of `rate` a second."""
    noise = np.random.default_rng(seed)
    # The number of arrivals is Poisson, and they are then uniform.
    return np.sort(noise.uniform(0.0, seconds, noise.poisson(rate * seconds)))


class _Calls:
    """Calls over one channel. Callbacks, all in one thread of gRPC, cost a client less than threads or asyncio do."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # No retries: what fails is counted as it is.
        self._channel = grpc.insecure_channel(
            plan.address, options=[*channel_options(plan.address), ("grpc.enable_retries", 0)]
        )
        # The bytes as they are: a load generator that parses answers measures itself.
        self._infer: Any = self._channel.unary_unary(METHOD)
        self._requests = itertools.cycle(plan.requests)
        self._outcomes: list[Outcome] = []
        self.begin_s = 0.0
        self._collects = False

    def __enter__(self) -> _Calls:
        try:
            grpc.channel_ready_future(self._channel).result(timeout=self._plan.ready_within_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise TimeoutError(f"nobody answers at {self._plan.address}") from None
        # A collection stops the client for a fifth of a second, and what it sends then comes all at once.
        gc.collect()
        self._collects = gc.isenabled()
        gc.disable()
        self.begin_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()
        self._channel.close()

    def send(self, due_s: float, then: Callable[[], None], deadline_s: float = math.inf) -> None:
        """Calls, and calls `then` when the call has ended. It is given up after the plan's time, or at `deadline_s`."""
        request = next(self._requests)
        sent_s = time.perf_counter()
        timeout_s = min(self._plan.deadline_s, deadline_s - sent_s)
        if timeout_s <= 0:  # it has no time left, and the server never hears of it
            self._outcomes.append(Outcome(LATE, due_s, sent_s, sent_s))
            then()
            return
        call = self._infer.future(request, timeout=timeout_s, metadata=self._plan.metadata)
        call.add_done_callback(partial(self._ended, due_s, sent_s, deadline_s, then))

    def wait(self, ended: threading.Semaphore, count: int, within_s: float) -> None:
        until_s = time.perf_counter() + within_s + self._plan.deadline_s + END_WITHIN_S
        for number in range(count):
            if not ended.acquire(timeout=max(until_s - time.perf_counter(), 0.0)):
                raise TimeoutError(
                    f"{count - number} of {count} calls do not end, {END_WITHIN_S:.0f} s after their time"
                )

    def measured(self) -> Measured:
        first_s = self.begin_s + self._plan.warm_up_s
        counted = [one for one in self._outcomes if one.due_s >= first_s]
        return Measured(self._plan.seconds, self._plan.rows_per_request, counted)

    def _ended(self, due_s: float, sent_s: float, deadline_s: float, then: Callable[[], None], call: Any) -> None:
        ended_s = time.perf_counter()
        code = call.code()
        timed_out = code is grpc.StatusCode.DEADLINE_EXCEEDED and not _told(call)
        too_late = code is grpc.StatusCode.OK and ended_s > deadline_s
        status = LATE if timed_out or too_late else code.name
        self._outcomes.append(Outcome(status, due_s, sent_s, ended_s))
        then()


def _told(call: Any) -> bool:
    """Whether the server said it: gRPC ends a call by its own timer without a word from there."""
    return any(key in (DETAILS_KEY, REQUEST_ID_KEY) for key, _ in call.trailing_metadata() or ())
