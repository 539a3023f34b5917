"""Versions that are imported and prepared in this process, without a data service and without Ray."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_service.convert import import_spec_from, transform_spec_from
from data_service.imports.job import run_import
from data_service.transforms.job import run_transform
from millrace.data.v1 import data_service_pb2
from millrace.train.v1 import resources_pb2, suggestion_pb2
from millrace_client.specs import ratio_split
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.attempt import Entry, run_attempt
from shared.jobs.transitions import begin_attempt
from shared.storage import ObjectStore
from tests.support.transforming import run_here
from train_service.convert import given_from_proto, suggestion_to_proto
from train_service.jobs.training_jobs import suggest_spec


def import_here(store: ObjectStore, name: str, folder: Path, sources: Iterable[data_service_pb2.ImportSource]) -> None:
    """Make the version `name` of files below `folder`."""
    spec = import_spec_from(data_service_pb2.ImportVersionRequest(sources=sources))
    _make(store, name, {"import": spec.as_record(), "import_roots": [str(folder)]}, run_import)


def prepare_here(store: ObjectStore, name: str, preparation: suggestion_pb2.Preparation, seed: int = 0) -> None:
    """Make the version `name` as a client would have it made; `seed`, unless 0, in place of that of the splits."""
    request = data_service_pb2.TransformVersionRequest(
        source=preparation.source, transform=preparation.transform, fit_split=preparation.fit_split
    )
    if preparation.splits:
        shares = {one.split: one.weight for one in preparation.splits}
        request.splits.CopyFrom(ratio_split(shares, seed=seed or preparation.split_seed))
    record = transform_spec_from(request).as_record()
    _make(store, name, {"transform": record}, functools.partial(run_transform, run_parts=run_here))


def suggest_here(
    store: ObjectStore, name: str, spec: resources_pb2.TrainingSpec | None = None
) -> suggestion_pb2.SuggestTrainingSpecResponse:
    """What the RPC answers."""
    given = given_from_proto(spec or resources_pb2.TrainingSpec())
    return suggestion_to_proto(suggest_spec(store, name, given))


def _make(store: ObjectStore, name: str, spec: dict[str, Any], run: Entry) -> None:
    jobs, now = Jobs(store, IMPORT_KIND), time.time()
    recorded = {**spec, "request_id": ""}
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=recorded, create_time=now, update_time=now))
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    run_attempt(run, store, IMPORT_KIND, name, 1)
    job = jobs.get(name, name)
    assert job.state is JobState.SUCCEEDED, job.error
