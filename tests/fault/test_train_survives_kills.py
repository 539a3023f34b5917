"""SIGKILL to everything that takes part in a run: it is done in the end, once, and with the very same weights.

One run is left alone but for its service, and another is struck four times; both have two workers and the same seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from shared.checkpoint import resolve
from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.ray_head import RayHead, ray_head
from tests.support.training import State, TrainStack, Watch, digits_spec, train_stack
from tests.support.waiting import wait_until

WORKER, ATTEMPT = "ray::RayTrainWorker", "ray::AttemptActor.run"
EPOCHS, STEPS_PER_EPOCH, EVERY = 16, 20, 7

pytestmark = [pytest.mark.timeout(1800), pytest.mark.chaos]


@dataclass
class Site:
    """A service on a Ray head that can be taken away and put back, on the same port."""

    stack: TrainStack
    stop: ExitStack
    head: RayHead

    def new_head(self) -> None:
        self.head = self.stop.enter_context(ray_head(num_cpus=4, port=int(self.head.address.rpartition(":")[2])))

    def kill_worker(self) -> None:
        """One of the newest attempt: pids grow, and an earlier attempt's processes may still be on their way out."""
        os.kill(max(self.head.processes(WORKER)), signal.SIGKILL)

    def kill_attempt(self) -> None:
        for pid in self.head.processes(ATTEMPT):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Struck:
    """What a run that was struck did: for each blow the checkpoints there were just after it."""

    job: res.TrainingJob
    watch: Watch
    kept: list[list[res.Checkpoint]] = field(default_factory=list)
    # When the worker was, in seconds since the epoch.
    killed_at: float = 0.0
    damaged: str = ""
    reported_without_ray: list[res.TrainingJob] = field(default_factory=list)
    seen_without_ray: int = 0

    def started(self, attempt: int) -> pb.TrainingEvent:
        return next(
            event
            for event in self.watch.events
            if event.attempt == attempt and event.WhichOneof("event") == "attempt_started"
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("train-kills")
    with ExitStack() as stop:
        head = stop.enter_context(ray_head(num_cpus=4))
        settings = StoreSettings(url=(folder / "store").as_uri())
        yield Site(stop.enter_context(train_stack(settings, head.address, folder)), stop, head)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Struck:
    """A run whose service was killed in the middle, and started again: that is no business of its workers."""
    job = site.stack.client.create(digits_spec(epochs=EPOCHS, checkpoint_every_steps=EVERY))
    watch = site.stack.client.watch(job.name)
    watch.until("progress")
    site.stack.service.kill()
    site.stack.service.start()
    rest = site.stack.client.watch(job.name, after_sequence=watch.events[-1].sequence)
    rest.rest()
    rest.events = watch.events + rest.events
    return Struck(site.stack.client.get(job.name), rest)


@pytest.fixture(scope="module")
def struck(site: Site, undisturbed: Struck) -> Struck:
    """The same run: a worker killed, then the attempt's own process and the newest checkpoint damaged, then Ray."""
    client = site.stack.client
    job = client.create(undisturbed.job.spec)
    run = Struck(job, client.watch(job.name, timeout_s=1700))

    until_checkpoints(run, attempt=1)
    run.killed_at = time.time()
    site.kill_worker()
    run.watch.until_state(State.STATE_RECOVERING)
    run.kept.append(client.checkpoints(job.name))

    until_checkpoints(run, attempt=2)
    workers = set(site.head.processes(WORKER))
    site.kill_attempt()
    wait_until(lambda: not workers & set(site.head.processes(WORKER)), "the workers to end with it")
    run.kept.append(client.checkpoints(job.name))
    newest = max(run.kept[-1], key=lambda one: one.step)
    run.damaged = newest.name
    damage(site.stack, newest.name)

    until_checkpoints(run, attempt=3)
    site.head.kill()
    run.kept.append(client.checkpoints(job.name))
    listed = client.rpc.ListTrainingJobs(pb.ListTrainingJobsRequest(), timeout=60).training_jobs
    run.reported_without_ray = [client.get(job.name), *listed]
    again = client.watch(job.name)
    again.until("checkpoint_committed", lambda event: event.attempt == 3)
    run.seen_without_ray = len(again.events)
    again.cancel()

    site.new_head()
    run.watch.rest()
    run.job = client.get(job.name)
    return run


def until_checkpoints(run: Struck, attempt: int) -> None:
    """Read on to the second checkpoint of this attempt."""
    for _ in range(2):
        run.watch.until("checkpoint_committed", lambda event: event.attempt == attempt)


def damage(stack: TrainStack, checkpoint: str) -> None:
    key = f"{resolve(stack.store, 'name', checkpoint).folder}/model.safetensors"
    data = bytearray(stack.store.get(key))
    data[-1] ^= 1
    stack.store.put(key, bytes(data))


def states_in_log(site: Site, job: str) -> list[str]:
    records = [json.loads(site.stack.store.get(info.key)) for info in site.stack.store.list(f"{job}/log")]
    return [record["state"]["state"] for record in sorted(records, key=lambda record: int(record["number"]))]


def test_a_run_goes_on_while_its_service_is_dead_and_succeeds_once(site: Site, undisturbed: Struck) -> None:
    assert undisturbed.job.state == State.STATE_SUCCEEDED
    assert undisturbed.job.attempt == 1
    assert states_in_log(site, undisturbed.job.name) == ["PENDING", "RUNNING", "SUCCEEDED"]
    events = undisturbed.watch.events
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))


def test_a_run_that_was_struck_succeeds_once_and_counts_each_fault_once(
    site: Site, struck: Struck, faults: Faults
) -> None:
    for fault in ("SIGKILL worker", "SIGKILL attempt", "damage to the newest checkpoint", "SIGKILL Ray head"):
        faults.add(fault, "training", "file")
    assert struck.job.state == State.STATE_SUCCEEDED, struck.job
    assert struck.job.attempt == 4
    assert states_in_log(site, struck.job.name) == [
        "PENDING",
        *["RUNNING", "RECOVERING"] * 3,
        "RUNNING",
        "SUCCEEDED",
    ]


def test_after_a_workers_death_the_next_attempt_resumes_at_the_step_of_the_newest_checkpoint(struck: Struck) -> None:
    newest = max(struck.kept[0], key=lambda one: one.step)

    started = struck.started(2).attempt_started
    assert (started.step, started.checkpoint, started.num_workers) == (newest.step, newest.name, 2)
    assert newest.step % EVERY == 0 or newest.step % STEPS_PER_EPOCH == 0
    noticed = next(job.update_time for job in struck.watch.jobs if job.state == State.STATE_RECOVERING)
    print(
        f"\nafter the worker's death: RECOVERING {noticed.ToNanoseconds() / 1e9 - struck.killed_at:.1f} s, "
        f"the next attempt's first step {struck.started(2).time.ToNanoseconds() / 1e9 - struck.killed_at:.1f} s"
    )


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(struck: Struck) -> None:
    good = [one for one in struck.kept[1] if one.name != struck.damaged]
    newest = max(good, key=lambda one: one.step)

    started = struck.started(3).attempt_started
    assert (started.step, started.checkpoint) == (newest.step, newest.name)
    warnings = [event for event in struck.watch.events if event.WhichOneof("event") == "warning"]
    assert [event.attempt for event in warnings] == [3]
    assert struck.damaged in warnings[0].warning


def test_without_ray_a_job_can_still_be_read_listed_and_watched(undisturbed: Struck, struck: Struck) -> None:
    assert struck.reported_without_ray[0].name == struck.job.name
    assert struck.reported_without_ray[0].state in (State.STATE_RUNNING, State.STATE_RECOVERING)
    assert {job.name for job in struck.reported_without_ray[1:]} == {undisturbed.job.name, struck.job.name}
    assert struck.seen_without_ray > 0


def test_on_a_new_ray_head_the_run_resumes_where_it_was(struck: Struck) -> None:
    newest = max(struck.kept[2], key=lambda one: one.step)

    started = struck.started(4).attempt_started
    assert (started.step, started.checkpoint) == (newest.step, newest.name)


def test_the_log_of_events_has_no_gap_and_attempts_never_mix(struck: Struck) -> None:
    events = struck.watch.events

    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    attempts = [event.attempt for event in events]
    assert attempts == sorted(attempts)
    assert set(attempts) == {1, 2, 3, 4}


def test_the_struck_run_has_bit_for_bit_the_weights_of_the_undisturbed_one(
    site: Site, undisturbed: Struck, struck: Struck
) -> None:
    def digests(job: res.TrainingJob) -> dict[int, str]:
        return {
            one.step: hashlib.sha256(site.stack.weights(one.name)).hexdigest()
            for one in site.stack.client.checkpoints(job.name)
            if one.name != struck.damaged or job.name != struck.job.name or one.attempt > 2
        }

    expected, found = digests(undisturbed.job), digests(struck.job)
    assert max(found) == EPOCHS * STEPS_PER_EPOCH
    assert found == expected


def test_metrics_are_those_of_the_undisturbed_run(undisturbed: Struck, struck: Struck) -> None:
    def validated(run: Struck) -> dict[int, tuple[float, float]]:
        return {one.step: (one.loss, one.accuracy) for one in run.watch.of("validated")}

    assert validated(struck) == validated(undisturbed)


def test_nothing_is_left_running_for_finished_jobs(site: Site, struck: Struck) -> None:
    wait_until(lambda: not site.head.processes(ATTEMPT), "the attempt's process to end")
    wait_until(lambda: not list(site.stack.store.list("live/train")), "the markers of live jobs to go")
    assert time.time() > struck.job.update_time.seconds
