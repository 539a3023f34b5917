"""Which requests that were not answered are held against the version that had them, as a rollout's limits count."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from inference_service.domain.signature import Outputs, Rows
from inference_service.serve.infer import InFlightBytes
from tests.support.grpc_kit import call_error
from tests.support.inference_server import Classifier, Server, ask, attach, deployment, inference_server, until

MICROSECOND = {"timeout": {"int64_param": 1}}
TENTH = {"timeout": {"int64_param": 100_000}}


class Slow(Classifier):
    """Takes 0.3 s for a batch."""

    async def forward(self, rows: Rows) -> Outputs:
        await asyncio.sleep(0.3)
        return await super().forward(rows)


class Behind(Classifier):
    """Computes for a millisecond, after batches of others that take 0.3 s."""

    async def forward(self, rows: Rows) -> Outputs:
        await asyncio.sleep(0.3)
        return replace(await super().forward(rows), input_s=0.0, infer_s=0.001)


def faults(server: Server, number: str = "1") -> tuple[int, int]:
    """Faults, and requests, that are held against that version."""
    one = next(one for one in server.models.listed() if one.version.number == number)
    seen = one.statistics.recent.seen(time.time(), 60.0)
    return seen.faults, seen.requests


async def test_a_request_that_gives_the_model_less_time_than_it_needs_is_no_fault_of_it() -> None:
    async with inference_server() as server:
        await server.stub.ModelInfer(ask(1))
        for _ in range(5):
            refused = await call_error(server.stub.ModelInfer(ask(1, parameters=MICROSECOND)))
            assert refused.code.name == "DEADLINE_EXCEEDED"
        assert faults(server) == (0, 1)


@pytest.mark.timed
async def test_a_version_that_is_too_slow_for_what_another_answers_in_time_is_at_fault() -> None:
    async with inference_server() as server:
        two = deployment(versions=(*deployment().versions, replace(deployment().versions[0], number="2")))
        server.models.put(two)
        attach(server.models, two, Slow(), "2")
        for number in ("1", "2"):
            await server.stub.ModelInfer(ask(1, model_version=number))
        refused = await call_error(server.stub.ModelInfer(ask(1, model_version="2", parameters=TENTH)))
        assert refused.code.name == "DEADLINE_EXCEEDED"
        assert faults(server, "2") == (1, 2)


@pytest.mark.timed
async def test_a_version_that_is_late_because_batches_wait_for_each_other_is_at_fault() -> None:
    async with inference_server() as server:
        attach(server.models, deployment(), Behind())
        await server.stub.ModelInfer(ask(1))
        refused = await call_error(server.stub.ModelInfer(ask(1, parameters=TENTH)))
        assert refused.code.name == "DEADLINE_EXCEEDED"
        assert faults(server) == (1, 2)


async def test_a_request_that_finds_the_memory_full_of_others_is_no_fault_of_its_version() -> None:
    async with inference_server(held=InFlightBytes(6)) as server:
        server.model.may_work.clear()
        first = asyncio.ensure_future(server.stub.ModelInfer(ask(1)))
        await until(lambda: server.model.at_work == 1, "the first to be at work")
        refused = await call_error(server.stub.ModelInfer(ask(1)))
        assert refused.code.name == "RESOURCE_EXHAUSTED"
        server.model.may_work.set()
        await first
        assert faults(server) == (0, 1)
