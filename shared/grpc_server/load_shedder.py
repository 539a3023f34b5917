"""Refuses calls before their messages are read, where more come than this process can read in time.

gRPC hands a process one call after the other, and those that it has not taken yet wait in gRPC's core, in order of
arrival, for as long as it takes: once they wait longer than their clients do, each that is taken is too late, and the
process works for nobody. So a door measures that wait, with a call of the process to itself, and turns a share of the
calls away that grows with it, as routers drop packets before their queues are full: linearly between two thresholds
(Floyd and Jacobson, "Random Early Detection Gateways for Congestion Avoidance", 1993). A call turned away costs a third
of one that is read and refused; so a process that has no time to spare also turns away what it would refuse later.
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
# None is turned away below the first, and all that could be above the second.
SOME_FROM_S, ALL_FROM_S = 0.015, 0.06
# From the first on, what would be refused after it was read is turned away as well, above the second all of it.
BUSY_FROM_S, FULLY_BUSY_S = 0.003, 0.01
# Calls are remembered for about so long; so many times as many as were served are let in; and so few say little.
REMEMBERED_S, LET_IN, FEW = 0.5, 1.2, 10
# Those with so many times as long left as calls wait, and at least this, are in no danger of waiting too long.
MIN_WAITS_LEFT, MIN_TIME_LEFT_S = 10.0, 1.0
# Between two knocks, where calls wait and where they do not. A knock takes as much CPU as a call that does nothing.
OFTEN_S, SELDOM_S = 0.01, 0.05
REPORT_INTERVAL_S = 5.0
RETRY_AFTER_S = 0.2
PROBE_TIMEOUT_S = 5.0

Context = aio.ServicerContext[Any, Any]


class LoadShedder:
    """Before those `methods`, by their full names, of a server in whose event loop it lives. `turned_away` is told of
    each call."""

    def __init__(self, methods: Collection[str], turned_away: Callable[[], None]) -> None:
        self.methods = frozenset(methods)
        self._turned_away = turned_away
        self._found_s = (0.0, 0.0)
        self._probed_s: float | None = None
        self._came = asyncio.Event()
        # Calls that have ended, in whatever way, and those among them that were not refused.
        self._ended, self._served = Decaying(REMEMBERED_S), Decaying(REMEMBERED_S)
        self._unreported = 0
        # What a call is told, made once: it is refused so that hardly any work is done for it.
        self.details, self.status = details_and_status(
            ResourceExhausted(
                "more calls come than this process can read; try again later",
                reason="OVERLOADED",
                retry_after_s=RETRY_AFTER_S,
            )
        )

    def wait_s(self) -> float:
        """How long calls wait before this process takes them, as far as it is known now: the less of what the last two
        knocks found, since one may have met what is over already."""
        if self._probed_s is None:
            return min(self._found_s)
        # One that is still under way has found that much at least.
        return min(self._found_s[-1], asyncio.get_running_loop().time() - self._probed_s)

    def turns_away(self, remaining_s: float | None) -> bool:
        """Whether a call that comes now, with so much time left or None for no deadline, is to be refused unread."""
        self._came.set()
        wait_s = self.wait_s()
        if wait_s <= BUSY_FROM_S or remaining_s is None or remaining_s > max(MIN_WAITS_LEFT * wait_s, MIN_TIME_LEFT_S):
            return False
        now_s = asyncio.get_running_loop().time()
        # Where no time is left at all, its client hears nothing of what is said here.
        if remaining_s > 0 and random.random() >= self._share(wait_s, now_s):
            return False
        self._ended.add(now_s)
        self._unreported += 1
        self._turned_away()
        return True

    def ended(self, *, in_vain: bool) -> None:
        """A call that was let in has ended: `in_vain` where whom it was for refused it, or its time passed."""
        now_s = asyncio.get_running_loop().time()
        self._ended.add(now_s)
        if not in_vain:
            self._served.add(now_s)

    def _share(self, wait_s: float, now_s: float) -> float:
        # Clients do the same in "Site Reliability Engineering" (Beyer and others, 2016), chapter 21.
        ended, served = self._ended.at(now_s), self._served.at(now_s)
        in_vain = max(ended - LET_IN * served, 0.0) / (ended + FEW)
        return max(_between(SOME_FROM_S, ALL_FROM_S, wait_s), in_vain * _between(BUSY_FROM_S, FULLY_BUSY_S, wait_s))

    def handler(self) -> grpc.GenericRpcHandler:
        """What opens to the process's own knocks."""
        return _Opening(self._opened)

    async def watch(self, address: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """Knocks at its own server, with the headers `metadata`, while calls come, until cancelled. Where that is
        impossible, all calls come in."""
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
        except aio.AioRpcError as error:  # too late, or refused like others: either took as long
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
    """A count of what happened, each the less the longer ago: by a factor of e in `forgotten_s`. Of what goes on
    happening at one rate, it is that rate times `forgotten_s`."""

    def __init__(self, forgotten_s: float) -> None:
        self._forgotten_s = forgotten_s
        self._count = self._at_s = 0.0

    def add(self, now_s: float, count: float = 1.0) -> None:
        self._count = self.at(now_s) + count
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        return self._count * math.exp((self._at_s - now_s) / self._forgotten_s)


def _between(low: float, high: float, value: float) -> float:
    """0 at `low`, 1 at `high`, linear between."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


class _Opening(grpc.GenericRpcHandler):
    def __init__(self, behaviour: Any) -> None:
        self._handler: Any = grpc.unary_unary_rpc_method_handler(behaviour)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler if handler_call_details.method == METHOD else None
