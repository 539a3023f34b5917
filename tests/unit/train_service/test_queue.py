"""The queue of training jobs for the cluster's resources. What Ray would answer is given here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs import reconciler as shared_reconciler
from shared.jobs.attempt import AttemptContext
from shared.jobs.reconciler import Reconciler
from shared.jobs.transitions import request_cancel
from shared.settings import OwnCode, ServiceSettings
from shared.storage import ObjectStore
from tests.unit.train_service.domain.test_spec import GOOD
from train_service import placement, reconciler
from train_service.attempt import trainer
from train_service.domain.capacity import (
    STRICT_PACK,
    STRICT_SPREAD,
    Claim,
    ClusterUse,
    Holder,
    left_by,
    workers_that_fit,
)
from train_service.domain.spec import GPU, MAX_WORKERS, RAY_DATA, Placement, TrainingSpec, max_workers
from train_service.placement import UNPLACED_S, Node, Queue, QueueRecord
from train_service.records.event_log import TRAIN_KIND


def gpu_job(workers: int = 1, gpus: float = 1.0, priority: int = 0) -> TrainingSpec:
    return replace(
        GOOD, num_workers=workers, priority=priority, placement=Placement(cpus_per_worker=1.0, gpus_per_worker=gpus)
    )


def cpu_job() -> TrainingSpec:
    return replace(GOOD, num_workers=1, placement=Placement(cpus_per_worker=1.0, gpus_per_worker=0.0))


# --- What claims leave ---


@pytest.mark.parametrize(
    ("claim", "free", "left"),
    [
        (Claim(bundle={"GPU": 1}, workers=2, strategy="PACK"), [3, 0], [1, 0]),
        (Claim(bundle={"GPU": 1}, workers=2, strategy=STRICT_SPREAD), [3, 1], [2, 0]),
        (Claim(bundle={"GPU": 1}, workers=9, strategy="PACK"), [3, 1], [0, 0]),
        (Claim(bundle={"GPU": 1}, workers=4, strategy=STRICT_PACK), [3, 2], [0, 2]),
        (Claim(bundle={"GPU": 1}, workers=5, strategy=STRICT_PACK), [3, 2], [3, 2]),
        (Claim(bundle={"GPU": 2}, workers=1, strategy="PACK"), [1, 1], [0, 1]),
        (Claim(bundle={"GPU": 5}, workers=1, strategy="PACK"), [3, 1], [3, 1]),
        (Claim(bundle={"CPU": 1}, workers=1, strategy="PACK"), [3, 1], [3, 1]),
    ],
    ids=[
        "packed",
        "spread",
        "all-there-is",
        "on-one-node",
        "on-no-node",
        "the-next-one-there",
        "never-fits",
        "another-resource",
    ],
)
def test_a_claim_takes_the_places_that_its_workers_will_have(claim: Claim, free: list[int], left: list[int]) -> None:
    totals = [{"GPU": 4.0, "CPU": 4.0}] * 2

    found = left_by([claim], [{"GPU": number, "CPU": 0.0} for number in free], totals)

    assert [node["GPU"] for node in found] == left


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_jobs_behind_workers_that_must_be_on_one_node_never_lower_its_room(
    nodes: list[tuple[int, int]], workers: int, need: int, behind: int
) -> None:
    totals = [{"GPU": float(max(node))} for node in nodes]
    free = [{"GPU": float(min(node))} for node in nodes]
    claim = Claim(bundle={"GPU": need}, workers=workers, strategy=STRICT_PACK)
    could = [place for place, total in enumerate(totals) if total["GPU"] >= workers * need]
    roomiest = max((free[place]["GPU"] for place in could), default=0.0)

    left = left_by([claim], free, totals)
    # A job behind it takes what it can, one GPU at a time.
    for node, before in zip(left, free, strict=True):
        if workers_that_fit([node], {"GPU": 1.0}, "PACK", 1, behind):
            taken = min(float(behind), node["GPU"])
            before["GPU"] -= taken

    if roomiest <= workers * need:
        assert max((free[place]["GPU"] for place in could), default=0.0) == roomiest
    else:
        assert max(free[place]["GPU"] for place in could) >= workers * need


# --- A cluster and its reconciler ---


class Cluster:
    """One node with 2 GPUs and 4 CPUs of which so many are free, and the attempts there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = {"CPU": 4.0, "GPU": 1.0}
        self.total = {"CPU": 4.0, "GPU": 2.0}
        self.now = 0.0
        self.actors: set[str] = set()
        self.holding: set[str] = set()
        for module in (placement, reconciler, trainer):
            monkeypatch.setattr(module, "usable_nodes", lambda: [Node("a", dict(self.free), self.total)])
        monkeypatch.setattr(shared_reconciler, "find_actor", self.find)
        monkeypatch.setattr(shared_reconciler, "start_actor", self.start)
        monkeypatch.setattr(shared_reconciler, "memory_kill", lambda _: "")
        self.kept: dict[str, float] = {}
        queue = Queue(
            lambda: self.now, lambda: self.holding, lambda actor: actor in self.actors, lambda: dict(self.kept)
        )
        monkeypatch.setattr(reconciler, "Queue", lambda: queue)
        monkeypatch.setattr(reconciler.ClusterWatch, "__call__", lambda *_: None)

    def find(self, name: str) -> Any:
        return _Handle() if name in self.actors else None

    def start(self, name: str) -> Any:
        self.actors.add(name)
        return _Handle()


class _Handle:
    class run:  # noqa: N801
        @staticmethod
        def remote(*_: Any) -> None: ...


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def create(store: ObjectStore, job_id: str, spec: TrainingSpec) -> None:
    name = f"trainingJobs/{job_id}"
    config = {"training": spec.as_config()}
    Jobs(store, TRAIN_KIND).create(name, JobRecord(uid=job_id, name=name, spec=config, create_time=0, update_time=0))


def reconciling(store: ObjectStore) -> Reconciler:
    return Reconciler(
        ServiceSettings(listen="", store=store.settings), reconciler.training(store, own_code=OwnCode(is_trusted=True))
    )


def running(store: ObjectStore) -> list[str]:
    jobs = Jobs(store, TRAIN_KIND)
    found = [jobs.get(live.folder, live.folder) for live in jobs.live()]
    return sorted(job.uid for job in found if job.state is JobState.RUNNING)


def actor_of(store: ObjectStore, job_id: str) -> str:
    return Jobs(store, TRAIN_KIND).get(f"trainingJobs/{job_id}", "").actor


def test_of_many_jobs_for_one_gpu_the_first_begins_and_the_next_one_when_it_is_free_again(
    store: ObjectStore, cluster: Cluster
) -> None:
    for number in range(10):
        create(store, f"j{number}", gpu_job())
    looking = reconciling(store)

    for _ in range(3):  # Ray still reports the GPU as free
        looking.reconcile()
        assert running(store) == ["j0"]
    cluster.free["GPU"] = 0.0
    cluster.holding.add(actor_of(store, "j0"))
    looking.reconcile()
    assert running(store) == ["j0"]
    assert "0 GPU free" in Jobs(store, TRAIN_KIND).waiting_for("trainingJobs/j1")

    cluster.free["GPU"] = 1.0  # the second GPU
    looking.reconcile()
    assert running(store) == ["j0", "j1"]
    after = {number: Jobs(store, TRAIN_KIND).waiting_for(f"trainingJobs/j{number}") for number in (2, 3, 9)}
    assert after[2].endswith(": trainingJobs/j1 is before it in the queue and takes what is free")
    assert after[3].endswith(": trainingJobs/j2 is before it in the queue and takes what is free")
    assert after[9].endswith(": trainingJobs/j2 is before it in the queue and takes what is free")


def test_capacity_reserved_by_waiting_jobs_is_recorded_for_attempts_that_could_grow(
    store: ObjectStore, cluster: Cluster
) -> None:
    for number in range(3):
        create(store, f"j{number}", gpu_job())
    cluster.free["GPU"] = 0.0
    looking = reconciling(store)
    looking.reconcile()
    assert "j0 is before" not in Jobs(store, TRAIN_KIND).waiting_for("trainingJobs/j0")
    for job_id in ("j1", "j2"):
        waiting_for = Jobs(store, TRAIN_KIND).waiting_for(f"trainingJobs/{job_id}")
        assert "0 GPU free" in waiting_for
        assert waiting_for.endswith("; trainingJobs/j0 is before it in the queue")
    looking.reconcile()
    assert [claim.job for claim in QueueRecord(store).read()] == [f"trainingJobs/j{number}" for number in range(3)]


@pytest.mark.parametrize("ends", ["dies", "is-not-placed"])
def test_an_attempt_that_takes_nothing_after_all_leaves_its_place(
    store: ObjectStore, cluster: Cluster, ends: str
) -> None:
    create(store, "j0", gpu_job())
    create(store, "j1", gpu_job())
    looking = reconciling(store)
    looking.reconcile()
    looking.reconcile()
    assert running(store) == ["j0"]

    if ends == "dies":
        cluster.actors.clear()
    else:
        cluster.now = UNPLACED_S + 1
    looking.reconcile()

    assert "j1" in running(store)


def test_a_higher_priority_begins_first_and_equal_ones_as_they_came(store: ObjectStore, cluster: Cluster) -> None:
    for job_id, priority in (("low", -1), ("a", 0), ("high", 5), ("b", 0)):
        create(store, job_id, gpu_job(priority=priority))
    looking = reconciling(store)

    begun: list[str] = []
    for _ in range(4):
        looking.reconcile()
        begun += [job_id for job_id in running(store) if job_id not in begun]
        cluster.holding |= cluster.actors

    assert begun == ["high", "a", "b", "low"]


def test_a_job_that_waits_is_not_passed_by_smaller_ones_for_what_it_asks_for(
    store: ObjectStore, cluster: Cluster
) -> None:
    create(store, "large", gpu_job(workers=2))
    create(store, "small", gpu_job())
    create(store, "cpu", cpu_job())
    looking = reconciling(store)

    looking.reconcile()

    assert running(store) == ["cpu"]
    cluster.free["GPU"] = 2.0
    looking.reconcile()
    assert running(store) == ["cpu", "large"]


def test_a_job_that_the_cluster_could_not_hold_keeps_no_place(store: ObjectStore, cluster: Cluster) -> None:
    create(store, "huge", gpu_job(workers=3))
    create(store, "small", gpu_job())

    reconciling(store).reconcile()

    assert running(store) == ["small"]
    assert "and 4 CPU and 2 GPU in all" in Jobs(store, TRAIN_KIND).waiting_for("trainingJobs/huge")
    assert cluster.total["GPU"] == 2.0


def test_a_job_whose_workers_and_rows_the_cluster_could_not_hold_together_keeps_no_place(
    store: ObjectStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "cpus_of_tasks", lambda: 0.0)
    cluster.free["CPU"] = 3.0
    create(store, "huge", replace(cpu_job(), num_workers=4, ingest=RAY_DATA))
    create(store, "small", cpu_job())

    reconciling(store).reconcile()

    assert running(store) == ["small"]


@pytest.mark.parametrize(("kept", "begins"), [(1.0, ["small"]), (0.0, [])], ids=["by-a-deployment", "by-a-job"])
def test_a_job_that_deployments_leave_too_little_for_keeps_no_place(
    store: ObjectStore, cluster: Cluster, kept: float, begins: list[str]
) -> None:
    cluster.kept["GPU"] = kept
    create(store, "large", gpu_job(workers=2))
    create(store, "small", gpu_job())

    reconciling(store).reconcile()

    assert running(store) == begins


def test_the_use_of_deployments_is_the_sum_over_their_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    holders = [
        Holder(deployment_uid="a", cpus=1.0, gpus=1.0),
        Holder(deployment_uid="b", cpus=2.0),
        Holder(attempt="train-1", cpus=8.0, gpus=8.0),
        Holder(what="tasks", cpus=8.0),
    ]
    monkeypatch.setattr(placement, "cluster_use", lambda: ClusterUse(holders=holders))

    assert placement.kept_by_deployments() == {"CPU": 3.0, "GPU": 1.0}


@pytest.mark.usefixtures("cluster")
def test_an_elastic_attempt_takes_no_more_than_jobs_before_it_leave(store: ObjectStore) -> None:
    create(store, "fixed", replace(cpu_job(), num_workers=3))
    elastic = replace(cpu_job(), num_workers=8, min_workers=1)
    create(store, "elastic", elastic)
    reconciling(store).reconcile()
    assert running(store) == ["elastic", "fixed"]

    # The elastic one is faster, and all 4 CPUs are free.
    jobs = Jobs(store, TRAIN_KIND)
    sizes = {}
    for job_id, spec in (("elastic", elastic), ("fixed", replace(cpu_job(), num_workers=3))):
        job = jobs.get(f"trainingJobs/{job_id}", "")
        sizes[job_id] = trainer.size_of_attempt(AttemptContext(store, jobs, job.name, job), spec).workers

    assert sizes == {"elastic": 1, "fixed": 3}


def test_an_attempt_that_is_alone_takes_what_is_free_once_it_begins(store: ObjectStore, cluster: Cluster) -> None:
    cluster.free["CPU"] = 1.0
    elastic = replace(cpu_job(), num_workers=8, min_workers=1)
    create(store, "elastic", elastic)
    reconciling(store).reconcile()
    cluster.free["CPU"] = 4.0
    jobs = Jobs(store, TRAIN_KIND)
    job = jobs.get("trainingJobs/elastic", "")

    assert trainer.size_of_attempt(AttemptContext(store, jobs, job.name, job), elastic).workers == 4


def test_a_script_that_needs_more_workers_than_it_was_counted_with_asks_for_them() -> None:
    script = replace(cpu_job(), num_workers=4)

    assert max_workers(script, {MAX_WORKERS: 1}) == 4
    assert max_workers(replace(script, min_workers=2), {MAX_WORKERS: 3}) == 3


@pytest.mark.usefixtures("cluster")
def test_an_attempt_whose_beginning_was_not_answered_counts_once_it_is_started(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store, "j0", gpu_job())
    create(store, "j1", gpu_job())
    looking = reconciling(store)
    put, lost = looking._store.put_if_absent, [True]

    def unanswered(key: str, data: bytes) -> None:
        put(key, data)
        if lost and "/log/" in key:
            lost.clear()
            raise Unavailable("the answer was lost")

    monkeypatch.setattr(looking._store, "put_if_absent", unanswered)
    with pytest.raises(Unavailable):
        looking.reconcile()
    assert running(store) == ["j0"]

    for _ in range(3):
        looking.reconcile()  # Ray still reports the GPU as free
        assert running(store) == ["j0"]


def test_a_job_that_is_cancelled_while_it_waits_leaves_its_place(store: ObjectStore, cluster: Cluster) -> None:
    create(store, "large", gpu_job(workers=2))
    create(store, "small", gpu_job())
    looking = reconciling(store)
    looking.reconcile()
    assert running(store) == []

    Jobs(store, TRAIN_KIND).transition("trainingJobs/large", lambda job: request_cancel(job, 1.0))
    looking.reconcile()

    assert running(store) == ["small"]
    assert placement.devices_of(gpu_job(), "", [Node("a", cluster.free, cluster.total)]) == (GPU, GPU)


def test_a_log_of_a_live_job_is_read_with_one_request_where_nothing_is_new(
    store: ObjectStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        create(store, f"j{number}", gpu_job(workers=2))
    cluster.free["GPU"] = 0.0
    looking = reconciling(store)
    looking.reconcile()
    reads: list[str] = []
    get = ObjectStore.get

    def counted(self: ObjectStore, key: str) -> bytes:
        reads.append(key)
        return get(self, key)

    monkeypatch.setattr(ObjectStore, "get", counted)

    looking.reconcile()

    assert sorted(reads) == [f"trainingJobs/j{number}/log/000000000002.json" for number in range(5)]
