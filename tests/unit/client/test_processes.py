"""Processes told apart by pid and start time, and families ended as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from millrace_client.stack import record
from millrace_client.stack.record import Process, end, family, wait_gone

# A leader with a child in its session; both end on SIGTERM, or on nothing but SIGKILL when they are stubborn.
FAMILY = """
import signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def a_family(*arguments: str) -> Iterator[tuple[Process, Process, subprocess.Popen[str]]]:
    """The leader, its child, and the handle with which to reap the leader."""
    command = (sys.executable, "-c", FAMILY, *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as popen:
        assert popen.stdout is not None
        leader, child = Process.from_pid(popen.pid), Process.from_pid(int(popen.stdout.readline()))
        assert leader is not None
        assert child is not None
        try:
            yield leader, child, popen
        finally:
            for one in (leader, child):
                one.send(signal.SIGKILL)


def test_a_process_is_not_mistaken_for_a_later_owner_of_its_pid() -> None:
    me = Process.from_pid(os.getpid())
    assert me is not None
    assert me.is_alive()
    earlier = Process(me.pid, me.start_ticks - 1)
    assert not earlier.is_alive()
    earlier.send(signal.SIGKILL)  # must not reach this test


def test_a_process_that_waits_to_be_reaped_counts_as_gone() -> None:
    with a_family() as (leader, _, _):
        os.kill(leader.pid, signal.SIGKILL)
        assert wait_gone([leader], 120.0) == set()


def test_a_family_is_found_by_its_session_when_its_leader_is_dead() -> None:
    with a_family() as (leader, child, popen):
        assert family([leader]) == {leader, child}
        leader.send(signal.SIGKILL)
        popen.wait()
        assert family([leader]) == {child}


def test_the_session_of_a_reused_pid_is_nobodys_family() -> None:
    with a_family() as (leader, _, _):
        assert family([Process(leader.pid, leader.start_ticks - 1)]) == set()


def test_ending_a_family_leaves_none_of_it() -> None:
    with a_family() as (leader, child, _):
        end(leader, grace_s=2.0)
        assert not leader.is_alive()
        assert not child.is_alive()


def test_a_process_that_ignores_the_request_to_end_is_killed() -> None:
    with a_family("stubborn") as (leader, child, _):
        assert not end(leader, grace_s=0.2)
        assert not leader.is_alive()
        assert not child.is_alive()


class Stuck:
    """A process in a call to the kernel that no signal ends, such as a read of a disk that is gone."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send(self, signal_number: int) -> None:
        self.signals.append(signal_number)
        assert len(self.signals) < 100, "it is waited for for ever"


def test_a_process_that_no_signal_ends_is_not_waited_for_longer_than_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, stuck = [0.0], Stuck()

    def wait_gone(_: Any, timeout_s: float) -> set[Stuck]:
        now_s[0] += timeout_s
        return {stuck}

    monkeypatch.setattr(record, "wait_gone", wait_gone)
    monkeypatch.setattr(record, "family", lambda _: {stuck})
    monkeypatch.setattr(record, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    root: Any = stuck
    assert not end(root, grace_s=10.0)
    assert 75 <= now_s[0] < 85
    assert stuck.signals == [signal.SIGTERM, *[signal.SIGKILL] * 12]
