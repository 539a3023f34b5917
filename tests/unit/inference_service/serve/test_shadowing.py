"""What copies for a shadow leave to others."""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import pytest

from inference_service.domain.batch_policy import BatchTimes, Limits
from inference_service.domain.deployment import Shadow
from inference_service.domain.signature import Outputs, Rows
from inference_service.domain.statistics import Statistics
from inference_service.serve.batcher import Batcher
from inference_service.serve.infer import AT_ONCE, InFlightBytes, Shadowing
from shared.logging_and_tracing import JsonFormatter
from tests.support.deployment_server import weighed
from tests.support.grpc_kit import call_error
from tests.support.inference_server import Classifier, ask, attach, inference_server, until
from tests.unit.inference_service.doubling import Doubler


async def test_copies_for_a_shadow_leave_half_of_the_bytes_to_requests() -> None:
    async with asyncio.timeout(60):
        held, statistics, doubler = InFlightBytes(10), Statistics(), Doubler()
        limits = Limits(max_rows=4, max_delay_s=0, max_queued_rows=9, max_in_flight=1)
        real, shadow = (Batcher(doubler, limits, BatchTimes(), Statistics()) for _ in range(2))
        shadowing = Shadowing(held)

        def copy(size_bytes: int) -> None:
            shadowing.copy(Rows("raw", {"x": np.zeros(1)}, size_bytes=size_bytes), real, "2", shadow, statistics)

        copy(6)
        assert statistics.shadowed == {"SHED": 1}
        copy(5)
        assert not held.would_leave_half(1)
        while "OK" not in statistics.shadowed:  # noqa: ASYNC110 - nobody waits for it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert held.would_leave_half(5)


async def test_shadowing_never_sends_more_copies_than_allowed() -> None:
    async with asyncio.timeout(60):
        statistics, shadow = Statistics(), Classifier()
        limits = Limits(max_rows=1, max_delay_s=0, max_queued_rows=9, max_in_flight=AT_ONCE + 9)
        batchers = [Batcher(shadow, limits, BatchTimes(), Statistics()) for _ in range(2)]
        shadowing = Shadowing(InFlightBytes())

        def copy() -> None:
            shadowing.copy(Rows("raw", {"x": np.zeros((1, 1))}), batchers[0], "2", batchers[1], statistics)

        shadow.may_work.clear()
        for _ in range(AT_ONCE + 4):  # before any of them can wait for the model
            copy()
        assert statistics.shadowed == {"SHED": 4}
        await until(lambda: shadow.at_work > 0, "copies to be at work")
        shadow.may_work.set()
        await until(lambda: statistics.shadowed == {"SHED": 4, "OK": AT_ONCE}, "the copies to be answered")
        copy()
        await until(lambda: statistics.shadowed == {"SHED": 4, "OK": AT_ONCE + 1}, "another copy to be answered")


async def test_a_copy_that_fails_is_logged_as_the_shadow_s_own(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Classifier):
        async def forward(self, rows: Rows) -> Outputs:
            raise OSError(f"{len(rows)} rows")

    one = weighed("m", 100, 0, shadow=Shadow("2", 100))
    caplog.handler.setFormatter(JsonFormatter("inference"))

    async with inference_server(one) as server:
        attach(server.models, one, Broken(), "2")
        assert (await server.stub.ModelInfer(ask(1))).model_version == "1"
        await until(lambda: "a copy for a shadow failed" in caplog.text, "the copy to fail")

    (line,) = (json.loads(line) for line in caplog.text.splitlines() if "a copy for a shadow" in line)
    assert (line["model"], line["model_version"]) == ("m", "2")


async def test_a_request_that_is_refused_is_not_copied_to_the_shadow() -> None:
    one = weighed("m", 100, 0, shadow=Shadow("2", 100))

    async with inference_server(one) as server:
        attach(server.models, one, Classifier(), "2")
        copies = server.models.statistics(one, one.versions[1]).shadowed
        server.model.may_work.clear()
        running = server.stub.ModelInfer(ask(1), timeout=60)
        await until(lambda: copies.get("OK") == 1, "a copy of the one that is at work")
        queued = server.stub.ModelInfer(ask(*[2] * 100), timeout=60)
        await until(lambda: sum(copies.values()) == 2, "a copy of the one that waits")
        seen = dict(copies)
        refused = await call_error(server.stub.ModelInfer(ask(3), timeout=60))
        assert (refused.code, dict(copies)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, seen)
        server.model.may_work.set()
        await asyncio.gather(running, queued)
