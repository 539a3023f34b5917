"""`python -m tests.support.restarting_server host:port folder`: answers every unary call with an empty message.

It writes what it receives to `folder`/calls before it answers, and answers none while there is `folder`/hold.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from tests.support.ports import free_ports
from tests.support.waiting import wait_until


class _Answering(grpc.GenericRpcHandler):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def service(self, details: Any) -> Any:
        def answer(request: bytes, _: grpc.ServicerContext) -> bytes:
            with (self._folder / "calls").open("a") as calls:
                calls.write(f"{details.method} {request.hex()}\n")
            while (self._folder / "hold").exists():
                time.sleep(0.01)
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


class RestartingServer:
    """That server as a process, killed and started again on one port. `calls` are (method, request) as received."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    @property
    def calls(self) -> list[tuple[str, str]]:
        file = self._folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(method.rpartition("/")[2], request) for method, _, request in (one.partition(" ") for one in lines)]

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self.address, str(self._folder)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == "serving\n"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def kill_in_the_next_call(self) -> threading.Thread:
        """Take the next call in, dies without an answer, and is back a moment later."""
        (self._folder / "hold").touch()
        before = len(self.calls)

        def restart() -> None:
            wait_until(lambda: len(self.calls) > before, "the call")
            self.kill()
            (self._folder / "hold").unlink()
            self.start()

        thread = threading.Thread(target=restart)
        thread.start()
        return thread


@contextmanager
def restarting_server(folder: Path) -> Iterator[RestartingServer]:
    server = RestartingServer(folder)
    try:
        yield server
    finally:
        server.kill()


def main(address: str, folder: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_Answering(folder),))
    server.add_insecure_port(address)
    server.start()
    print("serving", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
