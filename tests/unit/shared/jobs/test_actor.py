"""When an actor that nobody calls ends, without Ray around it."""

from __future__ import annotations

import os
import threading

import pytest

from shared.jobs import actor
from shared.jobs.actor import AttemptActor

CALL_TIMEOUT_S = 0.1
ended = threading.Event()
# Whether it ended while it prepared.
seen: list[bool] = []


def slow() -> None:
    seen.append(ended.wait(3 * CALL_TIMEOUT_S))


def test_an_actor_does_not_count_the_time_it_prepares_and_ends_when_nobody_calls_it_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor, "CALL_TIMEOUT_S", CALL_TIMEOUT_S)
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    standby = AttemptActor()
    standby.prepare(f"{__name__}:slow")
    assert seen == [False]
    assert ended.wait(30)
