"""What copies for a shadow leave to others."""

from __future__ import annotations

import asyncio

import numpy as np

from inference_service.batcher import Batcher
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import Limits
from inference_service.domain.held_bytes import HeldBytes
from inference_service.domain.rows import Rows
from inference_service.domain.statistics import Statistics
from inference_service.shadowing import Shadowing
from tests.unit.inference_service.doubling import Doubler


def test_copies_for_a_shadow_leave_half_of_the_bytes_to_requests() -> None:
    async def scenario() -> None:
        held, statistics, doubler = HeldBytes(10), Statistics(), Doubler()
        limits = Limits(max_rows=4, max_delay_s=0, max_queued_rows=9, max_in_flight=1)
        real, shadow = (Batcher(doubler, limits, BatchTimes(), Statistics()) for _ in range(2))
        shadowing = Shadowing(held)

        def copy(size_bytes: int) -> None:
            shadowing.copy(Rows("raw", {"x": np.zeros(1)}, size_bytes=size_bytes), real, shadow, statistics)

        copy(6)
        assert statistics.shadowed == {"SHED": 1}
        copy(5)
        assert not held.would_leave_half(1)
        while "OK" not in statistics.shadowed:  # noqa: ASYNC110 - nobody waits for it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert held.would_leave_half(5)

    asyncio.run(asyncio.wait_for(scenario(), 10))
