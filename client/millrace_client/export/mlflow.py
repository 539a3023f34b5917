"""A run in a file store of MLflow, written by `mlflow-skinny`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.export import Written, job_id, parameters

EXPERIMENT = "millrace"
# What MLflow takes in one call, and the most of a parameter's value.
METRICS_AT_ONCE, PARAMETERS_AT_ONCE, VALUE_LENGTH = 1000, 100, 6000


def export(job: resources_pb2.TrainingJob, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
    """A finished run named by the job's id, in the experiment `millrace` below `folder`."""
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
    values = iter(Param(name, text[:VALUE_LENGTH]) for name, text in parameters(job).items())
    while some := list(islice(values, PARAMETERS_AT_ONCE)):
        client.log_batch(run_id, params=some)
    found = (
        Metric(name, value, point.time.ToMilliseconds(), point.step)
        for point in points
        for name, value in sorted(point.values.items())
    )
    while batch := list(islice(found, METRICS_AT_ONCE)):
        client.log_batch(run_id, metrics=batch)
    succeeded = job.state == resources_pb2.TrainingJob.STATE_SUCCEEDED
    client.set_terminated(run_id, "FINISHED" if succeeded else "FAILED", job.update_time.ToMilliseconds())
    return Written(str(folder), len(points), f"mlflow ui --backend-store-uri {folder.as_uri()} shows it (run {run_id})")
