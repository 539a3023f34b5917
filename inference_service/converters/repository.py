"""Between what a deployment is and Triton's messages for configuration, statistics and the repository's index."""

from __future__ import annotations

from collections.abc import Sequence

from inference import grpc_service_pb2 as pb
from inference import model_config_pb2 as config_pb
from inference_service.batching.models import Listed
from inference_service.converters.open_inference import PLATFORM
from inference_service.domain.deployment import Deployment, ModelVersion, State
from inference_service.domain.request_parameters import DEFAULT_PRIORITY, PRIORITY_LEVELS
from inference_service.domain.signature import Signature, TensorSpec
from inference_service.domain.statistics import OK, Histogram, Statistics
from inference_service.domain.version_policy import Kept, VersionPolicy

BACKEND = "millrace"
# Before an input's name: the type of its column of dates or times, whose unit no datatype tells.
COLUMN_TYPE = "column_type."
NS = 1_000_000_000
# A READY deployment whose replicas are not back yet is LOADING, too.
STATES = {
    State.LOADING: "LOADING",
    State.READY: "LOADING",
    State.DELETING: "UNLOADING",
    State.FAILED: "UNAVAILABLE",
    State.UNLOADED: "UNAVAILABLE",
}


def config_to_proto(deployment: Deployment, version: ModelVersion, signature: Signature) -> config_pb.ModelConfig:
    spec, group = deployment.spec, config_pb.ModelInstanceGroup
    config = config_pb.ModelConfig(
        name=deployment.model_name,
        platform=PLATFORM,
        backend=BACKEND,
        version_policy=_version_policy(spec.version_policy),
        max_batch_size=spec.max_batch_size,
        dynamic_batching=config_pb.ModelDynamicBatching(
            max_queue_delay_microseconds=round(spec.max_batch_delay_s * 1e6),
            priority_levels=PRIORITY_LEVELS,
            default_priority_level=DEFAULT_PRIORITY,
            default_queue_policy=config_pb.ModelQueuePolicy(allow_timeout_override=True),
        ),
        instance_group=[
            group(
                name=deployment.model_name,
                count=spec.num_replicas,
                kind=group.KIND_GPU if spec.gpus_per_replica else group.KIND_CPU,
            )
        ],
    )
    for tensor in signature.raw:
        _describe(config.input.add(), tensor)
    for flags in signature.null_flags.values():
        _describe(config.input.add(optional=True), flags)
    for tensor in signature.offered:
        _describe(config.output.add(), tensor)
    for name, value in (
        ("threads_per_replica", spec.threads_per_replica),
        ("max_queued_rows", spec.max_queued_rows),
        ("checkpoint", version.checkpoint),
        ("checkpoint_sha256", version.checkpoint_sha256),
    ):
        config.parameters[name].string_value = str(value)
    for tensor in signature.raw:
        if tensor.column_type:
            config.parameters[COLUMN_TYPE + tensor.name].string_value = tensor.column_type
    return config


def statistics_to_proto(listed: Listed) -> pb.ModelStatistics:
    statistics = listed.statistics
    return pb.ModelStatistics(
        name=listed.deployment.model_name,
        version=listed.version.number,
        last_inference=round(statistics.last_inference_s * 1000),
        inference_count=statistics.rows,
        execution_count=statistics.batch_rows.count,
        inference_stats=_requests(statistics),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=rows,
                compute_input=_duration(batch.input),
                compute_infer=_duration(batch.infer),
                compute_output=_duration(batch.output),
            )
            for rows, batch in sorted(statistics.batches.items())
        ],
    )


def index_to_proto(listed: Sequence[Listed], *, ready_only: bool) -> pb.RepositoryIndexResponse:
    index = pb.RepositoryIndexResponse()
    for one in listed:
        if one.answers or not ready_only:
            index.models.add(
                name=one.deployment.model_name,
                version=one.version.number,
                state="READY" if one.answers else _state(one),
                reason="" if one.answers else _reason(one),
            )
    return index


def _version_policy(policy: VersionPolicy) -> config_pb.ModelVersionPolicy:
    message = config_pb.ModelVersionPolicy()
    match policy.kept:
        case Kept.ALL:
            message.all.SetInParent()
        case Kept.NAMED:
            message.specific.versions.extend(map(int, policy.named))
        case Kept.LATEST:
            message.latest.num_versions = policy.count
    return message


def _state(listed: Listed) -> str:
    return "UNLOADING" if listed.version.retired_at is not None else STATES[listed.deployment.state]


def _reason(listed: Listed) -> str:
    deployment, version = listed.deployment, listed.version
    if deployment.error:
        return str(deployment.error["message"])
    if deployment.state is State.UNLOADED:
        return "unloaded"  # Triton's word
    if version.retired_at is not None:
        return "the version is going"
    if deployment.state is State.READY and version.signature is None:
        return "the version is being rolled out"
    return f"the deployment is {deployment.state}"


def _describe(message: config_pb.ModelInput | config_pb.ModelOutput, tensor: TensorSpec) -> None:
    kind = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    message.name = tensor.name
    message.data_type = getattr(config_pb, f"TYPE_{kind}")
    message.dims.extend(tensor.shape[1:] or (1,))
    if not tensor.shape[1:]:
        message.reshape.SetInParent()


def _requests(statistics: Statistics) -> pb.InferStatistics:
    failed = [histogram for status, histogram in statistics.requests.items() if status != OK]
    return pb.InferStatistics(
        success=_duration(statistics.requests.get(OK, Histogram())),
        fail=_duration(*failed),
        queue=_duration(statistics.queue),
        compute_input=_duration(statistics.computing.input),
        compute_infer=_duration(statistics.computing.infer),
        compute_output=_duration(statistics.computing.output),
        cache_hit=_duration(),
        cache_miss=_duration(),
    )


def _duration(*histograms: Histogram) -> pb.StatisticDuration:
    return pb.StatisticDuration(
        count=sum(one.count for one in histograms), ns=round(sum(one.sum for one in histograms) * NS)
    )
