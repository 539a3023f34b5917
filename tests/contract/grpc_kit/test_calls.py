"""What the kit adds to every call: identity, deadlines, limits, and care for malformed bytes and lost clients."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client.calls import RETRIES
from shared.errors import ResourceExhausted, Unavailable
from shared.grpc_server import LoadShedder, message_bytes
from shared.grpc_server.interceptor import request_id_of
from shared.names import MAX_MESSAGE_BYTES
from tests.support.garbage import uncollected
from tests.support.grpc_kit import (
    ECHO,
    GET_DATASET,
    READ_VERSION,
    Kit,
    call_error,
    everything,
    kit_server,
    raising,
    raising_after,
    running,
    with_kit,
)

# A field of wire type 7, which there is not; and a length that the bytes do not have.
MALFORMED = [b"\xff\xff\xff\xff", b"\x0a\x20short", b"\x0a\x02\xff\xfe"]


@pytest.mark.parametrize("data", MALFORMED, ids=["wire-type", "truncated", "not-utf8"])
async def test_malformed_bytes_are_an_invalid_argument(data: bytes) -> None:
    async with kit_server() as kit:
        found = [
            await call_error(kit.raw.unary_unary(GET_DATASET)(data)),
            await call_error(everything(kit.raw.unary_stream(READ_VERSION)(data))),
        ]
    for answer in found:
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert answer.info.reason == "MALFORMED_MESSAGE"
        assert "x-request-id" in answer.trailers


async def test_malformed_bytes_in_the_middle_of_a_stream_are_an_invalid_argument() -> None:
    async with kit_server() as kit:

        async def requests() -> AsyncIterator[bytes]:
            yield data_service_pb2.GetDatasetRequest(name="fine").SerializeToString()
            yield MALFORMED[0]

        call = kit.raw.stream_stream(ECHO)(requests())
        assert resources_pb2.Dataset.FromString(await call.read()).name == "fine"
        answer = await call_error(call.read())

    assert (answer.code, answer.info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


async def test_a_stream_of_requests_passes_through() -> None:
    async with kit_server() as kit:
        requests = [data_service_pb2.GetDatasetRequest(name=str(n)).SerializeToString() for n in range(5)]

        async def all_of_them() -> AsyncIterator[bytes]:
            for request in requests:
                yield request

        found = await everything(kit.raw.stream_stream(ECHO)(all_of_them()))
    answers = [resources_pb2.Dataset.FromString(data).name for data in found]

    assert answers == ["0", "1", "2", "3", "4"]


async def _request_ids(kit: Kit, given: str | None) -> list[str]:
    metadata = (("x-request-id", given),) if given is not None else ()
    unary = kit.data.GetDataset(data_service_pb2.GetDatasetRequest(), metadata=metadata)
    stream = kit.read(metadata=metadata)
    await unary
    await everything(stream)
    return [str(dict(await call.trailing_metadata())["x-request-id"]) for call in (unary, stream)]


async def test_a_request_id_comes_back_in_the_trailers() -> None:
    async with kit_server() as kit:
        found = await _request_ids(kit, "client-7.A_b")
    assert found == ["client-7.A_b"] * 2


@pytest.mark.parametrize(
    "given", [None, "", "x" * 65, "a b", "a;b", 'a"b', "x" * 3000], ids=lambda given: repr(given)[:9]
)
def test_a_missing_or_hostile_request_id_is_replaced(given: str | None) -> None:
    async def scenario(kit: Kit) -> list[str]:
        return await _request_ids(kit, given)

    for made in with_kit(scenario):
        assert re.fullmatch(r"[0-9a-f]{32}", made)


def test_a_request_id_with_line_breaks_never_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    # Python's own client refuses to send this; other clients may not: so the function itself.
    for given in ("a\nb", "a\r\nforged: line", "ok\n", b"bytes", "x" * 10_000):
        assert re.fullmatch(r"[0-9a-f]{32}", request_id_of(given))
    assert "forged" not in caplog.text


async def test_failed_calls_have_a_request_id_too() -> None:
    for error in (KeyError("odd"), Exception("odd")):
        async with kit_server(unary=raising(error), stream=raising_after(1, error)) as kit:
            metadata = (("x-request-id", "mine"),)
            found = [
                await call_error(kit.get(metadata=metadata)),
                await call_error(everything(kit.read(metadata=metadata))),
            ]
        for answer in found:
            assert answer.trailers["x-request-id"] == "mine"


async def test_every_call_is_logged_with_its_outcome(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shared.grpc_server.interceptor"):
        async with kit_server() as kit:
            await kit.get()
            await call_error(kit.raw.unary_unary(GET_DATASET)(MALFORMED[0]))

    assert f"{GET_DATASET} OK" in caplog.text
    assert f"{GET_DATASET} INVALID_ARGUMENT" in caplog.text


async def _never(_request: Any, _context: Any) -> Any:
    await asyncio.Event().wait()


async def test_a_unary_call_without_a_deadline_gets_the_default_one() -> None:
    async with kit_server(unary=_never, default_deadline_s=0.2) as kit:
        answer = await call_error(kit.get())

    assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.2 s" in answer.message


async def test_a_callers_own_deadline_holds_instead_of_the_default() -> None:
    async def slow(request: Any, _: Any) -> resources_pb2.Dataset:
        await asyncio.sleep(0.4)
        return resources_pb2.Dataset(name=request.name)

    async with kit_server(unary=slow, default_deadline_s=0.2) as kit:
        answer = await kit.get(timeout=60)
        name, late = answer.name, await call_error(kit.get(timeout=0.1))

    assert name == "n"
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_work_for_a_caller_whose_deadline_passed_is_cancelled() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def never(_request: Any, _context: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with kit_server(unary=never) as kit:
        while not begun.is_set():  # on a busy machine a deadline may pass before the server has read the call
            await call_error(kit.get(timeout=0.1))
        await asyncio.wait_for(ended.wait(), 60)


async def test_a_message_over_the_limit_is_refused_and_one_below_it_is_not() -> None:
    async with kit_server() as kit:
        large = await kit.get("x" * (MAX_MESSAGE_BYTES - 1024))
        answer, length = await call_error(kit.get("x" * (MAX_MESSAGE_BYTES + 1))), len(large.name)

    assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert length == MAX_MESSAGE_BYTES - 1024


async def test_an_answer_over_the_limit_is_an_error_and_not_a_silence() -> None:
    async def huge(_request: Any, _context: Any) -> resources_pb2.Dataset:
        return resources_pb2.Dataset(name="x" * (MAX_MESSAGE_BYTES + 1))

    async with kit_server(unary=huge) as kit:
        found = await call_error(kit.get(timeout=60))
    assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_calls_at_once_keep_their_own_request_ids() -> None:
    async def slow(request: Any, _: Any) -> resources_pb2.Dataset:
        await asyncio.sleep(0.01)
        return resources_pb2.Dataset(name=request.name)

    async def scenario(kit: Kit) -> list[tuple[str, str, str]]:
        async def one(number: int) -> tuple[str, str, str]:
            call = kit.data.GetDataset(
                data_service_pb2.GetDatasetRequest(name=f"n{number}"), metadata=(("x-request-id", f"id{number}"),)
            )
            answer = await call
            return str(number), answer.name, str(dict(await call.trailing_metadata())["x-request-id"])

        return list(await asyncio.gather(*(one(number) for number in range(200))))

    for number, name, request_id in with_kit(scenario, unary=slow):
        assert (name, request_id) == (f"n{number}", f"id{number}")


def _tasks() -> set[str]:
    return {task.get_coro().__qualname__ for task in asyncio.all_tasks() if not task.done()}  # type: ignore[union-attr]


@pytest.mark.parametrize("sends", [False, True], ids=["waiting", "sending"])
async def test_a_client_that_cancels_its_stream_leaves_nothing_behind(
    sends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def endless(_request: Any, _context: Any) -> AsyncIterator[data_service_pb2.ReadVersionResponse]:
        try:
            began.set()
            while True:
                # Far more than the client reads, so the server waits for it in the middle of sending.
                yield data_service_pb2.ReadVersionResponse(arrow_ipc=b"x" * (1 << 20))
                if not sends:
                    await asyncio.Event().wait()
        finally:
            ended.set()

    with caplog.at_level(logging.WARNING):
        async with kit_server(stream=endless) as kit:
            before = _tasks()
            call = kit.read()
            await call.read()
            await began.wait()
            await asyncio.sleep(0.2)  # let the flow-control window fill
            call.cancel()
            await asyncio.wait_for(ended.wait(), 60)
            await kit.get()
            async with asyncio.timeout(60):
                while _tasks() - before:  # noqa: ASYNC110 - they are grpc's own
                    await asyncio.sleep(0.02)

    assert caplog.text == ""


async def test_a_call_without_a_deadline_gets_the_default_deadline() -> None:
    left_s: list[float | None] = []

    async def noting(request: Any, context: Any) -> resources_pb2.Dataset:
        left_s.append(context.time_remaining())
        assert dict(context.invocation_metadata())
        return resources_pb2.Dataset(name=request.name)

    async with kit_server(unary=noting, default_deadline_s=240.0) as kit:
        await kit.get()

    assert left_s[0] is not None
    assert 0 < left_s[0] <= 240


class Asked:
    """A message that can be told to be gone."""

    def __init__(self, data: bytes) -> None:
        self.data = data


async def test_a_stream_reports_the_size_of_each_message_and_keeps_none_that_was_dealt_with() -> None:
    messages: list[weakref.ref[Asked]] = []

    async def sizes(requests: AsyncIterator[Asked], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            assert len(request.data) == message_bytes()
            messages.append(weakref.ref(request))
            del request
            yield str(message_bytes()).encode()

    handlers: dict[str, Any] = {"Sizes": grpc.stream_stream_rpc_method_handler(sizes, Asked, None)}

    def register(server: aio.Server) -> list[str]:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Sizes", handlers),))
        return []

    async with running(register) as kit:
        stream = kit.raw.stream_stream("/test.Sizes/Sizes")()
        for size in (1, 1000, 10):
            await stream.write(b"x" * size)
            assert int(await stream.read()) == size
        async with asyncio.timeout(60):
            while any(one() is not None for one in messages):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert len(messages) == 3
        stream.cancel()


def test_the_request_of_a_refused_call_is_freed_without_a_garbage_collection() -> None:
    messages: list[weakref.ref[Asked]] = []

    async def refuse(request: Asked, _: Any) -> bytes:
        messages.append(weakref.ref(request))
        raise ResourceExhausted("full", reason="QUEUE_FULL")

    async def refuse_after_one(request: Asked, _: Any) -> AsyncIterator[bytes]:
        messages.append(weakref.ref(request))
        yield b"one"
        raise ResourceExhausted("full", reason="QUEUE_FULL")

    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(refuse, Asked, None),
        "Stream": grpc.unary_stream_rpc_method_handler(refuse_after_one, Asked, None),
    }

    def register(server: aio.Server) -> list[str]:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Refusing", handlers),))
        return []

    async def main(**options: Any) -> None:
        async with running(register, **options) as kit:
            for timeout_s in (None, 240.0):
                call = kit.raw.unary_unary("/test.Refusing/Unary")
                assert (await call_error(call(b"x", timeout=timeout_s))).info.reason == "QUEUE_FULL"
            assert (await call_error(everything(kit.raw.unary_stream("/test.Refusing/Stream")(b"x")))).message == "full"
            assert len(messages) == 3
            async with asyncio.timeout(60):
                while any(one() is not None for one in messages):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)

    with uncollected():
        asyncio.run(main())
        messages.clear()
        asyncio.run(main(load_shedder=LoadShedder(["/test.Refusing/Unary"], lambda: None)))


@pytest.mark.parametrize("load_shedder", [False, True])
async def test_a_call_refused_as_unavailable_is_tried_again_by_clients_that_grpc_retries_for(
    load_shedder: bool,
) -> None:
    tries: list[bytes] = []

    async def busy_twice(request: bytes, _: Any) -> bytes:
        tries.append(request)
        if len(tries) < 3:
            raise Unavailable("starting", reason="STARTING")
        return b"answer"

    def register(server: aio.Server) -> list[str]:
        handlers: dict[str, Any] = {"Unary": grpc.unary_unary_rpc_method_handler(busy_twice)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Busy", handlers),))
        return []

    options: dict[str, Any] = {"load_shedder": LoadShedder(["/test.Busy/Unary"], lambda: None)} if load_shedder else {}
    of_all = {"methodConfig": [{**RETRIES["methodConfig"][0], "name": [{}]}]}
    async with (
        running(register, **options) as kit,
        aio.insecure_channel(kit.address, options=[("grpc.service_config", json.dumps(of_all))]) as channel,
    ):
        call: Any = channel.unary_unary("/test.Busy/Unary")
        assert await call(b"x", timeout=60) == b"answer"

    assert tries == [b"x"] * 3
