"""Whether the store can be used: asked before the service starts, and until it has answered once.

A store that cannot be used for good (no bucket, refused credentials, no put-if-absent) is a fault of the settings, and
the process ends. One that is full or silent is an outage: replicas that run need no store, so the service starts
without it, and serves what it knows.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from shared.errors import STORE_OUTAGES
from shared.settings import StoreSettings
from shared.storage import open_store, probe
from shared.storage.opening import ensure_bucket

logger = logging.getLogger(__name__)

# Longer than a healthy store takes; a silent one is given up by its client only after half a minute.
CHECKED_WITHIN_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class StoreCheck:
    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self.passed = False

    def begin(self) -> None:
        """Checks once, and returns after `CHECKED_WITHIN_S` seconds at the latest. Raises `StoreRefused`."""
        # Of its own, and not waited for at the end: the store may be silent for longer than that.
        thread = ThreadPoolExecutor(1, thread_name_prefix="store-check")
        try:
            thread.submit(self._check).result(CHECKED_WITHIN_S)
            self.passed = True
        except TimeoutError:
            self._warn(f"{self._settings.url} has not answered within {CHECKED_WITHIN_S:.0f} s")
        except STORE_OUTAGES as error:
            self._warn(error.message)
        finally:
            thread.shutdown(wait=False)

    async def finish(self) -> None:
        """Checks again and again, ever more seldom, until the store has answered. Raises `StoreRefused`."""
        pause_s = FIRST_PAUSE_S
        while not self.passed:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                await asyncio.to_thread(self._check)
            except STORE_OUTAGES as error:
                logger.debug("%s; checking again in %.0f s", error.message, pause_s)
                continue
            self.passed = True
            logger.info("%s answers and takes what is written", self._settings.url)

    def _check(self) -> None:
        ensure_bucket(self._settings)
        probe(open_store(self._settings))

    def _warn(self, why: str) -> None:
        logger.warning(
            "%s; starting all the same: what runs is served as far as it is known, and nothing can be changed until "
            "the store answers and has room",
            why,
        )
