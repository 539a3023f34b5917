"""The time of a checked module that counts against its caller is not what a busy machine takes from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.waiting import wait_until
from train_service.jobs import entry_child
from train_service.jobs.entry_child import MAX_IDLE_STEP_S, IdleTime

FIRST, IMPORTING = 7, 8
QUESTION = {"limits": {"processes": 9, "memory_bytes": 1 << 30, "cpu_s": 60.0, "idle_s": 2.5, "wall_s": 500.0}}
GOOD = json.dumps({"problem": ""}).encode()


def test_a_sleeping_process_is_idle_all_the_time() -> None:
    idle = IdleTime(100.0)
    for poll in range(1, 21):
        idle.add(100.0 + poll / 4, cpu_s=0.25, delays_ns={"7": 1_000}, ready=False)
    assert idle.seconds == pytest.approx(5.0 - 0.25, abs=1e-3)


def test_time_on_a_cpu_and_time_of_waiting_for_one_do_not_count() -> None:
    idle = IdleTime(0.0)
    idle.add(1.0, cpu_s=0.3, delays_ns={"7": 500_000_000}, ready=False)
    assert idle.seconds == pytest.approx(0.2)
    idle.add(2.0, cpu_s=0.3, delays_ns={"7": 500_000_000, "8": 900_000_000}, ready=False)
    assert idle.seconds == pytest.approx(0.3)


def test_a_process_that_is_ready_or_waits_for_the_disk_is_not_idle() -> None:
    idle = IdleTime(0.0)
    for poll in range(1, 100):
        idle.add(float(poll), cpu_s=0.0, delays_ns={}, ready=True)
    assert idle.seconds == 0.0


def test_a_watch_that_was_itself_not_run_adds_little() -> None:
    idle = IdleTime(0.0)
    idle.add(600.0, cpu_s=0.0, delays_ns={"7": 0}, ready=False)
    assert idle.seconds == MAX_IDLE_STEP_S


def test_the_end_of_a_thread_takes_nothing_back() -> None:
    idle = IdleTime(0.0)
    idle.add(1.0, cpu_s=0.0, delays_ns={"7": 400_000_000, "8": 600_000_000}, ready=False)
    idle.add(2.0, cpu_s=0.0, delays_ns={"7": 400_000_000}, ready=False)
    assert idle.seconds == pytest.approx(1.0)


def test_the_time_in_which_the_processes_are_read_does_not_count() -> None:
    idle = IdleTime(0.0)
    idle.add(1.0, cpu_s=1.0, delays_ns={}, ready=False)
    idle.resume(1.8)
    idle.add(2.0, cpu_s=1.0, delays_ns={}, ready=False)
    assert idle.seconds == pytest.approx(0.2)


@pytest.fixture
def ended() -> Iterator[int]:
    """A process that has ended, and is not reaped."""
    process = subprocess.Popen(["true"])
    stat = Path("/proc", str(process.pid), "stat")
    try:
        wait_until(lambda: stat.read_bytes().rpartition(b") ")[2].startswith(b"Z"), "its end")
        yield process.pid
    finally:
        process.wait()


def test_an_ended_process_that_the_guard_has_not_reaped_is_not_idle(ended: int) -> None:
    _, ready = entry_child._waits_for_cpu([ended], {os.getpid()})
    assert ready


def test_an_ended_child_that_the_module_does_not_reap_hides_no_waiting(ended: int) -> None:
    _, ready = entry_child._waits_for_cpu([ended], {1})
    assert not ready


Watch = Callable[..., dict[str, Any]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watch processes that are listed as in `polls`, a second apart, and idle. `statuses` are those of each reap."""
    reading, writing = os.pipe()

    def watched(
        polls: list[list[int]],
        statuses: list[int | None],
        *,
        isolated: bool = True,
        cpu_s: float = 0.0,
        answer: bytes = GOOD,
    ) -> dict[str, Any]:
        os.write(writing, answer)
        clock, listed, reaped = [0.0], iter(polls), iter(statuses)

        def sleep(_: float) -> None:
            clock[0] += 1.0

        monkeypatch.setattr(entry_child, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
        monkeypatch.setattr(entry_child, "_reap", lambda _: next(reaped))
        monkeypatch.setattr(entry_child, "_below", lambda _: [(pid, 0, 0.0) for pid in next(listed)])
        monkeypatch.setattr(entry_child, "_cpu_s", lambda below: 0.0 if below else cpu_s)
        monkeypatch.setattr(entry_child, "_waits_for_cpu", lambda *_: ({}, False))
        return entry_child._watch(FIRST, reading, QUESTION, isolated)

    yield watched
    os.close(reading)
    os.close(writing)


def test_the_start_of_the_namespaces_is_not_the_modules_waiting(watch: Watch) -> None:
    assert watch([[FIRST]] * 5 + [[FIRST, IMPORTING]], [None] * 6 + [0])["problem"] == ""


@pytest.mark.parametrize("isolated", [True, False])
def test_the_waiting_of_the_users_process_counts(watch: Watch, isolated: bool) -> None:
    listed = [FIRST, IMPORTING] if isolated else [FIRST]
    assert "waits for more than 2.5 s" in watch([listed] * 4, [None] * 5, isolated=isolated)["problem"]


def test_a_module_that_has_ended_since_is_answered_and_not_refused(watch: Watch) -> None:
    assert watch([[FIRST, IMPORTING]] * 4, [None] * 4 + [0])["problem"] == ""
    assert "waits for more" in watch([[FIRST, IMPORTING]] * 4, [None] * 4 + [9])["problem"]


@pytest.mark.parametrize("isolated", [True, False])
def test_a_process_that_the_kernel_ends_at_its_limit_of_cpu_time_is_refused_for_that(
    watch: Watch, isolated: bool
) -> None:
    killed = (128 + signal.SIGKILL) << 8 if isolated else signal.SIGKILL
    problem = watch([[FIRST, IMPORTING]], [None, killed], isolated=isolated, cpu_s=61.0, answer=b"")["problem"]
    assert problem == "its module takes more than 60 s of CPU time when it is imported"


@pytest.mark.parametrize("status", [signal.SIGSEGV, (128 + signal.SIGSEGV) << 8])
def test_a_signal_that_ends_the_users_process_is_named(watch: Watch, status: int) -> None:
    assert watch([[FIRST, IMPORTING]], [None, status], answer=b"")["problem"].endswith("imported it, by SIGSEGV")


@pytest.mark.parametrize(("code", "isolated"), [(3, True), (3, False), (129, False)])
def test_an_exit_status_of_the_users_process_is_named(watch: Watch, code: int, isolated: bool) -> None:
    answer = watch([[FIRST, IMPORTING]], [None, code << 8], isolated=isolated, answer=b"")
    assert answer["problem"].endswith(f"it, with exit status {code}")
