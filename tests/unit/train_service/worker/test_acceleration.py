"""Runs that use their device otherwise end with the same weights: on a CPU, and where there is one on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.checkpoint import CheckpointRegistry
from shared.dataset_version import load_version
from shared.errors import InvalidArgument
from shared.storage import ObjectStore
from tests.support.gpu import DEVICES
from tests.unit.train_service import learners
from tests.unit.train_service.learning.test_device_settings import settings_of_torch
from tests.unit.train_service.worker.test_loop import (
    SPEC,
    config_of,
    entries,
    lose_and_begin,
    new_job,
    saved,
    small_version,
)
from train_service.domain.spec import BFLOAT16, BY_DEVICE, FSDP, Acceleration, Placement, TrainingSpec
from train_service.jobs.model_check import check_parallel
from train_service.learning import learner
from train_service.learning.ranks import Ranks, set_up_device
from train_service.loading.preprocessing import check_prepared
from train_service.worker.loop import Run

__all__ = ["settings_of_torch", "small_version"]

AUGMENTED: dict[str, Any] = {
    "steps": [
        {"randomCrop": {"height": 28, "width": 28, "padding": 3}},
        {"randomFlip": {"horizontalProbability": 0.5}},
        {"toFloat": {}},
        {"normalize": {"mean": [0.15], "std": [0.25]}},
    ]
}
BY_LOADER_SPEC = replace(SPEC, transform=AUGMENTED)
WHOLE, RESUMED, OTHER = "trainingJobs/whole", "trainingJobs/resumed", "trainingJobs/other"


def run(store: ObjectStore, name: str, spec: TrainingSpec, device: str, attempt: int = 1) -> None:
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    set_up_device(where, spec)
    Run(config_of(store, name, attempt, spec), Ranks(0, 1, where)).run()


def accelerated(**changes: Any) -> TrainingSpec:
    return replace(BY_LOADER_SPEC, acceleration=Acceleration(**changes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 3])
def test_transforms_on_the_device_train_the_same_weights(store: ObjectStore, device: str, ahead: int) -> None:
    for name, spec in (
        (WHOLE, BY_LOADER_SPEC),
        (OTHER, accelerated(transform_device=BY_DEVICE, prefetch_batches=ahead)),
    ):
        new_job(store, name)
        run(store, name, spec, device)

    here, there = entries(store, WHOLE), entries(store, OTHER)
    assert [saved(store, there[step]) for step in there] == [saved(store, here[step]) for step in here]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["FLOAT32", BFLOAT16])
def test_with_channels_last_a_resumed_run_ends_with_the_same_bits(
    store: ObjectStore, device: str, precision: str
) -> None:
    spec = replace(accelerated(channels_last=True, transform_device=BY_DEVICE), precision=precision)
    new_job(store, WHOLE)
    run(store, WHOLE, spec, device)
    whole = entries(store, WHOLE)
    new_job(store, RESUMED)
    # As if the run had died just after this checkpoint.
    CheckpointRegistry(store, RESUMED).commit(replace(whole[4], name=f"{RESUMED}/checkpoints/step-00000004"))
    lose_and_begin(store, RESUMED)

    run(store, RESUMED, spec, device, attempt=2)

    resumed = entries(store, RESUMED)
    assert {step: saved(store, one) for step, one in resumed.items()} == {
        step: saved(store, whole[step]) for step in resumed
    }


def test_channels_last_is_refused_for_rows_without_channels(store: ObjectStore) -> None:
    learners.commit_table(store)
    spec = replace(learners.SPEC, acceleration=Acceleration(channels_last=True))

    with pytest.raises(InvalidArgument, match="no channels to put last") as raised:
        check_prepared(spec, load_version(store, learners.VERSION).columns)
    assert [field for field, _ in raised.value.fields] == ["spec.acceleration.channels_last"]


def test_channels_last_is_refused_with_fsdp() -> None:
    with pytest.raises(InvalidArgument, match="FSDP") as raised:
        check_parallel(replace(accelerated(channels_last=True), placement=Placement(parallel=FSDP)))
    assert [field for field, _ in raised.value.fields] == ["spec.acceleration.channels_last"]


def test_validation_is_in_full_float32_whatever_the_training_rounds_to(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the model is served."""
    seen: list[tuple[bool, bool]] = []
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    evaluate = learner.evaluate

    def looking(*arguments: Any, **named: Any) -> Any:
        seen.append((cudnn.allow_tf32, matmul.allow_tf32))
        return evaluate(*arguments, **named)

    monkeypatch.setattr(learner, "evaluate", looking)
    cudnn.allow_tf32 = matmul.allow_tf32 = True
    new_job(store, WHOLE)
    Run(config_of(store, WHOLE, 1, replace(SPEC, epochs=1)), Ranks(0, 1, torch.device("cpu"))).run()

    assert seen == [(False, False)]
    assert cudnn.allow_tf32
    assert matmul.allow_tf32
