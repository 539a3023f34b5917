"""The rules of a specification. They need only its own values and the number of rows."""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Iterable
from typing import NoReturn

from shared.errors import invalid_fields
from shared.jobs.retry_limits import MAX_FAILURES_LIMIT, MAX_PREEMPTIONS_LIMIT
from shared.model_spec import NONE, STANDARD
from train_service.domain.capacity import ACCELERATOR, GRAIN
from train_service.domain.order import MIN_ROWS_PER_RANK, min_rows_of_a_rank, shapes_of_steps, steps_per_epoch
from train_service.domain.spec import (
    BFLOAT16,
    BY_DEVICE,
    BY_LOADER,
    CAUSAL_LM,
    CLASSIFICATION,
    CONSTANT,
    CONTINUE,
    COSINE_WITH_WARMUP,
    DDP,
    DETERMINISTIC,
    DROP,
    FASTEST,
    FLOAT16,
    FLOAT32,
    FSDP,
    KEEP,
    NEXT_TOKEN,
    PERPLEXITY,
    RAY_DATA,
    REGRESSION,
    REPLAY,
    SCRIPT_SUFFIX,
    TF32,
    THREADS,
    Program,
    TrainingSpec,
)

MAX_WORKERS = 64
MAX_PRIORITY = 1000
MAX_LANES = 4096
MAX_PREFETCH_BATCHES = 64
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
MAX_CONFIG_BYTES = 64 * 1024
MAX_ENTRY_CHARACTERS = 255
MAX_INPUTS = 64
# Fields that only Millrace's own loop reads. With a program they stay unset, and the rules for them do not apply.
FIELDS_OF_OWN_LOOP = frozenset(
    {
        "acceleration",
        "accumulation_steps",
        "allow_non_finite",
        "checkpoint_every_steps",
        "compile",
        "early_stopping",
        "epochs",
        "global_batch_size",
        "group_by_length",
        "ingest",
        "initial_checkpoint",
        "input_column",
        "input_columns",
        "label_column",
        "loss",
        "max_gradient_norm",
        "metrics",
        "model",
        "optimizer",
        "precision",
        "target_scaling",
        "task",
        "training_step",
        "transform",
        "checkpoints.every",
        "placement.parallel",
    }
)
# (whether the rule holds, the field, its value, the remedy)
Rule = tuple[bool, str, object, str]


def check(spec: TrainingSpec) -> None:
    """Raise `InvalidArgument` for fields out of bounds. The error names every such field."""
    rules = [*_of_the_run(spec), *_of_the_model(spec), *_of_the_optimizer(spec), *_of_checkpoints(spec)]
    rules += [*_of_placement(spec), *_of_acceleration(spec)]
    if spec.input_columns:
        rules += _of_several_inputs(spec)
    if spec.local:
        rules += _of_local_mode(spec)
    if spec.program is not None:
        rules = [*_of_a_program(spec.program), *(rule for rule in rules if not _is_of_own_loop(rule[1]))]
    broken = [(f"spec.{path}", value, remedy) for holds, path, value, remedy in rules if not holds]
    if broken:
        raise invalid_fields(broken)


def check_unset(fields: Iterable[str]) -> None:
    """Raise `InvalidArgument` for fields without effect.

    The error names each of `fields` that has no effect with a program.
    """
    remedy = "with a program it has no effect: leave it out, or give it in program.config_json"
    broken = [(f"spec.{path}", "set", remedy) for path in sorted(fields) if path in FIELDS_OF_OWN_LOOP]
    if broken:
        raise invalid_fields(broken)


def check_rows(spec: TrainingSpec, rows: int) -> None:
    """Raise `InvalidArgument` unless ranks can share steps.

    Every world size up to W must be able to share the train split of `rows` rows.
    """
    path = "spec.global_batch_size"
    if spec.global_batch_size > rows:
        raise invalid_fields([(path, spec.global_batch_size, f"the split has {rows} rows; use at most as many")])
    shapes = shapes_of_steps(rows, steps_per_epoch(rows, spec.global_batch_size), spec.lanes)
    for world_size in range(1, spec.max_ranks + 1):
        fewest = min_rows_of_a_rank(shapes, spec.lanes, world_size)
        if fewest < MIN_ROWS_PER_RANK * spec.accumulation_steps:
            remedy = (
                f"with {world_size} workers and {spec.lanes} lanes a worker would get {fewest} rows in a step, and "
                f"needs {MIN_ROWS_PER_RANK * spec.accumulation_steps}; use a larger batch, or fewer workers or "
                "accumulation_steps"
            )
            raise invalid_fields([(path, spec.global_batch_size, remedy)])


def _is_of_own_loop(path: str) -> bool:
    return path in FIELDS_OF_OWN_LOOP or path.partition(".")[0] in FIELDS_OF_OWN_LOOP


def _of_a_program(program: Program) -> list[Rule]:
    return [
        (
            _is_entry(program.entry),
            "program.entry",
            program.entry,
            "use module:function, e.g. train:train_loop_per_worker, or the path of a script, e.g. cells.py",
        ),
        (not (remedy := _config_problem(program.config_json)), "program.config_json", program.config_json, remedy),
        _one_of("program.data_resume", program.data_resume, (REPLAY, CONTINUE), "DATA_RESUME_"),
        _one_of("program.remainder", program.remainder, (DROP, KEEP), "REMAINDER_"),
        (
            program.hang_after_s == 0 or 1 <= program.hang_after_s <= 604_800,
            "program.hang_after",
            program.hang_after_s,
            "use 1 second to 7 days",
        ),
        (
            1 <= program.stop_within_s <= 604_800,
            "program.stop_within",
            program.stop_within_s,
            "use 1 second to 7 days",
        ),
    ]


def _is_entry(entry: str) -> bool:
    if entry.endswith(SCRIPT_SUFFIX):
        return len(entry) <= MAX_ENTRY_CHARACTERS and not set(entry.split("/")) & {"", ".", "..", SCRIPT_SUFFIX}
    module, colon, function = entry.partition(":")
    names = [*module.split("."), function]
    good = all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    return bool(colon) and good and len(entry) <= MAX_ENTRY_CHARACTERS


def _config_problem(text: str) -> str:
    """Return the problem of a program's configuration.

    The text includes the remedy, and is empty if there is no problem.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_CONFIG_BYTES:
        return f"use at most {MAX_CONFIG_BYTES >> 10} KiB; larger things belong in the bundle or in a dataset version"
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return f"use a JSON object: {error}"
    return "" if isinstance(value, dict) else 'use a JSON object, e.g. {"lr": 0.001}'


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _of_the_run(spec: TrainingSpec) -> list[Rule]:
    fewest = spec.min_workers
    return [
        _one_of("task", spec.task, (CLASSIFICATION, REGRESSION), "TASK_"),
        (1 <= spec.epochs <= 10_000, "epochs", spec.epochs, "use 1 to 10,000"),
        (1 <= spec.global_batch_size < 2**31, "global_batch_size", spec.global_batch_size, "use 1 to 2^31 - 1"),
        (0 <= spec.seed < 2**64, "seed", spec.seed, "use 0 to 2^64 - 1"),
        (
            0 <= spec.num_workers <= MAX_WORKERS,
            "num_workers",
            spec.num_workers,
            f"use 1 to {MAX_WORKERS}, or 0 for local mode",
        ),
        (0 <= fewest <= max(spec.num_workers, 0), "min_workers", fewest, "use 0 to num_workers"),
        (1 <= spec.threads_per_worker <= 256, "threads_per_worker", spec.threads_per_worker, "use 1 to 256"),
        (
            0 <= spec.max_failures <= MAX_FAILURES_LIMIT,
            "max_failures",
            spec.max_failures,
            f"use 0 to {MAX_FAILURES_LIMIT:,}",
        ),
        (
            0 <= spec.max_preemptions <= MAX_PREEMPTIONS_LIMIT,
            "max_preemptions",
            spec.max_preemptions,
            f"use 0 to {MAX_PREEMPTIONS_LIMIT:,}",
        ),
        (-MAX_PRIORITY <= spec.priority <= MAX_PRIORITY, "priority", spec.priority, "use -1,000 to 1,000"),
        (
            min(spec.max_ranks, MAX_WORKERS) <= spec.lanes <= MAX_LANES,
            "lanes",
            spec.lanes,
            f"use num_workers to {MAX_LANES}",
        ),
        _one_of("ingest", spec.ingest, (THREADS, RAY_DATA), "INGEST_"),
    ]


def _of_the_model(spec: TrainingSpec) -> list[Rule]:
    model, loss = spec.model, spec.loss
    classes = spec.task == CLASSIFICATION
    smoothing = loss.label_smoothing
    # For a user's own model, both numbers are derived if they are 0.
    own = model.is_own
    return [
        (
            not (own and model.builder),
            "model.builder",
            model.builder,
            "spec.model.entry names a model of your own; leave one of both out",
        ),
        (
            not own or _is_entry(model.entry),
            "model.entry",
            model.entry,
            "use module:name of a function or class, e.g. net:build",
        ),
        (
            own or not model.code_bundle,
            "model.entry",
            model.entry,
            "name the function or class of spec.model.code_bundle that makes the model, e.g. net:build",
        ),
        (
            (own and not model.in_channels) or 1 <= model.in_channels <= 65_536,
            "model.in_channels",
            model.in_channels,
            "use 1 to 65,536",
        ),
        (
            (own and not model.num_classes) or (2 if classes else 1) <= model.num_classes <= 1_000_000,
            "model.num_classes",
            model.num_classes,
            f"use {2 if classes else 1} to 1,000,000",
        ),
        *_of_language_models(spec),
        (0 <= smoothing < 1, "loss.label_smoothing", smoothing, "use 0 to below 1"),
        (
            not smoothing or loss.name == "cross_entropy",
            "loss.label_smoothing",
            smoothing,
            f"{loss.name} has none; use it with cross_entropy",
        ),
        (
            spec.task != REGRESSION or loss.name != "cross_entropy",
            "loss.name",
            loss.name,
            "it is a loss of classes; use mse, l1 or huber for TASK_REGRESSION",
        ),
        _one_of("target_scaling", spec.target_scaling, (NONE, STANDARD), "TARGET_SCALING_"),
        (
            not classes or spec.target_scaling == NONE,
            "target_scaling",
            spec.target_scaling,
            "classes have no scale; leave it out, or use TASK_REGRESSION",
        ),
        _one_of("precision", spec.precision, (FLOAT32, BFLOAT16, FLOAT16, TF32), "PRECISION_"),
        (1 <= spec.accumulation_steps <= 1024, "accumulation_steps", spec.accumulation_steps, "use 1 to 1,024"),
        (
            0 <= spec.max_gradient_norm < math.inf,
            "max_gradient_norm",
            spec.max_gradient_norm,
            "use a finite number, 0 for no clipping",
        ),
    ]


def _of_several_inputs(spec: TrainingSpec) -> list[Rule]:
    """Return the rules for a model of several inputs."""
    columns = spec.input_columns
    if len(columns) > MAX_INPUTS:
        return [(False, "input_columns", f"{len(columns)} columns", f"use at most {MAX_INPUTS}")]
    repeated = [name for index, name in enumerate(columns) if name in columns[:index]]
    needs_images = (
        "spec.input_columns is set, and only a model of one input has images alone to do this to; leave it out"
    )
    return [
        (all(columns), "input_columns", ", ".join(columns), "one has no name; name a column of the version each"),
        (not repeated, "input_columns", ", ".join(repeated), "name each column once"),
        (
            spec.model.is_own,
            "input_columns",
            ", ".join(columns),
            "only a model of your own, spec.model.entry, takes several inputs; use input_column, and concat to put "
            "columns of a table together",
        ),
        (
            not spec.model.in_channels,
            "model.in_channels",
            spec.model.in_channels,
            "a model of several inputs has no channels; leave it out",
        ),
        (not spec.acceleration.channels_last, "acceleration.channels_last", True, needs_images),
        (
            spec.acceleration.transform_device == BY_LOADER,
            "acceleration.transform_device",
            spec.acceleration.transform_device,
            needs_images,
        ),
    ]


def _of_language_models(spec: TrainingSpec) -> list[Rule]:
    """Return the rules for what only a causal language model has, and for what it cannot have."""
    causal = spec.model.builder == CAUSAL_LM
    known = (NEXT_TOKEN,) if causal else tuple(name for name in (spec.loss.name,) if name != NEXT_TOKEN)
    # A model of a user's own may call its metrics what it likes.
    wrong = [] if spec.model.is_own else [name for name in spec.metrics if (name == PERPLEXITY) != causal]
    return [
        (
            not causal or spec.task == REGRESSION,
            "task",
            spec.task,
            f"leave it out, or use TASK_REGRESSION, with {CAUSAL_LM}",
        ),
        (
            spec.loss.name in known,
            "loss.name",
            spec.loss.name,
            f"{CAUSAL_LM} learns by {NEXT_TOKEN}, and no other model does",
        ),
        (
            not wrong,
            "metrics",
            ", ".join(wrong),
            f"{CAUSAL_LM} is measured by {PERPLEXITY}, and no other model is",
        ),
        (
            not causal or spec.target_scaling == NONE,
            "target_scaling",
            spec.target_scaling,
            "ids of tokens have no scale; leave it out",
        ),
    ]


def _of_the_optimizer(spec: TrainingSpec) -> list[Rule]:
    optimizer = spec.optimizer
    return [
        (
            0 < optimizer.learning_rate < math.inf,
            "optimizer.learning_rate",
            optimizer.learning_rate,
            "use a finite number above 0",
        ),
        _one_of("optimizer.schedule", optimizer.schedule, (CONSTANT, COSINE_WITH_WARMUP), "SCHEDULE_"),
        (
            not optimizer.scheduler or optimizer.schedule == CONSTANT,
            "optimizer.scheduler",
            optimizer.scheduler,
            "a schedule is set, too; use one of them",
        ),
        (
            bool(optimizer.scheduler) or not optimizer.scheduler_kwargs,
            "optimizer.scheduler_kwargs",
            optimizer.scheduler_kwargs,
            "name the scheduler that they are for",
        ),
    ]


def _of_checkpoints(spec: TrainingSpec) -> list[Rule]:
    policy, stopping = spec.checkpoints, spec.early_stopping
    rules: list[Rule] = [
        (spec.checkpoint_every_steps >= 0, "checkpoint_every_steps", spec.checkpoint_every_steps, "use 0 or more"),
        (
            policy.every_s == 0 or 1 <= policy.every_s <= 604_800,
            "checkpoints.every",
            policy.every_s,
            "use 1 second to 7 days",
        ),
        (0 <= policy.keep_newest <= 10_000, "checkpoints.keep_newest", policy.keep_newest, "use 0 to 10,000"),
        (1 <= policy.keep_best <= 10_000, "checkpoints.keep_best", policy.keep_best, "use 1 to 10,000"),
    ]
    if stopping is not None:
        rules += [
            (1 <= stopping.patience <= 10_000, "early_stopping.patience", stopping.patience, "use 1 to 10,000"),
            (
                0 <= stopping.min_delta < math.inf,
                "early_stopping.min_delta",
                stopping.min_delta,
                "use a finite number from 0",
            ),
        ]
    return rules


def _of_placement(spec: TrainingSpec) -> list[Rule]:
    placement = spec.placement
    gpus = placement.gpus_per_worker
    rules: list[Rule] = [
        (
            GRAIN <= placement.cpus_per_worker <= 1024,
            "placement.cpus_per_worker",
            placement.cpus_per_worker,
            f"use {GRAIN:g} to 1,024",
        ),
        (
            gpus is None or gpus == 0 or GRAIN <= gpus <= 1 or gpus in range(65),
            "placement.gpus_per_worker",
            gpus,
            f"use 0, a part of one from {GRAIN:g} up, or a whole number to 64",
        ),
        _one_of("placement.strategy", placement.strategy, STRATEGIES),
        _one_of("placement.parallel", placement.parallel, (DDP, FSDP)),
        _one_of("placement.backend", placement.backend, ("", "gloo", "nccl")),
        (
            placement.backend != "nccl" or gpus is None or not gpus < 1,
            "placement.backend",
            placement.backend,
            f"it needs a whole GPU for each worker, and placement.gpus_per_worker is {gpus}; use gloo, or 1 or more",
        ),
        (
            placement.backend != "nccl" or not placement.allow_cpu_fallback,
            "placement.backend",
            placement.backend,
            "nccl needs GPUs, and placement.allow_cpu_fallback is for CPUs; leave one of both out",
        ),
        (
            placement.parallel != FSDP or gpus is None or not 0 < gpus < 1,
            "placement.gpus_per_worker",
            gpus,
            "FSDP shards on GPUs by nccl, which needs a whole GPU for each worker; use 1 or more, or 0 for CPUs",
        ),
        (
            placement.parallel != FSDP or placement.backend != "gloo" or not gpus,
            "placement.backend",
            placement.backend,
            "FSDP shards on GPUs by nccl alone; leave it out, or set placement.gpus_per_worker to 0 for CPUs",
        ),
        (
            1 <= placement.timeout_s <= 86_400,
            "placement.timeout",
            placement.timeout_s,
            "use 1 second to 24 hours",
        ),
    ]
    for name, amount in placement.resources_per_worker.items():
        path = f"placement.resources_per_worker[{name}]"
        rules.append(
            (bool(name) and GRAIN <= amount < math.inf, path, amount, f"use a finite number from {GRAIN:g} up")
        )
        rules.append((not (remedy := _own_field(name)), path, amount, remedy))
    return rules


def _of_acceleration(spec: TrainingSpec) -> list[Rule]:
    given = spec.acceleration
    return [
        (
            0 <= given.prefetch_batches <= MAX_PREFETCH_BATCHES,
            "acceleration.prefetch_batches",
            given.prefetch_batches,
            f"use 0 to {MAX_PREFETCH_BATCHES}",
        ),
        _one_of("acceleration.algorithms", given.algorithms, (DETERMINISTIC, FASTEST), "ALGORITHMS_"),
        _one_of("acceleration.transform_device", given.transform_device, (BY_LOADER, BY_DEVICE), "TRANSFORM_DEVICE_"),
        (
            given.transform_device != BY_DEVICE or spec.ingest == THREADS,
            "acceleration.transform_device",
            given.transform_device,
            "Ray Data's tasks, which INGEST_RAY_DATA asks for, give whole inputs; leave one of both out",
        ),
    ]


def _own_field(resource: str) -> str:
    """Return the remedy for a misplaced resource.

    The resource has a field of its own. Other resources have an empty remedy.
    """
    if resource.startswith(ACCELERATOR):
        return f"use placement.accelerator_type, {resource.removeprefix(ACCELERATOR) or 'e.g. A100'}"
    return {"CPU": "use placement.cpus_per_worker", "GPU": "use placement.gpus_per_worker"}.get(resource.upper(), "")


def _of_local_mode(spec: TrainingSpec) -> list[Rule]:
    """Return the rules for local mode. Local mode has no workers that could have resources."""
    placement = spec.placement
    remedy = "num_workers is 0, local mode, which has no workers; leave it out, or use 1 worker"
    return [
        (spec.ingest == THREADS, "ingest", spec.ingest, remedy),
        (placement.parallel == DDP, "placement.parallel", placement.parallel, remedy),
        (not placement.gpus_per_worker, "placement.gpus_per_worker", placement.gpus_per_worker, remedy),
        (not placement.accelerator_type, "placement.accelerator_type", placement.accelerator_type, remedy),
        (not placement.resources_per_worker, "placement.resources_per_worker", placement.resources_per_worker, remedy),
        (placement.backend != "nccl", "placement.backend", placement.backend, remedy),
        (not placement.allow_cpu_fallback, "placement.allow_cpu_fallback", True, remedy),
    ]


def _one_of(path: str, value: str, known: tuple[str, ...], prefix: str = "") -> Rule:
    return value in known, path, value, f"use one of {', '.join(prefix + one for one in known if one)}"
