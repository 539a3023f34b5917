"""Tests here let time pass; however long a busy machine takes over one, no report of a frontend grows old."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tests.unit.inference_service.reconciled import Clock


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of lost replicas and of the phases of a rollout."""
    one = Clock()
    for module in ("serve.models", "deploy.rollout_driver"):
        instead = SimpleNamespace(monotonic=one.monotonic, time=lambda: time.time())
        monkeypatch.setattr(f"inference_service.{module}.time", instead)
    return one


@pytest.fixture(autouse=True)
def _reports_stay_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_service.frontend_processes.UNRESPONSIVE_AFTER_S", 3600.0)
