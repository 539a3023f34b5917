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

from inference_service.models import Models
from inference_service.ray_serve import ServeApplications
from inference_service.reconciler import RayLost, Reconciler
from shared.grpc_server import Health

logger = logging.getLogger(__name__)

EXIT_RAY_LOST = 75  # EX_TEMPFAIL of sysexits.h
LOOK_FOR_RAY_EVERY_S = 0.5
CONNECT_WITHIN_S = 60.0


class Front:
    def __init__(
        self,
        applications: ServeApplications,
        reconciler: Reconciler,
        models: Models,
        health: Health,
        stop: asyncio.Event,
    ) -> None:
        self._applications = applications
        self._reconciler = reconciler
        self._models = models
        self._health = health
        self._stop = stop
        self._tasks: set[asyncio.Task[None]] = set()
        self.exit_status = 0

    async def run(self, ray_address: str) -> None:
        """Serves Ray's side until cancelled; when Ray is lost it sets `exit_status` and stops the server."""
        try:
            await self._join(ray_address)
            await self._reconciler.run(self._serving)
        except RayLost as error:
            logger.error("Ray at %s is lost (%s); ending, to be started again", ray_address, error.__cause__)
            await self._health.set(False)
            self._models.close("Ray is lost; the service is starting again")
            self.exit_status = EXIT_RAY_LOST
            self._stop.set()

    async def _join(self, ray_address: str) -> None:
        await _reachable(ray_address)
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await asyncio.to_thread(self._applications.connect, ray_address)
        except Exception as error:  # Ray's client raises half a dozen kinds here
            raise RayLost from error
        # Ray's library put handlers of its own over ours, which print a stack as if SIGTERM were a crash.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        logger.info("joined Ray at %s", ray_address)

    def _serving(self) -> None:
        self._tasks.add(asyncio.create_task(self._health.set(True)))


async def _reachable(address: str) -> None:
    """Waits until something listens there: Ray's own client gives up after a while, and not always gently."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(LOOK_FOR_RAY_EVERY_S)
            continue
        writer.close()
        await writer.wait_closed()
        return
