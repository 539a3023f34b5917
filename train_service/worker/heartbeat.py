"""What a rank tells its attempt: that it lives, and what its training raised.

A thread tells the attempt once a second where the rank is, and takes its requests, over a plain connection of JSON
lines: an actor of Ray's for it would be one more process to start with each attempt. A rank whose interpreter is held
leaves its stacks in a file, by a thread that needs no interpreter.
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
# Well before the attempt takes a silent rank for hung, which is after 30 s at the earliest.
HELD_AFTER_S = 20.0
# Of a rank that only itself looks after: so long even an import or a compiler does not hold the interpreter.
ENDED_AFTER_S = 300.0
STDERR = 2


@dataclass
class _Request:
    body: dict[str, Any]
    answered: threading.Event = field(default_factory=threading.Event)
    # None: the rank ended before it came.
    answer: dict[str, Any] | None = None


class HeartbeatSender:
    """Use as a context around all that the rank does, in the thread that trains. Without an address it does nothing."""

    def __init__(
        self,
        rank: int,
        address: str = "",
        node_id: str = "",
        *,
        ends_if_held: bool = False,
        ended_after_s: float = ENDED_AFTER_S,
    ) -> None:
        """`address` is `host:port/token`, from `HeartbeatServer`; `node_id` is Ray's. With `ends_if_held` a process
        whose interpreter is held for `ended_after_s` writes its stacks to stderr and ends."""
        self._rank = rank
        self._ended_after_s = ended_after_s if ends_if_held else 0.0
        self._address = address
        self._node_id = node_id
        self._step = 0
        self._phase = Phase.STARTING
        self._moved = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        # Who trains, and whose waits count.
        self._trains = threading.get_ident()
        # Steps of the whole run, once they are known.
        self.total_steps = 0
        # A reason to stop that the attempt wishes, 0 for none; see `reporting`.
        self.request = 0
        # Requests under way, by number; and the connection that they go by, while there is one.
        self._requests: dict[int, _Request] = {}
        self._asked = 0
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        # Written to at the end, so that the thread waits for nothing more.
        self._waking, self._woken = socket.socketpair()

    @property
    def step(self) -> int:
        """How many steps of the run are done."""
        return self._step

    def at(self, step: int, phase: Phase) -> None:
        """Notes where the rank is. Cheap."""
        self._step, self._phase, self._moved = step, phase, time.monotonic()

    def tick(self) -> None:
        """Notes that it gets on, e.g. within a validation."""
        self._moved = time.monotonic()

    def ask(self, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """The attempt's answer to a request; of any thread. A request whose connection broke is sent again, so the
        attempt may get it twice. Raises `TimeoutError`, and `ConnectionError` once the context is left."""
        request = _Request(body)
        with self._sending:
            self._asked += 1
            number = self._asked
            self._requests[number] = request
            if self._connection is not None:
                try:
                    _send(self._connection, {"ask": number, "body": body})
                except OSError:  # half a line may be out: `_stay_connected` connects and sends anew
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
        """For the time until the next call: the thread that then acts needs no interpreter."""
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


# --- What training raised ---

# What backends say to a rank whose peer is gone. Its own end says nothing new.
OF_A_LOST_PEER = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "tcpstore")


def as_reported(error: Exception, rank: int, step: int) -> Exception:
    """`error` as one of ours that names its type, the first line of its message, the rank, how many steps were done,
    and the line of a user's own code. Itself where it is one of ours already, or where the rank only lost others that
    it waited for.

    It counts as a failure, and another attempt is made: what raised once may not again.
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
    """Whether it comes from a call in which ranks wait for one another."""
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    last = f"{frames[-1].filename} {frames[-1].name}" if frames else ""
    waited = any(frame in last for frame in WAITING_FRAMES if frame != "_engine_run_backward")
    return waited or any(text in str(error).lower() for text in OF_A_LOST_PEER)
