"""Ranks and their attempt over a real connection: where they are, stacks, and wishes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shared.errors import ResourceExhausted
from tests.support.process_states import stop_process
from tests.support.waiting import wait_until
from train_service.attempt.outcomes import RankErrors
from train_service.attempt.ray_run import Failure
from train_service.domain.watchdog import Phase, hung
from train_service.records.event_log import RESIZE, SUSPEND
from train_service.worker import heartbeat as heartbeat_module
from train_service.worker.heartbeat import HeartbeatSender, HeartbeatServer, RankHeartbeat

# A rank that is at step 7 and goes on saying so.
RANK = """
import sys, time
from train_service.domain.watchdog import Phase
from train_service.worker.heartbeat import HeartbeatSender
def train_loop():
    with HeartbeatSender(1, sys.argv[1], "n1") as heartbeat:
        heartbeat.at(7, Phase.TRAINING)
        time.sleep(600)
train_loop()
"""
# One that is alone, and whose interpreter is held.
HELD = """
import ctypes, faulthandler, sys, threading
from train_service.worker.heartbeat import HeartbeatSender
arm, armed = faulthandler.dump_traceback_later, threading.Semaphore(0)
def note(*arguments, **options):
    arm(*arguments, **options)
    armed.release()
faulthandler.dump_traceback_later = note
def held():
    ctypes.PyDLL(None).sleep(600)
with HeartbeatSender(0, sys.argv[1], ends_if_held=True, ended_after_s=4.0) as heartbeat:
    for _ in range(2):  # it is armed, and again
        armed.acquire()
    held()
"""


@pytest.fixture
def heartbeats() -> Iterator[HeartbeatServer]:
    with HeartbeatServer("127.0.0.1") as heartbeats:
        yield heartbeats


def test_the_attempt_hears_where_a_rank_is_and_that_it_left(heartbeats: HeartbeatServer) -> None:
    with HeartbeatSender(0, heartbeats.address, "n0") as heartbeat:
        heartbeat.total_steps = 40
        heartbeat.at(3, Phase.TRAINING)
        wait_until(lambda: any(one.step == 3 for one in heartbeats.heard()), "the rank to be heard")
        (heard,) = heartbeats.at_work()
        assert (heard.rank, heard.pid, heard.node_id) == (0, os.getpid(), "n0")
        assert (heard.total_steps, heard.phase) == (40, Phase.TRAINING)
    wait_until(lambda: not heartbeats.at_work(), "the rank to have left")
    assert heartbeats.heard()[0].left
    assert not heartbeats.heard()[0].lost


def test_how_long_a_rank_has_stood_still_is_reported_in_seconds(heartbeats: HeartbeatServer) -> None:
    with HeartbeatSender(0, heartbeats.address) as heartbeat:
        heartbeat.at(3, Phase.TRAINING)
        heartbeat._moved -= 100.0
        wait_until(lambda: any(one.step == 3 for one in heartbeats.heard()), "the rank to be heard")
        (heard,) = heartbeats.at_work()

        # A busy machine may add to it; milliseconds would be a thousand times as much, or as little.
        assert 100.0 <= heard.state(time.monotonic()).still_s < 10_000.0
        assert hung([heard.state(time.monotonic())], 30.0) == [0]
        assert hung([heard.state(time.monotonic())], 10_000.0) == []


def test_a_request_reaches_the_rank_and_the_highest_stays(heartbeats: HeartbeatServer) -> None:
    with HeartbeatSender(0, heartbeats.address) as heartbeat:
        wait_until(lambda: bool(heartbeats.at_work()), "the rank to be heard")
        heartbeats.ask_to_stop(SUSPEND)
        wait_until(lambda: heartbeat.request == SUSPEND, "the wish to arrive")
        heartbeats.ask_to_stop(RESIZE)
        heartbeats.stacks(60.0)  # taken after the wish
        assert heartbeat.request == SUSPEND


class RankZero:
    """Rank 0 as an attempt hears it, each time so many seconds later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = HeartbeatServer("127.0.0.1")
        self._server._server.server_close()
        self._now = 100.0
        self._rank = RankHeartbeat(0, os.getpid(), "n0", "", socket.socket(), self._now)
        monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic=lambda: self._now))

    def say(self, after_s: float, step: int, phase: Phase = Phase.TRAINING, total_steps: int = 0) -> None:
        self._now += after_s
        said = {"step": step, "total_steps": total_steps, "phase": phase, "still_s": 0.0, "store": False}
        self._server._note(self._rank, said)

    @property
    def first_step_s(self) -> float:
        return self._server.first_step_s

    @property
    def seconds_per_step(self) -> list[float]:
        return self._server.seconds_per_step


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankZero]:
    rank = RankZero(monkeypatch)
    yield rank
    rank._rank.connection.close()


def test_the_start_of_a_resumed_run_is_no_step(heard: RankZero) -> None:
    heard.say(0.0, 20, Phase.STARTING)
    heard.say(1.0, 21)
    assert not heard.seconds_per_step
    # Of step 21 alone, and not of twenty more that an attempt before did.
    assert heard.first_step_s == 1.0
    heard.say(0.5, 22)
    assert heard.seconds_per_step == [0.5]
    assert heard.first_step_s == 1.0


@pytest.mark.parametrize(("step_at_once", "first_step_s"), [(False, 0.25), (True, 1.0)])
def test_the_start_of_a_fresh_run_is_no_part_of_its_first_step(
    heard: RankZero, step_at_once: bool, first_step_s: float
) -> None:
    heard.say(0.0, 0, Phase.STARTING)
    heard.say(30.0, 0, Phase.STARTING)  # building, compiling
    if step_at_once:  # the loop began after the heartbeat before
        heard.say(1.0, 1, total_steps=40)
    else:
        heard.say(1.0, 0, Phase.STARTING, total_steps=40)
        heard.say(0.25, 1, total_steps=40)

    assert heard.first_step_s == first_step_s


def test_seconds_per_step_come_from_where_rank_0_is(heard: RankZero) -> None:
    heard.say(0.0, 1)
    for step in (9, 11, 19):
        heard.say(1.0, step)
    assert heard.seconds_per_step == [0.125, 0.5, 0.125]


def test_stacks_show_every_thread_of_a_rank_that_answers_and_a_stopped_one_falls_silent(
    heartbeats: HeartbeatServer,
) -> None:
    child = subprocess.Popen([sys.executable, "-c", RANK, heartbeats.address])
    try:
        wait_until(lambda: any(one.step == 7 for one in heartbeats.heard()), "the rank to be heard")
        assert "in train_loop" in heartbeats.stacks(60.0)[1]

        stop_process(child.pid)
        stopped = time.monotonic()
        states = [one.state(stopped + 31.0) for one in heartbeats.at_work()]
        assert hung(states, 30.0) == [1]
        assert 1 not in heartbeats.stacks(1.0)
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: heartbeats.heard()[0].lost, "the rank to be lost")


def test_a_process_that_is_alone_and_held_leaves_its_stacks_and_ends(heartbeats: HeartbeatServer) -> None:
    held = subprocess.run(
        [sys.executable, "-c", HELD, heartbeats.address], capture_output=True, timeout=240, check=False
    )

    assert held.returncode == 1
    assert b"in held" in held.stderr


def test_who_does_not_know_the_token_is_not_heard(heartbeats: HeartbeatServer) -> None:
    host, _, port = heartbeats.address.partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b'{"token": "x", "rank": 0, "pid": 1, "node": "", "stacks_file": "/etc/passwd"}\n')
        assert stranger.recv(1) == b""
    assert heartbeats.heard() == []


def test_without_an_address_nothing_happens() -> None:
    with HeartbeatSender(0) as heartbeat:
        heartbeat.at(1, Phase.TRAINING)
    assert heartbeat.request == 0


def test_an_error_that_a_rank_sends_before_its_process_ends_is_the_cause_of_the_loss() -> None:
    errors = RankErrors()
    with HeartbeatServer("127.0.0.1", errors) as server, HeartbeatSender(1, server.address) as heartbeat:
        for text in ("rank 1 has 3 GiB of memory", "it follows from the first"):
            error = ResourceExhausted(text, reason="WORKER_MEMORY", metadata={"ranks": "1"})
            heartbeat.ask({"kind": "failing", "error": error.as_record()}, timeout_s=60)
    lost = Failure(own=None, ranks="0", lacks_resources=False, text="a worker died")
    assert str(lost.cause(errors.first)) == "rank 1 has 3 GiB of memory"
    assert lost.cause(None).specific_reason == "WORKERS_LOST"
