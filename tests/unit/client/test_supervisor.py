"""The supervisor, with light processes in place of Ray and the services."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace_client.stack import supervisor as stack_supervisor
from millrace_client.stack.record import (
    FAMILY_TIMEOUT_S,
    KILL_INTERVAL_S,
    KILL_TIMEOUT_S,
    READY,
    Process,
    Record,
    read_record,
    write_record,
)
from millrace_client.stack.supervisor import (
    STOP_TIMEOUT_S,
    AlreadyRunning,
    StackOptions,
    StartFailed,
    Supervisor,
    hold_home,
    make_plan,
)
from tests.support.fake_stack import NAMES, fake_plan

TIMEOUT_S = 120.0

# A supervisor that can be killed: a process of its own.
SUPERVISE = """
import sys
from pathlib import Path
from millrace_client.stack.supervisor import Supervisor, hold_home
from tests.support.fake_stack import fake_plan
home = Path(sys.argv[1])
with hold_home(home):
    Supervisor(fake_plan(home), print).run()
"""


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def ready_record(home: Path) -> Record | None:
    record = read_record(home)
    return record if record is not None and record.state == READY and len(record.answering) == len(NAMES) else None


def now_ready(home: Path) -> Record:
    wait_until(lambda: ready_record(home) is not None)
    record = ready_record(home)
    assert record is not None
    return record


@contextmanager
def running(home: Path) -> Iterator[list[str]]:
    """A supervisor in a thread; yields what it says."""
    said: list[str] = []
    supervisor = Supervisor(fake_plan(home), said.append)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        yield said
    finally:
        supervisor.stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_parts_stop_in_the_reverse_order_and_nothing_is_left(tmp_path: Path) -> None:
    with running(tmp_path) as said:
        record = now_ready(tmp_path)
    assert [line for line in said if line.endswith("stopped")] == [f"{name} stopped" for name in reversed(NAMES)]
    assert not any(process.is_alive() for process in record.parts.values())
    assert read_record(tmp_path) is None
    assert not Path(record.ray_folder).exists()
    assert "ended in good order" in (tmp_path / "logs" / "data.log").read_text()


def test_a_part_that_dies_is_started_again_under_its_address(tmp_path: Path) -> None:
    with running(tmp_path) as said:
        before = now_ready(tmp_path)
        before.parts["train"].send(signal.SIGKILL)
        wait_until(lambda: (now := ready_record(tmp_path)) is not None and now.parts["train"] != before.parts["train"])
        after = now_ready(tmp_path)
    assert after.addresses == before.addresses
    assert {name for name in NAMES if after.parts[name] != before.parts[name]} == {"train"}
    assert "train ended with signal 9; starting it again" in said


def test_a_part_that_cannot_start_is_named_with_its_log_and_the_rest_is_stopped(tmp_path: Path) -> None:
    supervisor = Supervisor(fake_plan(tmp_path, failing="train"), lambda _: None)
    with pytest.raises(StartFailed, match=r"train ended with exit status 1; its log: .*train\.log"):
        supervisor.run()
    assert "MILLRACE_STORE" in (tmp_path / "logs" / "train.log").read_text()
    assert read_record(tmp_path) is None


class Dying:
    """A process that is still there when it was looked for `polls` times, as on a busy machine."""

    def __init__(self, polls: float, pid: int = 1) -> None:
        self.polls = polls
        self.pid = pid
        self.signals: list[int] = []

    def is_alive(self) -> bool:
        self.polls -= 1
        return self.polls >= 0

    def send(self, signal_number: int) -> None:
        self.signals.append(signal_number)


def test_orphans_that_take_long_to_die_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = Dying(3), Dying(1)
    monkeypatch.setattr(stack_supervisor, "children", lambda _: [slow, quick])
    monkeypatch.setattr(stack_supervisor, "wait_gone", lambda left, _: left)
    monkeypatch.setattr(stack_supervisor, "reap_orphans", lambda: None)
    said: list[str] = []
    stack_supervisor.end_orphans(said.append)
    assert said == []
    assert (slow.polls, quick.polls) == (-1, -3)
    assert (slow.signals, quick.signals) == ([signal.SIGKILL] * 3, [signal.SIGKILL])


class Clock:
    """Takes the place of `time`, and of the wait for processes that never end."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wait_gone(self, left: set[Dying], timeout_s: float) -> set[Dying]:
        self.now_s += timeout_s
        return left


def test_orphans_that_no_signal_ends_are_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a call to the kernel, such as a read of a disk that is gone, outlives SIGKILL."""
    clock, said = Clock(), list[str]()
    stuck, other = Dying(float("inf"), 71), Dying(2, 70)
    monkeypatch.setattr(stack_supervisor, "time", clock)
    monkeypatch.setattr(stack_supervisor, "wait_gone", clock.wait_gone)
    monkeypatch.setattr(stack_supervisor, "children", lambda _: [stuck, other])
    monkeypatch.setattr(stack_supervisor, "reap_orphans", lambda: None)
    stack_supervisor.end_orphans(said.append)
    assert said == [
        "SIGKILL did not end these processes within 60 s: pids 71. They wait for a disk or another device, and are "
        "left running"
    ]
    assert 60 <= clock.now_s < 70

    said.clear()
    other.polls = float("inf")
    stack_supervisor.end_orphans(said.append)
    assert "pids 70, 71." in said[0]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_part_that_no_signal_ends_does_not_hold_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_supervisor, "end", lambda *_, **__: False)
    monkeypatch.setattr(stack_supervisor, "REAP_TIMEOUT_S", 0.01)
    child = stack_supervisor.Child(fake_plan(tmp_path).parts[0])
    process = child.start()
    try:
        assert not child.stop()
        assert process.is_alive()
    finally:
        process.send(signal.SIGKILL)
        os.waitpid(process.pid, 0)


def test_ports_are_of_those_that_the_system_gives_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_supervisor, "EPHEMERAL", tmp_path / "range")  # there is none
    monkeypatch.setattr(stack_supervisor, "is_free", lambda _: True)
    found = stack_supervisor.free_ports(50)
    assert len(set(found) & set(stack_supervisor.PORTS)) == 50

    monkeypatch.setattr(stack_supervisor, "is_free", lambda port: port % 2_000 == 0)
    assert sorted(stack_supervisor.free_ports(3)) == [26_000, 28_000, 30_000]
    with pytest.raises(StartFailed, match="3 ports from 26000 to 31999 are free, and a stack needs 4"):
        stack_supervisor.free_ports(4)


def test_ports_that_the_system_gives_away_are_taken_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_supervisor, "EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(stack_supervisor, "is_free", lambda _: True)
    (tmp_path / "range").write_text("26020\t60999\n")
    assert sorted(stack_supervisor.free_ports(20)) == list(range(26_000, 26_020))
    found = stack_supervisor.free_ports(22)
    assert (sorted(found[:20]), len(set(found) & set(stack_supervisor.PORTS))) == (list(range(26_000, 26_020)), 22)
    (tmp_path / "range").write_text("1024\t60999\n")  # where it gives all of them away, any is as good
    assert len(set(stack_supervisor.free_ports(22)) & set(stack_supervisor.PORTS)) == 22


def test_ports_differ_where_a_program_fixes_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_supervisor, "is_free", lambda _: True)
    state = random.getstate()
    try:
        random.seed(1)
        found = stack_supervisor.free_ports(50)
        random.seed(1)
        assert stack_supervisor.free_ports(50) != found
    finally:
        random.setstate(state)


def test_one_home_has_one_supervisor(tmp_path: Path) -> None:
    with hold_home(tmp_path), pytest.raises(AlreadyRunning, match=str(tmp_path)):
        hold_home(tmp_path)
    hold_home(tmp_path).close()


def test_processes_of_a_killed_supervisor_are_stopped(tmp_path: Path) -> None:
    with subprocess.Popen((sys.executable, "-c", SUPERVISE, str(tmp_path)), start_new_session=True) as popen:
        record = now_ready(tmp_path)
        popen.kill()
    assert stack_supervisor.running_record(tmp_path) is None
    assert all(process.is_alive() for process in record.parts.values())

    assert stack_supervisor.stop(tmp_path)

    assert not any(process.is_alive() for process in record.parts.values())
    assert read_record(tmp_path) is None


def test_stopping_a_stale_record_touches_nobody_who_has_the_pids_now(tmp_path: Path) -> None:
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE, start_new_session=True) as other:
        now = Process.from_pid(other.pid)
        assert now is not None
        then = Process(now.pid, now.start_ticks - 1)
        stale = Record(
            state=READY,
            supervisor=then,
            addresses={},
            store="",
            ray_address="",
            dashboard="",
            import_roots=(),
            ray_folder=str(tmp_path / "gone"),
            parts={"data": then},
        )
        write_record(tmp_path, stale)

        assert not stack_supervisor.stop(tmp_path)

        assert now.is_alive()
        assert read_record(tmp_path) is None
        other.kill()


def test_a_supervisor_none_of_whose_parts_can_be_killed_ends_before_it_is_killed_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    budgets: list[float] = []

    def end(_: Process, *, grace_s: float, kill_timeout_s: float) -> bool:
        nonlocal now_s
        budgets.append(kill_timeout_s)
        now_s += grace_s + FAMILY_TIMEOUT_S + kill_timeout_s + KILL_INTERVAL_S
        return False

    class Unending:
        def wait(self, timeout_s: float) -> None:
            nonlocal now_s
            now_s += timeout_s
            raise subprocess.TimeoutExpired("part", timeout_s)

    monkeypatch.setattr(stack_supervisor, "end", end)
    said: list[str] = []
    supervisor = Supervisor(make_plan(tmp_path, StackOptions(), {}), said.append)
    own = Process.from_pid(os.getpid())
    for child in supervisor._children:
        monkeypatch.setattr(child, "_popen", Unending())
        monkeypatch.setattr(child, "_process", own)
    monkeypatch.setattr(stack_supervisor, "time", SimpleNamespace(monotonic=lambda: now_s))

    supervisor._end()

    assert [line for line in said if line.endswith("had to be killed")] == [
        f"{name} had to be killed" for name in reversed(NAMES)
    ]
    assert budgets == [KILL_TIMEOUT_S, *[KILL_INTERVAL_S] * (len(NAMES) - 1)]
    assert now_s + KILL_TIMEOUT_S + KILL_INTERVAL_S < STOP_TIMEOUT_S  # and the orphans
