"""A PredictVersionRequest as a domain value."""

from __future__ import annotations

from data_service.converters.imports import bad_rows_from
from data_service.domain.predict_spec import DEFAULT_BATCH_SIZE, CheckpointRef, PredictSpec, Workers
from millrace.data.v1 import data_service_pb2


def predict_spec_from(request: data_service_pb2.PredictVersionRequest) -> PredictSpec:
    workers = request.workers
    return PredictSpec(
        source=request.source,
        checkpoint=CheckpointRef(name=request.checkpoint, sha256=request.checkpoint_sha256),
        split=request.split,
        columns=list(request.columns),
        outputs=list(request.outputs),
        column_prefix=request.column_prefix,
        bad_rows=bad_rows_from(request.bad_rows),
        workers=Workers(
            most=workers.max_workers,
            batch_size=workers.batch_size or DEFAULT_BATCH_SIZE,
            cpus=workers.cpus or 1,
            gpus=workers.gpus,
        ),
    )
