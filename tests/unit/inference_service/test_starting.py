"""The service's own process, before Ray is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.ports import free_ports

# The store as it is when its disk is full: it can be read, and takes nothing.
WITH_A_FULL_STORE = """
from shared.errors import ResourceExhausted
from shared.storage import ObjectStore

def full(*_):
    raise ResourceExhausted("the object store is full", reason="STORE_FULL")

ObjectStore.put = ObjectStore.put_if_absent = full
from inference_service.__main__ import main
main()
"""


# One that has not answered yet when the process is told to stop.
WITH_UNRESPONSIVE_STORE = """
import threading
from inference_service import frontend_tasks as store_check

store_check.CHECKED_TIMEOUT_S = 0.1
store_check.probe = lambda _: threading.Event().wait()
from inference_service.__main__ import main
main()
"""


def _ended_once_it_answers(
    tmp_path: Path, program: str, **variables: str
) -> tuple[health_pb2.HealthCheckResponse, int, bytes]:
    """What it says of its health, its exit status, and its log."""
    port, ray_port = free_ports(2)
    environ = {
        **os.environ,
        "MILLRACE_STORE": tmp_path.as_uri(),
        "MILLRACE_LISTEN": f"127.0.0.1:{port}",
        "RAY_ADDRESS": f"127.0.0.1:{ray_port}",
        **variables,
    }
    with subprocess.Popen([sys.executable, "-c", program], env=environ, stderr=subprocess.PIPE) as process:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                found = stub.Check(health_pb2.HealthCheckRequest(), timeout=240, wait_for_ready=True)
            process.terminate()
            _, logged = process.communicate(timeout=240)
        finally:
            process.kill()
    return found, process.returncode, logged


def test_a_frontend_starts_while_the_store_is_full_and_says_that_it_does_not_serve_yet(tmp_path: Path) -> None:
    found, status, logged = _ended_once_it_answers(tmp_path, WITH_A_FULL_STORE)

    assert found.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert status == 0
    assert b"the object store is full; starting all the same" in logged


def test_the_parent_of_several_frontends_ends_while_the_store_is_silent(tmp_path: Path) -> None:
    found, status, logged = _ended_once_it_answers(tmp_path, WITH_UNRESPONSIVE_STORE, MILLRACE_FRONTENDS="2")

    assert found.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert status == 0
    assert b"starting all the same" in logged
