"""A stack of light processes in place of Ray and the services, for tests of the supervisor."""

from __future__ import annotations

import sys
from pathlib import Path

from millrace_client.stack.supervisor import PlannedProcess, StackPlan
from tests.support.ports import free_ports

NAMES = ("ray", "data", "train", "inference")

LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    listener.accept()[0].close()
"""
SERVE = """
import signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port("127.0.0.1:" + sys.argv[1])
server.start()
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
stop.wait()
server.stop(1).wait()
print("ended in good order", flush=True)
"""
REFUSE = "import sys; sys.exit('MILLRACE_STORE: use file:///folder')"
CODE = {"ray": LISTEN, "data": SERVE, "train": SERVE, "inference": SERVE}


def fake_plan(home: Path, *, failing: str = "") -> StackPlan:
    """Ray is a bare listener, each service answers its health; the one named `failing` ends at once."""
    ports = free_ports(len(NAMES))
    parts = tuple(
        PlannedProcess(
            name=name,
            command=(
                sys.executable,
                "-c",
                REFUSE if name == failing else LISTEN if name == "ray" else SERVE,
                str(port),
            ),
            environment={},
            address=f"127.0.0.1:{port}",
            log=home / "logs" / f"{name}.log",
            grace_s=5.0,
        )
        for name, port in zip(NAMES, ports, strict=True)
    )
    ray_folder = home / "ray"
    ray_folder.mkdir(parents=True)
    return StackPlan(
        home=home,
        parts=parts,
        addresses={part.name: part.address for part in parts[1:]},
        store="file:///nowhere",
        ray_address=parts[0].address,
        dashboard="",
        ray_folder=str(ray_folder),
        import_roots=(),
    )
