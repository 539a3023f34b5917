"""Exports a run's metrics and parameters for other tools: from the API into files, without other connections.

TensorBoard's event files are written with its own package; TensorFlow is not needed. A file store of MLflow needs
`mlflow-skinny`. A run of Weights & Biases is written offline, and `wandb sync` can upload it to a server.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb

# --- Export ---

TARGETS = ("tensorboard", "mlflow", "wandb")


class ExporterMissing(Exception):
    """The package that writes this format is not installed. It is an extra."""


@dataclass(frozen=True)
class Written:
    """A finished export. `points` is the number of steps; `hint` says how to view it."""

    folder: str
    points: int
    hint: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_run(target: str, job: resources_pb2.TrainingJob, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
    """Export a run. `target` is one of `TARGETS`. Raises `ExporterMissing` if its extra is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    exporters = {"tensorboard": export_tensorboard, "mlflow": export_mlflow, "wandb": export_wandb}
    try:
        return exporters[target](job, points, folder.absolute())
    except ImportError as error:
        raise ExporterMissing(f"{target} is not installed ({error})") from None


def job_id(job: resources_pb2.TrainingJob) -> str:
    return str(job.name.rpartition("/")[2])


def parameters(job: resources_pb2.TrainingJob) -> dict[str, str]:
    """Return the specification, flattened: `optimizer.learning_rate`, `transform.steps.0.to_float`, …"""
    flat: dict[str, str] = {}

    def add(path: str, value: Any) -> None:
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        if children is None or not value:
            flat[path] = str(value) if value not in ({}, []) else ""
            return
        for name, child in children:
            add(f"{path}.{name}" if path else str(name), child)

    add("", MessageToDict(job.spec, preserving_proto_field_name=True))
    return flat


# --- TensorBoard ---


def export_tensorboard(job: resources_pb2.TrainingJob, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
    """Write a run named by the job's id below `folder`: a scalar per metric, and the specification as text."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    run = folder / job_id(job)
    # TensorBoard shows all event files of a folder as one run, so a repeated export replaces the old one.
    for old in run.glob("events.out.tfevents.*"):
        old.unlink()
    writer = EventFileWriter(str(run))
    try:
        text = json.dumps(parameters(job), indent=1, sort_keys=True)
        spec = TensorProto(dtype=7, string_val=[f"```json\n{text}\n```".encode()])  # DT_STRING
        spec.tensor_shape.dim.add(size=1)
        shown_by = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag="spec", tensor=spec, metadata=shown_by)
        writer.add_event(Event(wall_time=job.create_time.seconds, summary=Summary(value=[value])))
        for point in points:
            values = [Summary.Value(tag=name, simple_value=one) for name, one in sorted(point.values.items())]
            wall_time = point.time.seconds + point.time.nanos / 1e9
            writer.add_event(Event(wall_time=wall_time, step=point.step, summary=Summary(value=values)))
    finally:
        writer.close()
    return Written(str(run), len(points), f"tensorboard --logdir {folder} shows it")


# --- MLflow ---

EXPERIMENT = "millrace"
# MLflow's limits for one call, and for a parameter's value.
METRICS_AT_ONCE, PARAMETERS_AT_ONCE, VALUE_LENGTH = 1000, 100, 6000
# MLflow also accepts slashes and, except on Windows, colons. But each parameter is a file, and slashes would make
# folders.
NOT_IN_NAMES = re.compile(r"[^\w.\- ]")
# A file's name may have 255 bytes, MLflow's 250 characters; the rest is for a number at the end.
NAME_BYTES = 240

Job = resources_pb2.TrainingJob
# All other states, in which an attempt runs or soon will, are RUNNING. Jobs that wait for resources or for a resume are
# SCHEDULED.
STATUSES = {
    Job.STATE_PENDING: "SCHEDULED",
    Job.STATE_SUSPENDED: "SCHEDULED",
    Job.STATE_SUCCEEDED: "FINISHED",
    Job.STATE_FAILED: "FAILED",
    Job.STATE_CANCELLED: "KILLED",
    Job.STATE_DELETING: "KILLED",
}
ENDED = ("FINISHED", "FAILED", "KILLED")


def export_mlflow(job: Job, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
    """Write the job's present state as a run, named by its id, in the experiment `millrace` below `folder`."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(tracking_uri=folder.as_uri())
    experiment = client.get_experiment_by_name(EXPERIMENT)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
    tags = {"mlflow.runName": job_id(job), "millrace.training_job": job.name, "millrace.uid": job.uid}
    begun_ms = job.create_time.ToMilliseconds()
    run_id = client.create_run(experiment_id, start_time=begun_ms, tags=tags).info.run_id
    values = iter(Param(name, text[:VALUE_LENGTH]) for name, text in renamed(parameters(job)).items())
    while some := list(islice(values, PARAMETERS_AT_ONCE)):
        client.log_batch(run_id, params=some)
    found = (
        Metric(name, value, point.time.ToMilliseconds(), point.step)
        for point in points
        for name, value in sorted(point.values.items())
    )
    while batch := list(islice(found, METRICS_AT_ONCE)):
        client.log_batch(run_id, metrics=batch)
    status = STATUSES.get(job.state, "RUNNING")
    if status in ENDED:
        client.set_terminated(run_id, status, job.update_time.ToMilliseconds())
    else:
        client.update_run(run_id, status)
    return Written(str(folder), len(points), f"mlflow ui --backend-store-uri {folder.as_uri()} shows it (run {run_id})")


def renamed(values: Mapping[str, str]) -> dict[str, str]:
    """Rename values so that MLflow accepts their names, because columns may have any name.

    Valid names stay. If others would become equal, all but the first get a number.
    """
    good = {name: text for name, text in values.items() if name == _mended(name)}
    for name, text in sorted(values.items()):
        if name not in good:
            mended = _mended(name)
            numbered = (mended if number == 1 else f"{mended}_{number}" for number in count(1))
            good[next(one for one in numbered if one not in good)] = text
    return good


def _mended(name: str) -> str:
    return NOT_IN_NAMES.sub("_", name).encode()[:NAME_BYTES].decode(errors="ignore")


# --- Weights & Biases ---

# Exit codes by state. W&B calls all but 0 failed, and its own library reports 255 for an interrupted process. A run
# that has not ended is neither, but a file without an end would count as crashed.
EXIT_CODES = {Job.STATE_FAILED: 1, Job.STATE_CANCELLED: 255, Job.STATE_DELETING: 255}


def export_wandb(job: Job, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
    """Write the job's present state as a run `offline-run-…` below `folder/wandb`, with the job's id and uid.

    A tag names the job's state, unless it is of a later release. W&B's own process, which writes the run, is stopped
    afterwards.
    """
    import wandb

    settings = wandb.Settings(
        mode="offline",
        x_disable_stats=True,
        x_disable_meta=True,
        disable_git=True,
        disable_code=True,
        console="off",
        silent=True,
    )
    run = wandb.init(
        project="millrace",
        name=job_id(job),
        id=job.uid or None,
        dir=str(folder),
        config=parameters(job),
        tags=_tags(job),
        settings=settings,
    )
    try:
        for point in points:
            run.log(
                {**point.values, "epoch": point.epoch, "attempt": point.attempt, "time": point.time.ToSeconds()},
                step=point.step,
            )
        place = str(Path(run.settings.sync_dir))
    finally:
        run.finish(exit_code=EXIT_CODES.get(job.state, 0))
        wandb.teardown()  # waits for the file; `finish` may return before it is written
    return Written(place, len(points), f"wandb sync {place} takes it to a server")


def _tags(job: Job) -> list[str]:
    return [name.removeprefix("STATE_").lower() for name, state in Job.State.items() if state == job.state]
