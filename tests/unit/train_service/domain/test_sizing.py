"""How many workers fit, and what is said where too few do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_service.domain.capacity import (
    PACK,
    SPREAD,
    STRICT_PACK,
    STRICT_SPREAD,
    what_is_missing,
    workers_that_fit,
)

CPU = {"CPU": 1.0}


@pytest.mark.parametrize(
    ("strategy", "expected"), [(PACK, 4), (SPREAD, 4), (STRICT_PACK, 3), (STRICT_SPREAD, 2)], ids=str
)
def test_a_strategy_decides_on_how_many_nodes_the_workers_may_lie(strategy: str, expected: int) -> None:
    assert workers_that_fit([{"CPU": 3.0}, {"CPU": 1.5}, {"CPU": 0.5}], CPU, strategy, 1, 8) == expected


@pytest.mark.parametrize("strategy", [PACK, SPREAD, STRICT_PACK, STRICT_SPREAD])
def test_a_node_of_which_more_is_spoken_for_than_it_has_takes_no_worker(strategy: str) -> None:
    assert workers_that_fit([{"CPU": -0.5}], CPU, strategy, 1, 8) == 0


def test_every_resource_of_a_bundle_must_be_on_the_same_node() -> None:
    bundle = {"CPU": 1.0, "GPU": 1.0, "accelerator_type:A100": 0.001}
    nodes = [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 2.0, "GPU": 4.0, "accelerator_type:A100": 1.0}]
    assert workers_that_fit(nodes, bundle, PACK, 1, 8) == 2


def test_with_room_for_fewer_than_the_fewest_there_are_none() -> None:
    assert workers_that_fit([{"CPU": 1.0}], CPU, PACK, 2, 3) == 0
    assert workers_that_fit([{"CPU": 2.0}], CPU, PACK, 2, 3) == 2
    assert workers_that_fit([{"CPU": 9.0}], CPU, PACK, 2, 3) == 3
    assert workers_that_fit([], CPU, PACK, 1, 3) == 0


def test_thirds_of_a_cpu_fit_three_times() -> None:
    assert workers_that_fit([{"CPU": 1.0}], {"CPU": 0.3333}, PACK, 1, 8) == 3
    assert workers_that_fit([{"CPU": 0.3}], {"CPU": 0.1}, PACK, 1, 8) == 3


@given(
    st.lists(st.integers(0, 9), max_size=5),
    st.integers(1, 4),
    st.sampled_from([PACK, SPREAD, STRICT_PACK, STRICT_SPREAD]),
)
def test_more_nodes_never_hold_fewer_workers(cpus: list[int], need: int, strategy: str) -> None:
    nodes = [{"CPU": float(amount)} for amount in cpus]
    bundle = {"CPU": float(need)}
    fits = workers_that_fit(nodes, bundle, strategy, 1, 64)
    assert fits <= workers_that_fit([*nodes, {"CPU": 3.0}], bundle, strategy, 1, 64)
    assert fits * need <= sum(cpus)


def test_the_error_of_missing_resources_names_the_request_and_the_present_ones() -> None:
    free, total = [{"CPU": 1.0}, {}], [{"CPU": 4.0}, {"CPU": 4.0}]
    assert what_is_missing(free, total, CPU, PACK, 2) == "2 workers of 1 CPU: the cluster has 1 CPU free on 1 node"


def test_a_size_that_can_never_fit_is_reported_as_such() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 4.0}]
    assert what_is_missing(nodes, nodes, {"CPU": 2.0, "GPU": 1.0}, PACK, 1) == (
        "1 worker of 2 CPU and 1 GPU: the cluster has 8 CPU and 0 GPU free on 2 nodes, and 8 CPU and 0 GPU in all"
    )
    assert what_is_missing(nodes, nodes, CPU, STRICT_SPREAD, 3) == (
        "3 workers of 1 CPU on a node each: the cluster has 8 CPU free on 2 nodes, and 8 CPU in all"
    )
    assert what_is_missing([], [], CPU, PACK, 1) == "1 worker of 1 CPU: the cluster has no node"
    assert what_is_missing(nodes, nodes, {**CPU, "accelerator_type:A100": 0.001}, PACK, 1) == (
        "1 worker of 1 CPU and A100: the cluster has 8 CPU and no A100 free on 2 nodes, and 8 CPU and no A100 in all"
    )
