"""Exports a run into a file store of MLflow, with `mlflow-skinny`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import count, islice
from pathlib import Path

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.export import Written, job_id, parameters

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


def export(job: Job, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
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
