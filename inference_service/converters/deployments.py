"""Between the messages of `DeploymentService` and plain values."""

from __future__ import annotations

from collections.abc import Callable

from inference_service.converters.roll_outs import (
    policy_from_proto,
    policy_to_proto,
    roll_out_to_proto,
    seconds_of,
    timestamp,
)
from inference_service.converters.traffic import traffic_to_proto
from inference_service.domain.deployment import Creation, Deployment, ModelVersion, Spec, State, check_spec
from inference_service.domain.routing import find_version
from inference_service.domain.scaling import DEFAULT_DOWN_S, DEFAULT_UP_S, Autoscaling
from millrace.common.v1 import lineage_pb2
from millrace.inference.v1 import deployment_service_pb2 as pb
from shared.errors import invalid_field
from shared.grpc_errors import status_proto_from_record
from shared.requests import body_digest


def creation_from_proto(request: pb.CreateDeploymentRequest) -> Creation:
    """Raises `InvalidArgument` for the spec's numbers."""
    if not request.HasField("spec"):
        raise invalid_field("spec", None, "say at least which checkpoint to serve")
    spec = request.spec
    delay_s = seconds_of(spec.max_batch_delay) if spec.HasField("max_batch_delay") else None
    return Creation(
        deployment_id=request.deployment_id,
        spec=check_spec(
            checkpoint=spec.checkpoint,
            num_replicas=spec.num_replicas,
            threads_per_replica=spec.threads_per_replica,
            max_batch_size=spec.max_batch_size,
            max_batch_delay_s=delay_s,
            max_queued_rows=spec.max_queued_rows,
            version_policy=policy_from_proto("spec.version_policy", spec.version_policy),
            autoscaling=_autoscaling_from_proto(spec.autoscaling) if spec.HasField("autoscaling") else None,
            cpus_per_replica=spec.cpus_per_replica if spec.HasField("cpus_per_replica") else None,
            gpus_per_replica=spec.gpus_per_replica,
            allow_non_finite=spec.allow_non_finite,
            predictor=spec.predictor,
        ),
        request_id=request.request_id,
        digest=body_digest(request),
        validate_only=request.validate_only,
    )


def deployment_to_proto(
    deployment: Deployment, replicas: Callable[[Deployment, ModelVersion], int | None] = lambda *_: None
) -> pb.Deployment:
    """`replicas` are those of a version now, None where nobody knows."""
    version = find_version(deployment, "")
    assert version is not None
    message = pb.Deployment(
        name=deployment.name,
        uid=deployment.uid,
        spec=_spec_to_proto(deployment.spec),
        state=_state_to_proto(deployment.state),
        operation=deployment.operation,
        lineage=lineage_to_proto(deployment, version),
        create_time=timestamp(deployment.create_time),
        update_time=timestamp(deployment.update_time),
        etag=deployment.etag,
        versions=[_version_to_proto(deployment, one, replicas(deployment, one)) for one in deployment.versions],
        roll_out=roll_out_to_proto(deployment.roll_out) if deployment.roll_out else None,
        traffic=traffic_to_proto(deployment),
    )
    if deployment.error is not None:
        message.error.CopyFrom(status_proto_from_record(deployment.error))
    return message


def _state_to_proto(state: State) -> pb.Deployment.State:
    # A deployment that is gone is seen only as what an operation once made.
    shown = State.DELETING if state is State.GONE else state
    found: pb.Deployment.State = getattr(pb.Deployment, f"STATE_{shown}")
    return found


def lineage_to_proto(deployment: Deployment, version: ModelVersion) -> lineage_pb2.Lineage:
    return lineage_pb2.Lineage(
        dataset_version=version.dataset_version,
        training_job=version.training_job,
        checkpoint=version.checkpoint,
        checkpoint_sha256=version.checkpoint_sha256,
        deployment=deployment.name,
        model_version=version.number,
        code_bundle=version.code_bundle,
    )


def _version_to_proto(deployment: Deployment, version: ModelVersion, replicas: int | None) -> pb.ModelVersion:
    state = pb.ModelVersion.STATE_READY if version.signature else pb.ModelVersion.STATE_LOADING
    if version.retired_at is not None:
        state = pb.ModelVersion.STATE_RETIRING
    return pb.ModelVersion(
        number=version.number,
        state=state,
        weight=version.weight,
        lineage=lineage_to_proto(deployment, version),
        replicas=replicas,
    )


def roll_out_metadata_to_proto(deployment: Deployment) -> pb.RollOutMetadata:
    assert deployment.roll_out is not None
    return pb.RollOutMetadata(deployment=deployment.name, roll_out=roll_out_to_proto(deployment.roll_out))


def metadata_to_proto(deployment: Deployment) -> pb.DeploymentMetadata:
    return pb.DeploymentMetadata(deployment=deployment.name, create_time=timestamp(deployment.create_time))


def _autoscaling_from_proto(message: pb.Autoscaling) -> Autoscaling:
    up, down = message.HasField("scale_up_after"), message.HasField("scale_down_after")
    return Autoscaling(
        min_replicas=message.min_replicas,
        max_replicas=message.max_replicas,
        rows_per_replica=message.rows_per_replica,
        up_after_s=seconds_of(message.scale_up_after) if up else DEFAULT_UP_S,
        down_after_s=seconds_of(message.scale_down_after) if down else DEFAULT_DOWN_S,
    )


def _autoscaling_to_proto(autoscaling: Autoscaling) -> pb.Autoscaling:
    message = pb.Autoscaling(
        min_replicas=autoscaling.min_replicas,
        max_replicas=autoscaling.max_replicas,
        rows_per_replica=autoscaling.rows_per_replica,
    )
    message.scale_up_after.FromMicroseconds(round(autoscaling.up_after_s * 1e6))
    message.scale_down_after.FromMicroseconds(round(autoscaling.down_after_s * 1e6))
    return message


def _spec_to_proto(spec: Spec) -> pb.DeploymentSpec:
    message = pb.DeploymentSpec(
        checkpoint=spec.checkpoint,
        num_replicas=0 if spec.autoscaling else spec.num_replicas,
        threads_per_replica=spec.threads_per_replica,
        max_batch_size=spec.max_batch_size,
        max_queued_rows=spec.max_queued_rows,
        version_policy=policy_to_proto(spec.version_policy),
        autoscaling=_autoscaling_to_proto(spec.autoscaling) if spec.autoscaling else None,
        cpus_per_replica=spec.cpus_per_replica,
        gpus_per_replica=spec.gpus_per_replica,
        allow_non_finite=spec.allow_non_finite,
        predictor=spec.predictor,
    )
    message.max_batch_delay.FromMicroseconds(round(spec.max_batch_delay_s * 1e6))
    return message
