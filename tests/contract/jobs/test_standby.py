"""The actor that waits for the next attempt: it saves a start, and whatever becomes of it costs no job anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection

import pytest

from shared.jobs import Jobs
from shared.jobs.actor import CALL_TIMEOUT_S
from tests.support.ray_head import RayHead
from tests.support.toy_jobs import prepared_by
from tests.support.toy_processes import Toys, new_job, wait_for_state
from tests.support.waiting import wait_until


def test_an_attempt_runs_in_the_process_that_waited_for_it_and_another_follows(
    toys: Toys, jobs: Jobs, ray: RayHead
) -> None:
    toys.start(standby=True)
    waiting = _standby(toys, ray)

    done = wait_for_state(jobs, new_job(jobs), "SUCCEEDED")

    assert done.result == {"attempt": 1, "pid": waiting, "prepared": True}
    next_one = _standby(toys, ray, besides={waiting})
    assert wait_for_state(jobs, new_job(jobs), "SUCCEEDED").result["pid"] == next_one


def test_a_spare_that_was_killed_costs_no_attempt_and_is_followed_by_another(
    toys: Toys, jobs: Jobs, ray: RayHead
) -> None:
    toys.start(standby=True)
    killed = _standby(toys, ray)

    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in _actors(ray), "the spare to be gone")
    done = wait_for_state(jobs, new_job(jobs), "SUCCEEDED")

    assert (done.attempt, done.failures) == (1, 0)
    # The job may have run in the spare that followed the killed one, and that process is about to end.
    _standby(toys, ray, besides={killed, done.result["pid"]})


TAKES_WHAT_IT_KILLS = """
import os, signal, sys
import ray
from shared.jobs.actor import NAMESPACE
from shared.jobs.actor import Standby

ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False)
standby = Standby("toy", sys.argv[2])
standby.hold(replace=True)
os.kill(int(sys.stdin.readline()), signal.SIGKILL)
print("took it" if standby.take() else "not taken", flush=True)
"""


def test_a_spare_that_died_a_moment_ago_is_not_taken(toys: Toys, ray: RayHead) -> None:
    """Ray goes on naming it for a while."""
    command = [sys.executable, "-c", TAKES_WHAT_IT_KILLS, ray.address, prepared_by(str(toys.spares_folder))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taking:
        said, _ = taking.communicate(f"{_standby(toys, ray)}\n", timeout=240)
    # Ray prints lines of its own there, too.
    assert "not taken" in said.splitlines(), said


@pytest.mark.chaos
def test_a_spare_that_no_reconciler_holds_any_more_ends(toys: Toys, ray: RayHead) -> None:
    reconciler = toys.start(standby=True)
    left = _standby(toys, ray)

    reconciler.kill()
    reconciler.wait()

    wait_until(lambda: left not in _actors(ray), "the spare to end", CALL_TIMEOUT_S + 120.0)


def _actors(ray: RayHead) -> set[int]:
    return set(ray.processes("ray::AttemptActor"))


def _standby(toys: Toys, ray: RayHead, *, besides: Collection[int] = ()) -> int:
    """The pid of a living actor that is not among `besides`, once it is prepared."""
    found: set[int] = set()

    def is_there() -> bool:
        found.clear()
        found.update((toys.spares() & _actors(ray)) - set(besides))
        return bool(found)

    wait_until(is_there, "a standby", 240.0)
    (standby,) = found
    return standby
