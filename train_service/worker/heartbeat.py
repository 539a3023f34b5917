"""Heartbeats of a rank to its attempt, and the errors that its training raised.

Once a second a thread sends the rank's position to the attempt and receives its requests, over a plain connection of
JSON lines; an actor of Ray's would be one more process to start with each attempt. If code holds the rank's
interpreter, a thread that does not need the interpreter writes the rank's stacks to a file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import socket
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.code_loading import line_in_code
from shared.errors import Internal, MillraceError, first_line
from shared.log import StaleAttempt
from train_service.domain.watchdog import WAITING_FRAMES, Phase
from train_service.store_retry import waits_for_store

# --- Heartbeat ---

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 5.0
# Well before the attempt considers a silent rank hung, which is after 30 s at the earliest.
HELD_AFTER_S = 20.0
# For a rank that no other process watches. Not even an import or a compiler holds the interpreter this long.
ENDED_AFTER_S = 300.0
STDERR = 2
# The kind of request by which a rank sends the error that its process ends with.
FAILING = "failing"


@dataclass
class _Request:
    body: dict[str, Any]
    answered: threading.Event = field(default_factory=threading.Event)
    # None: the rank ended before the answer came.
    answer: dict[str, Any] | None = None


class HeartbeatSender:
    """Sender of a rank's heartbeats.

    Use it as a context around everything the rank does, in the training thread. Without an address it does nothing.
    """

    def __init__(
        self,
        rank: int,
        address: str = "",
        node_id: str = "",
        *,
        ends_if_held: bool = False,
        ended_after_s: float = ENDED_AFTER_S,
    ) -> None:
        """Prepare the heartbeats.

        `address` is `host:port/token`, from `HeartbeatServer`; `node_id` is Ray's. With `ends_if_held` a process whose
        interpreter is held for `ended_after_s` writes its stacks to stderr and ends.
        """
        self._rank = rank
        self._ended_after_s = ended_after_s if ends_if_held else 0.0
        self._address = address
        self._node_id = node_id
        self._step = 0
        self._phase = Phase.STARTING
        self._moved = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        # The training thread; only its waits for the store are reported.
        self._trains = threading.get_ident()
        # Steps of the whole run, set once they are known.
        self.total_steps = 0
        # The attempt's reason to stop, 0 for none; see `reporting`.
        self.request = 0
        # Pending requests by number, and their connection while there is one.
        self._requests: dict[int, _Request] = {}
        self._asked = 0
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        # Written to at the end, to wake the thread.
        self._waking, self._woken = socket.socketpair()

    @property
    def step(self) -> int:
        """The number of completed steps of the run."""
        return self._step

    def at(self, step: int, phase: Phase) -> None:
        """Record the rank's position. Cheap."""
        self._step, self._phase, self._moved = step, phase, time.monotonic()

    def tick(self) -> None:
        """Record progress within a step or phase, e.g. in a validation."""
        self._moved = time.monotonic()

    def ask(self, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Send a request to the attempt and return its answer. Any thread may call it.

        A request whose connection broke is sent again, so the attempt may receive it twice. Raises `TimeoutError`, and
        `ConnectionError` once the context is left.
        """
        request = _Request(body)
        with self._sending:
            self._asked += 1
            number = self._asked
            self._requests[number] = request
            if self._connection is not None:
                try:
                    _send(self._connection, {"ask": number, "body": body})
                except OSError:  # half a line may be sent: `_stay_connected` reconnects and sends again
                    with contextlib.suppress(OSError):
                        self._connection.shutdown(socket.SHUT_RDWR)
        try:
            if not request.answered.wait(timeout_s):
                raise TimeoutError(f"the attempt has not answered within {timeout_s} s")
        finally:
            with self._sending:
                self._requests.pop(number, None)
        if request.answer is None:
            raise ConnectionError("the rank ends, and asks nothing more")
        return request.answer

    def __enter__(self) -> HeartbeatSender:
        if self._address:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._waking.send(b"!")
        if self._address:
            self._thread.join(CONNECT_TIMEOUT_S)
        if not self._thread.is_alive():
            self._waking.close()
            self._woken.close()
        with self._sending:
            for request in self._requests.values():
                request.answered.set()

    def _run(self) -> None:
        with tempfile.NamedTemporaryFile(prefix="millrace-stacks-", suffix=".txt") as stacks:
            while not self._ended.is_set():
                try:
                    self._stay_connected(stacks)
                except (OSError, ValueError) as error:
                    logger.warning("the attempt cannot be told how it goes: %s", error)
                    self._ended.wait(INTERVAL_S)
            faulthandler.cancel_dump_traceback_later()

    def _stay_connected(self, stacks: Any) -> None:
        where, _, token = self._address.rpartition("/")
        host, _, port = where.rpartition(":")
        with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as connection:
            hello = {"token": token, "rank": self._rank, "pid": os.getpid(), "node": self._node_id}
            with self._sending:
                _send(connection, {**hello, "stacks_file": stacks.name})
                for number, request in self._requests.items():
                    _send(connection, {"ask": number, "body": request.body})
                self._connection = connection
            try:
                self._converse(connection, stacks)
            finally:
                with self._sending:
                    self._connection = None

    def _converse(self, connection: socket.socket, stacks: Any) -> None:
        received, said_at = b"", 0.0
        while not self._ended.is_set():
            self._guard(stacks)
            if time.monotonic() - said_at >= INTERVAL_S:
                said_at = time.monotonic()
                self._say(connection, self._state())
            wait_s = max(0.0, said_at + INTERVAL_S - time.monotonic())
            ready, _, _ = select.select([connection, self._woken], [], [], wait_s)
            if connection not in ready:
                continue
            chunk = connection.recv(65536)
            if not chunk:
                raise OSError("it closed the connection")
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                self._obey(connection, json.loads(line), stacks)
        with contextlib.suppress(OSError):
            self._say(connection, {**self._state(), "bye": True})

    def _say(self, connection: socket.socket, message: dict[str, Any]) -> None:
        with self._sending:
            _send(connection, message)

    def _guard(self, stacks: Any) -> None:
        """Arm faulthandler until the next call. Its thread needs no interpreter."""
        if self._ended_after_s:
            faulthandler.dump_traceback_later(self._ended_after_s, exit=True, file=STDERR)
        else:
            faulthandler.dump_traceback_later(HELD_AFTER_S, file=stacks)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "total_steps": self.total_steps,
            "phase": self._phase,
            "still_s": time.monotonic() - self._moved,
            "store": waits_for_store(self._trains),
        }

    def _obey(self, connection: socket.socket, order: dict[str, Any], stacks: Any) -> None:
        if "reply" in order:
            with self._sending:
                request = self._requests.get(order["reply"])
            if request is not None:
                request.answer = order["body"]
                request.answered.set()
        elif "stop" in order:
            self.request = max(self.request, int(order["stop"]))
        elif "dump" in order:
            stacks.seek(0)
            stacks.truncate()
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            self._say(connection, {"stacks": Path(stacks.name).read_text(errors="replace")})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


# --- Errors of the training ---

# Error texts of backends on a rank that lost its peer. Its own end adds no information.
OF_A_LOST_PEER = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "tcpstore")


def as_reported(error: Exception, rank: int, step: int) -> Exception:
    """Return `error` as an `Internal` that names its type, first line, rank, step, and line of a user's code.

    Returns `error` itself if it is already one of ours, or if the rank only lost other ranks that it waited for.

    It counts as a failure and another attempt is made, because the error may not occur again.
    """
    if isinstance(error, (MillraceError, StaleAttempt)) or lost_others(error):
        return error
    kind, line = type(error).__name__, line_in_code(error)
    at = f" at {line}" if line else ""
    return Internal(
        f"{kind} on rank {rank} at step {step}{at}: {first_line(error)}",
        reason="WORKER_RAISED",
        metadata={"ranks": str(rank), "step": str(step), "exception": kind, **({"line": line} if line else {})},
    )


def lost_others(error: Exception) -> bool:
    """Return whether the error comes from a call in which ranks wait for one another."""
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    last = f"{frames[-1].filename} {frames[-1].name}" if frames else ""
    waited = any(frame in last for frame in WAITING_FRAMES if frame != "_engine_run_backward")
    return waited or any(text in str(error).lower() for text in OF_A_LOST_PEER)
