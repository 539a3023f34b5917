"""Looking now and then for what nobody needs any more, beside the server of a service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.errors import STORE_OUTAGES

logger = logging.getLogger(__name__)


async def sweep_periodically(sweep: Callable[[], None], interval_s: float, stop: asyncio.Event) -> None:
    """Calls `sweep`, in a thread, at once and then every `interval_s` seconds until `stop`. No failure ends it."""
    while not stop.is_set():
        try:
            await asyncio.to_thread(sweep)
        except STORE_OUTAGES as error:
            logger.warning("the sweep is put off: %s", error.message)
        except Exception:
            logger.exception("the sweep failed; the next one tries again")
        try:
            async with asyncio.timeout(interval_s):
                await stop.wait()
        except TimeoutError:
            continue
