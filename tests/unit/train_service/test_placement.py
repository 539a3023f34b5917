"""How many workers there is room for, beside other jobs and in place of an attempt's own. Ray's word is given here."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

import pytest

from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, lose_attempt
from shared.storage import ObjectStore
from train_service import placement
from train_service.domain.spec import RAY_DATA, THREADS, TrainingSpec
from train_service.ingest_room import ingest_beside
from train_service.placement import Node, Size, lacking, size_now
from train_service.reporting import TRAIN_KIND

from .domain.test_spec import GOOD

B = "trainingJobs/b"


def cluster(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> None:
    monkeypatch.setattr(placement, "usable_nodes", lambda: list(nodes))


def node(node_id: str, free: dict[str, float], total: dict[str, float]) -> Node:
    return Node(node_id, free, total)


def begun(store: ObjectStore, name: str, ingest: str) -> Jobs:
    """A job with an attempt at work."""
    now, jobs = time.time(), Jobs(store, TRAIN_KIND)
    spec = {"training": replace(GOOD, ingest=ingest).as_config()}
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=spec, create_time=now, update_time=now))
    jobs.transition(name, lambda job: begin_attempt(job, now), attempt=1)
    return jobs


def workers(number: int, fewest: int = 0, **changes: str) -> TrainingSpec:
    return replace(GOOD, num_workers=number, min_workers=fewest, **changes)  # type: ignore[arg-type]


def test_the_cpu_that_prepares_another_jobs_rows_is_not_for_workers(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Job A has two workers, and its tasks run on one of the other CPUs now and then.
    cluster(monkeypatch, node("n", {"CPU": 2.0}, {"CPU": 4.0}))
    jobs = begun(store, "trainingJobs/a", RAY_DATA)
    begun(store, "trainingJobs/c", THREADS)

    def beside() -> int:
        return ingest_beside(store, B)

    assert lacking(workers(2), beside).endswith("besides 1 CPU that prepares rows")
    assert lacking(workers(1, ingest=RAY_DATA), beside).endswith("besides 2 CPU that prepare rows")
    assert lacking(workers(1), beside) == ""
    assert size_now(workers(2, fewest=1), beside).workers == 1
    assert size_now(workers(2), beside).workers == 0
    assert ingest_beside(store, "trainingJobs/a") == 0, "its own is counted by itself"

    jobs.transition("trainingJobs/a", lambda job: lose_attempt(job, Unavailable("lost"), time.time()), attempt=1)
    assert lacking(workers(2), beside) == ""
    assert size_now(workers(2), beside).workers == 2


def test_other_jobs_are_looked_up_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, node("n", {"CPU": 1.0}, {"CPU": 4.0}))

    def never() -> int:
        raise AssertionError

    assert lacking(workers(2), never)
    assert size_now(workers(2), never).workers == 0


def test_workers_that_run_make_room_for_what_they_hold_and_not_for_what_the_next_would() -> None:
    size = Size(2, {"CPU": 1.0})

    assert size.held({"a": 1, "b": 1}) == {"a": {"CPU": 1.0}, "b": {"CPU": 1.0}}


def test_a_node_with_a_gpu_does_not_make_gpus_of_workers_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of one CPU each; then a node with a GPU comes, and the next attempt would ask for GPUs."""
    both = [node(name, {"CPU": 0.0}, {"CPU": 1.0}) for name in "ab"]
    cluster(monkeypatch, *both, node("c", {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}))
    size = size_now(workers(3, fewest=1), own=Size(2, {"CPU": 1.0}).held({"a": 1, "b": 1}))

    assert size == Size(1, {"CPU": 1.0, "GPU": 1.0})
