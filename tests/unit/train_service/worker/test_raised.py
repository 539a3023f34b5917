"""What is said of an exception that a rank raised: its own, or one that another rank's end made."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from shared.errors import Internal, Unavailable
from shared.jobs import Jobs, JobState
from shared.jobs.transitions import lose_attempt
from shared.storage import ObjectStore
from tests.unit.train_service.learners import SPEC, commit_table
from tests.unit.train_service.worker.test_loop import ALONE, config_of, new_job
from train_service.domain.spec import DETERMINISTIC, FASTEST
from train_service.learning import learner
from train_service.records.event_log import TRAIN_KIND
from train_service.worker.heartbeat import as_reported
from train_service.worker.loop import train_loop

JOB = "trainingJobs/a"


class Breaking(nn.Module):
    """Raises in its third pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 3:
            raise ZeroDivisionError("the scale is 0\nand more that nobody needs")
        made: torch.Tensor = self.layer(x)
        return made


def test_an_error_of_the_model_is_reported_with_its_type_message_rank_and_step(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "build_model", lambda *_: Breaking())
    commit_table(store)
    new_job(store, JOB)

    with pytest.raises(Internal) as raised:
        train_loop(config_of(store, JOB, spec=replace(SPEC, validation_split="")), ALONE)

    assert raised.value.message == "ZeroDivisionError on rank 0 at step 2: the scale is 0"
    assert raised.value.specific_reason == "WORKER_RAISED"
    assert raised.value.metadata == {"ranks": "0", "step": "2", "exception": "ZeroDivisionError"}
    # It is a failure like others, and the last one says so.
    jobs = Jobs(store, TRAIN_KIND)
    failed = replace(jobs.get(JOB, JOB), max_failures=0)
    lost = lose_attempt(failed, raised.value, time.time())
    assert lost.state is JobState.FAILED
    assert lost.error is not None
    assert "ZeroDivisionError on rank 0 at step 2: the scale is 0" in lost.error["message"]


@pytest.mark.parametrize(("algorithms", "is_named"), [(DETERMINISTIC, True), (FASTEST, False)])
def test_a_gpu_whose_memory_is_full_names_the_fields_that_need_less(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, algorithms: str, is_named: bool
) -> None:
    class Full(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 92 GiB.")

    monkeypatch.setattr(learner, "build_model", lambda *_: nn.Sequential(nn.Linear(6, 3), Full()))
    commit_table(store)
    new_job(store, JOB)
    spec = replace(SPEC, validation_split="", acceleration=replace(SPEC.acceleration, algorithms=algorithms))

    with pytest.raises(Internal, match="Tried to allocate 92 GiB") as raised:
        train_loop(config_of(store, JOB, spec=spec), ALONE)

    assert f"lower spec.global_batch_size ({SPEC.global_batch_size})" in raised.value.message
    assert ("spec.acceleration.algorithms to ALGORITHMS_FASTEST" in raised.value.message) is is_named


def test_errors_of_ours_stay_what_they_are() -> None:
    known = Unavailable("away")
    assert as_reported(known, 1, 7) is known


def test_an_error_caused_by_a_lost_rank_is_not_the_ranks_own() -> None:
    waiting = compile("raise RuntimeError('it went')", "/x/torch/distributed/c10d.py", "exec")
    with pytest.raises(RuntimeError) as raised:
        exec(waiting)
    assert as_reported(raised.value, 0, 7) is raised.value
    for text in ("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection reset by peer", "NCCL communicator was aborted"):
        error = RuntimeError(text)
        assert as_reported(error, 0, 7) is error
    assert isinstance(as_reported(RuntimeError("shapes do not fit"), 0, 7), Internal)
