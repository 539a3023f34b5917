"""Large requests beside small ones, over gRPC: the real server, dispatcher and batcher before a replica that sleeps.

Times are five times those of a ResNet-18's batches and of 200 ms, so that a busy machine's pauses weigh little; what is
asserted are shares of counts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from inference_service.domain.signature import Outputs, Rows
from tests.support.inference_server import Server, ask, deployment, served
from tests.support.simulated_serving import CAPACITY, COMPUTING_S, MAX_ROWS

SLOWER, DEADLINE_S = 5, 1.0
SMALL, SMALL_PER_S = 100, 20  # a tenth of the capacity
LARGE_ROWS = 512


class Sleeper:
    """Computes one batch after the other; remembers how many rows each had, and how long it should have taken them."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self.batches: list[int] = []
        self.busy_s = 0.0

    async def forward(self, rows: Rows) -> Outputs:
        computing_s = SLOWER * float(np.interp(len(rows), list(COMPUTING_S), list(COMPUTING_S.values())))
        async with self._free:
            self.batches.append(len(rows))
            self.busy_s += computing_s
            await asyncio.sleep(computing_s)
        logits = next(iter(rows.values.values())).astype(np.float32)
        return Outputs([logits, logits.argmax(axis=1)], input_s=0.0, infer_s=computing_s)


def test_small_requests_are_in_time_beside_large_ones_which_get_what_they_leave() -> None:
    statuses: Counter[str] = Counter()
    sleeper = Sleeper()

    async def scenario(server: Server) -> None:
        large = ask(*[1] * LARGE_ROWS)
        end = asyncio.Event()
        answered_rows = 0

        async def ask_small() -> None:
            try:
                await server.stub.ModelInfer(ask(1), timeout=DEADLINE_S)
                statuses["OK"] += 1
            except grpc.aio.AioRpcError as error:
                statuses[error.code().name] += 1

        async def ask_large() -> None:
            nonlocal answered_rows
            while not end.is_set():
                await server.stub.ModelInfer(large, timeout=60)
                answered_rows += LARGE_ROWS

        bulk = asyncio.create_task(ask_large())
        asking = []
        for _ in range(SMALL):  # whenever their time has come, answered or not
            asking.append(asyncio.create_task(ask_small()))
            await asyncio.sleep(1 / SMALL_PER_S)
        await asyncio.gather(*asking)
        end.set()
        await bulk
        assert statuses["OK"] >= 0.95 * SMALL, (statuses, sleeper.batches)
        left = CAPACITY / SLOWER * sleeper.busy_s - statuses["OK"]
        assert answered_rows >= 0.9 * left, (answered_rows, statuses, sleeper.batches)

    one = deployment()
    options: dict[str, Any] = {"max_rows": MAX_ROWS, "max_queued_rows": 4096, "max_in_flight": 2, "max_delay_s": 0.002}
    served(scenario, replace(one, spec=replace(one.spec, max_queued_rows=4096)), model=sleeper, **options)
