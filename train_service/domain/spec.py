"""Training specifications as plain values with every default filled in.

The messages of the contract describe each field. The learning rate and early stopping are pure functions of the step
and of the measurements of past epochs, so a resumed run has no state to restore. The later sections apply what is
learned after the request: the facts of a user's own model, the settings of a script's trainer, and the devices that the
job's log keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shared.checkpoint.ranking import Ranking
from shared.durable import fields_of
from shared.errors import invalid_field, invalid_fields
from shared.jobs.retry_limits import DEFAULT_MAX_FAILURES, DEFAULT_MAX_PREEMPTIONS
from shared.model_spec import CLASSIFICATION as CLASSIFICATION
from shared.model_spec import NONE, ModelSpec
from shared.model_spec import REGRESSION as REGRESSION
from train_service.domain.order import WINDOW_ROWS

# --- Specification ---

FLOAT32, BFLOAT16, FLOAT16, TF32 = "FLOAT32", "BFLOAT16", "FLOAT16", "TF32"
# Learning rate schedules.
CONSTANT, COSINE_WITH_WARMUP = "CONSTANT", "COSINE_WITH_WARMUP"
THREADS, RAY_DATA = "THREADS", "RAY_DATA"
DDP, FSDP = "DDP", "FSDP"
# Whether a GPU must compute the same bits each time.
DETERMINISTIC, FASTEST = "DETERMINISTIC", "FASTEST"
# Where the last steps of the transform run: in the loader, or on the worker's device.
BY_LOADER, BY_DEVICE = "CPU", "WORKER"
# Devices that workers compute on.
CPU, GPU = "CPU", "GPU"
# The name of a loss or an optimizer that the user's own model supplies.
OWN = ""
# How a program's shard resumes after a checkpoint in the middle of an epoch.
REPLAY, CONTINUE = "REPLAY", "CONTINUE"
# File suffix of a script's path.
SCRIPT_SUFFIX = ".py"
# What happens to rows that do not divide equally among the workers.
DROP, KEEP = "DROP", "KEEP"


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    name: str = "AdamW"
    learning_rate: float = 0.001
    kwargs: dict[str, Any] = field(default_factory=dict)
    schedule: str = CONSTANT
    # If empty, `schedule` controls the learning rate.
    scheduler: str = ""
    scheduler_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """Rules for taking and keeping checkpoints.

    If `every_s` is 0, no checkpoint is taken by time. If `keep_newest` is 0, all checkpoints are kept.
    """

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


# A causal language model predicts the tokens of its own input: its labels are the ids, and this loss is its only one.
CAUSAL_LM = "transformers.causal_lm"
NEXT_TOKEN, PERPLEXITY = "next_token", "perplexity"
IDS_COLUMN = "input_ids"


def default_task(builder: str) -> str:
    return REGRESSION if builder == CAUSAL_LM else CLASSIFICATION


def default_label_column(builder: str) -> str:
    return IDS_COLUMN if builder == CAUSAL_LM else "label"


def default_loss(task: str, builder: str = "") -> str:
    if builder == CAUSAL_LM:
        return NEXT_TOKEN
    return "mse" if task == REGRESSION else "cross_entropy"


def default_metrics(task: str, builder: str = "") -> tuple[str, ...]:
    if builder == CAUSAL_LM:
        return (PERPLEXITY,)
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
    # None: one GPU if the backend is nccl, or if the cluster has a GPU for each of the fewest workers at the first
    # attempt; otherwise none.
    gpus_per_worker: float | None = None
    # Whether a run on GPUs may continue on CPUs while the cluster lacks GPUs.
    allow_cpu_fallback: bool = False
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    accelerator_type: str = ""
    strategy: str = "PACK"
    parallel: str = DDP
    # If empty, the devices determine the backend.
    backend: str = ""
    timeout_s: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class Acceleration:
    """Settings for how a worker uses its device."""

    channels_last: bool = False
    # Number of batches copied to a GPU ahead of the step that uses them.
    prefetch_batches: int = 2
    algorithms: str = DETERMINISTIC
    transform_device: str = BY_LOADER


@dataclass(frozen=True, kw_only=True)
class Program:
    """A user's own training function or script.

    `entry` is `module:function`, or the path of a script in the bundle. `config_json` is a JSON object. If
    `hang_after_s` is 0, the limit follows from the median interval.
    """

    code_bundle: str
    entry: str
    config_json: str = "{}"
    data_resume: str = REPLAY
    remainder: str = DROP
    hang_after_s: float = 0.0
    stop_within_s: float = 300.0

    @property
    def is_script(self) -> bool:
        """Return whether `entry` is a script. A script trains by calling `fit()`; otherwise the entry is a function."""
        return self.entry.endswith(SCRIPT_SUFFIX)


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """A training specification; it mirrors `millrace.train.v1.TrainingSpec`.

    An empty string, 0 or None disables an optional part.
    """

    dataset_version: str
    train_split: str = "train"
    validation_split: str = ""
    input_column: str = "image"
    # The columns of a model that gets a dict of several inputs. `input_column` is empty then.
    input_columns: tuple[str, ...] = ()
    label_column: str = "label"
    # The JSON form of `millrace.common.v1.Transform`.
    transform: dict[str, Any] = field(default_factory=dict)
    task: str = CLASSIFICATION
    # For TASK_REGRESSION: whether the model learns the target itself or the scaled target.
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
    # Rows of a shuffle window. The order of rows depends on it, so it is fixed when the job is created.
    window_rows: int = WINDOW_ROWS
    ingest: str = THREADS
    # 0 means local mode.
    num_workers: int = 1
    # The fewest workers that the run may continue with; 0 means `num_workers`.
    min_workers: int = 0
    threads_per_worker: int = 1
    placement: Placement = field(default_factory=Placement)
    checkpoint_every_steps: int = 0
    checkpoints: CheckpointPolicy = field(
        default_factory=lambda: CheckpointPolicy(best_metric="validation_accuracy", maximize=True)
    )
    early_stopping: EarlyStopping | None = None
    # Whether inputs and targets may be NaN or infinite.
    allow_non_finite: bool = False
    # The column by whose lengths rows are grouped. Empty: they are not.
    group_by_length: str = ""
    # The lost attempts that a job may have.
    max_failures: int = DEFAULT_MAX_FAILURES
    max_preemptions: int = DEFAULT_MAX_PREEMPTIONS
    # Of jobs that wait for resources, those with a higher priority begin first.
    priority: int = 0
    # A user's own training function or script; None means Millrace's loop. With a program, `model` has an empty
    # builder, and `epochs` and `global_batch_size` are 0.
    program: Program | None = None
    # For a script: the paths of the fields that the caller left to the script's own configurations.
    left_open: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that the model reads."""
        return self.input_columns or (self.input_column,)

    @property
    def local(self) -> bool:
        """Return whether the attempt's own process trains, without workers."""
        return self.num_workers == 0

    @property
    def max_ranks(self) -> int:
        return max(self.num_workers, 1)

    @property
    def effective_min_workers(self) -> int:
        return self.min_workers or self.num_workers

    def as_config(self) -> dict[str, Any]:
        # JSON has no tuples.
        lists = {name: list(getattr(self, name)) for name in ("metrics", "left_open", "input_columns")}
        return {**asdict(self), **lists}

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
                "input_columns": tuple(config.get("input_columns", ())),
            }
        )


# --- Learning rate ---

WARMUP_SHARE = 0.1


def learning_rate(schedule: str, base: float, step: int, total_steps: int) -> float:
    """Return the learning rate for step `step`. Steps count from 0."""
    if schedule == CONSTANT:
        return base
    warmup = max(1, round(total_steps * WARMUP_SHARE))
    if step < warmup:
        return base * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return base * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


# --- Early stopping ---


def should_stop(rule: EarlyStopping | None, history: Sequence[tuple[int, float]]) -> bool:
    """Return whether the run ends now.

    It ends after the last epoch of `history`, or should have ended earlier. `history` holds (epoch, value of
    `rule.metric`) for each epoch measured so far, in any order. An epoch that a later attempt measures again counts
    once, with its last value. The first finite value is the initial best. A value that is better by at least
    `min_delta` replaces it; NaN never does.
    """
    if rule is None:
        return False
    values = dict(history)
    best, since = math.nan, 0
    for epoch in sorted(values):
        gain = (values[epoch] - best) * (1 if rule.maximize else -1)
        if math.isfinite(values[epoch]) and (math.isnan(best) or (gain > 0 and gain >= rule.min_delta)):
            best, since = values[epoch], 0
        else:
            since += 1
        if since >= rule.patience:
            return True
    return False


# --- Facts of a user's own model ---


@dataclass(frozen=True, kw_only=True)
class OwnModelFacts:
    """Facts that the check of a user's own model found.

    `num_classes` is the width of the output, or 0 if the output is not (rows, width). `has_optimizers` means that the
    model configures its optimizers. `is_manual` means that its training step calls them itself. `metrics` holds the
    names that the model's `metrics` returns.
    """

    num_classes: int
    is_step: bool = False
    is_manual: bool = False
    has_optimizers: bool = False
    has_loss: bool = False
    metrics: tuple[str, ...] = ()

    def as_config(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OwnModelFacts:
        """Return the facts in `config`.

        Raises `ValueError` for values of wrong types. A user's code may have made up the values.
        """
        facts = cls(**{**fields_of(cls, config), "metrics": tuple(config["metrics"])})
        flags = (facts.is_step, facts.is_manual, facts.has_optimizers, facts.has_loss)
        names = all(isinstance(name, str) and name.isidentifier() for name in facts.metrics)
        if type(facts.num_classes) is not int or not names or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(f"no facts of a model: {config!r:.200}")
        return facts


def settled(spec: TrainingSpec, facts: OwnModelFacts, row_shape: Sequence[int]) -> TrainingSpec:
    """Return `spec` completed with what follows from the model.

    `row_shape` is the shape of one row of the model's input. It is empty for a model of several inputs, which has no
    channels. Raises `InvalidArgument` for fields that the model replaces or does not support.
    """
    classes = spec.task == CLASSIFICATION
    width = spec.model.num_classes or facts.num_classes
    if not width:
        remedy = "the output of the model's forward for these rows is not (rows, width), so it does not say it; set it"
        raise invalid_field("spec.model.num_classes", 0, remedy)
    if facts.num_classes and width != facts.num_classes:
        remedy = f"the model's output is (rows, {facts.num_classes}); leave it out, or change the model"
        raise invalid_field("spec.model.num_classes", width, remedy)
    if classes and width < 2:
        remedy = "the model has one output, and a class is one of two or more; use TASK_REGRESSION, or give it more"
        raise invalid_field("spec.model.num_classes", width, remedy)
    if facts.is_step:
        _refuse_what_a_step_does_itself(spec, facts)
    loss, optimizer, metrics = spec.loss, spec.optimizer, spec.metrics
    if loss.name == OWN and not facts.is_step and not facts.has_loss:
        loss = replace(loss, name=default_loss(spec.task))
    if optimizer.name == OWN and not facts.has_optimizers:
        optimizer = replace(optimizer, name=OptimizerSpec().name)
    if not facts.is_step:
        metrics = tuple(dict.fromkeys((*(metrics or default_metrics(spec.task)), *facts.metrics)))
    return replace(
        spec,
        model=replace(
            spec.model, in_channels=row_shape[0] if row_shape else 0, num_classes=width, is_step=facts.is_step
        ),
        loss=loss,
        optimizer=optimizer,
        metrics=metrics,
    )


def settled_base(base: TrainingSpec, trials: Sequence[TrainingSpec]) -> TrainingSpec:
    """Return a sweep's completed base specification.

    It is completed with what follows from the model. `trials` are some of the trials' checked specifications. Raises
    `InvalidArgument` if their models do not agree on outputs, metrics and methods.
    """
    first = trials[0]
    for other in trials:
        if (other.model.num_classes, other.model.is_step, other.metrics) != (
            first.model.num_classes,
            first.model.is_step,
            first.metrics,
        ):
            remedy = "trials of a sweep are compared, so their models must have the same outputs, metrics and methods"
            raise invalid_field("spec.model.kwargs", other.model.kwargs, remedy)
    model = replace(
        base.model,
        in_channels=first.model.in_channels,
        num_classes=first.model.num_classes,
        is_step=first.model.is_step,
    )
    return replace(
        base,
        model=model,
        loss=replace(base.loss, name=first.loss.name),
        optimizer=replace(base.optimizer, name=first.optimizer.name),
        metrics=first.metrics,
    )


def _refuse_what_a_step_does_itself(spec: TrainingSpec, facts: OwnModelFacts) -> None:
    has_step = "the model has a training_step of its own, which makes it; leave it out"
    manual = "the model optimizes by hand (automatic_optimization is False), which does not go with it; leave it out"
    refused = [
        (spec.loss.name != OWN, "loss.name", spec.loss.name, has_step),
        (bool(spec.metrics), "metrics", ", ".join(spec.metrics), "a training_step logs its own; leave it out"),
        (bool(spec.training_step), "training_step", spec.training_step, has_step),
        (spec.target_scaling != NONE, "target_scaling", spec.target_scaling, "a training_step scales; leave it out"),
        (
            facts.has_optimizers and spec.optimizer != OptimizerSpec(name=OWN),
            "optimizer.name",
            spec.optimizer.name,
            "the model has configure_optimizers; leave it out",
        ),
        (facts.is_manual and spec.accumulation_steps > 1, "accumulation_steps", spec.accumulation_steps, manual),
        (facts.is_manual and spec.precision == FLOAT16, "precision", spec.precision, manual),
        (facts.is_manual and spec.max_gradient_norm > 0, "max_gradient_norm", spec.max_gradient_norm, manual),
        (facts.is_manual and spec.placement.parallel == FSDP, "placement.parallel", FSDP, manual),
    ]
    broken = [(f"spec.{path}", value, remedy) for holds, path, value, remedy in refused if holds]
    if broken:
        raise invalid_fields(broken)


# --- Settings of a script's trainer ---

# The key in `JobRecord.choices` whose value maps field paths to settings.
SCRIPT = "script"
# Settings of the job as a whole, which the log keeps in fields of its own.
BUDGETS = ("max_failures", "max_preemptions")


def with_settings(spec: TrainingSpec, settings: Mapping[str, Any]) -> TrainingSpec:
    """Return `spec` with `settings` applied and no longer open.

    `settings` maps field paths, such as `placement.backend`, to values.
    """
    for path, value in settings.items():
        parent, _, name = path.rpartition(".")
        change = {parent: replace(getattr(spec, parent), **{name: value})} if parent else {name: value}
        spec = replace(spec, **change)
    return replace(spec, left_open=tuple(one for one in spec.left_open if one not in settings))


def spec_of_job(config: Mapping[str, Any], choices: Mapping[str, Any]) -> TrainingSpec:
    """Return a job's specification with its script's settings. The script chose these settings for the present run."""
    return with_settings(TrainingSpec.from_config(config), choices.get(SCRIPT, {}))


# --- Devices ---

# Keys of `JobRecord.choices`; the values are CPU and GPU.
RUN_DEVICE = "device"
ATTEMPT_DEVICE = "attempt_device"
# The device of the previous attempt; set only if the device has changed.
DEVICE_BEFORE = "device_before"


# The most workers that the queue left to the present attempt, if it left fewer than the job asks for.
MAX_WORKERS = "max_workers"


def with_devices(choices: Mapping[str, Any], run: str, attempt: str) -> dict[str, Any]:
    """Return the choices for a job's next attempt. The attempt runs on the device `attempt`, and the run on `run`."""
    chosen = {**choices, RUN_DEVICE: run, ATTEMPT_DEVICE: attempt}
    before = choices.get(ATTEMPT_DEVICE, run)
    chosen.pop(DEVICE_BEFORE, None)
    return chosen if before == attempt else {**chosen, DEVICE_BEFORE: before}


def attempt_device(choices: Mapping[str, Any]) -> str:
    """Return the device of the present or last attempt.

    Empty before the first attempt, and for a job that an earlier release ran.
    """
    return str(choices.get(ATTEMPT_DEVICE, ""))


def max_workers(spec: TrainingSpec, choices: Mapping[str, Any]) -> int:
    """Return the most workers that the present attempt may begin with.

    A script says how many it needs only after its first attempt has begun, so the fewest may be more than were left.
    """
    left = int(choices.get(MAX_WORKERS, spec.num_workers))
    return max(spec.effective_min_workers, min(spec.num_workers, left))
