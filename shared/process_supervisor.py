"""Work beside a service's server: a supervised child process, and periodic work.

The child is restarted with growing delays whenever it ends. Garbage collection, which removes objects that are no
longer needed, is periodic.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from shared.errors import STORE_OUTAGES

# --- Child process ---

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 5.0
# A child that lived this long was healthy: the next delay is the first one again.
WELL_AFTER_S = 30.0
STOP_TIMEOUT_S = 5.0
# A process that waits for an unresponsive disk dies only once the disk answers.
KILLED_TIMEOUT_S = 5.0


class ChildRefused(Exception):
    """The child ended with the status for a setup that cannot work."""


class WakeSignal:
    """Signal that wakes the supervised child before its next poll.

    Any thread may send it. A child that does not run misses it, and polls everything when it starts.
    """

    def __init__(self) -> None:
        self._child: Process | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._write)

    def aim_at(self, child: Process | None) -> None:
        self._loop, self._child = (asyncio.get_running_loop() if child else None), child

    def _write(self) -> None:
        if self._child is not None and self._child.stdin is not None and self._child.returncode is None:
            self._child.stdin.write(b"\n")


async def supervise(
    module: str,
    stop: asyncio.Event,
    wake: WakeSignal | None = None,
    *,
    arguments: Sequence[str] = (),
    stop_within_s: float = STOP_TIMEOUT_S,
    refusal: int | None = None,
    hangs: Callable[[int], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Run `python -m module` with `arguments` until `stop`, then end it, and kill it after `stop_within_s`.

    The child reads its standard input: a byte is a `wake`, and the end of input means that this process has ended.
    `hangs(pid)` returns once the child hangs; it is then killed and restarted.

    Raises `ChildRefused` if the first child ends with the status `refusal`, because another would, too. A restarted
    child may refuse only temporarily, and is tried again.
    """
    delay_s = FIRST_DELAY_S
    is_first = True
    while not stop.is_set():
        started = time.monotonic()
        child = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdin=PIPE)
        if wake is not None:
            wake.aim_at(child)
        ended = asyncio.create_task(child.wait())
        stopped = asyncio.create_task(stop.wait())
        hung = asyncio.create_task(_never() if hangs is None else hangs(child.pid))
        await asyncio.wait({ended, stopped, hung}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and not stop.is_set():
            logger.error("%s hangs: it is killed", " ".join((module, *arguments)))
            child.kill()
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        hung.cancel()
        if wake is not None:
            wake.aim_at(None)
        if stop.is_set():
            await _end(child, stop_within_s)
            ended.cancel()
            return
        if is_first and refusal is not None and child.returncode == refusal:
            raise ChildRefused(f"{module} ended with {refusal}")
        is_first = False
        if time.monotonic() - started > WELL_AFTER_S:
            delay_s = FIRST_DELAY_S
        logger.warning("%s ended with %s; again in %.1f s", module, child.returncode, delay_s)
        try:
            async with asyncio.timeout(delay_s):
                await stop.wait()
        except TimeoutError:
            delay_s = min(delay_s * 2, LONGEST_DELAY_S)


async def _never() -> None:
    await asyncio.Event().wait()


async def _end(child: Process, timeout_s: float) -> None:
    if child.returncode is not None:
        return
    child.terminate()
    if await _ends(child, timeout_s):
        return
    child.kill()
    if not await _ends(child, KILLED_TIMEOUT_S):
        logger.error("process %d was killed, and does not die: the kernel keeps it in a call; left behind", child.pid)


async def _ends(child: Process, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await child.wait()
    except TimeoutError:
        return False
    return True


# --- Periodic work ---


async def run_periodically(work: Callable[[], None], interval_s: float, stop: asyncio.Event) -> None:
    """Call `work`, in a thread, at once and then every `interval_s` seconds until `stop`. No failure ends it."""
    while not stop.is_set():
        try:
            await asyncio.to_thread(work)
        except STORE_OUTAGES as error:
            logger.warning("periodic work is put off: %s", error.message)
        except Exception:
            logger.exception("periodic work failed; it is tried again")
        try:
            async with asyncio.timeout(interval_s):
                await stop.wait()
        except TimeoutError:
            continue
