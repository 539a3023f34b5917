"""What Ray Train is told of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback

from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from train_service.attempt import ray_run
from train_service.attempt.ray_run import OF_THE_ATTEMPT, RayRun, backend_of
from train_service.domain.spec import Placement, TrainingSpec
from train_service.placement import Size
from train_service.worker.loop import LoopConfig


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [(0.0, "gloo"), (0.5, "gloo"), (1.0, "nccl"), (2.0, "nccl")],
)
def test_ranks_that_may_share_a_gpu_are_not_tied_together_by_nccl_which_would_refuse_them(
    gpus: float, backend: str
) -> None:
    bundle = {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}

    assert backend_of(Placement(gpus_per_worker=gpus), Size(2, bundle)) == backend


def test_a_backend_that_is_asked_for_is_taken() -> None:
    assert backend_of(Placement(backend="gloo"), Size(2, {"CPU": 1.0, "GPU": 1.0})) == "gloo"


@pytest.mark.parametrize(("datasets", "starts"), [(None, False), ({}, True)], ids=["no script", "script"])
def test_only_a_script_has_a_process_for_datasets_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: dict[str, Any] | None, starts: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_run, "selector", dict)  # no Ray is here to ask for silent nodes
    for name, value in OF_THE_ATTEMPT.items():  # which a run sets in its process, and this process lives on
        monkeypatch.setenv(name, value)
    spec = TrainingSpec(
        dataset_version="datasets/d/versions/v1",
        transform={"steps": []},
        model=ModelSpec(builder="mlp", in_channels=2, num_classes=2),
        epochs=1,
        global_batch_size=2,
    )
    store = StoreSettings(url=tmp_path.as_uri())
    config = LoopConfig(store=store, job_name="trainingJobs/j", attempt=1, spec=spec)

    run = RayRun(config, Size(2, {"CPU": 1.0}), datasets=datasets)

    callbacks = run._create_default_callbacks()
    assert any(isinstance(one, DatasetsCallback) for one in callbacks) is starts
