"""One part of the stack at run time: started, watched, started again when it dies, stopped."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace_client.calls import open_channel
from millrace_client.stack.plan import Part
from millrace_client.stack.ports import answers
from millrace_client.stack.processes import Process, end

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
# A child that lived so long before it died starts with the first pause again.
STEADY_AFTER_S = 60.0


class Child:
    """Holds at most one process of its part at a time; it leads a session of its own."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.failures = 0
        self.answering = False
        self.last_exit = ""
        self._popen: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None
        self._started_at = 0.0
        self._start_again_at = 0.0

    def start(self) -> Process:
        """Starts it; its output goes to the end of its log."""
        self.part.log.parent.mkdir(parents=True, exist_ok=True)
        with self.part.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self.part.command,
                env=dict(self.part.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = Process.of(self._popen.pid)
        assert self._process is not None, "an unreaped child is always in /proc"
        self._started_at = time.monotonic()
        self.answering = False
        return self._process

    def has_died(self) -> bool:
        """True once for each death; what it left behind is ended, and the time of the next start is settled."""
        if self._popen is None or self._popen.poll() is None:
            return False
        code = self._popen.returncode
        self.last_exit = f"signal {-code}" if code < 0 else f"exit status {code}"
        self._end_family()
        if time.monotonic() - self._started_at > STEADY_AFTER_S:
            self.failures = 0
        pause_s = min(FIRST_PAUSE_S * 2**self.failures, LONGEST_PAUSE_S)
        self.failures += 1
        self._start_again_at = time.monotonic() + pause_s
        return True

    def is_due(self) -> bool:
        """Whether it is not running and its pause is over."""
        return self._popen is None and time.monotonic() >= self._start_again_at

    def begins_to_answer(self) -> bool:
        """True once for each start, when its address answers."""
        if self.answering or self._popen is None:
            return False
        self.answering = answers(self.part.address) and (self.part.name == "ray" or _serves(self.part.address))
        return self.answering

    def stop(self) -> bool:
        """Ends it and all it started. Returns whether it went by itself."""
        if self._popen is None:
            return True
        return self._end_family()

    def _end_family(self) -> bool:
        assert self._popen is not None
        assert self._process is not None
        graceful = end(self._process, grace_s=self.part.grace_s)
        self._popen.wait()
        self._popen, self._process, self.answering = None, None, False
        return graceful


def _serves(address: str) -> bool:
    with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
