"""This process's bond with Ray: waits for it, joins it, and ends the process when it is lost.

Why end, and not reconnect: Ray's client library holds the old cluster in threads and globals of C++ and Python, aborts
the process by itself about a minute after the head has gone, and Serve's handles belong to the old controller. A new
process has none of that, starts in seconds, and reads from the logs what to serve; the supervisor provides it. Until
Ray is reached, Get and List answer from the store and health says NOT_SERVING.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from inference_service.batching.models import Models
from inference_service.reconciling.ray_serve import ServeApplications
from inference_service.reconciling.reconciler import RayLost, Reconciler
from inference_service.reconciling.serve_calls import to_serve_thread
from inference_service.settings import InferenceSettings
from shared.grpc_server import Health

logger = logging.getLogger(__name__)

EXIT_RAY_LOST = 75  # EX_TEMPFAIL of sysexits.h
LOOK_FOR_RAY_EVERY_S = 0.5
CONNECT_WITHIN_S = 60.0
# Not asyncio's connections: they resolve a host name in the event loop's threads. These may all wait for the store, and
# Ray would seem to be gone.
WATCHING = ThreadPoolExecutor(4, thread_name_prefix="watching-ray")


class Front:
    """`exit_status` is the process's, once `run` has ended; `ready` is set once it has seen what there is to serve."""

    def __init__(
        self,
        settings: InferenceSettings,
        applications: ServeApplications,
        reconciler: Reconciler,
        models: Models,
        health: Health,
        stop: asyncio.Event,
    ) -> None:
        self._address = settings.service.ray_address
        self._gone_after_s = settings.ray_gone_after_s
        self._applications = applications
        self._reconciler = reconciler
        self._models = models
        self._health = health
        self._stop = stop
        self.exit_status = 0
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Serves Ray's side until cancelled; when Ray is lost it sets `exit_status` and stops the server."""
        try:
            await self._join()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._reconciler.run(self._serving))
        except* RayLost as lost:
            logger.error("Ray at %s is lost (%s); ending, to be started again", self._address, lost.exceptions[0])
            await self._health.set(False)
            self._models.close("Ray is lost; the service is starting again")
            self.exit_status = EXIT_RAY_LOST
            self._stop.set()

    async def _join(self) -> None:
        # Ray's own client gives up after a while, and not always gently.
        while True:
            if await _listens(self._address):
                break
            await asyncio.sleep(LOOK_FOR_RAY_EVERY_S)
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await to_serve_thread(self._applications.connect, self._address)
        except Exception as error:  # Ray's client raises half a dozen kinds here
            raise RayLost(f"joining failed: {error!r}") from error
        # Ray's library put handlers of its own over ours, which print a stack as if SIGTERM were a crash.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        logger.info("joined Ray at %s", self._address)

    async def _watch(self) -> None:
        """Raises `RayLost` when the head's port has been closed for a while: its client would only hang."""
        seen_at = time.monotonic()
        while time.monotonic() - seen_at < self._gone_after_s:
            if await _listens(self._address):
                seen_at = time.monotonic()
            await asyncio.sleep(LOOK_FOR_RAY_EVERY_S)
        raise RayLost(f"nothing listens there for {self._gone_after_s:.0f} s")

    async def _serving(self) -> None:
        await self._health.set(True)
        self.ready.set()


async def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")

    def connect() -> None:
        socket.create_connection((host, int(port)), LOOK_FOR_RAY_EVERY_S).close()

    try:
        async with asyncio.timeout(LOOK_FOR_RAY_EVERY_S):
            await asyncio.get_running_loop().run_in_executor(WATCHING, connect)
    except (OSError, TimeoutError):
        return False
    return True
