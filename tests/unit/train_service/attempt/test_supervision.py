"""What an attempt looks after while its workers train. Ray's word is given here; ranks are heard over connections."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from shared.errors import Unavailable
from shared.jobs import AttemptContext, Jobs
from shared.jobs.transitions import PREEMPTED, RESIZED
from shared.settings import StoreSettings
from shared.storage import ObjectStore
from tests.support.waiting import wait_until
from tests.unit.train_service.worker.test_loop import SPEC, events, new_job
from train_service import placement
from train_service.attempt import trainer
from train_service.attempt.outcomes import FAILURE
from train_service.attempt.trainer import Supervision
from train_service.domain.spec import Program
from train_service.domain.watchdog import Phase
from train_service.placement import Node, Size
from train_service.program.coordinator import ReportCoordinator
from train_service.records.event_log import PREEMPT, RESIZE, TRAIN_KIND, EventKind
from train_service.worker.heartbeat import HeartbeatSender, HeartbeatServer

JOB = "trainingJobs/a"
# An attempt whose only rank says goodbye; what should end then does not.
STAYS = """
import sys, time
from dataclasses import replace
from shared.jobs import AttemptContext, Jobs
from shared.settings import StoreSettings
from shared.storage import open_store
from train_service.attempt import trainer
from train_service.placement import Size
from train_service.worker.heartbeat import HeartbeatSender
from train_service.worker.heartbeat import HeartbeatServer
from train_service.attempt.trainer import Supervision
from tests.unit.train_service.worker.test_loop import SPEC

trainer.GONE_TIMEOUT_S = trainer.FIT_ENDS_TIMEOUT_S = 1.0
Supervision._check_drains = lambda self, ranks: None  # there is no Ray to ask
store = open_store(StoreSettings(url=sys.argv[1]))
jobs = Jobs(store, "train")
context = AttemptContext(store, jobs, sys.argv[2], jobs.get(sys.argv[2], sys.argv[2]))
spec = replace(SPEC, num_workers=1)
with HeartbeatServer("127.0.0.1") as heartbeats, Supervision(context, spec, heartbeats, Size(1, {"CPU": 1.0})):
    with HeartbeatSender(0, heartbeats.address):
        while not heartbeats.at_work():
            time.sleep(0.01)
    time.sleep(600)
"""


@pytest.fixture
def context(store: ObjectStore) -> AttemptContext:
    new_job(store, JOB)
    jobs = Jobs(store, TRAIN_KIND)
    return AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB))


@pytest.fixture
def going(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The nodes that will be taken away; the attempt's own process is on `own`."""
    leaving: set[str] = set()
    monkeypatch.setattr(trainer, "draining_nodes", lambda: leaving)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "own"))
    return leaving


@pytest.fixture
def heartbeats() -> Iterator[HeartbeatServer]:
    with HeartbeatServer("127.0.0.1") as heartbeats:
        yield heartbeats


def test_an_attempt_does_not_outlast_its_ranks_for_ever(store: ObjectStore, file_store: StoreSettings) -> None:
    new_job(store, JOB)
    stayed = subprocess.run([sys.executable, "-c", STAYS, file_store.url, JOB], timeout=240, check=False)

    assert stayed.returncode == 1
    (ended,) = events(store, JOB, EventKind.ATTEMPT_ENDED)
    assert ended.payload["cause"] == FAILURE
    assert "gone" in ended.payload["text"]


def test_a_node_that_goes_before_workers_have_made_way_for_another_size_counts_as_taken_away(
    context: AttemptContext, heartbeats: HeartbeatServer, going: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "CAPACITY_STABLE_S", 0.0)
    monkeypatch.setattr(trainer, "size_now", lambda *_: Size(2, {"CPU": 1.0}))
    monkeypatch.setattr(Supervision, "_pays", lambda _: True)
    looking = Supervision(context, replace(SPEC, num_workers=2), heartbeats, Size(1, {"CPU": 1.0}))
    with HeartbeatSender(0, heartbeats.address, "n0") as heartbeat:
        heartbeat.at(1, Phase.TRAINING)
        wait_until(lambda: bool(heartbeats.at_work()), "the rank to be heard")
        looking._poll()
        assert looking.cause is not None
        assert looking.cause.specific_reason == RESIZED
        wait_until(lambda: heartbeat.request == RESIZE, "the wish")

        going.add("n0")
        looking._poll()

        assert looking.cause.specific_reason == PREEMPTED
        wait_until(lambda: heartbeat.request == PREEMPT, "the wish")


@pytest.mark.parametrize(("of_run", "moves"), [("GPU", True), ("CPU", False)])
def test_a_run_moves_from_cpus_to_gpus_only_where_they_are_its_own_that_are_back(
    store: ObjectStore,
    heartbeats: HeartbeatServer,
    going: set[str],
    monkeypatch: pytest.MonkeyPatch,
    of_run: str,
    moves: bool,
) -> None:
    assert not going
    new_job(store, JOB)
    jobs = Jobs(store, TRAIN_KIND)
    jobs.transition(JOB, lambda job: replace(job, choices={"device": of_run, "attempt_device": "CPU"}))
    context = AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB))
    monkeypatch.setattr(trainer, "CAPACITY_STABLE_S", 0.0)
    regarded = []

    def size_now(_: Any, device: str, *__: Any, claims: Any) -> Size:
        regarded.append(claims)
        return Size(2, {"CPU": 1.0, **({"GPU": 1.0} if device == "GPU" else {})})

    monkeypatch.setattr(trainer, "size_now", size_now)
    monkeypatch.setattr(Supervision, "_pays", lambda _: True)
    looking = Supervision(context, replace(SPEC, num_workers=2), heartbeats, Size(2, {"CPU": 1.0}))
    with HeartbeatSender(0, heartbeats.address, "n0") as first, HeartbeatSender(1, heartbeats.address, "n0"):
        wait_until(lambda: len(heartbeats.at_work()) == 2, "the ranks to be heard")
        looking._poll()
        if moves:
            wait_until(lambda: first.request == RESIZE, "the wish to take a checkpoint and end")

    assert (looking.cause is not None) is moves
    assert not moves or (looking.cause is not None and "on GPUs" in looking.cause.message)
    # GPUs for which a job in the queue waits do not count as free.
    assert [claims() for claims in regarded] == [[]] * moves


@pytest.mark.parametrize(("capacity", "grows"), [(3, False), (4, True)])
def test_a_run_grows_only_if_the_slowest_worker_then_computes_less(
    context: AttemptContext,
    heartbeats: HeartbeatServer,
    going: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capacity: int,
    grows: bool,
) -> None:
    assert not going
    monkeypatch.setattr(trainer, "CAPACITY_STABLE_S", 0.0)
    monkeypatch.setattr(trainer, "size_now", lambda *_: Size(capacity, {"CPU": 1.0}))
    monkeypatch.setattr(Supervision, "_pays", lambda _: True)
    spec = replace(SPEC, num_workers=4, min_workers=2, lanes=4)
    looking = Supervision(context, spec, heartbeats, Size(2, {"CPU": 1.0}))
    with HeartbeatSender(0, heartbeats.address, "n0"), HeartbeatSender(1, heartbeats.address, "n0"):
        wait_until(lambda: len(heartbeats.at_work()) == 2, "the ranks to be heard")
        looking._poll()

    assert (looking.cause is not None) is grows


def test_a_drain_is_noted_for_the_process_that_finds_the_attempt_gone(
    context: AttemptContext, heartbeats: HeartbeatServer, going: set[str]
) -> None:
    jobs = Jobs(context.store, TRAIN_KIND)
    looking = Supervision(context, SPEC, heartbeats, Size(1, {"CPU": 1.0}))
    looking._poll()
    assert not jobs.was_leaving(JOB, 1)

    going.add("own")
    looking._poll()

    assert jobs.was_leaving(JOB, 1)
    assert not jobs.was_leaving(JOB, 2)


def test_a_drain_that_cannot_be_noted_is_noted_at_a_later_look_and_holds_up_none(
    context: AttemptContext, heartbeats: HeartbeatServer, going: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    note = context.note_leaving

    def absent_twice() -> None:
        tries.append(1)
        if len(tries) <= 2:
            raise Unavailable("the store is away")
        note()

    monkeypatch.setattr(context, "note_leaving", absent_twice)
    monkeypatch.setattr(trainer, "STORE_OUTAGE_TIMEOUT_S", 0.0)
    looking = Supervision(context, SPEC, heartbeats, Size(1, {"CPU": 1.0}))
    going.add("own")
    for expected in (1, 2, 3, 3):
        looking._poll()
        assert len(tries) == expected

    assert Jobs(context.store, TRAIN_KIND).was_leaving(JOB, 1)
    assert looking.cause is not None
    assert looking.cause.specific_reason == PREEMPTED


@pytest.mark.parametrize(("free", "asked"), [(0.0, 0), (1.0, 1)])
def test_other_jobs_are_read_only_where_there_is_room_for_more_than_the_attempt_has(
    context: AttemptContext,
    heartbeats: HeartbeatServer,
    going: set[str],
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    asked: int,
) -> None:
    assert not going
    read: list[str] = []

    def none_beside(_: ObjectStore, name: str) -> int:
        read.append(name)
        return 0

    monkeypatch.setattr(trainer, "count_concurrent_ingests", none_beside)
    monkeypatch.setattr(placement, "usable_nodes", lambda: [Node("n0", {"CPU": free}, {"CPU": 3.0})])
    monkeypatch.setattr(Supervision, "_pays", lambda _: True)
    spec = replace(SPEC, num_workers=3, min_workers=1)
    looking = Supervision(context, spec, heartbeats, Size(1, {"CPU": 1.0}))
    with HeartbeatSender(0, heartbeats.address, "n0"):
        wait_until(lambda: bool(heartbeats.at_work()), "the rank to be heard")
        looking._poll()

    assert len(read) == asked


@pytest.mark.parametrize(("reported", "hangs"), [(0, False), (1, True)])
def test_a_function_without_an_optimizer_hangs_after_its_own_limit_once_it_has_reported(
    context: AttemptContext, heartbeats: HeartbeatServer, monkeypatch: pytest.MonkeyPatch, reported: int, hangs: bool
) -> None:
    """It steps no optimizer, and its rank says of itself that it starts."""
    monkeypatch.setattr(trainer, "STACKS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(trainer, "end_hard", lambda _: {})
    monkeypatch.setattr(Supervision, "_give_up", lambda looking, cause: setattr(looking, "cause", cause))
    spec = replace(SPEC, num_workers=1, program=Program(code_bundle="codeBundles/x", entry="a:b", hang_after_s=60.0))
    coordinator = SimpleNamespace(reported=reported, is_committing=False)
    looking = Supervision(context, spec, heartbeats, Size(1, {"CPU": 1.0}), cast("ReportCoordinator", coordinator))
    with HeartbeatSender(0, heartbeats.address, "n0") as heartbeat:
        heartbeat.at(0, Phase.STARTING)
        heartbeat._moved -= 100.0
        wait_until(lambda: bool(heartbeats.at_work()) and heartbeats.at_work()[0].still_since > 0, "the rank")
        wait_until(lambda: heartbeats.at_work()[0].state(time.monotonic()).still_s > 60.0, "its heartbeat")
        looking._check_hung_ranks(heartbeats.at_work())
    assert (looking.cause is not None) == hangs
    if looking.cause is not None:
        assert "rank 0 at step 0 stood still for more than 60 s" in looking.cause.message
