"""A server works on so many calls at a time: the others hear when to come again, and health is told all the same."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.data.v1 import data_service_pb2, resources_pb2
from shared.grpc_server import server
from tests.support.grpc_kit import GET_DATASET, READ_VERSION, Kit, call_error, kit_server
from tests.support.inference_server import until

REQUEST_MESSAGE = data_service_pb2.GetDatasetRequest(name="n")
REQUEST = REQUEST_MESSAGE.SerializeToString()


class Held:
    """Calls that wait until they may go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.under_way = 0

    async def answer(self, request: Any, _: Any) -> resources_pb2.Dataset:
        self.under_way += 1
        try:
            await self.go_on.wait()
        finally:
            self.under_way -= 1
        return resources_pb2.Dataset(name=request.name)


def _health(kit: Kit) -> Any:
    return health_pb2_grpc.HealthStub(kit.channel)


async def test_health_is_reported_while_as_many_calls_wait_as_may() -> None:
    held = Held()

    async with kit_server(held.answer) as kit:
        calls = [asyncio.ensure_future(kit.get(timeout=480)) for _ in range(server.MAX_CALLS)]
        await until(lambda: held.under_way == server.MAX_CALLS, "all calls to wait", 240)

        found = await _health(kit).Check(health_pb2.HealthCheckRequest(), timeout=240)
        watching = _health(kit).Watch(health_pb2.HealthCheckRequest())
        watched = await watching.read()
        watching.cancel()
        held.go_on.set()
        answers = await asyncio.gather(*calls)

        assert found.status == watched.status == health_pb2.HealthCheckResponse.SERVING
        assert len(answers) == server.MAX_CALLS


async def test_a_call_above_the_limit_is_refused_unread_and_hears_when_to_come_again() -> None:
    held = Held()

    async with kit_server(held.answer, max_calls=2) as kit:
        calls = [asyncio.ensure_future(kit.get(timeout=240)) for _ in range(2)]
        await until(lambda: held.under_way == 2, "both calls to wait")

        # Of neither is there a message yet, so nobody can have read one.
        unread = kit.raw.stream_unary(GET_DATASET)(timeout=240)
        streamed = kit.raw.stream_stream(READ_VERSION)(timeout=240)
        for refused in (await call_error(unread), await call_error(streamed.read())):
            assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (refused.info.reason, refused.info.metadata["max_calls"]) == ("TOO_MANY_CALLS", "2")
            assert refused.retry_after_s == server.RETRY_AFTER_S
            assert refused.trailers["x-request-id"]

        held.go_on.set()
        await asyncio.gather(*calls)
        assert (await kit.get("after", timeout=240)).name == "after"


async def test_a_call_that_its_client_gives_up_before_its_message_was_sent_makes_room() -> None:
    async with kit_server(max_calls=1) as kit:
        for _ in range(5):
            call = kit.raw.stream_unary(GET_DATASET)(timeout=240)
            await call.wait_for_connection()
            call.cancel()
            # The server hears of it some time later, and refuses until then.
            while await kit.data.GetDataset(REQUEST_MESSAGE, timeout=240).code() is not grpc.StatusCode.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_watchers_of_health_leave_room_for_checks(monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "MAX_HEALTH_CALLS", 2)

    async with kit_server() as kit:
        watching = [_health(kit).Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for one in watching:
            await one.read()

        refused = await call_error(_health(kit).Watch(health_pb2.HealthCheckRequest()).read())
        found = await _health(kit).Check(health_pb2.HealthCheckRequest(), timeout=240)

        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.retry_after_s
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        for one in watching:
            one.cancel()


async def test_a_burst_of_patient_calls_is_answered_or_hears_when_to_come_again() -> None:
    """They come while the server's event loop has something else to do, so that they wait in gRPC's core."""
    outcomes: Counter[str] = Counter()
    calls = 4000

    def count(sent: list[Any]) -> None:
        for one in sent:
            try:
                one.result()
                outcomes["OK"] += 1
            except grpc.RpcError as error:
                has_details = "grpc-status-details-bin" in dict(cast(Any, error).trailing_metadata() or ())
                outcomes[f"{error.code().name}{' with details' if has_details else ''}"] += 1

    async with kit_server() as kit:
        with grpc.insecure_channel(kit.address, options=[("grpc.enable_retries", 0)]) as channel:
            await asyncio.to_thread(grpc.channel_ready_future(channel).result, 240)
            get: Any = channel.unary_unary(GET_DATASET)
            sent: list[Any] = []

            def send() -> None:
                sent.extend([get.future(REQUEST, timeout=480) for _ in range(calls)])

            sending = threading.Thread(target=send)
            sending.start()
            sending.join()  # on the event loop, on purpose
            await asyncio.to_thread(count, sent)

    assert outcomes["OK"] + outcomes["RESOURCE_EXHAUSTED with details"] == calls, outcomes
    assert outcomes["OK"] >= server.MAX_CALLS / 2, outcomes
