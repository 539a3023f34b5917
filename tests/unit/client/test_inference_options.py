"""What a request of the SDK may say beside its tensors, on the inference service's own servicer and batcher."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from inference_service.domain.deployment import HeaderRoute
from millrace_client import Millrace, connect, errors
from millrace_client.inference import Answer
from tests.support.deployment_server import weighed
from tests.support.inference_client import image, with_client
from tests.support.inference_server import Server, inference_server, until

CANARY = {"x-canary": "yes"}


def test_headers_lead_a_request_to_the_version_of_their_route() -> None:
    def scenario(_: Server, millrace: Millrace) -> None:
        infer = millrace.inference
        assert infer.infer("m", image(1)).version == "1"
        assert infer.infer("m", image(1), headers=CANARY).version == "2"
        many = list(infer.infer_many("m", [image(1), image(2)], headers=CANARY))
        assert [one.version for one in many] == ["2", "2"]
        streamed = list(infer.infer_stream("m", [image(1), image(2)], headers=CANARY))
        assert [one.version for one in streamed if isinstance(one, Answer)] == ["2", "2"]

    one = weighed("m", 100, 0, routes=(HeaderRoute("x-canary", "yes", "2"),))
    with_client(scenario, one)


async def test_an_urgent_request_goes_before_those_that_wait() -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        with connect(inference=server.kit.address) as millrace, ThreadPoolExecutor(3) as pool:
            ask = millrace.inference.infer
            calls = [pool.submit(ask, "m", image(1))]
            await until(lambda: server.model.at_work == 1, "the model is at work")
            for place, priority in ((2, 10), (3, 1)):
                calls.append(pool.submit(ask, "m", image(place), priority=priority))
                await until(lambda: waiting(server) == len(calls) - 1, "the request waits")
            server.model.may_work.set()
            await asyncio.gather(*map(asyncio.wrap_future, calls))
        assert server.model.batches == [[1], [3, 2]]


def waiting(server: Server) -> int:
    return sum(one.queued_rows for one in server.models.listed())


def test_the_server_itself_ends_a_request_after_the_time_that_it_is_given() -> None:
    def scenario(server: Server, millrace: Millrace) -> None:
        server.model.may_work.clear()
        with pytest.raises(errors.DeadlineExceeded, match=r"within the 0\.05 s that the request has"):
            millrace.inference.infer("m", image(1), server_timeout_s=0.05)

    with_client(scenario)


def test_a_priority_that_is_none_is_refused_by_its_field() -> None:
    def scenario(_: Server, millrace: Millrace) -> None:
        with pytest.raises(errors.InvalidArgument) as raised:
            millrace.inference.infer("m", image(1), priority=-1)
        assert [one.field for one in raised.value.field_violations] == ["parameters.priority"]

    with_client(scenario)
