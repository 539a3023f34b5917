"""The server's life: health, reflection, and a stop that lets calls finish."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc, resources_pb2
from shared.grpc_server import serve
from tests.support.grpc_kit import call_error, kit_server
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_server_that_is_ready_is_serving() -> None:
    async with kit_server() as kit:
        check = health_pb2_grpc.HealthStub(kit.channel).Check  # type: ignore[attr-defined]
        found = await check(health_pb2.HealthCheckRequest())
    assert found.status == SERVING


async def test_reflection_names_the_services_and_their_messages() -> None:
    async with kit_server() as kit:

        def ask() -> tuple[set[str], list[str]]:
            with grpc.insecure_channel(kit.address) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                file = database.FindFileContainingSymbol("millrace.data.v1.DataService")
                return set(database.get_services()), [service.name for service in file.service]

        services, in_file = await asyncio.to_thread(ask)

    assert services == {
        "millrace.data.v1.DataService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert in_file == ["DataService"]


def test_a_taken_port_is_an_error_and_not_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(RuntimeError, match=str(port)):
            asyncio.run(serve(f"127.0.0.1:{port}", lambda _: []))


async def test_stopping_answers_calls_under_way() -> None:
    begun, let_go = asyncio.Event(), asyncio.Event()

    async def unary(request: Any, _: Any) -> Any:
        begun.set()
        await let_go.wait()
        return resources_pb2.Dataset(name=request.name)

    async with kit_server(unary, grace_s=240.0) as kit:
        watched: Any = health_pb2_grpc.HealthStub(kit.channel).Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
        assert (await watched.read()).status == SERVING
        under_way = asyncio.ensure_future(kit.get("under-way"))
        await asyncio.wait_for(begun.wait(), 60)
        kit.stop.set()
        assert (await watched.read()).status == NOT_SERVING
        let_go.set()
        assert (await under_way).name == "under-way"
        watched.cancel()


async def test_stopping_cuts_off_calls_that_stay() -> None:
    begun = asyncio.Event()

    async def stays(_request: Any, _context: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    async with kit_server(stays, grace_s=0.1) as kit:
        call = asyncio.ensure_future(call_error(kit.get()))
        await asyncio.wait_for(begun.wait(), 60)
        kit.stop.set()
        assert (await call).code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_after_its_calls_with_status_0(ending: signal.Signals, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kit_server", address, str(tmp_path)],
            stdin=subprocess.DEVNULL,
            stderr=output,
        )
    try:
        with grpc.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch  # type: ignore[attr-defined]
            watched = watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=240)
            assert next(watched).status == SERVING
            data = data_service_pb2_grpc.DataServiceStub(channel)
            call = data.GetDataset.future(
                data_service_pb2.GetDatasetRequest(name="under-way"), metadata=(("x-request-id", "r1"),)
            )
            wait_until((tmp_path / "began").exists, "the call to begin")

            process.send_signal(ending)
            assert next(watched).status == NOT_SERVING
            (tmp_path / "go").touch()

            assert call.result(timeout=240).name == "under-way"
            watched.cancel()
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (access,) = [line for line in lines if "GetDataset OK" in line["message"]]
    assert (access["request_id"], access["method"]) == ("r1", "/millrace.data.v1.DataService/GetDataset")
    assert access["service"] == "kit"
    assert access["status"] == "OK"
    assert access["duration_ms"] > 0
