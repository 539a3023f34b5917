"""What may die or be away while a run is at work, one test each: it succeeds, and counts one failure at most."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from shared.checkpoint import load_checkpoint, resolve
from shared.settings import StoreSettings
from shared.storage.object_store import ensure_bucket
from tests.support.faults import Faults
from tests.support.killable_s3 import killable_s3
from tests.support.ray_head import RayHead, ray_head
from tests.support.s3_fault_proxy import NONE, S3FaultProxy, fault_proxy, slow
from tests.support.s3_server import S3Program
from tests.support.training import State, TrainClient, TrainStack, digits_spec, train_stack
from tests.support.waiting import wait_until

WORKER, ATTEMPT = "ray::RayTrainWorker", "ray::AttemptActor.run"
STORE_AWAY_S = 20.0
# Of a checkpoint's files the weights have 1.4 MB and the optimizer's state twice as much.
UPLOAD_BYTES_PER_S, HALF_SENT_BYTES = 1_000_000, 500_000
DONE_TIMEOUT_S = 600.0

pytestmark = [pytest.mark.timeout(1200), pytest.mark.chaos]


@dataclass
class Place:
    head: RayHead
    stack: TrainStack

    def workers(self) -> list[int]:
        return self.head.processes(WORKER)

    def job(self, **changes: object) -> res.TrainingJob:
        """The one before has left nothing behind, so that what is found is this one's."""
        wait_until(lambda: not self.workers(), "earlier workers to end", timeout_s=120)
        return self.stack.client.create(digits_spec(**{"epochs": 8, "checkpoint_every_steps": 5, **changes}))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder: Path = tmp_path_factory.mktemp("never-lost")
    settings = StoreSettings(url=(folder / "store").as_uri())
    with ray_head(num_cpus=4) as head, train_stack(settings, head.address, folder) as stack:
        yield Place(head, stack)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_after_a_loss_processes_that_waited_are_the_workers(place: Place, faults: Faults) -> None:
    client = place.stack.client
    job = place.job(epochs=2000)
    watch = client.watch(job.name)
    watch.until("progress")
    wait_until(lambda: len(warm_processes(place.head)) == 2, "processes that wait", timeout_s=180)
    waiting = warm_processes(place.head)
    kill(max(place.workers()))
    faults.add("SIGKILL worker", "training, others wait", "file")
    watch.until("attempt_started", lambda event: event.attempt == 2)

    assert set(place.workers()) == waiting
    client.cancel(job.name)
    client.finished(job.name)


def warm_processes(head: RayHead) -> set[int]:
    """Those that no actor has, of the environment in which a worker's imports are made."""
    found = set()
    for pid in head.processes("ray::IDLE"):
        with suppress(OSError):
            if b"MILLRACE_WARM_MODULES=train_service" in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    return found


def test_a_worker_killed_while_it_starts(place: Place, faults: Faults) -> None:
    job = place.job()
    watch = place.stack.client.watch(job.name, timeout_s=DONE_TIMEOUT_S)
    watch.until_state(State.STATE_RUNNING)
    wait_until(lambda: bool(place.workers()), "a worker to start", timeout_s=180)
    kill(place.workers()[0])
    faults.add("SIGKILL worker", "start of training", "file")
    watch.rest()

    assert (watch.jobs[-1].state, watch.jobs[-1].failures) == (State.STATE_SUCCEEDED, 1), watch.ends()
    ended, *_ = watch.of("attempt_ended")
    assert ended.cause == pb.AttemptEnded.CAUSE_FAILURE
    assert [event.attempt for event in watch.events] == sorted(event.attempt for event in watch.events)


def test_a_worker_killed_at_work(place: Place, faults: Faults) -> None:
    job = place.job()
    watch = place.stack.client.watch(job.name, timeout_s=DONE_TIMEOUT_S)
    watch.until("checkpoint_committed")
    watch.until("progress")
    killed_at = time.time()
    kill(max(place.workers()))
    faults.add("SIGKILL worker", "training", "file")
    again = watch.until("attempt_started", lambda event: event.attempt == 2)
    first = watch.until("progress", lambda event: event.attempt == 2)
    watch.rest()

    (ended,) = [event for event in watch.events if event.WhichOneof("event") == "attempt_ended"]
    recovering = next(one for one in watch.jobs if one.state == State.STATE_RECOVERING)
    running = next(one for one in watch.jobs if one.state == State.STATE_RUNNING and one.attempt == 2)
    for what, stamp in [
        ("the end is told", ended.time),
        ("RECOVERING", recovering.update_time),
        ("RUNNING", running.update_time),
        ("the loop begins", again.time),
        ("first progress", first.time),
    ]:
        print(f"\n{stamp.ToNanoseconds() / 1e9 - killed_at:6.1f} s  {what}", end="")
    assert (watch.jobs[-1].state, watch.jobs[-1].failures) == (State.STATE_SUCCEEDED, 1), watch.ends()
    assert len(ended.attempt_ended.ranks) >= 1


def test_the_attempts_own_process_killed_with_the_controller_in_it(place: Place, faults: Faults) -> None:
    job = place.job()
    watch = place.stack.client.watch(job.name, timeout_s=DONE_TIMEOUT_S)
    watch.until("checkpoint_committed")
    before = set(place.workers())
    for pid in place.head.processes(ATTEMPT):
        kill(pid)
        faults.add("SIGKILL attempt", "training", "file")
    wait_until(lambda: not before & set(place.workers()), "its workers to end with it")
    watch.rest()

    assert (watch.jobs[-1].state, watch.jobs[-1].failures) == (State.STATE_SUCCEEDED, 1), watch.ends()
    kinds = [(event.attempt, event.WhichOneof("event")) for event in watch.events]
    assert kinds.index((1, "attempt_ended")) == kinds.index((2, "attempt_started")) - 1


def test_the_service_killed(place: Place, faults: Faults) -> None:
    job = place.job()
    before = place.stack.client.watch(job.name, timeout_s=DONE_TIMEOUT_S)
    before.until("progress")
    place.stack.service.kill()
    faults.add("SIGKILL service", "training", "file")
    place.stack.service.start()
    watch = place.stack.client.watch(job.name, timeout_s=DONE_TIMEOUT_S)
    watch.rest()

    assert (watch.jobs[-1].state, watch.jobs[-1].attempt) == (State.STATE_SUCCEEDED, 1)


def test_the_store_away_for_twenty_seconds_in_the_middle_of_an_upload(
    s3_program: S3Program, place: Place, tmp_path: Path, faults: Faults
) -> None:
    """Training stalls, and does not fail; the checkpoint whose bytes were cut off is whole in the end."""
    with killable_s3(s3_program, tmp_path / "s3") as s3:
        settings = s3.settings("s3://millrace/away")
        ensure_bucket(settings)
        with (
            fault_proxy(settings) as proxy,
            train_stack(proxy.settings(settings), place.head.address, tmp_path) as stack,
        ):
            job = stack.client.create(digits_spec(epochs=12, checkpoint_every_steps=1))
            watch = stack.client.watch(job.name, timeout_s=DONE_TIMEOUT_S)
            watch.until("checkpoint_committed")
            proxy.fault = slow(UPLOAD_BYTES_PER_S)
            wait_until(lambda: half_sent(proxy), "an upload to be half done", timeout_s=60, interval_s=0.01)
            cut = half_sent(proxy)
            back = s3.kill_for(STORE_AWAY_S)
            wait_until(lambda: cut in proxy.broken, "the upload to break off")
            proxy.fault = NONE
            back.join()
            faults.add("SIGKILL S3 server", "training, a checkpoint half uploaded", f"s3-{s3.name}")
            done = finished(stack.client, job.name)
            again = stack.client.watch(job.name, timeout_s=240)
            again.rest()
            kept = stack.client.checkpoints(job.name)
            for one in kept:
                entry = resolve(stack.store, "name", one.name)
                load_checkpoint(stack.store, entry.folder, entry.manifest_sha256).verify()

    assert (done.state, done.attempt, done.failures) == (State.STATE_SUCCEEDED, 1, 0)
    step = int(re.search(r"/step-(\d{8})-", cut)[1])  # type: ignore[index]
    assert [one.step for one in kept] == list(range(1, 101))  # of 240, a page
    assert step in range(1, 101)
    waits = [int(re.search(r"a checkpoint took (\d+) s", text)[1]) for text in again.of("warning")]  # type: ignore[index]
    assert max(waits) >= STORE_AWAY_S - 5


def half_sent(proxy: S3FaultProxy) -> str:
    """The path of a checkpoint's file of which a part has been sent, if there is one."""
    sending = dict(proxy.sending).items()
    return next((path for path, sent in sending if "/checkpoints/" in path and sent > HALF_SENT_BYTES), "")


def finished(client: TrainClient, name: str) -> res.TrainingJob:
    """As `TrainClient.finished`, but patient with a service whose store has just come back."""
    until = time.monotonic() + DONE_TIMEOUT_S
    while True:
        try:
            return client.finished(name)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise
            time.sleep(1.0)
