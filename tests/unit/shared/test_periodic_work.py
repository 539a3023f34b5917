"""Periodic work goes on, whatever happens to one of its runs."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import Internal, Unavailable
from shared.process_supervisor import run_periodically


@pytest.mark.parametrize("error", [Unavailable("no answer"), Internal("a fault"), RuntimeError("odd")], ids=repr)
def test_periodic_work_that_fails_is_tried_again(error: Exception) -> None:
    async def main() -> int:
        stop, passes = asyncio.Event(), 0
        loop = asyncio.get_running_loop()

        def sweep() -> None:
            nonlocal passes
            passes += 1
            if passes == 2:
                loop.call_soon_threadsafe(stop.set)
            raise error

        await asyncio.wait_for(run_periodically(sweep, 0.0, stop), 60)
        return passes

    assert asyncio.run(main()) >= 2
