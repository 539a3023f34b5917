"""Jobs on a real Ray: each is done once, whichever of the processes that do it is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shared.jobs import Jobs
from shared.storage import ObjectStore
from tests.support.toy_jobs import beginnings, let_go
from tests.support.toy_processes import Toys, new_job, wait_for_state
from tests.support.waiting import wait_until


def test_jobs_are_done_once_cancelled_and_given_up(toys: Toys, jobs: Jobs, store: ObjectStore) -> None:
    simple = new_job(jobs)
    waiting = new_job(jobs, waits=True)
    withdrawn = new_job(jobs, waits=True)
    jobs.cancel(withdrawn.name, withdrawn.name)
    hopeless = new_job(jobs, kill_itself=True)

    toys.start()
    done = wait_for_state(jobs, simple, "SUCCEEDED")
    wait_until(lambda: bool(beginnings(store, waiting.name)), "the waiting job to begin")
    jobs.cancel(waiting.name, waiting.name)
    cancelled = wait_for_state(jobs, waiting, "CANCELLED")
    never_begun = wait_for_state(jobs, withdrawn, "CANCELLED")
    failed = wait_for_state(jobs, hopeless, "FAILED")

    assert [attempt for attempt, _ in beginnings(store, simple.name)] == [1]
    assert done.result == {"attempt": 1, "pid": beginnings(store, simple.name)[0][1], "prepared": False}
    assert (cancelled.attempt, cancelled.failures) == (1, 0)
    assert beginnings(store, withdrawn.name) == []
    assert never_begun.attempt == 0
    assert (failed.attempt, failed.failures) == (3, 3)
    assert failed.error is not None
    assert failed.error["reason"] == "TOO_MANY_FAILURES"
    # What is final is no longer looked at, and its actor is gone.
    wait_until(lambda: not jobs.live(), "every marker to be gone")
    wait_until(lambda: not _alive(done.result["pid"]), "the actor to end")


def test_after_its_actor_is_killed_the_next_attempt_finishes_the_job(
    toys: Toys, jobs: Jobs, store: ObjectStore
) -> None:
    job = new_job(jobs, waits=True)
    toys.start()
    wait_until(lambda: bool(beginnings(store, job.name)), "the first attempt")

    os.kill(beginnings(store, job.name)[0][1], signal.SIGKILL)
    wait_until(lambda: len(beginnings(store, job.name)) == 2, "the second attempt")
    let_go(store, job.name)
    done = wait_for_state(jobs, job, "SUCCEEDED")

    assert [attempt for attempt, _ in beginnings(store, job.name)] == [1, 2]
    assert (done.attempt, done.failures, done.result["attempt"]) == (2, 1, 2)


def test_a_job_goes_on_with_the_same_attempt_while_its_reconciler_is_killed_and_started_again(
    toys: Toys, jobs: Jobs, store: ObjectStore
) -> None:
    job = new_job(jobs, waits=True)
    first = toys.start()
    wait_until(lambda: bool(beginnings(store, job.name)), "the attempt")

    first.kill()
    first.wait()
    toys.start()
    wait_until(lambda: toys.said.count("reconciling toy jobs") == 2, "the second reconciler")
    second_job = new_job(jobs)
    wait_for_state(jobs, second_job, "SUCCEEDED")  # so it has looked at the first as well
    let_go(store, job.name)
    done = wait_for_state(jobs, job, "SUCCEEDED")

    assert len(beginnings(store, job.name)) == 1
    assert (done.attempt, done.failures, done.result["pid"]) == (1, 0, beginnings(store, job.name)[0][1])


def test_two_reconcilers_at_once_start_each_attempt_once(toys: Toys, jobs: Jobs, store: ObjectStore) -> None:
    both = [toys.start(), toys.start()]
    wait_until(lambda: toys.said.count("reconciling toy jobs") == 2, "both reconcilers")

    made = [new_job(jobs) for _ in range(6)]
    done = [wait_for_state(jobs, job, "SUCCEEDED") for job in made]

    for job in done:
        assert [attempt for attempt, _ in beginnings(store, job.name)] == [1], toys.said
        assert (job.attempt, job.failures) == (1, 0)
    assert [process.poll() for process in both] == [None, None], toys.said


def test_one_job_that_cannot_be_read_does_not_hold_up_the_others(toys: Toys, jobs: Jobs, store: ObjectStore) -> None:
    broken = new_job(jobs)
    store.put(f"{broken.name}/log/{1:012d}.json", b'{"from": "another release"}')
    reconciler = toys.start()

    wait_for_state(jobs, new_job(jobs), "SUCCEEDED")

    assert reconciler.poll() is None
    assert broken.name in toys.said


def test_a_supervised_reconciler_is_started_again_and_ends_with_its_service(
    toys: Toys, jobs: Jobs, store: ObjectStore
) -> None:
    service = toys.start("serve")
    wait_until(lambda: len(toys.pids()) == 1, "the reconciler")
    os.kill(toys.pids()[0], signal.SIGKILL)
    wait_until(lambda: len(toys.pids()) == 2, "another reconciler")
    # Once it works it has long been listening for our end.
    job = new_job(jobs)
    wait_for_state(jobs, job, "SUCCEEDED")

    service.kill()  # no chance to say goodbye
    service.wait()

    wait_until(lambda: not any(_alive(pid) for pid in toys.pids()), "the reconcilers to end")
    assert len(beginnings(store, job.name)) == 1


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in (Path(f"/proc/{pid}") / "status").read_text()
    except FileNotFoundError:
        return False
