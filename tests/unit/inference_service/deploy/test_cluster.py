"""What no cluster could hold is refused by field; what nobody knows, and what may come back, is not."""

from __future__ import annotations

from typing import Any

import pytest

from inference_service.deploy.deployments import REMEMBERED_S, Cluster
from inference_service.domain.deployment import Autoscaling
from shared.errors import FailedPrecondition
from tests.unit.inference_service.domain.test_scaling import spec

NODES = {"a": {"CPU": 4.0, "GPU": 1.0}, "b": {"CPU": 8.0}}


def autoscaling(least: int) -> Autoscaling:
    return Autoscaling(min_replicas=least, max_replicas=60, rows_per_replica=0)


def refused(cluster: Cluster, versions: int = 1, **changes: Any) -> str:
    with pytest.raises(FailedPrecondition) as error:
        cluster.check_fits(spec(**changes), versions)
    assert error.value.specific_reason == "NEVER_SCHEDULABLE"
    ((field, why),) = error.value.fields
    assert "MILLRACE_CLUSTER_MAX" in why
    return field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"threads_per_replica": 9}, "spec.threads_per_replica"),
        ({"cpus_per_replica": 8.5}, "spec.cpus_per_replica"),
        ({"cpus_per_replica": 8.0, "gpus_per_replica": 0.1}, "spec.cpus_per_replica"),
        ({"num_replicas": 13}, "spec.num_replicas"),
        ({"num_replicas": 5, "gpus_per_replica": 0.25}, "spec.num_replicas"),
        ({"autoscaling": autoscaling(13)}, "spec.autoscaling.min_replicas"),
    ],
)
def test_more_than_the_nodes_have_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    cluster = Cluster(None)
    cluster.note(NODES)
    assert refused(cluster, **changes) == field


@pytest.mark.parametrize(
    "changes",
    [
        {"threads_per_replica": 8},
        {"threads_per_replica": 100, "cpus_per_replica": 0.5},
        {"num_replicas": 12},
        {"num_replicas": 40, "cpus_per_replica": 0.3},  # 13 on the one, 26 on the other, and one is too many
        {"num_replicas": 4, "gpus_per_replica": 0.25},
        {"num_replicas": 10, "gpus_per_replica": 0.1, "cpus_per_replica": 0.4},
        {"autoscaling": autoscaling(12)},  # that the most do not fit is no matter
    ],
)
def test_a_deployment_that_fits_by_its_replicas_is_admitted(changes: dict[str, Any]) -> None:
    cluster = Cluster(None)
    cluster.note(NODES)
    if changes.get("num_replicas") == 40:
        assert refused(cluster, **changes) == "spec.num_replicas"
        changes = {**changes, "num_replicas": 39}
    cluster.check_fits(spec(**changes))


@pytest.mark.parametrize("cluster", [Cluster(None), Cluster({"CPU": 12.0})])
def test_two_versions_at_once_need_twice_the_room(cluster: Cluster) -> None:
    cluster.note(NODES)
    cluster.check_fits(spec(num_replicas=6), versions=2)
    assert refused(cluster, versions=2, num_replicas=7) == "name"


def test_a_cluster_that_nobody_has_seen_refuses_nothing() -> None:
    Cluster(None).check_fits(spec(threads_per_replica=200))


def test_a_node_that_is_away_for_a_while_still_counts() -> None:
    now_s = 0.0
    cluster = Cluster(None, lambda: now_s)
    cluster.note(NODES)
    now_s = REMEMBERED_S - 1
    cluster.note({"a": NODES["a"]})
    cluster.check_fits(spec(threads_per_replica=8))
    now_s = REMEMBERED_S + 1
    cluster.note({"a": NODES["a"]})
    assert refused(cluster, threads_per_replica=8) == "spec.threads_per_replica"


def test_of_a_cluster_that_grows_the_operators_bound_counts() -> None:
    cluster = Cluster({"CPU": 16.0})
    cluster.note(NODES)
    cluster.check_fits(spec(num_replicas=16, gpus_per_replica=1.0))
    assert refused(cluster, cpus_per_replica=17.0) == "spec.cpus_per_replica"
    assert refused(cluster, num_replicas=17) == "spec.num_replicas"
    assert refused(Cluster({"GPU": 0.0}), gpus_per_replica=0.5) == "spec.gpus_per_replica"
