"""From what a run left behind to the protobuf contract: coverage, metrics, logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from google.protobuf.timestamp_pb2 import Timestamp

from millrace.train.v1 import train_service_pb2 as pb
from train_service.converters.jobs import timestamp
from train_service.domain.cluster_use import ClusterUse
from train_service.jobs.run_records import Coverage
from train_service.records.log_reading import LogText
from train_service.records.metrics_log import MetricPoint


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
