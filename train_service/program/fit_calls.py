"""The `fit()` calls of a job's script: the run of each call, its requested settings, and its line.

    {job}/fits/{uid}/{number:04d}.json         how the run was called when it first began
    {job}/fits/{uid}/{number:04d}-done.json    its result

`uid` is the job's, so that a late process of a deleted job does not affect another job of its name.

An attempt runs the whole script. A `fit()` that ended in an earlier attempt returns at once; one that was interrupted
resumes from its own newest checkpoint. Runs are identified by name and storage path, as Ray does. If a script generates
a new name each time (Ray's own default is a date), the run is found by its line: it is the first run of that line that
this attempt has not met yet.

A run takes some settings from its script's trainer configurations, and reports each setting that it does not take.

The channel between an attempt and its script's process carries JSON objects, one per line, over a pair of sockets. The
script's process asks, the attempt answers, one question at a time. It is JSON because the attempt, which holds the
store's credentials, must not unpickle data of a script.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.durable import fields_of
from shared.errors import InvalidArgument, error_from_record
from shared.jobs.retry_limits import MAX_FAILURES_LIMIT, MAX_PREEMPTIONS_LIMIT
from shared.storage import ObjectMissing, ObjectStore
from train_service.domain import spec_rules
from train_service.domain.capacity import ACCELERATOR, PACK
from train_service.domain.order import default_lanes
from train_service.domain.spec import GPU, TrainingSpec, with_settings

# --- Calls of fit() ---


@dataclass(frozen=True, kw_only=True)
class FitCall:
    """Identity of a `fit()` call.

    `line` is where it is called, e.g. `cells.py:31`; `function` the qualified name of its training function;
    `config_sha256` the digest of the function's config.
    """

    name: str
    storage_path: str
    line: str
    function: str
    config_sha256: str


@dataclass(frozen=True, kw_only=True)
class FitDone:
    """Result of a completed run.

    `report` is the number of its newest report, `checkpoint` the name of its newest checkpoint or empty, `metrics`
    those of the newest report; `function` and `config_sha256` as in its call.
    """

    function: str
    config_sha256: str
    report: int
    checkpoint: str
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One run of the script. `number` counts from 1, in the order in which the runs first began."""

    number: int
    call: FitCall
    done: FitDone | None = None
    # Sentences about overridden settings that were already reported.
    reported_overrides: Sequence[str] = field(default_factory=tuple)
    # The device, CPU or GPU, that the script chose; else empty.
    device: str = ""

    def is_done(self, call: FitCall) -> bool:
        """Return whether this exact training has ended. With another configuration, e.g. more epochs, it continues."""
        done = self.done
        return done is not None and (done.function, done.config_sha256) == (call.function, call.config_sha256)


def matching(fits: Sequence[Fit], call: FitCall, met: Collection[int]) -> Fit | None:
    """Return the run that `call` continues, or None for a new one.

    `met` are the numbers of the runs that this attempt has already requested.
    """
    named = (fit for fit in fits if (fit.call.name, fit.call.storage_path) == (call.name, call.storage_path))
    placed = (one for one in fits if one.call.line == call.line and one.number not in met)
    return next(named, None) or next(placed, None)


class Fits:
    """The runs of one job. All methods block on the store and may be repeated. Only the current attempt writes."""

    def __init__(self, store: ObjectStore, job_name: str, uid: str) -> None:
        self._store = store
        self._folder = f"{job_name}/fits/{uid}"

    def read(self) -> list[Fit]:
        """Return the runs in the order of their numbers."""
        found: list[Fit] = []
        while (begun := self._get(f"{len(found) + 1:04d}")) is not None:
            number = len(found) + 1
            done = self._get(f"{number:04d}-done")
            found.append(
                Fit(
                    number=number,
                    call=FitCall(**fields_of(FitCall, begun["call"])),
                    done=FitDone(**fields_of(FitDone, done)) if done is not None else None,
                    reported_overrides=tuple(begun["reported_overrides"]),
                    device=begun.get("device", ""),
                )
            )
        return found

    def begin(self, fit: Fit) -> None:
        begun = {
            "call": asdict(fit.call),
            "reported_overrides": list(fit.reported_overrides),
            "device": fit.device,
        }
        self._put(f"{fit.number:04d}", begun)

    def finish(self, number: int, done: FitDone) -> None:
        self._put(f"{number:04d}-done", asdict(done))

    def _get(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._store.get(f"{self._folder}/{name}.json"))
        except ObjectMissing:
            return None
        return found

    def _put(self, name: str, state: Mapping[str, Any]) -> None:
        self._store.put(f"{self._folder}/{name}.json", json.dumps(state).encode())


# --- What a call asks for ---

NCCL, GLOO = "nccl", "gloo"
BACKENDS = (NCCL, GLOO)
# Ray's own defaults, which do not express a choice of the script.
DEFAULT_TIMEOUT_S = 1800.0
NO_FAILURES = 0
ANY_PREEMPTIONS = -1


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of a trainer's `ScalingConfig`, `RunConfig` and `TorchConfig`, in plain values.

    `num_workers` is one number, or the minimum and the maximum.
    """

    num_workers: int | list[int]
    use_gpu: bool = False
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    accelerator_type: str = ""
    placement_strategy: str = PACK
    backend: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S
    storage_path: str = ""
    max_failures: int = NO_FAILURES
    max_preemption_failures: int = ANY_PREEMPTIONS
    num_to_keep: int | None = None
    score_attribute: str = ""
    score_order: str = "max"
    callbacks: int = 0
    has_worker_environment: bool = False
    has_validation: bool = False
    # Other settings that differ from Ray's defaults, as written, e.g. `ScalingConfig(topology='4x4')`.
    others: list[str] = field(default_factory=list)
    # Entries of `train_loop_config` that the job's configuration replaces: by key the script's value and the job's, as
    # text.
    config: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> TrainerSettings:
        return cls(**fields_of(cls, message))

    @property
    def effective_min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]


@dataclass(frozen=True, kw_only=True)
class RequestedField:
    """One field of a specification with the value that the script requests, and the script's text for it."""

    path: str
    value: Any
    theirs: str
    # Applies only if workers have GPUs.
    needs_gpu: bool = False


def requested_fields(trainer_settings: TrainerSettings) -> list[RequestedField]:
    """Return a trainer's configurations as fields of a specification.

    Ray's defaults are left out, except for the number of workers and `use_gpu`, because Ray has no other way to express
    these values.
    """
    workers = f"ScalingConfig(num_workers={_workers(trainer_settings.num_workers)})"
    found = [
        RequestedField(path="num_workers", value=trainer_settings.max_workers, theirs=workers),
        RequestedField(
            path="min_workers",
            value=max(trainer_settings.effective_min_workers, 1)
            if trainer_settings.effective_min_workers != trainer_settings.max_workers
            else 0,
            theirs=workers,
        ),
    ]
    if trainer_settings.max_workers:  # local mode has no workers with settings
        found += _of_workers(trainer_settings)
    if trainer_settings.max_failures != NO_FAILURES:
        # Ray's -1 means unlimited; a job has at most MAX_FAILURES_LIMIT.
        unlimited = trainer_settings.max_failures < 0
        failures = MAX_FAILURES_LIMIT if unlimited else min(trainer_settings.max_failures, MAX_FAILURES_LIMIT)
        theirs = f"FailureConfig(max_failures={trainer_settings.max_failures})"
        found.append(RequestedField(path="max_failures", value=failures, theirs=theirs))
    if trainer_settings.max_preemption_failures != ANY_PREEMPTIONS:
        preemptions = min(trainer_settings.max_preemption_failures, MAX_PREEMPTIONS_LIMIT)
        theirs = f"FailureConfig(max_preemption_failures={trainer_settings.max_preemption_failures})"
        found.append(RequestedField(path="max_preemptions", value=preemptions, theirs=theirs))
    return found + _of_checkpoints(trainer_settings)


def settled(
    trainer_settings: TrainerSettings,
    spec: TrainingSpec,
    lanes: int,
    device_of: Callable[[TrainingSpec], str],
    line: str,
) -> tuple[dict[str, Any], TrainingSpec]:
    """Return the fields that the run takes from its script, and the specification with them.

    `spec` is the job's own. `lanes` are those that the job's first run began with, 0 before that: rows keep the order
    that these define. `device_of` chooses the device of the run.

    Raises `InvalidArgument` that begins with `line` if no run can have these settings.
    """
    wanted = [one for one in requested_fields(trainer_settings) if one.path in spec.left_open]
    taken = {one.path: one.value for one in wanted if not one.needs_gpu}
    workers = taken.get("num_workers", spec.num_workers)
    if not workers:  # local mode has no workers to place
        wanted = [one for one in wanted if not one.path.startswith("placement.")]
        taken = {one.path: one.value for one in wanted}
    if "lanes" in spec.left_open:
        taken["lanes"] = lanes or default_lanes(min(workers, spec_rules.MAX_WORKERS))
        if lanes and workers > lanes:
            raise InvalidArgument(
                f"{line}: {_scaling_text(trainer_settings)} is more than the {lanes} lanes that this job's first "
                "run began "
                "with, and its "
                f"rows keep their order; ask for at most {lanes} workers, or run the script as a job of its own",
                reason="MORE_WORKERS_THAN_LANES",
            )
    settings = with_settings(spec, taken)
    try:
        spec_rules.check(settings)
        if device_of(settings) == GPU:
            taken |= {one.path: one.value for one in wanted if one.needs_gpu}
            settings = with_settings(spec, taken)
            spec_rules.check(settings)
    except InvalidArgument as error:
        error.message = f"{line}: of the trainer's configurations: {error.message}"
        raise
    return taken, settings


def overridden(trainer_settings: TrainerSettings, spec: TrainingSpec, *, use_gpu: bool) -> list[str]:
    """Return a sentence for each setting that `spec`, the run's, overrides. `use_gpu`: its workers have GPUs."""
    sentences = [
        _difference(one, trainer_settings, spec, use_gpu=use_gpu) for one in requested_fields(trainer_settings)
    ]
    sentences += [
        "ScalingConfig(use_gpu=True) asks for a GPU for each worker, and the job's workers have none: they compute on "
        "CPUs"
        if trainer_settings.use_gpu and not use_gpu
        else "",
        "the job's workers have GPUs, without ScalingConfig(use_gpu=True)"
        if use_gpu and not trainer_settings.use_gpu
        else "",
        f"RunConfig(storage_path={trainer_settings.storage_path!r}) is not used: checkpoints are in the job's own "
        "registry"
        if trainer_settings.storage_path
        else "",
        f"TorchConfig(backend={trainer_settings.backend!r}) is not used: workers talk by {GLOO} or {NCCL}"
        if trainer_settings.backend and trainer_settings.backend not in BACKENDS
        else "",
        f"RunConfig(callbacks=...) is not used: {trainer_settings.callbacks} callbacks are not called"
        if trainer_settings.callbacks
        else "",
        "RunConfig(worker_runtime_env=...) is not used: workers have the job's bundle and the installed packages"
        if trainer_settings.has_worker_environment
        else "",
        "TorchTrainer(validation_config=...) is not used: validate in the training function"
        if trainer_settings.has_validation
        else "",
    ]
    sentences += [f"{one} is not used: a job has no such setting" for one in trainer_settings.others]
    sentences += _resources(trainer_settings, spec.placement.resources_per_worker)
    sentences += [
        f"train_loop_config[{key!r}] is {ours}, by the job's configuration, and not {theirs}"
        for key, (theirs, ours) in sorted(trainer_settings.config.items())
    ]
    return list(dict.fromkeys(sentence for sentence in sentences if sentence))


def _of_workers(trainer_settings: TrainerSettings) -> list[RequestedField]:
    resources = {name: amount for name, amount in trainer_settings.resources_per_worker.items() if amount}
    found = [
        # A specification that leaves it open means 1, as Ray does, if the cluster has GPUs.
        # Another number of GPUs asks for GPUs no more than 1 does: without any in the cluster the workers use CPUs.
        RequestedField(
            path="placement.gpus_per_worker",
            value=gpus,
            theirs=f"ScalingConfig(use_gpu={trainer_settings.use_gpu})",
            needs_gpu=trainer_settings.use_gpu,
        )
        for gpus in [float(resources.get("GPU", 1.0)) if trainer_settings.use_gpu else 0.0]
        if gpus != 1.0
    ]
    if "CPU" in resources:
        theirs = f"ScalingConfig(resources_per_worker={{'CPU': {resources['CPU']:g}}})"
        found.append(RequestedField(path="placement.cpus_per_worker", value=float(resources["CPU"]), theirs=theirs))
    if further := {name: amount for name, amount in resources.items() if not _has_field(name)}:
        theirs = f"ScalingConfig(resources_per_worker={further})"
        found.append(RequestedField(path="placement.resources_per_worker", value=further, theirs=theirs))
    if accelerator := accelerator_of(trainer_settings):
        theirs = f"ScalingConfig(accelerator_type={accelerator!r})"
        found.append(
            RequestedField(path="placement.accelerator_type", value=accelerator, theirs=theirs, needs_gpu=True)
        )
    if trainer_settings.placement_strategy != PACK:
        theirs = f"ScalingConfig(placement_strategy={trainer_settings.placement_strategy!r})"
        found.append(
            RequestedField(path="placement.strategy", value=trainer_settings.placement_strategy, theirs=theirs)
        )
    if trainer_settings.backend in BACKENDS:
        theirs = f"TorchConfig(backend={trainer_settings.backend!r})"
        needs_gpu = trainer_settings.backend == NCCL
        found.append(
            RequestedField(path="placement.backend", value=trainer_settings.backend, theirs=theirs, needs_gpu=needs_gpu)
        )
    if trainer_settings.timeout_s != DEFAULT_TIMEOUT_S:
        theirs = f"TorchConfig(timeout_s={trainer_settings.timeout_s:g})"
        found.append(RequestedField(path="placement.timeout_s", value=float(trainer_settings.timeout_s), theirs=theirs))
    return found


def _of_checkpoints(trainer_settings: TrainerSettings) -> list[RequestedField]:
    """Return the checkpoint settings.

    Ray keeps the newest checkpoint and the best `num_to_keep`, or without a score the newest `num_to_keep`.
    """
    keep, score = trainer_settings.num_to_keep, trainer_settings.score_attribute
    kept = f"CheckpointConfig(num_to_keep={keep})"
    found = []
    if keep is not None:
        found.append(RequestedField(path="checkpoints.keep_newest", value=1 if score else keep, theirs=kept))
    if keep is not None and score:
        found.append(RequestedField(path="checkpoints.keep_best", value=keep, theirs=kept))
    if score:
        theirs = f"CheckpointConfig(checkpoint_score_attribute={score!r})"
        found.append(RequestedField(path="checkpoints.best_metric", value=score, theirs=theirs))
        theirs = f"CheckpointConfig(checkpoint_score_order={trainer_settings.score_order!r})"
        found.append(
            RequestedField(path="checkpoints.maximize", value=trainer_settings.score_order == "max", theirs=theirs)
        )
    return found


def accelerator_of(trainer_settings: TrainerSettings) -> str:
    marks = [
        name.removeprefix(ACCELERATOR) for name in trainer_settings.resources_per_worker if name.startswith(ACCELERATOR)
    ]
    return trainer_settings.accelerator_type or next(iter(marks), "")


def _difference(wanted: RequestedField, trainer_settings: TrainerSettings, spec: TrainingSpec, *, use_gpu: bool) -> str:
    """Return a sentence if the run's value differs from the script's."""
    parent, _, name = wanted.path.rpartition(".")
    value = getattr(getattr(spec, parent) if parent else spec, name)
    if value == wanted.value or wanted.path in ("placement.gpus_per_worker", "placement.resources_per_worker"):
        return ""  # both have their own sentences
    if wanted.path == "min_workers" and spec.num_workers != trainer_settings.max_workers:
        return ""  # the sentence on `num_workers` names the same argument
    if wanted.path == "placement.backend" and wanted.needs_gpu and not use_gpu:
        return f"{wanted.theirs} is not used: the workers have no GPUs, and talk by {value or GLOO}"
    shown = {
        "placement.accelerator_type": value or "(none)",
        "checkpoints.keep_newest": value or "0 (all)",
        "checkpoints.best_metric": value or "(the newest)",
        "checkpoints.maximize": "MAXIMIZE" if value else "MINIMIZE",
    }
    return f"the job's {_shown(wanted.path)} {shown.get(wanted.path, value)} counts, and not {wanted.theirs}"


def _shown(path: str) -> str:
    """Return a field's name in the API."""
    return {"placement.timeout_s": "placement.timeout", "checkpoints.maximize": "checkpoints.order"}.get(path, path)


def _scaling_text(trainer_settings: TrainerSettings) -> str:
    return f"ScalingConfig(num_workers={_workers(trainer_settings.num_workers)})"


def _workers(number: int | list[int]) -> str:
    return str(number) if isinstance(number, int) else f"({', '.join(map(str, number))})"


def _has_field(resource: str) -> bool:
    return resource in ("CPU", "GPU") or resource.startswith(ACCELERATOR)


def _resources(trainer_settings: TrainerSettings, given: Mapping[str, float]) -> list[str]:
    """Return sentences for resources that have no field of their own."""
    left = {
        name: amount
        for name, amount in trainer_settings.resources_per_worker.items()
        if amount and not _has_field(name) and given.get(name) != amount
    }
    sentence = f"ScalingConfig(resources_per_worker={left}) is not used: the job's placement says what workers need"
    return [sentence] if left else []


# --- Channel to the process of the script ---

PIECE_BYTES = 65536
# A question holds settings of a trainer and metrics of its checkpoints; a longer one is invalid.
MAX_LINE_BYTES = 64 * 1024 * 1024


class ChannelClosed(Exception):
    """The other process has ended, or has closed its end."""


class Channel:
    """One end of the channel. One thread may call `receive`, any thread `send` and `ask`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self._sending = threading.Lock()
        self._asking = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises `ChannelClosed`."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None if none arrives within `timeout_s`. Raises `ChannelClosed`."""
        while b"\n" not in self._received:
            if timeout_s is not None and not select.select([self._connection], [], [], timeout_s)[0]:
                return None
            try:
                piece = self._connection.recv(PIECE_BYTES)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not piece or len(self._received) > MAX_LINE_BYTES:
                raise ChannelClosed("its end is closed" if not piece else "a message is too long")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and return the answer. Raises the error that the answer holds, and `ChannelClosed`."""
        with self._asking:
            self.send(question)
            answer = self.receive()
        assert answer is not None
        if "error" in answer:
            raise error_from_record(answer["error"])
        return answer

    def close(self) -> None:
        self._connection.close()
