"""Which clusters were there lately, and which jobs are refused for it before any worker starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.errors import FailedPrecondition
from shared.settings import SettingsError, largest_cluster
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits
from tests.unit.train_service.conftest import VERSION
from tests.unit.train_service.jobs.test_training_jobs import SPEC
from train_service.jobs.training_jobs import REFRESHED_S, REMEMBERED_S, ClusterMemory, TrainingJobs

NODE = {"CPU": 2.0, "memory": 8.3 * 2**30, "node:127.0.0.1": 1.0, "object_store_memory": 4e9}
LARGE = replace(SPEC, num_workers=4)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def small_version(store: ObjectStore) -> None:
    commit_version(store, VERSION, {"train": striped_digits(40)})


def test_a_node_that_is_gone_is_remembered_for_a_day(store: ObjectStore, clock: Clock) -> None:
    memory = ClusterMemory(store, clock)
    memory.note([NODE, NODE])
    memory.note([NODE])

    small, large = [{"CPU": 2.0, "memory": 9.0 * 2**30}], [{"CPU": 2.0, "memory": 9.0 * 2**30}] * 2
    assert ClusterMemory(store, clock).clusters() == [large, small]
    clock.now += REMEMBERED_S - REFRESHED_S
    memory.note([NODE])
    clock.now += REFRESHED_S
    assert memory.clusters() == [small]


def test_the_largest_cluster_is_remembered_however_often_nodes_came_and_went_since(
    store: ObjectStore, clock: Clock
) -> None:
    memory = ClusterMemory(store, clock)
    for nodes in (150, *range(149, 0, -1), *range(2, 150)):
        memory.note([NODE] * nodes)
        clock.now += 60

    largest, *others = [len(nodes) for nodes in memory.clusters()]
    assert largest == 150
    assert others[-1] == 149
    assert len(others) < 10


def test_a_smaller_cluster_seen_long_after_a_larger_one_outlasts_it(store: ObjectStore, clock: Clock) -> None:
    memory = ClusterMemory(store, clock)
    memory.note([NODE, NODE, NODE])
    clock.now += REMEMBERED_S / 2
    memory.note([NODE, NODE])
    memory.note([NODE])

    clock.now += REMEMBERED_S / 2

    assert [len(nodes) for nodes in memory.clusters()] == [2, 1]


def test_an_unreadable_record_delays_no_job_and_is_written_anew(store: ObjectStore) -> None:
    for content in (b"not JSON", b"[]", b'{"clusters": [{"nodes": 3, "seen": 0}]}'):
        store.put("clusters/train.json", content)

        TrainingJobs(store).create("a", LARGE, "", "", validate_only=True)
        ClusterMemory(store).note([NODE])

        assert len(ClusterMemory(store).clusters()) == 1


def test_a_cluster_that_stays_is_written_only_now_and_then(store: ObjectStore, clock: Clock) -> None:
    memory = ClusterMemory(store, clock)
    memory.note([NODE])
    written = store.get("clusters/train.json")
    clock.now += REFRESHED_S / 2
    memory.note([NODE])
    assert store.get("clusters/train.json") == written
    clock.now += REFRESHED_S
    memory.note([NODE])
    assert store.get("clusters/train.json") != written


def test_a_cluster_without_nodes_says_nothing_of_its_size(store: ObjectStore) -> None:
    ClusterMemory(store).note([])

    assert ClusterMemory(store).clusters() == []


@pytest.mark.parametrize("validate_only", [True, False])
def test_a_job_that_no_cluster_could_hold_is_refused_and_leaves_nothing(
    store: ObjectStore, validate_only: bool
) -> None:
    ClusterMemory(store).note([NODE])
    before = sorted(info.key for info in store.list())

    with pytest.raises(FailedPrecondition) as refused:
        TrainingJobs(store).create("a", LARGE, "", "", validate_only)

    assert refused.value.specific_reason == "NEVER_SCHEDULABLE"
    ((path, problem),) = refused.value.fields
    assert path == "spec.num_workers"
    assert "the cluster has 2 CPU on 1 node in all" in problem
    assert "4 workers of 1 CPU can never be placed" in refused.value.message
    assert sorted(info.key for info in store.list()) == before


def test_a_repeated_call_gets_its_job_though_the_cluster_has_shrunk(store: ObjectStore) -> None:
    request_id = "7f0c3b3e-6a1f-4f0b-9d0e-3f8a2b1c4d5e"
    made = TrainingJobs(store).create("a", LARGE, request_id, "digest", validate_only=False)
    ClusterMemory(store).note([NODE])

    again = TrainingJobs(store).create("a", LARGE, request_id, "digest", validate_only=False)

    assert again.record.uid == made.record.uid


def test_an_operators_bound_takes_the_place_of_what_was_seen(store: ObjectStore) -> None:
    ClusterMemory(store).note([NODE])
    jobs = TrainingJobs(store, cluster_max={"CPU": 4.0})

    jobs.create("a", LARGE, "", "", validate_only=True)
    with pytest.raises(FailedPrecondition, match="never has more than 4 CPU"):
        jobs.create("a", replace(LARGE, num_workers=5), "", "", validate_only=True)


def test_the_bound_is_read_from_the_environment() -> None:
    assert largest_cluster({}) is None
    assert largest_cluster({"MILLRACE_CLUSTER_MAX": "CPU=512, GPU=64"}) == {"CPU": 512.0, "GPU": 64.0}


@pytest.mark.parametrize("text", ["64", "CPU=", "CPU=x", "=3", "CPU=-1", "CPU=nan", "cpu=4", "gpu=1"])
def test_a_bound_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="MILLRACE_CLUSTER_MAX"):
        largest_cluster({"MILLRACE_CLUSTER_MAX": text})
