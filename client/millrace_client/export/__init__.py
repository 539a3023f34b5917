"""Exports a run's metrics and parameters for other tools: from the API into files, without other connections."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb

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
    module = importlib.import_module(f"millrace_client.export.{target}")
    try:
        written: Written = module.export(job, points, folder.absolute())
    except ImportError as error:
        raise ExporterMissing(f"{target} is not installed ({error})") from None
    return written


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
