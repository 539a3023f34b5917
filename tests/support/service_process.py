"""A service as a process of its own, started, killed and stopped as an operator would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.settings import StoreSettings
from tests.support.ports import free_ports

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 240.0


def store_environ(store: StoreSettings) -> dict[str, str]:
    """The environment that names a store to a service."""
    return {
        "MILLRACE_STORE": store.url,
        "MILLRACE_S3_ENDPOINT": store.s3_endpoint,
        "MILLRACE_S3_ACCESS_KEY": store.s3_access_key,
        "MILLRACE_S3_SECRET_KEY": store.s3_secret_key,
        "MILLRACE_S3_REGION": store.s3_region,
    }


class ServiceProcess:
    """`python -m module` on a free loopback port; `address` is host:port, the same after a restart."""

    def __init__(self, module: str, environ: Mapping[str, str], log: Path) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.log = log
        self._module = module
        self._environ = {**os.environ, **environ, "MILLRACE_LISTEN": self.address}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, **variables: str) -> None:
        """Return once the health service says SERVING. This once, with further `variables` in its environment."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                env={**self._environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_serving():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._module} did not start:\n{self.log.read_text(errors='replace')}")
            time.sleep(0.05)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL: no process of ours gets to say goodbye."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _is_serving(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            try:
                check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
                answer = check(health_pb2.HealthCheckRequest(), timeout=10.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def running_service(module: str, environ: Mapping[str, str], log: Path) -> Iterator[ServiceProcess]:
    service = ServiceProcess(module, environ, log)
    try:
        service.start()
        yield service
    finally:
        if service.is_running():
            service.stop()
