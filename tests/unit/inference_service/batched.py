"""A batcher before models that tests control."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from inference_service.domain.batch_policy import BatchTimes, Limits
from inference_service.domain.signature import Outputs, Rows
from inference_service.domain.statistics import Statistics
from inference_service.serve.batcher import Batcher, Model
from shared.errors import MillraceError

# Rows that the model refuses begin here.
BAD = 1000


class Doubler:
    """A model of one number a row that works when it is told to; remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.given_up = 0
        self.may_work = asyncio.Event()
        self.error: MillraceError | None = None

    async def forward(self, rows: Rows) -> Outputs:
        self.sizes.append(len(rows))
        try:
            await self.may_work.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.error is not None:
            raise self.error
        values = rows.values["x"]
        refused = {int(place): f"{values[place]} is bad" for place in np.flatnonzero(values >= BAD)}
        return Outputs([values * 2, -values], refused)


class PiecesInTurn:
    """Each batch comes back when it is told to."""

    def __init__(self) -> None:
        self.done: list[asyncio.Event] = []

    async def forward(self, given: Rows) -> Outputs:
        self.done.append(asyncio.Event())
        await self.done[-1].wait()
        return Outputs([given.values["x"]])


def rows(*values: int, form: str = "raw") -> Rows:
    return Rows(form, {"x": np.array(values)})


def batcher(
    model: Model, times: BatchTimes | None = None, statistics: Statistics | None = None, **limits: Any
) -> Batcher:
    """One that knows nothing yet and counts for itself, unless the test says otherwise."""
    defaults: dict[str, Any] = {"max_rows": 4, "max_delay_s": 0.0, "max_queued_rows": 100, "max_in_flight": 1}
    return Batcher(model, Limits(**{**defaults, **limits}), times or BatchTimes(), statistics or Statistics())


def on_a_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(bounded())


async def settle() -> None:
    """Let everything run that can run without the model."""
    for _ in range(10):
        await asyncio.sleep(0)


async def sent(model: Doubler, batches: int) -> None:
    """Wait until the model has got this many batches, and check that no more follow at once."""
    async with asyncio.timeout(240):
        while len(model.sizes) < batches:  # noqa: ASYNC110 - a batch may be held for a moment by the clock
            await asyncio.sleep(0.001)
    await settle()
    assert len(model.sizes) == batches


def submit(one: Batcher, what: Rows, remaining_s: float | None = None) -> asyncio.Task[Any]:
    return asyncio.create_task(one.submit(what, remaining_s))


async def occupied(model: Model, **limits: Any) -> tuple[Batcher, asyncio.Task[Any]]:
    """A batcher whose model is at work on the number 1; what is asked next gathers behind that."""
    one = batcher(model, **limits)
    first = submit(one, rows(1))
    await settle()
    return one, first
