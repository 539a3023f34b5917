"""When an actor that nobody calls ends, without Ray around it."""

from __future__ import annotations

import os
import threading

import pytest

from shared.jobs import actor
from shared.jobs.actor import AttemptActor

ended = threading.Event()
# The countdown that was running before it prepared.
countdowns: list[threading.Timer] = []
# Whether that was over while it prepared.
seen: list[bool] = []


def slow() -> None:
    seen.append(countdowns[0].finished.is_set())
    actor.CALL_TIMEOUT_S = 0.01  # of the countdown that begins when this ends


def test_an_actor_does_not_count_the_time_it_prepares_and_ends_when_nobody_calls_it_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor, "CALL_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    standby = AttemptActor()
    ended.clear()
    countdowns[:], seen[:] = [standby._unclaimed], []
    standby.prepare(f"{__name__}:slow")
    assert seen == [True]
    assert ended.wait(240)


def node(name: str, **labels: str) -> dict[str, object]:
    return {"NodeID": name, "Alive": True, "Labels": labels}


def test_a_node_that_does_not_answer_is_left_out_only_while_another_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [node("a"), node("b"), node("of-a-service", **{actor.ROLE_LABEL: actor.SERVICE})]
    answering = {"a", "of-a-service"}
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(actor, "_answers", lambda one: one["NodeID"] in answering)

    assert actor.worker_labels() == {**actor.NOT_BESIDE_A_SERVICE, actor.NODE_ID_LABEL: "!in(b)"}
    answering.remove("a")
    assert actor.worker_labels() == actor.NOT_BESIDE_A_SERVICE
