"""A server with a token answers calls that bring it, and health checks; all others end before anything is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace.data.v1 import data_service_pb2, resources_pb2
from shared.grpc_server import BearerToken, LoadShedder, server
from shared.grpc_server.interceptor import METHOD
from tests.support.grpc_kit import (
    ECHO,
    GET_DATASET,
    READ_VERSION,
    CallError,
    Kit,
    call_error,
    everything,
    kit_server,
    with_kit,
)
from tests.support.inference_server import until

TOKEN = "a-token-of-the-tests"
RIGHT = (("authorization", f"Bearer {TOKEN}"),)
REQUEST = data_service_pb2.GetDatasetRequest(name="n")
UNKNOWN = "/millrace.data.v1.DataService/Nothing"
REFLECTION = reflection_pb2.ServerReflectionRequest(list_services="")


async def calls_of_all_kinds(kit: Kit, metadata: Any, *, writes: bool = True) -> dict[str, Any]:
    """What becomes of a call of each kind: its answer or its error.

    Streams that are refused must not be written to: where the server ends one first, gRPC's client in asyncio may say
    INTERNAL instead of the server's status.
    """
    echoes = kit.raw.stream_stream(
        ECHO, data_service_pb2.GetDatasetRequest.SerializeToString, resources_pb2.Dataset.FromString
    )
    reflected: Any = reflection_pb2_grpc.ServerReflectionStub(kit.raw)
    return {
        "unary": await _outcome(kit.get(metadata=metadata)),
        "server stream": await _outcome(everything(kit.read(metadata=metadata))),
        "bidirectional stream": await _outcome(
            _first_answer(echoes(metadata=metadata, timeout=60), REQUEST if writes else None)
        ),
        "unknown method": await _outcome(kit.raw.unary_unary(UNKNOWN)(b"", metadata=metadata)),
        "reflection": await _outcome(
            _first_answer(reflected.ServerReflectionInfo(metadata=metadata, timeout=60), REFLECTION if writes else None)
        ),
    }


async def _first_answer(call: Any, request: Any) -> Any:
    if request is not None:
        await call.write(request)
        await call.done_writing()
    return await call.read()


async def _outcome(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return await call_error(_raised(error))


async def _raised(error: Exception) -> None:
    raise error


def test_calls_of_all_kinds_pass_with_the_token() -> None:
    answers = with_kit(lambda kit: calls_of_all_kinds(kit, RIGHT), token=BearerToken(TOKEN))

    assert answers["unary"].name == "n"
    assert len(answers["server stream"]) == 3
    assert answers["bidirectional stream"].name == "n"
    assert answers["unknown method"].code is grpc.StatusCode.UNIMPLEMENTED
    listed = answers["reflection"].list_services_response.service
    assert "millrace.data.v1.DataService" in [one.name for one in listed]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "TOKEN_REQUIRED"),
        ((("authorization", "Bearer another-token-of-tests"),), "TOKEN_INVALID"),
        ((("authorization", f"Bearer {TOKEN}x"),), "TOKEN_INVALID"),
        ((("authorization", f"Bearer {TOKEN[:-1]}"),), "TOKEN_INVALID"),
        ((("authorization", "Bearer "),), "TOKEN_INVALID"),
        ((("authorization", TOKEN),), "TOKEN_INVALID"),
        ((("authorization", f"Basic {TOKEN}"),), "TOKEN_INVALID"),
        ((("authorization-bin", f"Bearer {TOKEN}".encode()),), "TOKEN_REQUIRED"),
    ],
)
def test_calls_of_all_kinds_are_refused_without_it(metadata: Any, reason: str) -> None:
    touched: list[str] = []

    async def unary(request: Any, _: Any) -> resources_pb2.Dataset:
        touched.append("unary")
        return resources_pb2.Dataset(name=request.name)

    async def stream(_: Any, __: Any) -> AsyncIterator[data_service_pb2.ReadVersionResponse]:
        touched.append("stream")
        yield data_service_pb2.ReadVersionResponse()

    answers = with_kit(
        lambda kit: calls_of_all_kinds(kit, metadata, writes=False), unary, stream, token=BearerToken(TOKEN)
    )

    assert touched == []
    for kind, answer in answers.items():
        assert isinstance(answer, CallError), f"{kind}: {answer}"
        assert answer.code is grpc.StatusCode.UNAUTHENTICATED, kind
        assert (answer.info.reason, answer.info.domain) == (reason, "millrace"), kind
        assert dict(answer.info.metadata) == {"header": "authorization", "scheme": "Bearer"}
        assert "authorization: Bearer TOKEN" in answer.message
        assert answer.trailers["x-request-id"]
        assert TOKEN not in str(answer)


@pytest.mark.parametrize("value", [f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_the_scheme_may_be_written_in_any_case(value: str) -> None:
    answer = with_kit(lambda kit: kit.get(metadata=(("authorization", value),)), token=BearerToken(TOKEN))

    assert answer.name == "n"


async def test_health_needs_no_token() -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with kit_server(token=BearerToken(TOKEN)) as kit:
        health: Any = health_pb2_grpc.HealthStub(kit.channel)
        found = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        watching = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        watched = await watching.read()
        watching.cancel()
        results = found.status, watched.status
    assert results == (serving, serving)


def test_a_server_without_a_token_ignores_the_header() -> None:
    answers = with_kit(lambda kit: calls_of_all_kinds(kit, (("authorization", "Bearer whatever"),)))

    assert answers["unary"].name == "n"
    assert len(answers["server stream"]) == 3


async def test_a_call_without_the_token_is_refused_unread_and_takes_no_place_of_another() -> None:
    held, under_way = asyncio.Event(), asyncio.Event()

    async def waiting(request: Any, _: Any) -> resources_pb2.Dataset:
        under_way.set()
        await held.wait()
        return resources_pb2.Dataset(name=request.name)

    async with kit_server(waiting, max_calls=1, token=BearerToken(TOKEN)) as kit:
        taken = asyncio.ensure_future(kit.get(metadata=RIGHT, timeout=60))
        await asyncio.wait_for(under_way.wait(), 60)
        # Of neither is there a message yet, so nobody can have read one.
        unread = await call_error(kit.raw.stream_unary(GET_DATASET)(timeout=60))
        streamed = await call_error(kit.raw.stream_stream(READ_VERSION)(timeout=60).read())
        over = await call_error(kit.get(metadata=RIGHT, timeout=60))
        held.set()
        await taken

        assert (unread.info.reason, streamed.info.reason) == ("TOKEN_REQUIRED", "TOKEN_REQUIRED")
        assert over.info.reason == "TOO_MANY_CALLS", "the limit holds for calls with the token"


async def test_refused_calls_are_logged_without_what_they_brought(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOG_EVERY_S", 3600.0)
    wrong = "wrong-but-nearly-right"

    with caplog.at_level(logging.DEBUG):
        async with kit_server(token=BearerToken(TOKEN)) as kit:
            for _ in range(3):
                await call_error(kit.get(metadata=(("authorization", f"Bearer {wrong}"),)))
            await kit.get(metadata=RIGHT)

    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "brought no valid token" in line]) == 1, "once in a while"
    assert any("127.0.0.1" in line for line in lines if "brought no valid token" in line)
    assert not any(wrong in line or TOKEN in line for line in lines)


class Counting(LoadShedder):
    """Before GetDataset; counts its own probes that come in."""

    def __init__(self) -> None:
        super().__init__([GET_DATASET], lambda: None)
        self.came_in = 0

    async def _opened(self, request: bytes, context: Any) -> bytes:
        self.came_in += 1
        return await super()._opened(request, context)


async def test_a_doors_own_probe_brings_the_token_and_nobody_elses_comes_in_without() -> None:
    load_shedder = Counting()

    async with kit_server(token=BearerToken(TOKEN), load_shedder=load_shedder) as kit:
        await kit.get(metadata=RIGHT, timeout=60)
        await until(lambda: load_shedder.came_in > 0, "the door's own probe")
        probe = await call_error(kit.raw.unary_unary(METHOD)(b"", timeout=60))
        assert probe.code is grpc.StatusCode.UNAUTHENTICATED
