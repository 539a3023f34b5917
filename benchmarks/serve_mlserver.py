"""The peer MLServer: a separate environment from `mlserver.lock`, and a process that serves the same weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc as pb_grpc
from tests.support.ports import free_ports

HERE = Path(__file__).parent
LOCK = HERE / "mlserver.lock"
MODEL = "digits"
MAX_BATCH = 32
# The tried times that a batch waits for more requests.
BATCH_WAITS_S = (0.002, 0.02)
INSTALL_TIMEOUT_S, START_TIMEOUT_S, STOP_TIMEOUT_S = 900.0, 120.0, 20.0
HOST = "127.0.0.1"


def environment() -> Path:
    """Return the Python of MLServer's environment, which is created below MILLRACE_CACHE if necessary, one for each
    lock.
    """
    cache = Path(os.environ.get("MILLRACE_CACHE") or ".cache").absolute()
    folder = cache / f"mlserver-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True, timeout=INSTALL_TIMEOUT_S)
        sync = [uv, "pip", "sync", "-q", "--python", python, "--require-hashes", LOCK]
        subprocess.run([str(part) for part in sync], check=True, timeout=INSTALL_TIMEOUT_S)
        (folder / ".installed").touch()
    return python


@contextmanager
def running(weights: Path, threads: int, batch_wait_s: float) -> Iterator[str]:
    """Yield the gRPC address once the model answers."""
    python = environment()
    with tempfile.TemporaryDirectory(prefix="bench-mlserver-") as scratch:
        folder = Path(scratch)
        grpc_port, http_port, metrics_port = free_ports(3)
        _write_settings(folder, (grpc_port, http_port, metrics_port), batch_wait_s)
        environ = {**os.environ, "BENCH_WEIGHTS": str(weights), "BENCH_THREADS": str(threads)}
        log = folder / "mlserver.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, "-m", "mlserver.cli.main", "start", folder],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            address = f"{HOST}:{grpc_port}"
            _wait_until_ready(address, process, log)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _write_settings(folder: Path, ports: tuple[int, ...], batch_wait_s: float) -> None:
    # All unneeded features that cost time are off. The model stays in the server's own process, since a worker process
    # would only add a copy.
    grpc_port, http_port, metrics_port = ports
    server = {
        "debug": False,
        "host": HOST,
        "grpc_port": grpc_port,
        "http_port": http_port,
        "metrics_port": metrics_port,
        "metrics_endpoint": None,
        "gzip_enabled": False,
        "parallel_workers": 0,
    }
    model = {
        "name": MODEL,
        "implementation": "digits.Digits",
        "max_batch_size": MAX_BATCH,
        "max_batch_time": batch_wait_s,
    }
    shutil.copy(HERE / "mlserver_digits.py", folder / "digits.py")
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(json.dumps(model))


def _wait_until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        while True:
            try:
                if stub.ModelReady(pb.ModelReadyRequest(name=MODEL), timeout=1.0).ready:
                    return
            except grpc.RpcError:
                pass
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"MLServer did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.1)
