"""Large requests beside small ones, over gRPC: the real server, dispatcher and batcher before a model that the test
lets compute one batch after the other. What is asserted are numbers of batches and of rows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from inference_service.domain.signature import Outputs, Rows
from tests.support.inference_server import ask, deployment, inference_server, until
from tests.support.simulated_serving import MAX_ROWS

SMALL, SMALL_ONE = 30, 2
LARGE_ROWS = 512
IN_FLIGHT = 2


class Gated:
    """Computes a batch, the first that came of those that wait, when it is let to; remembers how many rows each had,
    and which batches had a small request's."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Event] = []
        self.batches: list[int] = []
        self.with_small: list[int] = []

    async def forward(self, rows: Rows) -> Outputs:
        first_numbers = next(iter(rows.values.values()))[:, 0]
        if SMALL_ONE in first_numbers:
            self.with_small.append(len(self.batches))
        self.batches.append(len(rows))
        may_end = asyncio.Event()
        self.waiting.append(may_end)
        await may_end.wait()
        logits = next(iter(rows.values.values())).astype(np.float32)
        return Outputs([logits, logits.argmax(axis=1)])

    async def compute_one(self) -> None:
        await until(lambda: bool(self.waiting), "a batch to come")
        self.waiting.pop(0).set()


async def test_small_requests_wait_for_few_batches_beside_large_ones_which_get_what_they_leave() -> None:
    gated = Gated()
    one = deployment()
    options: dict[str, Any] = {"max_rows": MAX_ROWS, "max_queued_rows": 4096, "max_in_flight": IN_FLIGHT}
    options["max_delay_s"] = 0.002
    async with inference_server(
        replace(one, spec=replace(one.spec, max_queued_rows=4096)), model=gated, **options
    ) as server:
        end = asyncio.Event()
        answered = 0

        def queued_rows() -> int:
            return sum(one.queued_rows for one in server.models.listed())

        def small_ones_that_came() -> int:
            return (sum(gated.batches) + queued_rows()) % LARGE_ROWS

        async def ask_large() -> None:
            nonlocal answered
            while not end.is_set():
                await server.stub.ModelInfer(ask(*[1] * LARGE_ROWS), timeout=240)
                answered += 1

        async def fill_slots_and_queue() -> None:
            """Return while all slots are taken and rows wait. Batches are computed as long as no rows wait: where the
            slots hold the last rows of both large requests, the next ones come only after their answers. Every second
            one is computed, too, in case that the batcher holds rows back until it sees a batch end."""
            polls = 0
            while len(gated.waiting) < IN_FLIGHT or queued_rows() == 0:
                await until(lambda: bool(gated.waiting), "a batch to come")
                polls += 1
                if queued_rows() == 0 or polls % 200 == 0:
                    await gated.compute_one()
                await asyncio.sleep(0.005)

        async def batches_before_a_small_one() -> int:
            """How many are begun between the coming of a small request and its own batch."""
            # While all slots are taken no rows are on their way from the queue to the model, so the count is exact.
            await fill_slots_and_queue()
            before = small_ones_that_came()
            small = asyncio.ensure_future(server.stub.ModelInfer(ask(SMALL_ONE), timeout=240))
            await until(lambda: small_ones_that_came() == before + 1, "the small request to come")
            begun = len(gated.batches)
            while not small.done():
                await gated.compute_one()
                await until(lambda: small.done() or bool(gated.waiting), "the next batch, or the answer")
            await small
            return gated.with_small[-1] - begun

        async def let_all_compute() -> None:
            while True:
                await gated.compute_one()

        bulk = [asyncio.create_task(ask_large()) for _ in range(2)]
        waited = [await batches_before_a_small_one() for _ in range(SMALL)]
        end.set()
        rest = asyncio.create_task(let_all_compute())
        await asyncio.gather(*bulk)
        rest.cancel()
        # In the order in which they came it would be up to 32.
        assert max(waited) <= 1, waited
        assert answered * LARGE_ROWS == sum(gated.batches) - SMALL
        assert sum(gated.batches) >= 0.9 * MAX_ROWS * len(gated.batches), gated.batches
