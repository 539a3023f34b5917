"""Load shedding: refuses calls unread while more calls arrive than this process can read in time.

gRPC hands a process one call after the other. Further calls wait in gRPC's core, in order of arrival, without a limit
of time. Once they wait longer than their clients do, every call that is taken is too late, and the process works in
vain. `LoadShedder` therefore measures this wait with a probe, a call of the process to itself. It turns away a share of
the calls that grows with the wait, linearly between two thresholds, as routers drop packets before their queues are
full (Floyd and Jacobson, "Random Early Detection Gateways for Congestion Avoidance", 1993). Turning a call away costs a
third of reading and refusing it. A busy process therefore also turns away the calls that it would probably refuse
later.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import grpc
from grpc import aio

from shared.errors import ResourceExhausted
from shared.grpc_errors import details_and_status

logger = logging.getLogger(__name__)

METHOD = "/millrace.Door/Knock"
# Thresholds of the wait in seconds: no call is turned away below the first, every eligible call above the second.
SOME_FROM_S, ALL_FROM_S = 0.015, 0.06
# Thresholds of the wait for calls that would probably be refused after reading: below the first none of these is turned
# away, above the second all are.
BUSY_FROM_S, FULLY_BUSY_S = 0.003, 0.01
# Adaptive throttling ("Site Reliability Engineering", ch. 21): the share of calls in vain is max(0, ended - LET_IN *
# served) / (ended + FEW). REMEMBERED_S is the time constant of both counters. FEW keeps a handful of calls from
# triggering it.
REMEMBERED_S, LET_IN, FEW = 0.5, 1.2, 10
# Calls with more time left than MIN_WAITS_LEFT times the wait, and more than MIN_TIME_LEFT_S, are always let in.
MIN_WAITS_LEFT, MIN_TIME_LEFT_S = 10.0, 1.0
# Pauses between two probes: while calls wait, and while they do not. A probe costs as much CPU as a call that does
# nothing.
OFTEN_S, SELDOM_S = 0.01, 0.05
REPORT_INTERVAL_S = 5.0
RETRY_AFTER_S = 0.2
PROBE_TIMEOUT_S = 5.0

Context = aio.ServicerContext[Any, Any]


class LoadShedder:
    """Sheds load on the given methods of a server in the same event loop.

    `methods` are full names. `turned_away` is called for each refused call.
    """

    def __init__(self, methods: Collection[str], turned_away: Callable[[], None]) -> None:
        self.methods = frozenset(methods)
        self._turned_away = turned_away
        self._found_s = (0.0, 0.0)
        self._probed_s: float | None = None
        self._came = asyncio.Event()
        # Decaying counts of all calls that have ended, and of those that were not refused.
        self._ended, self._served = Decaying(REMEMBERED_S), Decaying(REMEMBERED_S)
        self._unreported = 0
        # The refusal is encoded once, so that refusing a call costs hardly any work.
        self.details, self.status = details_and_status(
            ResourceExhausted(
                "more calls come than this process can read; try again later",
                reason="OVERLOADED",
                retry_after_s=RETRY_AFTER_S,
            )
        )

    def wait_s(self) -> float:
        """Return the current estimate of how long calls wait before this process takes them.

        It is the smaller of the last two probes, because one of them may have met a delay that has already passed.
        """
        if self._probed_s is None:
            return min(self._found_s)
        # A probe that is still in flight has waited at least this long.
        return min(self._found_s[-1], asyncio.get_running_loop().time() - self._probed_s)

    def turns_away(self, remaining_s: float | None) -> bool:
        """Return whether a call that arrives now is to be refused unread.

        `remaining_s` is the time until its deadline; None: no deadline.
        """
        self._came.set()
        wait_s = self.wait_s()
        if wait_s <= BUSY_FROM_S or remaining_s is None or remaining_s > max(MIN_WAITS_LEFT * wait_s, MIN_TIME_LEFT_S):
            return False
        now_s = asyncio.get_running_loop().time()
        # A call without any time left is always refused, because its client no longer receives an answer.
        if remaining_s > 0 and random.random() >= self._share(wait_s, now_s):
            return False
        self._ended.add(now_s)
        self._unreported += 1
        self._turned_away()
        return True

    def ended(self, *, in_vain: bool) -> None:
        """Count a call that was let in and has ended.

        `in_vain` means that its servicer refused it for lack of time, or that its deadline passed.
        """
        now_s = asyncio.get_running_loop().time()
        self._ended.add(now_s)
        if not in_vain:
            self._served.add(now_s)

    def _share(self, wait_s: float, now_s: float) -> float:
        # Clients throttle themselves in the same way in "Site Reliability Engineering" (Beyer and others, 2016),
        # chapter 21.
        ended, served = self._ended.at(now_s), self._served.at(now_s)
        in_vain = max(ended - LET_IN * served, 0.0) / (ended + FEW)
        return max(_between(SOME_FROM_S, ALL_FROM_S, wait_s), in_vain * _between(BUSY_FROM_S, FULLY_BUSY_S, wait_s))

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler that answers the process's own probes."""
        return _Opening(self._opened)

    async def watch(self, address: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """Probe this process's own server while calls arrive, until cancelled.

        `metadata` are the probe's headers. If probing is impossible, all calls are let in.
        """
        try:
            async with aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
                await self._keep_probing(partial(channel.unary_unary(METHOD), metadata=metadata))
        except Exception:
            logger.exception("this process no longer knows how long calls wait, and turns none away")
        finally:
            self._found_s = (0.0, 0.0)

    async def _keep_probing(self, probe: Any) -> None:
        loop = asyncio.get_running_loop()
        reported_s = loop.time()
        while True:
            if not self._came.is_set():
                self._found_s = (0.0, 0.0)
            await self._came.wait()
            self._came.clear()
            await self._probe(probe)
            if self._unreported and loop.time() - reported_s > REPORT_INTERVAL_S:
                logger.warning("%d calls were turned away: more come than can be read", self._unreported)
                self._unreported, reported_s = 0, loop.time()
            await asyncio.sleep(OFTEN_S if self._found_s[-1] > SOME_FROM_S / 2 else SELDOM_S)

    async def _probe(self, probe: Any) -> None:
        loop = asyncio.get_running_loop()
        began_s = self._probed_s = loop.time()
        try:
            await probe(b"", timeout=PROBE_TIMEOUT_S)
        except aio.AioRpcError as error:  # too late, or refused like other calls; either took as long
            logger.debug("knocking at its own door: %s", error.details())
            self._find(loop.time() - began_s)
        finally:
            self._probed_s = None

    async def _opened(self, _: bytes, __: Context) -> bytes:
        if self._probed_s is not None:
            self._find(asyncio.get_running_loop().time() - self._probed_s)
            self._probed_s = None
        return b""

    def _find(self, wait_s: float) -> None:
        self._found_s = (self._found_s[-1], wait_s)


class Decaying:
    """An exponentially decaying count with the time constant `forgotten_s`.

    For events at a constant rate, the count is that rate times `forgotten_s`.
    """

    def __init__(self, forgotten_s: float) -> None:
        self._forgotten_s = forgotten_s
        self._count = self._at_s = 0.0

    def add(self, now_s: float, count: float = 1.0) -> None:
        self._count = self.at(now_s) + count
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        return self._count * math.exp((self._at_s - now_s) / self._forgotten_s)


def _between(low: float, high: float, value: float) -> float:
    """Return 0 at `low`, 1 at `high`, and linear values between."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


class _Opening(grpc.GenericRpcHandler):
    def __init__(self, behaviour: Any) -> None:
        self._handler: Any = grpc.unary_unary_rpc_method_handler(behaviour)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler if handler_call_details.method == METHOD else None
