"""The time of a checked module that counts against its caller is not what a busy machine takes from it."""

from __future__ import annotations

import pytest

from train_service.jobs.entry_child import MAX_IDLE_STEP_S, IdleTime


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
