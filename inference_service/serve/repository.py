"""Triton's extensions: the model repository, the model configuration, and the statistics of all frontends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from inference import grpc_service_pb2 as pb
from inference import model_config_pb2 as config_pb
from inference_service.convert import PLATFORM
from inference_service.deploy.deployments import Deployments
from inference_service.domain.deployment import (
    Deployment,
    Kept,
    ModelVersion,
    State,
    VersionPolicy,
    application_name,
    checked,
)
from inference_service.domain.rollout_transitions import check_can_begin
from inference_service.domain.signature import DEFAULT_PRIORITY, PRIORITY_LEVELS, Signature, TensorSpec
from inference_service.domain.statistics import OK, Histogram, Statistics
from inference_service.frontend_processes import Peers
from inference_service.serve.models import Listed, Models
from shared.errors import NotFound, not_found
from shared.names import ID, check_id

# --- Model repository ---
# Triton's model repository: unloads and reloads deployments by the names of their models.

FIELD = "model_name"


class ModelRepository:
    """Unloads and loads deployments.

    Blocking; safe to call from several threads. Each method returns the newest state of the deployment.
    """

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    def unload(self, model_name: str) -> Deployment:
        """Unload a deployment; no effect if it is unloaded.

        Raises `InvalidArgument` (no name), `NotFound` and `FailedPrecondition` (it is not READY, or a rollout is
        running).
        """
        return self._request(model_name, with_unloaded)

    def load(self, model_name: str) -> Deployment:
        """Load an unloaded deployment; no effect on others.

        Raises `InvalidArgument` (no name) and `NotFound`.
        """
        return self._request(model_name, with_loaded_again)

    def _request(
        self, model_name: str, step: Callable[[Deployment | None, str, float], Deployment | None]
    ) -> Deployment:
        name = f"deployments/{_id_of(model_name)}"
        try:
            return self._deployments.request(name, lambda before: step(before, name, time.time()))
        except NotFound:
            raise _unknown(model_name) from None


def _id_of(model_name: str) -> str:
    if model_name and not ID.fullmatch(model_name):
        raise _unknown(model_name)
    return check_id(FIELD, model_name)


def _unknown(model_name: str) -> NotFound:
    return not_found(f"model {model_name[:100]!r}", "CreateDeployment makes it, of a checkpoint")


# --- Unloading ---
# Takes a deployment out of service and back. Its spec, traffic and versions stay; its replicas are removed.


def with_unloaded(deployment: Deployment | None, name: str, now_s: float) -> Deployment | None:
    """Return the deployment unloaded; None if it is unloaded already.

    Raises `NotFound`, and `FailedPrecondition` if it is not READY, or a rollout is running.
    """
    there = checked(deployment, name, "")
    if there.state is State.UNLOADED:
        return None
    check_can_begin(there, "it can be unloaded")
    return _now(there, State.UNLOADED, now_s)


def with_loaded_again(deployment: Deployment | None, name: str, now_s: float) -> Deployment | None:
    """Return an unloaded deployment as READY; None if it is not unloaded.

    Its replicas are then started as after the loss of all of them. Raises `NotFound`.
    """
    there = checked(deployment, name, "")
    return _now(there, State.READY, now_s) if there.state is State.UNLOADED else None


def _now(deployment: Deployment, state: State, now_s: float) -> Deployment:
    return replace(deployment, state=state, generation=deployment.generation + 1, update_time=now_s)


# --- Messages ---
# Converts deployments to Triton's messages for configuration, statistics and the repository's index.

BACKEND = "millrace"
# The prefix of the parameter for an input column of dates or times: its column type, since no datatype has the unit.
COLUMN_TYPE = "column_type."
NS = 1_000_000_000
# A READY deployment without replicas yet is LOADING, too.
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
        return "unloaded"  # Triton's term
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
        count=sum(histogram.count for histogram in histograms), ns=round(sum(one.sum for one in histograms) * NS)
    )


# --- Summed statistics ---
# ModelStatistics of a service: the sum over its frontend processes.
#
# Each process writes its statistics to the shared folder once a second, and the process that gets a request reads them
# there.

FILE = "statistics"


class SummedStatistics:
    """Sums this process's present statistics and the last ones written by its peers."""

    def __init__(self, models: Models, peers: Peers) -> None:
        self._models = models
        self._peers = peers
        # By application: the statistics last written, and the number of requests and batches in them.
        self._left: dict[str, pb.ModelStatistics] = {}
        # None before the first write: until then the file is from the previous process.
        self._counted: dict[str, tuple[int, int]] | None = None

    def leave(self) -> None:
        """Write this process's statistics for its peers, if they have changed; raise `OSError`."""
        now = {_application(one): one for one in self._models.listed() if one.statistics.requests}
        counted = {application: _counted(one.statistics) for application, one in now.items()}
        before = self._counted or {}
        changed = [application for application in now if counted[application] != before.get(application)]
        if self._counted is not None and not changed and len(counted) == len(before):
            return
        for application in changed:
            self._left[application] = statistics_to_proto(now[application])
            # A deployment that was deleted and recreated has the same name, so the application name is used.
            self._left[application].name = application
        self._left = {application: self._left[application] for application in now}
        own = pb.ModelStatisticsResponse(model_stats=self._left.values())
        self._peers.leave(FILE, own.SerializeToString())
        self._counted = counted

    def statistics_of(self, model_name: str, model_version: str) -> list[pb.ModelStatistics]:
        """Return the statistics of the selected versions; raise the errors of `Models.listed_of`."""
        found = self._models.listed_of(model_name, model_version)
        others = [
            {stat.name: stat for stat in pb.ModelStatisticsResponse.FromString(data).model_stats}
            for data in self._peers.left(FILE)
        ]
        return [self._sum(listed, (there.get(_application(listed)) for there in others)) for listed in found]

    def _sum(self, listed: Listed, others: Iterable[pb.ModelStatistics | None]) -> pb.ModelStatistics:
        total = statistics_to_proto(listed)
        for other in others:
            if other is not None:
                _add(total, other)
        return total


def _application(listed: Listed) -> str:
    return application_name(listed.deployment, listed.version)


def _counted(statistics: Statistics) -> tuple[int, int]:
    return sum(request.count for request in statistics.requests.values()), statistics.batch_rows.count


def _add(total: pb.ModelStatistics, other: pb.ModelStatistics) -> None:
    total.last_inference = max(total.last_inference, other.last_inference)
    total.inference_count += other.inference_count
    total.execution_count += other.execution_count
    _add_durations(total.inference_stats, other.inference_stats)
    batches = {stat.batch_size: stat for stat in total.batch_stats}
    for batch in other.batch_stats:
        if batch.batch_size in batches:
            _add_durations(batches[batch.batch_size], batch)
        else:
            total.batch_stats.append(batch)
    total.batch_stats.sort(key=lambda one: one.batch_size)


def _add_durations(total: Any, other: Any) -> None:
    """Add every `StatisticDuration` of one message to another of the same type."""
    for field, value in other.ListFields():
        if isinstance(value, pb.StatisticDuration):
            duration = getattr(total, field.name)
            duration.count += value.count
            duration.ns += value.ns
