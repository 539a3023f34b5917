"""The heartbeats of ranks, from both ends: a rank sends them, and its attempt keeps the last one of each rank.

Once a second a thread sends the rank's position to the attempt and receives its requests, over a plain connection of
JSON lines; an actor of Ray's would be one more process to start with each attempt. If code holds the rank's
interpreter, a thread that does not need the interpreter writes the rank's stacks to a file.

The attempt sends requests to the ranks over the same connections.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import logging
import os
import secrets
import select
import socket
import socketserver
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.code_bundle_registry import line_in_code
from shared.errors import Internal, MillraceError, first_line
from shared.resource_log import StaleAttempt
from train_service.domain.watchdog import WAITING_FRAMES, Phase, RankState
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

    def note_progress(self) -> None:
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


def as_reported(error: Exception, rank: int, step: int, remedy: str = "") -> Exception:
    """Return `error` as an `Internal` that names its type, first line, rank, step, line of a user's code, and remedy.

    Return `error` itself if it is already one of ours, or if the rank only lost other ranks that it waited for.

    It counts as a failure and another attempt is made, because the error may not occur again.
    """
    if isinstance(error, (MillraceError, StaleAttempt)) or lost_others(error):
        return error
    kind, line = type(error).__name__, line_in_code(error)
    at = f" at {line}" if line else ""
    return Internal(
        f"{kind} on rank {rank} at step {step}{at}: {first_line(error)}{f'; {remedy}' if remedy else ''}",
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


# --- The attempt receives ---

# A rank sends a few hundred bytes a second. Its stacks, and a program's reports of many files, are the longest lines.
LONGEST_LINE = 32 * 1024 * 1024
HELLO_TIMEOUT_S = 10.0

# Sends the answer to a request, from any thread. Does nothing if the rank's connection has ended.
Reply = Callable[[dict[str, Any]], None]
# Handles a rank's request. It is called in the thread of that rank's connection, so it should return soon.
Handler = Callable[[int, dict[str, Any], Reply], None]


@dataclass
class RankHeartbeat:
    """The last heartbeat of one rank. Times are those of this process's monotonic clock."""

    rank: int
    pid: int
    node_id: str
    stacks_file: str
    connection: socket.socket
    received_at: float
    step: int = 0
    total_steps: int = 0
    phase: Phase = Phase.STARTING
    still_since: float = 0.0
    waits_for_store: bool = False
    stacks: str = ""
    # The rank announced that it ends.
    left: bool = False
    # The connection ended without that announcement, and when.
    lost: bool = False
    lost_at: float = 0.0
    # Held while a message is sent to the rank.
    sending: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def send(self, message: dict[str, Any]) -> None:
        with self.sending:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def state(self, now: float) -> RankState:
        still, unresponsive = now - self.still_since, now - self.received_at
        return RankState(self.rank, self.step, self.phase, still, unresponsive, self.waits_for_store)


@dataclass
class _Steps:
    """Seconds per step, derived from heartbeats. A rank reports its step once a second."""

    step: int = 0
    at: float = 0.0
    received_at: float = 0.0
    # The rank is in its loop.
    begun: bool = False
    timed: bool = False
    seconds: list[float] = field(default_factory=list)
    first_s: float = 0.0

    def note(self, step: int, total_steps: int, phase: Phase, now: float) -> None:
        if total_steps and not self.begun:
            # Time before the loop is no part of a step. A step that is already done began after the previous heartbeat.
            self.begun, self.at = True, self.received_at if step > self.step else now
        self.received_at = now
        if step > self.step and self.at:
            took_s = (now - self.at) / (step - self.step)
            if self.timed:
                self.seconds.append(took_s)
                del self.seconds[:-200]
            elif phase is not Phase.STARTING:
                self.first_s = took_s
        if step > self.step or not self.at:
            self.step, self.at = step, now
        # The step after a start, also that of a resumed run, takes longer than other steps.
        self.timed = phase is not Phase.STARTING


class HeartbeatServer:
    """A server for the heartbeats of one attempt's ranks. It listens on a port of this node. Use as a context."""

    def __init__(self, host: str, handler: Handler | None = None) -> None:
        """Create the server.

        `handler` receives the ranks' requests (`HeartbeatSender.ask`). It may receive a request again after a
        connection broke.
        """
        self._handler = handler
        self._token = secrets.token_hex(16)
        self._ranks: dict[int, RankHeartbeat] = {}
        self._steps = _Steps()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._server = _Server((host, 0), self)
        self.address = f"{host}:{self._server.server_address[1]}/{self._token}"

    def __enter__(self) -> HeartbeatServer:
        threading.Thread(target=self._server.serve_forever, name="pulses", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def heard(self) -> list[RankHeartbeat]:
        """Return every rank that ever connected, ordered by rank."""
        with self._lock:
            return [self._ranks[rank] for rank in sorted(self._ranks)]

    def at_work(self) -> list[RankHeartbeat]:
        """Return the ranks that neither left nor were lost."""
        return [one for one in self.heard() if not one.left and not one.lost]

    @property
    def seconds_per_step(self) -> list[float]:
        """Seconds per step of rank 0's newest steps."""
        with self._lock:
            return list(self._steps.seconds)

    @property
    def first_step_s(self) -> float:
        """Seconds of rank 0's first step of the attempt.

        They count from the beginning of its loop, and are 0 until the step is done.
        """
        with self._lock:
            return self._steps.first_s

    def ask_to_stop(self, reason: int) -> None:
        """Ask the ranks to stop. Rank 0 makes all of them stop after the same step."""
        self._send_to_ranks({"stop": reason})

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Return the stacks of all threads, by rank. Ranks that do not answer in time are left out."""
        for one in self.heard():
            one.stacks = ""
        self._send_to_ranks({"dump": True})
        until = time.monotonic() + timeout_s
        with self._changed:
            while any(not one.stacks for one in self._ranks.values() if not (one.left or one.lost)):
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return {rank: one.stacks for rank, one in self._ranks.items() if one.stacks}

    def _send_to_ranks(self, order: dict[str, Any]) -> None:
        for one in self.at_work():
            # A stopped process reads nothing, but its socket's buffer has room for these few bytes.
            with contextlib.suppress(OSError):
                one.send(order)

    def _serve(self, connection: socket.socket) -> None:
        """Serve one rank's connection in its own thread."""
        connection.settimeout(HELLO_TIMEOUT_S)
        with connection.makefile("rb") as lines:
            hello = json.loads(lines.readline(LONGEST_LINE))
            if not hmac.compare_digest(str(hello.get("token", "")), self._token):
                return
            connection.settimeout(None)
            now = time.monotonic()
            rank_heartbeat = RankHeartbeat(
                hello["rank"], hello["pid"], hello["node"], hello["stacks_file"], connection, now
            )
            rank_heartbeat.still_since = now
            with self._changed:
                self._ranks[rank_heartbeat.rank] = rank_heartbeat
            try:
                while line := lines.readline(LONGEST_LINE):
                    self._note(rank_heartbeat, json.loads(line))
            finally:
                rank_heartbeat.lost, rank_heartbeat.lost_at = not rank_heartbeat.left, time.monotonic()

    def _answer(self, rank_heartbeat: RankHeartbeat, asked: int, body: dict[str, Any]) -> None:
        def reply(answer: dict[str, Any]) -> None:
            with contextlib.suppress(OSError):  # a rank that is still alive asks again
                rank_heartbeat.send({"reply": asked, "body": answer})

        if self._handler is not None:
            self._handler(rank_heartbeat.rank, body, reply)

    def _note(self, rank_heartbeat: RankHeartbeat, said: dict[str, Any]) -> None:
        now = time.monotonic()
        if "ask" in said:
            rank_heartbeat.received_at = now
            self._answer(rank_heartbeat, said["ask"], said["body"])
            return
        with self._changed:
            rank_heartbeat.received_at = now
            if "stacks" in said:
                rank_heartbeat.stacks = said["stacks"]
                self._changed.notify_all()
                return
            rank_heartbeat.step, rank_heartbeat.total_steps, rank_heartbeat.phase = (
                said["step"],
                said["total_steps"],
                Phase(said["phase"]),
            )
            rank_heartbeat.still_since = now - said["still_s"]
            rank_heartbeat.waits_for_store = said["store"]
            rank_heartbeat.left = bool(said.get("bye"))
            if rank_heartbeat.rank == 0:
                self._steps.note(rank_heartbeat.step, rank_heartbeat.total_steps, rank_heartbeat.phase, now)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], heartbeats: HeartbeatServer) -> None:
        super().__init__(address, _Handler)
        self.heartbeats = heartbeats

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("connection %s of %s ended", request, client_address, exc_info=True)


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.server.heartbeats._serve(self.request)
