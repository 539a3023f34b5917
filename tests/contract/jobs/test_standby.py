"""The actor that waits for the next attempt: it saves a start, and whatever becomes of it costs no job anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from shared.jobs import Jobs
from shared.jobs.actor import CALL_TIMEOUT_S
from tests.support.ray_head import RayHead
from tests.support.toy_processes import Toys, new_job, wait_for_state
from tests.support.waiting import wait_until


def test_an_attempt_runs_in_the_process_that_waited_for_it_and_another_follows(
    toys: Toys, jobs: Jobs, ray: RayHead
) -> None:
    before = _actors(ray)
    toys.start(standby=True)
    waiting = _standby(ray, besides=before)

    done = wait_for_state(jobs, new_job(jobs), "SUCCEEDED")

    assert done.result == {"attempt": 1, "pid": waiting, "prepared": True}
    next_one = _standby(ray, besides=before | {waiting})
    assert wait_for_state(jobs, new_job(jobs), "SUCCEEDED").result["pid"] == next_one


def test_a_spare_that_was_killed_costs_no_attempt_and_is_followed_by_another(
    toys: Toys, jobs: Jobs, ray: RayHead
) -> None:
    before = _actors(ray)
    toys.start(standby=True)
    killed = _standby(ray, besides=before)

    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in _actors(ray), "the spare to be gone")
    done = wait_for_state(jobs, new_job(jobs), "SUCCEEDED")

    assert (done.attempt, done.failures) == (1, 0)
    # The job may have run in the spare that followed the killed one, and that process is about to end.
    _standby(ray, besides=before | {killed, done.result["pid"]})


TAKES_WHAT_IT_KILLS = """
import os, signal, sys
import ray
from shared.jobs.actor import NAMESPACE
from shared.jobs.standby import Standby

ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False)
standby = Standby("toy", "tests.support.toy_jobs:prepare")
standby.hold(replace=True)
os.kill(int(sys.stdin.readline()), signal.SIGKILL)
print("took it" if standby.take() else "not taken", flush=True)
"""


def test_a_spare_that_died_a_moment_ago_is_not_taken(ray: RayHead) -> None:
    """Ray goes on naming it for a while."""
    before = _actors(ray)
    command = [sys.executable, "-c", TAKES_WHAT_IT_KILLS, ray.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taking:
        said, _ = taking.communicate(f"{_standby(ray, besides=before)}\n", timeout=120)
    # Ray prints lines of its own there, too.
    assert "not taken" in said.splitlines(), said


@pytest.mark.chaos
def test_a_spare_that_no_reconciler_holds_any_more_ends(toys: Toys, ray: RayHead) -> None:
    before = _actors(ray)
    reconciler = toys.start(standby=True)
    left = _standby(ray, besides=before)

    reconciler.kill()
    reconciler.wait()

    wait_until(lambda: left not in _actors(ray), "the spare to end", CALL_TIMEOUT_S + 30.0)


def _actors(ray: RayHead) -> set[int]:
    return set(ray.processes("ray::AttemptActor"))


def _standby(ray: RayHead, *, besides: set[int]) -> int:
    """The pid of the one actor that is not among `besides`, once it is up."""
    others: set[int] = set()

    def find_one() -> bool:
        others.clear()
        others.update(_actors(ray) - besides)
        return len(others) == 1

    wait_until(find_one, "a spare")
    return others.pop()
