"""The attempt's side of its ranks' heartbeats.

It keeps the last state of each rank, and sends requests to the ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from train_service.domain.watchdog import Phase, RankState

logger = logging.getLogger(__name__)

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
