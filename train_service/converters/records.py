"""Between the protobuf contract and a run's bundles of code, its suggestions, coverage, metrics and logs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp

from millrace.train.v1 import code_bundle_pb2, resources_pb2, suggestion_pb2
from millrace.train.v1 import train_service_pb2 as pb
from shared.code_bundle import BundleRecord
from shared.errors import invalid_field
from train_service.converters.jobs import timestamp
from train_service.domain.capacity import ClusterUse
from train_service.domain.suggesting import Preparation, Suggestion
from train_service.jobs.bundle_intake import Header
from train_service.jobs.run_records import Coverage
from train_service.records.logs import LogText
from train_service.records.metrics_log import MetricPoint

# --- Coverage, metrics and logs ---


def coverage_to_proto(coverage: Coverage) -> pb.Coverage:
    return pb.Coverage(
        training_job=coverage.training_job,
        epoch=coverage.epoch,
        checkpoint=coverage.checkpoint,
        epoch_done=coverage.epoch_done,
        skipped_steps=coverage.skipped_steps,
        witness=f"WITNESS_{coverage.witness}",
        shard=coverage.shard,
        **asdict(coverage.counts),
    )


def point_to_proto(point: MetricPoint) -> pb.MetricPoint:
    time = Timestamp()
    time.FromNanoseconds(int(point.time * 1e9))
    return pb.MetricPoint(step=point.step, epoch=point.epoch, attempt=point.attempt, time=time, values=point.values)


def use_to_proto(use: ClusterUse, names: Mapping[str, str], seen_at: float) -> pb.ClusterUse:
    """`names` are those of jobs, by the names of their attempts' actors."""
    return pb.ClusterUse(
        time=timestamp(seen_at) if seen_at else None,
        nodes=use.nodes,
        cpus=use.cpus,
        gpus=use.gpus,
        free_cpus=use.free_cpus,
        free_gpus=use.free_gpus,
        holders=[
            pb.ClusterUse.Holder(
                job=names.get(one.attempt, ""),
                deployment_uid=one.deployment_uid,
                description=one.what or (f"an attempt, {one.attempt}" if one.attempt else ""),
                cpus=one.cpus,
                gpus=one.gpus,
            )
            for one in use.holders
        ],
    )


def log_to_proto(log: LogText) -> pb.StreamLogsResponse:
    return pb.StreamLogsResponse(attempt=log.attempt, rank=log.rank, text=log.text)


# --- Bundles of code ---


async def parts_from_proto(requests: AsyncIterator[Any]) -> AsyncIterator[Header | bytes]:
    async for request in requests:
        if request.WhichOneof("content") == "header":
            yield Header(request.header.sha256, request.header.size_bytes)
        else:
            yield request.chunk


def bundle_to_proto(record: BundleRecord) -> code_bundle_pb2.CodeBundle:
    return code_bundle_pb2.CodeBundle(
        name=record.name,
        size_bytes=record.size_bytes,
        unpacked_size_bytes=record.unpacked_size_bytes,
        file_count=record.file_count,
        requirements=record.requirements,
        modules=record.modules,
        create_time=timestamp(record.create_time),
    )


# --- Suggestions ---


def given_from_proto(spec: resources_pb2.TrainingSpec) -> dict[str, Any]:
    """The fields that are set, as JSON. Raises `InvalidArgument` for what JSON does not hold."""
    try:
        given: dict[str, Any] = json_format.MessageToDict(spec, preserving_proto_field_name=True)
    except (ValueError, json_format.Error) as error:
        raise invalid_field("spec", "a number", f"use finite numbers in its kwargs: {error}") from None
    given.pop("dataset_version", None)
    return given


def suggestion_to_proto(suggestion: Suggestion) -> suggestion_pb2.SuggestTrainingSpecResponse:
    response = suggestion_pb2.SuggestTrainingSpecResponse(
        choices=[
            suggestion_pb2.Choice(field=one.field, value=one.value, reason=one.reason) for one in suggestion.choices
        ],
        preparation=_preparation(suggestion.preparation) if suggestion.preparation else None,
    )
    json_format.ParseDict(suggestion.spec, response.spec)
    return response


def _preparation(preparation: Preparation) -> suggestion_pb2.Preparation:
    message = suggestion_pb2.Preparation(
        source=preparation.source,
        splits=[suggestion_pb2.SplitShare(split=split, weight=weight) for split, weight in preparation.shares.items()],
        split_seed=preparation.seed if preparation.shares else 0,
        fit_split=preparation.fit_split,
        request_id=preparation.request_id,
    )
    json_format.ParseDict({"steps": preparation.steps}, message.transform)
    return message
