"""How many workers of Ray wait for the next transform, and where."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from data_service import parallel, reconciler
from data_service.parallel import WARM_WORKERS, StandbyWorkers, start


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What is started on a cluster of three nodes, the last without a CPU."""
    nodes = [{"NodeID": name, "Alive": True, "Resources": {"CPU": cpus}} for name, cpus in (("a", 8.0), ("b", 2.0))]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"NodeID": "c", "Alive": True, "Resources": {}}])
    counts_by_node: list[dict[str, int]] = []
    monkeypatch.setattr(type(WARM_WORKERS), "start", lambda _, counts: counts_by_node.append(dict(counts)))
    return counts_by_node


class Met:
    """Takes the place of Ray's functions that are only called."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, _: object) -> Met:
        return self

    def remote(self) -> None:
        self.times += 1


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    made = Met()
    monkeypatch.setattr(ray, "remote", lambda **_: made)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return made


@pytest.mark.parametrize(
    ("count", "on"), [(1, {"a": 1}), (2, {"a": 1, "b": 1}), (4, {"a": 2, "b": 2}), (9, {"a": 4, "b": 2})]
)
def test_they_are_spread_over_the_nodes(started: list[dict[str, int]], count: int, on: dict[str, int]) -> None:
    start(count)
    assert started == [on]


def test_only_so_many_follow_as_were_taken(started: list[dict[str, int]], met: Met) -> None:
    waiting = StandbyWorkers()
    waiting.replace()
    assert started == []

    waiting.start_for(2)
    waiting.start_for(3)  # a second pass, over more parts
    waiting.replace()
    assert (met.times, started) == (2, [{"a": 1, "b": 1}])


@pytest.mark.usefixtures("met")
@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("import", "data_service.imports.job.run_import"),
        ("transform", "data_service.transforms.job.run_transform"),
        ("predict", "data_service.transforms.predict_job.run_predict"),
    ],
)
def test_workers_follow_those_that_a_job_of_any_kind_took(
    started: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch, kind: str, entry: str
) -> None:
    waiting = StandbyWorkers()
    monkeypatch.setattr(parallel, "STANDBY_WORKERS", waiting)

    def take_two(_: object) -> dict[str, Any]:
        waiting.start_for(2)
        return {}

    monkeypatch.setattr(entry, take_two)
    afterwards: list[Callable[[], None]] = []
    context: Any = SimpleNamespace(job=SimpleNamespace(spec={kind: {}}), afterwards=afterwards.append)
    reconciler.run(context)
    assert started == []
    for one in afterwards:
        one()
    assert started == [{"a": 1, "b": 1}]


@pytest.mark.usefixtures("met")
def test_a_job_does_not_fail_of_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise RuntimeError("no such node")

    monkeypatch.setattr(parallel, "start", broken)
    waiting = StandbyWorkers()
    waiting.start_for(1)
    waiting.replace()
