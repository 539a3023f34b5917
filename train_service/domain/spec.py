"""What to train, as plain values with every default filled in. The messages of the contract describe each field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.checkpoint.ranking import Ranking
from shared.durable import fields_of
from shared.model_spec import CLASSIFICATION as CLASSIFICATION
from shared.model_spec import NONE, ModelSpec
from shared.model_spec import REGRESSION as REGRESSION
from train_service.domain.order import WINDOW_ROWS
from train_service.domain.schedule import CONSTANT

FLOAT32, BFLOAT16, FLOAT16, TF32 = "FLOAT32", "BFLOAT16", "FLOAT16", "TF32"
THREADS, RAY_DATA = "THREADS", "RAY_DATA"
DDP, FSDP = "DDP", "FSDP"
# Whether a GPU gives the same bits each time.
DETERMINISTIC, FASTEST = "DETERMINISTIC", "FASTEST"
# Who computes the last steps of the transform: the loader, or the worker's device.
BY_LOADER, BY_DEVICE = "CPU", "WORKER"
# What workers compute on.
CPU, GPU = "CPU", "GPU"
# The name of a loss and an optimizer that a model of a user's own brings itself.
OWN = ""
# Where a program's shard goes on after a checkpoint in the middle of an epoch.
REPLAY, CONTINUE = "REPLAY", "CONTINUE"
# Of the path of a script.
SCRIPT_SUFFIX = ".py"
# What happens to rows that the workers cannot share equally.
DROP, KEEP = "DROP", "KEEP"


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    name: str = "AdamW"
    learning_rate: float = 0.001
    kwargs: dict[str, Any] = field(default_factory=dict)
    schedule: str = CONSTANT
    # Empty: `schedule` says how the rate moves.
    scheduler: str = ""
    scheduler_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """`every_s` 0: no such rule; `keep_newest` 0: all are kept."""

    every_s: float = 0.0
    keep_newest: int = 0
    keep_best: int = 1
    best_metric: str
    maximize: bool

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.best_metric, self.maximize)


def default_best_metric(task: str) -> str:
    return "validation_loss" if task == REGRESSION else "validation_accuracy"


def default_loss(task: str) -> str:
    return "mse" if task == REGRESSION else "cross_entropy"


def default_metrics(task: str) -> tuple[str, ...]:
    return ("mae",) if task == REGRESSION else ("accuracy",)


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    metric: str
    maximize: bool
    patience: int
    min_delta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Placement:
    cpus_per_worker: float = 1.0
    # None: one where the backend is nccl or the cluster has as many as workers at the first attempt, else none.
    gpus_per_worker: float | None = None
    # Whether a run on GPUs may go on on CPUs while the cluster lacks them.
    allow_cpu_fallback: bool = False
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    accelerator_type: str = ""
    strategy: str = "PACK"
    parallel: str = DDP
    # Empty: as the devices need.
    backend: str = ""
    timeout_s: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class Acceleration:
    """How a worker uses its device."""

    channels_last: bool = False
    # Batches that are copied to a GPU ahead of the step that takes them.
    prefetch_batches: int = 2
    algorithms: str = DETERMINISTIC
    transform_device: str = BY_LOADER


@dataclass(frozen=True, kw_only=True)
class Program:
    """A user's own training function or script. `entry` is `module:function`, or the path of a script in the bundle;
    `config_json` is a JSON object; `hang_after_s` 0: by the median interval."""

    code_bundle: str
    entry: str
    config_json: str = "{}"
    data_resume: str = REPLAY
    remainder: str = DROP
    hang_after_s: float = 0.0
    stop_within_s: float = 300.0

    @property
    def is_script(self) -> bool:
        """Whether `entry` is a script, whose `fit()` calls train, and not a function."""
        return self.entry.endswith(SCRIPT_SUFFIX)


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """Mirrors `millrace.train.v1.TrainingSpec`. An empty string, 0 or None means that a part is not wanted."""

    dataset_version: str
    train_split: str = "train"
    validation_split: str = ""
    input_column: str = "image"
    label_column: str = "label"
    # The JSON form of `millrace.common.v1.Transform`.
    transform: dict[str, Any] = field(default_factory=dict)
    task: str = CLASSIFICATION
    # Of TASK_REGRESSION: what the model learns is the target, or that scaled.
    target_scaling: str = NONE
    model: ModelSpec
    initial_checkpoint: str = ""
    loss: LossSpec = field(default_factory=lambda: LossSpec(name="cross_entropy"))
    metrics: tuple[str, ...] = ("accuracy",)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    training_step: str = ""
    precision: str = FLOAT32
    accumulation_steps: int = 1
    max_gradient_norm: float = 0.0
    compile: bool = False
    acceleration: Acceleration = field(default_factory=Acceleration)
    epochs: int
    global_batch_size: int
    seed: int = 0
    lanes: int = 24
    # Rows of a shuffle window; fixed with the job, for the order of rows hangs on it.
    window_rows: int = WINDOW_ROWS
    ingest: str = THREADS
    # 0: local mode.
    num_workers: int = 1
    # The fewest that it may go on with; 0: `num_workers`.
    min_workers: int = 0
    threads_per_worker: int = 1
    placement: Placement = field(default_factory=Placement)
    checkpoint_every_steps: int = 0
    checkpoints: CheckpointPolicy = field(
        default_factory=lambda: CheckpointPolicy(best_metric="validation_accuracy", maximize=True)
    )
    early_stopping: EarlyStopping | None = None
    # Whether inputs and numbers to learn may be NaN or infinite.
    allow_non_finite: bool = False
    max_failures: int = 3
    max_preemptions: int = 100
    # A user's own training function; None: Millrace's loop. With it `model` has an empty builder, and `epochs` and
    # `global_batch_size` are 0.
    program: Program | None = None
    # Of a script: the fields, by their paths here, that its caller left to the script's own configurations.
    left_open: tuple[str, ...] = ()

    @property
    def local(self) -> bool:
        """Whether it trains in the attempt's own process, without workers."""
        return self.num_workers == 0

    @property
    def max_ranks(self) -> int:
        return max(self.num_workers, 1)

    @property
    def effective_min_workers(self) -> int:
        return self.min_workers or self.num_workers

    def as_config(self) -> dict[str, Any]:
        return {**asdict(self), "metrics": list(self.metrics), "left_open": list(self.left_open)}  # as JSON gives it

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrainingSpec:
        stopping, program = config["early_stopping"], config.get("program")
        return cls(
            **{
                **fields_of(cls, config),
                "model": ModelSpec.from_config(config["model"]),
                "loss": LossSpec(**fields_of(LossSpec, config["loss"])),
                "metrics": tuple(config["metrics"]),
                "optimizer": OptimizerSpec(**fields_of(OptimizerSpec, config["optimizer"])),
                "placement": Placement(**fields_of(Placement, config["placement"])),
                "acceleration": Acceleration(**fields_of(Acceleration, config.get("acceleration", {}))),
                "checkpoints": CheckpointPolicy(**fields_of(CheckpointPolicy, config["checkpoints"])),
                "early_stopping": EarlyStopping(**fields_of(EarlyStopping, stopping)) if stopping else None,
                "program": Program(**fields_of(Program, program)) if program else None,
                "left_open": tuple(config.get("left_open", ())),
            }
        )
