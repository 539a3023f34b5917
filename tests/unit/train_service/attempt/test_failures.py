"""Why an attempt ended, when its workers did not end by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from ray.train import WorkerGroupError

from shared.errors import Internal, Unavailable
from shared.jobs.transitions import PREEMPTED, RESIZED
from train_service.attempt.ray_run import Failure

CRASH: Any = WorkerGroupError("a worker died", {1: RuntimeError("it died")})


@pytest.mark.parametrize("reason", [PREEMPTED, "RANK_HUNG"])
def test_workers_that_were_ended_or_whose_node_went_ended_for_that(reason: str) -> None:
    ended_for = Unavailable("x", reason=reason)

    assert Failure.from_error(CRASH).cause(ended_for) is ended_for


@pytest.mark.parametrize("ended_for", [None, Unavailable("there is room for 2 workers", reason=RESIZED)])
def test_a_crash_is_a_failure_also_after_a_change_of_size_was_asked_for(ended_for: Unavailable | None) -> None:
    cause = Failure.from_error(CRASH).cause(ended_for)

    assert cause.specific_reason == "WORKERS_LOST"
    assert cause.metadata["ranks"] == "1"


def test_an_error_of_a_users_own_is_the_cause_whatever_the_ranks_that_waited_say() -> None:
    raised = Internal("ValueError on rank 1 at step 7: no such thing", reason="WORKER_RAISED", metadata={"ranks": "1"})
    lost: Any = WorkerGroupError("both died", {0: RuntimeError("Connection closed by peer"), 1: raised})

    assert Failure.from_error(lost).cause(None).as_record() == raised.as_record()
