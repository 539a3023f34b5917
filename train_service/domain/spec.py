"""What to train, as plain values with every default filled in, and the rules that need nothing but those values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.errors import invalid_fields
from shared.model_spec import ModelSpec
from train_service.domain.schedule import CONSTANT, COSINE_WITH_WARMUP
from train_service.domain.slices import FEWEST_ROWS_PER_RANK, fewest_rows_of_a_rank, steps_per_epoch

OPTIMIZERS = ("SGD", "Adam", "AdamW")
MAX_WORKERS = 64
MAX_LANES = 4096


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    name: str = "AdamW"
    learning_rate: float = 0.001
    kwargs: dict[str, Any] = field(default_factory=dict)
    schedule: str = CONSTANT


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """Mirrors `millrace.train.v1.TrainingSpec`, which describes each field."""

    dataset_version: str
    train_split: str = "train"
    # Empty: none.
    validation_split: str = ""
    input_column: str = "image"
    label_column: str = "label"
    # The JSON form of `millrace.common.v1.Transform`.
    transform: dict[str, Any] = field(default_factory=dict)
    model: ModelSpec
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    epochs: int
    global_batch_size: int
    seed: int = 0
    num_workers: int = 1
    threads_per_worker: int = 1
    checkpoint_every_steps: int = 0
    max_failures: int = 3
    lanes: int = 24

    def as_config(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrainingSpec:
        return cls(
            **{
                **config,
                "model": ModelSpec.from_config(config["model"]),
                "optimizer": OptimizerSpec(**config["optimizer"]),
            }
        )


def check(spec: TrainingSpec) -> None:
    """Raises `InvalidArgument` naming every field that is out of its bounds."""
    rules: list[tuple[bool, str, object, str]] = [
        (1 <= spec.epochs <= 10_000, "epochs", spec.epochs, "use 1 to 10,000"),
        (spec.global_batch_size >= 1, "global_batch_size", spec.global_batch_size, "use 1 or more"),
        (1 <= spec.num_workers <= MAX_WORKERS, "num_workers", spec.num_workers, f"use 1 to {MAX_WORKERS}"),
        (1 <= spec.threads_per_worker <= 256, "threads_per_worker", spec.threads_per_worker, "use 1 to 256"),
        (spec.checkpoint_every_steps >= 0, "checkpoint_every_steps", spec.checkpoint_every_steps, "use 0 or more"),
        (0 <= spec.max_failures <= 1000, "max_failures", spec.max_failures, "use 0 to 1,000"),
        (spec.num_workers <= spec.lanes <= MAX_LANES, "lanes", spec.lanes, f"use num_workers to {MAX_LANES}"),
        (1 <= spec.model.in_channels <= 1024, "model.in_channels", spec.model.in_channels, "use 1 to 1,024"),
        (2 <= spec.model.num_classes <= 1_000_000, "model.num_classes", spec.model.num_classes, "use 2 to 1,000,000"),
        (
            spec.optimizer.name in OPTIMIZERS,
            "optimizer.name",
            spec.optimizer.name,
            f"use one of {', '.join(OPTIMIZERS)}",
        ),
        (
            0 < spec.optimizer.learning_rate < math.inf,
            "optimizer.learning_rate",
            spec.optimizer.learning_rate,
            "use a finite number above 0",
        ),
        (
            spec.optimizer.schedule in (CONSTANT, COSINE_WITH_WARMUP),
            "optimizer.schedule",
            spec.optimizer.schedule,
            "use SCHEDULE_CONSTANT or SCHEDULE_COSINE_WITH_WARMUP",
        ),
    ]
    broken = [(f"spec.{path}", value, remedy) for holds, path, value, remedy in rules if not holds]
    if broken:
        raise invalid_fields(broken)


def check_rows(spec: TrainingSpec, rows: int) -> None:
    """Raises `InvalidArgument` unless the train split of `rows` rows can be cut for every world size up to W."""
    path = "spec.global_batch_size"
    if spec.global_batch_size > rows:
        raise invalid_fields([(path, spec.global_batch_size, f"the split has {rows} rows; use at most as many")])
    steps = steps_per_epoch(rows, spec.global_batch_size)
    for world_size in range(1, spec.num_workers + 1):
        fewest = fewest_rows_of_a_rank(rows, steps, spec.lanes, world_size)
        if fewest < FEWEST_ROWS_PER_RANK:
            remedy = (
                f"with {world_size} workers and {spec.lanes} lanes a worker would get {fewest} rows in a step, and "
                f"needs {FEWEST_ROWS_PER_RANK}; use a larger batch or fewer workers"
            )
            raise invalid_fields([(path, spec.global_batch_size, remedy)])
