"""The bench of growth: what it reports of a case that grows, of one that does not end, and of its own store."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.scale import __main__ as scale
from benchmarks.scale.simulated_store import LATENCY_S, SimulatedStore
from shared.storage import ObjectExists, ObjectMissing


def test_a_ratio_is_that_of_a_units_cost_and_what_exceeds_a_limit_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_child(case: str, size: int) -> tuple[dict[str, object], str]:
        flat = {"units": 1, "per_unit_s": 0.1}
        bulk = {"units": size, "per_unit_s": 0.1 * size}
        late = case == "jobs" and size == 1000
        return ({"flat": flat} if late else {"flat": flat, "bulk": bulk}), "more than 240 s" if late else ""

    monkeypatch.setattr(scale, "run_child", run_child)
    monkeypatch.setattr(sys, "argv", ["scale", "--only", "jobs"])
    scale.main()

    reported = json.loads(capsys.readouterr().out)
    assert reported["flat_ratio"] == 1.0
    assert "bulk_ratio" not in reported
    assert reported["missed"] == {"jobs_1000x": "more than 240 s"}
    assert set(reported["sizes"]["bulk"]) == {"1x", "10x", "100x"}


def test_a_child_over_its_limit_of_time_is_killed_and_said_to_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "TIME_S", 0.0)

    assert scale.run_child("order", 1) == ({}, "more than 0 s")


def test_a_child_over_its_limit_of_memory_is_killed_and_said_to_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "MEMORY_BYTES", 1024)

    assert scale.run_child("order", 1) == ({}, "more than 0 GiB")


def test_the_simulated_store_counts_and_answers_as_a_store_does() -> None:
    store = SimulatedStore()
    store.put_zeros("a/zeros", 10)
    store.put_if_absent("a/b/c", b"abc")
    with pytest.raises(ObjectExists):
        store.put_if_absent("a/b/c", b"x")
    with pytest.raises(ObjectMissing):
        store.get("a/b")

    assert store.get_range("a/b/c", 1, 2) == b"bc"
    assert store.get("a/zeros") == bytes(10)
    assert [info.key for info in store.list("a")] == ["a/b/c", "a/zeros"]
    assert store.folders("a") == ["b"]
    assert store.requests == 7
    assert store.bytes == 3 + 2 + 10
    assert store.waited_s == pytest.approx(7 * LATENCY_S, rel=0.01)
