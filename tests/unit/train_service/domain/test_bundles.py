"""What a cluster can never hold, and which field asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.train_service.domain.test_spec import GOOD
from train_service.domain.capacity import besides_ingest, beyond, device_of_run, never_fits
from train_service.domain.spec import CPU, DDP, FSDP, GPU, Placement, TrainingSpec

TWO_CPUS = [{"CPU": 2.0}]
TWO_NODES = [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0, "accelerator_type:A100": 1.0}]


def spec(num_workers: int, min_workers: int = 0, ingest: str = "THREADS", **placement: Any) -> TrainingSpec:
    return replace(
        GOOD,
        num_workers=num_workers,
        min_workers=min_workers,
        ingest=ingest,
        lanes=100,
        placement=Placement(**placement),
    )


@pytest.mark.parametrize(
    ("asked", "nodes", "field"),
    [
        (spec(64), TWO_CPUS, "num_workers"),
        (spec(64, min_workers=3), TWO_CPUS, "min_workers"),
        (spec(1, cpus_per_worker=64), TWO_CPUS, "placement.cpus_per_worker"),
        (spec(1, gpus_per_worker=1), TWO_CPUS, "placement.gpus_per_worker"),
        (spec(1, backend="nccl"), TWO_CPUS, "placement.backend"),
        (spec(1, backend="nccl", gpus_per_worker=1), TWO_CPUS, "placement.gpus_per_worker"),
        (spec(2, backend="nccl"), TWO_NODES, "num_workers"),
        (spec(1, resources_per_worker={"disk": 1}), TWO_CPUS, "placement.resources_per_worker[disk]"),
        (spec(1, accelerator_type="H100"), TWO_NODES, "placement.accelerator_type"),
        (spec(5, strategy="STRICT_PACK"), TWO_NODES, "num_workers"),
        (spec(3, strategy="STRICT_SPREAD"), TWO_NODES, "num_workers"),
        (spec(2, ingest="RAY_DATA"), TWO_CPUS, "num_workers"),
    ],
)
def test_the_field_that_asks_for_too_much_is_named(
    asked: TrainingSpec, nodes: list[dict[str, float]], field: str
) -> None:
    fields, has = never_fits(asked, [nodes])

    assert fields == [f"spec.{field}"]
    assert "CPU" in has or "GPU" in has


@pytest.mark.parametrize(
    ("asked", "clusters"),
    [
        (spec(64, min_workers=2), [TWO_CPUS]),
        (spec(8), [TWO_NODES]),
        (spec(1, accelerator_type="A100"), [TWO_NODES]),
        (spec(1, backend="nccl"), [TWO_NODES]),
        # A node is gone, and was there before.
        (spec(8), [TWO_NODES, TWO_CPUS]),
        (spec(64), []),
        (spec(0), [[{"CPU": 0.0}]]),
        # Which node it is, and its share of memory for objects, are not remembered, so nothing is known of them.
        (spec(1, resources_per_worker={"node:10.0.0.1": 0.1, "object_store_memory": 1e9}), [TWO_CPUS]),
    ],
)
def test_a_job_that_fits_an_earlier_cluster_is_admitted(
    asked: TrainingSpec, clusters: list[list[dict[str, float]]]
) -> None:
    assert never_fits(asked, clusters) == ([], "")


def test_an_operators_bound_holds_for_what_it_names() -> None:
    most = {"CPU": 16.0}

    assert beyond(spec(16), most) == []
    assert beyond(spec(17), most) == ["spec.num_workers"]
    assert beyond(spec(1, cpus_per_worker=17), most) == ["spec.placement.cpus_per_worker"]
    assert beyond(spec(16, gpus_per_worker=8), most) == []
    assert beyond(spec(0), {"CPU": 0.0}) == []
    assert beyond(spec(1, backend="nccl"), {"CPU": 16.0, "GPU": 0.0}) == ["spec.placement.backend"]


def test_each_job_whose_rows_ray_data_prepares_leaves_a_cpu_of_the_node_that_has_most() -> None:
    nodes = [{"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}]

    assert besides_ingest(nodes, 0) == nodes
    assert besides_ingest(nodes, 1) == [{"CPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}]
    assert sorted(node["CPU"] for node in besides_ingest(nodes, 4)) == [1.0, 1.0]
    assert besides_ingest([], 2) == []


@pytest.mark.parametrize(("parallel", "backend", "device"), [(DDP, "gloo", GPU), (FSDP, "gloo", CPU), (FSDP, "", GPU)])
def test_a_run_that_shards_by_gloo_is_on_cpus(parallel: str, backend: str, device: str) -> None:
    nodes = [{"CPU": 4.0, "GPU": 2.0}]

    assert device_of_run(spec(2, parallel=parallel, backend=backend), nodes) == device
