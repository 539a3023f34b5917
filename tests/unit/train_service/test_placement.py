"""How many workers there is room for, beside other jobs and in place of an attempt's own. Ray's word is given here."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

import pytest

from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.transitions import begin_attempt, lose_attempt
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.unit.train_service.domain.test_spec import GOOD
from train_service import placement, reconciler
from train_service.domain.capacity import Claim, ClusterUse
from train_service.domain.spec import CPU, GPU, RAY_DATA, THREADS, Placement, Program, TrainingSpec
from train_service.placement import IngestReservation, Node, Queue, Size, count_concurrent_ingests, lacking, size_now
from train_service.records.event_log import TRAIN_KIND, EventKind, EventLog

B = "trainingJobs/b"


def cluster(monkeypatch: pytest.MonkeyPatch, *nodes: Node, tasks_hold: float = 0.0) -> None:
    for module in (placement, reconciler):
        monkeypatch.setattr(module, "usable_nodes", lambda: list(nodes))
    monkeypatch.setattr(placement, "cpus_of_tasks", lambda: tasks_hold, raising=False)
    monkeypatch.setattr(placement, "kept_by_deployments", dict)


def node(node_id: str, free: dict[str, float], total: dict[str, float]) -> Node:
    return Node(node_id, free, total)


def pending(store: ObjectStore, name: str, spec: TrainingSpec) -> Jobs:
    now, jobs = time.time(), Jobs(store, TRAIN_KIND)
    config = {"training": spec.as_config()}
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=config, create_time=now, update_time=now))
    return jobs


def begun(store: ObjectStore, name: str, ingest: str) -> Jobs:
    """A job with an attempt at work."""
    now, jobs = time.time(), pending(store, name, replace(GOOD, ingest=ingest))
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

    def concurrent_ingests() -> int:
        return count_concurrent_ingests(store, B)

    assert lacking(workers(2), CPU, concurrent_ingests).endswith("besides 1 CPU that prepares rows")
    assert lacking(workers(1, ingest=RAY_DATA), CPU, concurrent_ingests).endswith("besides 2 CPU that prepare rows")
    assert lacking(workers(1), CPU, concurrent_ingests) == ""
    assert size_now(workers(2, fewest=1), CPU, concurrent_ingests).workers == 1
    assert size_now(workers(2), CPU, concurrent_ingests).workers == 0
    assert count_concurrent_ingests(store, "trainingJobs/a") == 0, "its own is counted by itself"

    jobs.transition("trainingJobs/a", lambda job: lose_attempt(job, Unavailable("lost"), time.time()), attempt=1)
    assert lacking(workers(2), CPU, concurrent_ingests) == ""
    assert size_now(workers(2), CPU, concurrent_ingests).workers == 2


def test_other_jobs_are_looked_up_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, node("n", {"CPU": 1.0}, {"CPU": 4.0}))

    def never() -> int:
        raise AssertionError

    assert lacking(workers(2), CPU, never)
    assert size_now(workers(2), CPU, never).workers == 0


def test_the_jobs_at_work_are_read_once_for_all_that_wait(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, node("n", {"CPU": 2.0}, {"CPU": 4.0}))
    monkeypatch.setattr(reconciler, "totals", list)
    monkeypatch.setattr(reconciler, "cluster_use", ClusterUse)
    begun(store, "trainingJobs/a", RAY_DATA)
    waiting = [f"trainingJobs/p{number}" for number in range(20)]
    for name in waiting:
        pending(store, name, workers(2))
    kind, jobs = reconciler.training(store), Jobs(store, TRAIN_KIND)
    records = [jobs.get(name, name) for name in waiting]
    reads: list[str] = []
    get = type(store).get

    def counted(self: ObjectStore, key: str) -> object:
        reads.append(key)
        return get(self, key)

    monkeypatch.setattr(type(store), "get", counted)
    for _ in range(2):
        reads.clear()
        kind.polls(store)
        assert all("besides 1 CPU" in kind.missing_capacity(job) for job in records)
        assert 0 < len(reads) <= 4 * (len(waiting) + 1)

    jobs.transition("trainingJobs/a", lambda job: lose_attempt(job, Unavailable("lost"), time.time()), attempt=1)
    kind.polls(store)
    assert kind.missing_capacity(records[0]) == ""


def test_a_job_that_begins_counts_for_those_behind_it_in_the_same_look(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, node("n", {"CPU": 2.0}, {"CPU": 2.0}))
    monkeypatch.setattr(reconciler, "totals", list)
    monkeypatch.setattr(reconciler, "cluster_use", ClusterUse)
    for name, spec in (("trainingJobs/a", workers(1, ingest=RAY_DATA)), (B, workers(2))):
        jobs = pending(store, name, spec)
    kind = reconciler.training(store)
    kind.polls(store)
    assert kind.missing_capacity(jobs.get(B, B)) == ""

    first = jobs.get("trainingJobs/a", "trainingJobs/a")
    assert kind.missing_capacity(first) == "", "and does not count for itself"
    assert kind.missing_capacity(first) == ""
    assert "besides 1 CPU" in kind.missing_capacity(jobs.get(B, B))


def test_a_cpu_on_which_another_jobs_task_runs_is_not_asked_for_twice(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job A has a worker, and one of its tasks runs just now."""
    begun(store, "trainingJobs/a", RAY_DATA)

    def concurrent_ingests() -> int:
        return count_concurrent_ingests(store, B)

    cluster(monkeypatch, node("n", {"CPU": 1.0}, {"CPU": 3.0}), tasks_hold=1.0)
    assert lacking(workers(1), CPU, concurrent_ingests) == ""
    assert size_now(workers(2, fewest=1), CPU, concurrent_ingests).workers == 1
    assert "has 1 CPU free" in lacking(workers(2), CPU, concurrent_ingests)
    # Its own job's worker and task, when it looks for room for a second worker.
    own = Size(1, {"CPU": 1.0}).held({"n": 1})
    assert size_now(workers(2, fewest=1, ingest=RAY_DATA), CPU, own=own).workers == 2

    cluster(monkeypatch, node("n", {"CPU": 2.0}, {"CPU": 3.0}))
    assert lacking(workers(1), CPU, concurrent_ingests) == ""
    assert "has 1 CPU free" in lacking(workers(2), CPU, concurrent_ingests)
    assert size_now(workers(3, fewest=1, ingest=RAY_DATA), CPU, own=own).workers == 2


def test_workers_that_run_make_room_for_what_they_hold_and_not_for_what_the_next_would() -> None:
    size = Size(2, {"CPU": 1.0})

    assert size.held({"a": 1, "b": 1}) == {"a": {"CPU": 1.0}, "b": {"CPU": 1.0}}


def test_workers_on_cpus_have_room_on_a_node_with_a_gpu_and_ask_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of one CPU each; then a node with a GPU comes, which changes nothing of what the run asks for."""
    both = [node(name, {"CPU": 0.0}, {"CPU": 1.0}) for name in "ab"]
    cluster(monkeypatch, *both, node("c", {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}))
    size = size_now(workers(3, fewest=1), CPU, own=Size(2, {"CPU": 1.0}).held({"a": 1, "b": 1}))

    assert size == Size(3, {"CPU": 1.0})


HEAD = node("head", {"CPU": 16.0}, {"CPU": 16.0})
GPUS = node("gpus", {"CPU": 96.0, "GPU": 8.0}, {"CPU": 96.0, "GPU": 8.0})
BUSY = node("gpus", {"CPU": 96.0, "GPU": 0.0}, {"CPU": 96.0, "GPU": 8.0})


def a_job(spec: TrainingSpec, waited_s: float = 0.0, **choices: str) -> JobRecord:
    """One that waits for its next attempt."""
    now = time.time()
    return JobRecord(
        uid="u",
        name=B,
        spec={"training": spec.as_config()},
        create_time=now,
        update_time=now - waited_s,
        state=JobState.RECOVERING if choices else JobState.PENDING,
        attempt=1 if choices else 0,
        choices=choices,
    )


def missing_capacity(store: ObjectStore, job: JobRecord) -> str:
    gate = reconciler.OwnCodeGate(store, OwnCode())
    return reconciler.missing_capacity(IngestReservation(store), gate, Queue(), job)


def test_no_attempt_at_a_program_begins_while_own_code_is_switched_off_and_its_events_say_so(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, HEAD)
    job = a_job(replace(workers(1), program=Program(code_bundle=f"codeBundles/{'0' * 64}", entry="train:loop")))
    for _ in range(2):  # reconcilers, one after the other
        kind = reconciler.training(store)
        for _ in range(3):
            assert "MILLRACE_OWN_CODE=trusted" in kind.missing_capacity(job)
    (event,) = EventLog(store, job.name).after(0)
    assert event.kind is EventKind.WARNING
    assert "own code is switched off" in event.payload["text"]

    assert reconciler.training(store, own_code=OwnCode(is_trusted=True)).missing_capacity(job) == ""
    assert reconciler.training(store).missing_capacity(a_job(workers(1))) == ""


def on_gpus(fallback: bool, number: int = 8, **placed: object) -> TrainingSpec:
    return replace(workers(number), placement=Placement(allow_cpu_fallback=fallback, **placed))  # type: ignore[arg-type]


def test_a_run_that_began_on_gpus_waits_for_them_when_their_node_is_lost_and_says_so(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, HEAD, GPUS)
    spec = on_gpus(False)
    first = a_job(spec)
    assert missing_capacity(store, first) == ""
    chosen = reconciler.choose(first)
    assert (chosen["device"], chosen["attempt_device"]) == (GPU, GPU)

    cluster(monkeypatch, HEAD)
    job = a_job(spec, 3600.0, **chosen)

    assert "8 workers of 1 CPU and 1 GPU: the cluster has" in missing_capacity(store, job)
    assert "the run began on GPUs" in missing_capacity(store, job)
    assert "placement.allow_cpu_fallback" in missing_capacity(store, job)
    assert reconciler.choose(job) == chosen
    cluster(monkeypatch, HEAD, GPUS)
    assert missing_capacity(store, job) == ""


def test_a_run_that_began_on_cpus_stays_on_them_when_gpus_come(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, HEAD)
    chosen = reconciler.choose(a_job(on_gpus(True)))
    assert (chosen["device"], chosen["attempt_device"]) == (CPU, CPU)

    cluster(monkeypatch, HEAD, GPUS)

    assert reconciler.choose(a_job(on_gpus(True), 0.0, **chosen)) == chosen
    assert missing_capacity(store, a_job(on_gpus(True), 3600.0, **chosen)) == ""


def test_a_run_that_may_goes_on_on_cpus_once_its_gpus_are_gone_for_a_while_and_back_when_they_are_there(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = on_gpus(True)
    chosen = {"device": GPU, "attempt_device": GPU}
    cluster(monkeypatch, HEAD)
    assert "it goes on on CPUs once" in missing_capacity(store, a_job(spec, 1.0, **chosen))

    job = a_job(spec, reconciler.FALLBACK_AFTER_S + 1.0, **chosen)
    assert missing_capacity(store, job) == ""
    fallen = reconciler.choose(job)
    assert fallen == {"device": GPU, "attempt_device": CPU, "device_before": GPU}
    # Lost once more on CPUs, it need not wait for GPUs again.
    assert "gone for" not in missing_capacity(store, a_job(spec, 1.0, **fallen))
    assert "device_before" not in reconciler.choose(a_job(spec, 1.0, **fallen))

    cluster(monkeypatch, HEAD, GPUS)
    back = reconciler.choose(a_job(spec, 1.0, **fallen))
    assert back == {"device": GPU, "attempt_device": GPU, "device_before": CPU}


def test_gpus_that_others_hold_are_waited_for_though_the_run_may_go_on_on_cpus(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, HEAD, BUSY)
    job = a_job(on_gpus(True), 3600.0, device=GPU, attempt_device=GPU)

    assert "0 GPU free" in missing_capacity(store, job)
    assert reconciler.choose(job)["attempt_device"] == GPU


def test_an_elastic_run_keeps_to_the_gpus_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = node("gpus", {"CPU": 96.0, "GPU": 3.0}, {"CPU": 96.0, "GPU": 3.0})
    cluster(monkeypatch, HEAD, left)
    spec = replace(on_gpus(True), min_workers=2)

    chosen = reconciler.choose(a_job(spec, 3600.0, device=GPU, attempt_device=GPU))

    assert chosen["attempt_device"] == GPU
    assert size_now(spec, GPU) == Size(3, {"CPU": 1.0, "GPU": 1.0})


def test_on_cpus_the_type_of_the_gpus_is_not_asked_for(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, HEAD)
    spec = on_gpus(True, accelerator_type="A100", gpus_per_worker=1.0)

    assert missing_capacity(store, a_job(spec)) == ""
    assert reconciler.choose(a_job(spec)) == {"device": GPU, "attempt_device": CPU, "device_before": GPU}
    assert size_now(spec, CPU).bundle == {"CPU": 1.0}


def test_the_local_mode_is_on_the_cpu_and_asks_for_no_node(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch)

    assert missing_capacity(store, a_job(workers(0))) == ""
    assert reconciler.choose(a_job(workers(0))) == {"device": CPU, "attempt_device": CPU}


def test_an_attempt_does_not_grow_into_what_a_job_in_the_queue_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, node("n", {"CPU": 2.0}, {"CPU": 4.0}))
    own = {"n": {"CPU": 1.0}}
    first = Claim(bundle={"CPU": 1.0}, workers=1, strategy="PACK", job=B)

    def workers_beside(*claims: Claim) -> int:
        return size_now(workers(4, fewest=1), CPU, own=own, more_than=1, claims=lambda: claims).workers

    assert workers_beside() == 3
    assert workers_beside(first) == 2
    assert workers_beside(replace(first, workers=3)) == 1
    assert workers_beside(replace(first, bundle={"GPU": 1.0})) == 3
