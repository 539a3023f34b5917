"""Whether processes wait for the workers of the next attempt."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest
import ray

import shared.jobs
from shared.jobs import warm_workers


@pytest.mark.parametrize(("text", "warm"), [("", True), ("1", True), ("0", False), ("yes", False)])
def test_a_nodes_setting_that_cannot_be_read_costs_time_and_no_job(
    monkeypatch: pytest.MonkeyPatch, text: str, warm: bool
) -> None:
    monkeypatch.setenv("MILLRACE_WARM_WORKERS", text)

    assert warm_workers.wanted() is warm


@pytest.mark.parametrize("moved", ["ray._private.ray_constants", "ray._private.utils", "ray.core.generated"])
def test_a_ray_whose_modules_have_moved_costs_time_and_no_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moved: str
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "a", "Alive": True}])
    monkeypatch.setitem(sys.modules, moved, None)
    monkeypatch.setattr(shared.jobs, "warm_workers", warm_workers)  # to be there again afterwards
    monkeypatch.delitem(sys.modules, "shared.jobs.warm_workers")
    imported_anew = importlib.import_module("shared.jobs.warm_workers")

    with caplog.at_level(logging.WARNING):
        workers = imported_anew.WarmWorkers(("json",))
        environment = workers.runtime_env
        workers.start({"a": 1})

    assert (environment == {}) is (moved == "ray._private.ray_constants")
    assert "this Ray starts" in caplog.text
