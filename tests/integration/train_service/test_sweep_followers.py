"""An attempt at a sweep on a real Ray whose follower fails: what is told of it, and what is left of it."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.experimental.internal_kv import _internal_kv_list

from shared.errors import Unavailable
from shared.jobs import AttemptContext, JobRecord, Jobs
from shared.jobs.transitions import begin_attempt
from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.ray_head import RayHead
from tests.support.training import VERSION, commit_digits
from train_service.domain.spec import TrainingSpec
from train_service.domain.sweep import GRID, Domain, SweepSpec
from train_service.records.event_log import EventKind, EventLog
from train_service.sweeps import attempt
from train_service.sweeps.sweeps import SWEEP_KIND, Trials

NAME = "sweeps/s"
SPEC = SweepSpec(
    base=TrainingSpec(
        dataset_version=VERSION,
        transform={"steps": [{"toFloat": {}}]},
        model=ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10),
        epochs=2,
        global_batch_size=30,
    ),
    parameters={"seed": Domain(kind=GRID, values=(1,))},
)


@pytest.fixture
def context(train_ray: RayHead, tmp_path: Path) -> Iterator[AttemptContext]:
    """Of a sweep at its first attempt, in a driver of the cluster."""
    store = open_store(StoreSettings(url=(tmp_path / "store").as_uri()))
    commit_digits(store)
    ray.init(address=train_ray.address, log_to_driver=False)
    yield at_work(store)
    ray.shutdown()


def at_work(store: ObjectStore) -> AttemptContext:
    jobs = Jobs(store, SWEEP_KIND)
    made = JobRecord(
        uid=uuid.uuid4().hex,
        name=NAME,
        spec={"sweep": SPEC.as_config(), "request_id": ""},
        create_time=1.0,
        update_time=1.0,
    )
    jobs.create(NAME, made)
    job = jobs.transition(NAME, lambda newest: begin_attempt(newest, 1.0), attempt=1)
    return AttemptContext(store, jobs, NAME, job)


def test_a_follower_that_fails_again_is_reported_with_its_error_and_leaves_nothing_in_tunes_registry(
    context: AttemptContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "TUNE_DISABLE_STRICT_METRIC_CHECKING"):
        monkeypatch.setenv(name, "1")  # as the attempt does, in a process of its own
    monkeypatch.setattr(attempt, "FOLLOWER_RESTARTS", 1)
    for module in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, module)
    trials = Trials(context.store, context.job)
    trials.make(0)
    # An event without the metric.
    damaged = {"step": 1, "epoch": 0, "loss": 1.0, "row_count": 9, "metrics": {}}
    EventLog(context.store, trials.name(0)).append(1, EventKind.VALIDATED, damaged)

    with caplog.at_level(logging.WARNING, "train_service"), pytest.raises(Unavailable) as lost:
        attempt.run(context)

    assert "wandb" not in sys.modules
    assert lost.value.specific_reason == "FOLLOWER_LOST"
    assert "trainingJobs/s-000: KeyError: 'accuracy'" in lost.value.message
    first, last = [one.getMessage() for one in caplog.records if "follows trainingJobs/s-000" in one.getMessage()]
    assert "it is begun again" in first
    assert "in _value" in last
    assert [key for key in _internal_kv_list("TuneRegistry:") if b"trainable_class/follow" in key] == []
