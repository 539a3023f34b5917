"""What a specification may say; each field that is out of its bounds is refused by its name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from tests.support.cpu_time import cpu_at_most
from train_service.domain.spec import (
    FSDP,
    Acceleration,
    CheckpointPolicy,
    EarlyStopping,
    LossSpec,
    OptimizerSpec,
    Placement,
    TrainingSpec,
)
from train_service.domain.spec_rules import check, check_rows

MODEL = ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10)
GOOD = TrainingSpec(
    dataset_version="datasets/digits/versions/v1", model=MODEL, epochs=2, global_batch_size=64, num_workers=2
)
KEPT = CheckpointPolicy(best_metric="validation_accuracy", maximize=True)
LOW, HIGH = -(2**31), 2**31 - 1


def kept(**changes: Any) -> CheckpointPolicy:
    return replace(KEPT, **changes)


OUT_OF_BOUNDS: list[tuple[str, dict[str, Any]]] = [
    *[("epochs", {"epochs": value}) for value in (0, -1, 10_001, LOW, HIGH)],
    *[("global_batch_size", {"global_batch_size": value}) for value in (0, -1, LOW, HIGH + 1)],
    *[("seed", {"seed": value}) for value in (-1, 2**64)],
    *[("num_workers", {"num_workers": value, "lanes": 100}) for value in (-1, 65, LOW)],
    *[("threads_per_worker", {"threads_per_worker": value}) for value in (-1, 0, 257, HIGH)],
    *[("checkpoint_every_steps", {"checkpoint_every_steps": value}) for value in (-1, LOW)],
    *[
        (f"checkpoints.{field}", {"checkpoints": kept(**{argument: value})})
        for field, argument, values in (
            ("every", "every_s", (-1.0, 0.5, 604_801.0, math.nan)),
            ("keep_newest", "keep_newest", (-1, 10_001)),
            ("keep_best", "keep_best", (-1, 0, 10_001)),
        )
        for value in values
    ],
    *[("max_failures", {"max_failures": value}) for value in (-1, 1001, HIGH)],
    *[("lanes", {"lanes": value}) for value in (-1, 0, 1, 4097)],
    *[("model.in_channels", {"model": replace(MODEL, in_channels=value)}) for value in (0, -1, 65_537)],
    *[("model.num_classes", {"model": replace(MODEL, num_classes=value)}) for value in (-3, 0, 1, 1_000_001)],
    *[("min_workers", {"min_workers": value}) for value in (-1, 3)],
    *[("accumulation_steps", {"accumulation_steps": value}) for value in (0, -1, 1025)],
    *[("max_gradient_norm", {"max_gradient_norm": value}) for value in (-0.1, math.inf, math.nan)],
    *[("precision", {"precision": value}) for value in ("", "FP8", "7")],
    *[("task", {"task": value}) for value in ("", "RANKING")],
    *[("ingest", {"ingest": value}) for value in ("", "RAY")],
    *[("max_preemptions", {"max_preemptions": value}) for value in (-1, 100_001)],
    *[("priority", {"priority": value}) for value in (-1001, 1001)],
    *[
        ("loss.label_smoothing", {"loss": LossSpec(name="cross_entropy", label_smoothing=value)})
        for value in (-0.1, 1.0, math.nan)
    ],
    *[("placement.strategy", {"placement": Placement(strategy=value)}) for value in ("pack", "")],
    *[("placement.parallel", {"placement": Placement(parallel=value)}) for value in ("ddp", "TP")],
    *[
        ("placement.cpus_per_worker", {"placement": Placement(cpus_per_worker=value)})
        for value in (0, -1, math.nan, 0.00009, 1025)
    ],
    *[
        ("placement.gpus_per_worker", {"placement": Placement(gpus_per_worker=value)})
        for value in (-1, math.nan, 0.00009, 1.5, 65)
    ],
    *[
        ("placement.backend", {"placement": Placement(backend="nccl", gpus_per_worker=value)})
        for value in (0, 0.0001, 0.5)
    ],
    ("placement.gpus_per_worker", {"placement": Placement(parallel=FSDP, gpus_per_worker=0.5)}),
    ("placement.backend", {"placement": Placement(parallel=FSDP, backend="gloo", gpus_per_worker=1)}),
    *[
        ("acceleration.prefetch_batches", {"acceleration": Acceleration(prefetch_batches=value)})
        for value in (-1, 65, LOW)
    ],
    *[("acceleration.algorithms", {"acceleration": Acceleration(algorithms=value)}) for value in ("", "fastest", "7")],
    *[
        ("acceleration.transform_device", {"acceleration": Acceleration(transform_device=value)})
        for value in ("", "GPU")
    ],
    ("acceleration.transform_device", {"acceleration": Acceleration(transform_device="WORKER"), "ingest": "RAY_DATA"}),
    *[("placement.timeout", {"placement": Placement(timeout_s=value)}) for value in (0, -1, 90_000)],
    *[
        (f"placement.resources_per_worker[{name}]", {"placement": Placement(resources_per_worker={name: 2})})
        for name in ("CPU", "cpu", "GPU", "accelerator_type:A100", "accelerator_type:")
    ],
    *[
        ("placement.resources_per_worker[disk]", {"placement": Placement(resources_per_worker={"disk": value})})
        for value in (0, math.nan, math.inf, 0.00009)
    ],
    *[
        ("early_stopping.patience", {"early_stopping": EarlyStopping(metric="m", maximize=True, patience=value)})
        for value in (0, -1)
    ],
    *[
        ("optimizer.learning_rate", {"optimizer": OptimizerSpec(learning_rate=value)})
        for value in (0.0, -0.1, math.inf, math.nan)
    ],
    *[("optimizer.schedule", {"optimizer": OptimizerSpec(schedule=value)}) for value in ("", "7", "LINEAR")],
]


@pytest.mark.parametrize(("path", "change"), OUT_OF_BOUNDS)
def test_a_field_out_of_its_bounds_is_refused_by_its_name(path: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(replace(GOOD, **change))

    assert [field for field, _ in refused.value.fields] == [f"spec.{path}"]


@pytest.mark.parametrize(
    ("resource", "remedy"),
    [
        ("CPU", "use placement.cpus_per_worker"),
        ("GPU", "use placement.gpus_per_worker"),
        ("accelerator_type:A100", "use placement.accelerator_type, A100"),
    ],
)
def test_a_resource_with_a_field_of_its_own_is_refused_with_that_field(resource: str, remedy: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(replace(GOOD, placement=Placement(resources_per_worker={resource: 1})))

    ((_, problem),) = refused.value.fields
    assert remedy in problem


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("min_workers", {"min_workers": 1}),
        ("ingest", {"ingest": "RAY_DATA"}),
        ("placement.parallel", {"placement": Placement(parallel="FSDP")}),
        ("placement.gpus_per_worker", {"placement": Placement(gpus_per_worker=1)}),
        ("placement.accelerator_type", {"placement": Placement(accelerator_type="A100")}),
        ("placement.resources_per_worker", {"placement": Placement(resources_per_worker={"disk": 1})}),
        ("placement.backend", {"placement": Placement(backend="nccl")}),
    ],
)
def test_an_option_that_needs_workers_is_refused_in_local_mode(path: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(replace(GOOD, num_workers=0, **change))

    assert [field for field, _ in refused.value.fields] == [f"spec.{path}"]


def test_in_local_mode_one_rank_must_get_its_rows() -> None:
    with pytest.raises(InvalidArgument):
        check_rows(replace(GOOD, global_batch_size=1, num_workers=0), 100)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"epochs": 1},
        {"epochs": 10_000},
        {"num_workers": 64, "lanes": 64},
        {"num_workers": 0},
        {"lanes": 4096},
        {"max_failures": 0},
        {"max_failures": 1000},
        {"checkpoint_every_steps": 1},
        {"seed": 2**64 - 1},
        *[{"placement": Placement(gpus_per_worker=value)} for value in (None, 0, 0.0001, 0.3333, 1, 2.0, 64)],
        *[{"placement": Placement(backend="nccl", gpus_per_worker=value)} for value in (None, 1, 2)],
        *[{"placement": Placement(backend="gloo", gpus_per_worker=value)} for value in (None, 0, 0.5, 1)],
        *[{"placement": Placement(parallel=FSDP, gpus_per_worker=value)} for value in (None, 0, 1, 2)],
        *[{"placement": Placement(parallel=FSDP, backend="gloo", gpus_per_worker=value)} for value in (None, 0)],
        {"placement": Placement(cpus_per_worker=0.0001, resources_per_worker={"disk": 0.0001, "ssd": 1.5})},
        {"optimizer": OptimizerSpec(name="SGD", learning_rate=1e-9, schedule="COSINE_WITH_WARMUP")},
    ],
)
def test_values_within_their_bounds_are_taken(change: dict[str, Any]) -> None:
    check(replace(GOOD, **change))


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(replace(GOOD, epochs=0, global_batch_size=-5, max_failures=-1))

    assert [path for path, _ in refused.value.fields] == [
        "spec.epochs",
        "spec.global_batch_size",
        "spec.max_failures",
    ]


@pytest.mark.parametrize(("batch", "workers", "rows"), [(101, 1, 100), (1, 1, 100), (2, 2, 100), (5, 3, 1000)])
def test_a_batch_that_starves_a_worker_is_refused_by_its_name(batch: int, workers: int, rows: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_rows(replace(GOOD, global_batch_size=batch, num_workers=workers), rows)

    assert [path for path, _ in refused.value.fields] == ["spec.global_batch_size"]


def test_a_split_that_ends_one_row_after_a_batch_starves_nobody() -> None:
    check_rows(replace(GOOD, global_batch_size=64, num_workers=2), 64 * 30 + 1)


@pytest.mark.timed
@pytest.mark.parametrize("rows", [10**9, 10**12 + 7])
@pytest.mark.parametrize("lanes", [24, 4096])
def test_a_version_of_very_many_rows_is_checked_at_once(rows: int, lanes: int) -> None:
    spec = replace(GOOD, global_batch_size=64, num_workers=8, lanes=lanes)
    with cpu_at_most(5):
        check_rows(spec, rows)
        with pytest.raises(InvalidArgument, match="with 5 workers"):
            check_rows(replace(spec, global_batch_size=9), rows)


@pytest.mark.timed
def test_a_batch_of_very_many_rows_is_checked_at_once() -> None:
    with cpu_at_most(5):
        check_rows(replace(GOOD, global_batch_size=2**31 - 1), 10**12)


def test_a_specification_survives_the_job_log() -> None:
    spec = replace(GOOD, transform={"steps": [{"toFloat": {}}]}, optimizer=OptimizerSpec(kwargs={"betas": [0.9, 0.99]}))

    assert TrainingSpec.from_config(json.loads(json.dumps(spec.as_config()))) == spec
