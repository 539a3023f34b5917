"""Converts between messages of `DeploymentService` and plain values: deployments, traffic, and roll-outs."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from inference_service.domain.deployment import (
    DEFAULT_DOWN_S,
    DEFAULT_UP_S,
    MAX_ROUTES,
    MAX_WEIGHTS,
    Autoscaling,
    Creation,
    Deployment,
    HeaderRoute,
    Kept,
    ModelVersion,
    Shadow,
    Spec,
    State,
    TrafficChange,
    VersionPolicy,
    check_change,
    check_spec,
    latest_policy,
    named_policy,
)
from inference_service.domain.rollout import (
    DEFAULT_REQUESTS,
    DEFAULT_ROWS,
    DEFAULT_WINDOW_S,
    MAX_STEPS,
    Comparison,
    Rollout,
    RolloutChange,
    RolloutLimits,
    RolloutPlan,
    RolloutStep,
    check_plan,
)
from inference_service.serve.models import find_version
from millrace.common.v1 import lineage_pb2
from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import rollout_pb2
from shared import names
from shared.durable import known_of
from shared.errors import check_count, invalid_field
from shared.grpc_errors import status_proto_from_record
from shared.log import body_digest

# --- Deployments ---


def creation_from_proto(request: pb.CreateDeploymentRequest) -> Creation:
    """Returns the checked creation; raises `InvalidArgument` for the spec's numbers."""
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
    """Converts a deployment.

    `replicas` returns a version's present replicas, None if unknown.
    """
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
        rollout=rollout_to_proto(deployment.rollout) if deployment.rollout else None,
        traffic=traffic_to_proto(deployment),
    )
    if deployment.error is not None:
        message.error.CopyFrom(status_proto_from_record(deployment.error))
    return message


def _state_to_proto(state: State) -> pb.Deployment.State:
    # A deleted deployment appears only in the result of an operation.
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


def rollout_metadata_to_proto(deployment: Deployment) -> pb.RolloutMetadata:
    assert deployment.rollout is not None
    return pb.RolloutMetadata(deployment=deployment.name, rollout=rollout_to_proto(deployment.rollout))


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


# --- Traffic ---
# Converts between messages of a deployment's traffic and plain values.

PATHS = ("traffic.weights", "traffic.routes", "traffic.shadow", "spec.version_policy")

MAX_PATHS = 100


def change_from_proto(request: pb.UpdateDeploymentRequest) -> tuple[str, TrafficChange, str]:
    """Returns the deployment's name, the change and the etag; raises `InvalidArgument`."""
    if not request.HasField("deployment"):
        raise invalid_field("deployment", None, "give its name, and what to change")
    check_count("update_mask", request.update_mask.paths, MAX_PATHS)
    check_count("deployment.traffic.weights", request.deployment.traffic.weights, MAX_WEIGHTS)
    check_count("deployment.traffic.routes", request.deployment.traffic.routes, MAX_ROUTES)
    paths = {*request.update_mask.paths}
    if not paths or paths - {*PATHS}:
        raise invalid_field("update_mask", sorted(paths), f"name what to change, of: {', '.join(PATHS)}")
    given, traffic = request.deployment, request.deployment.traffic
    routes = tuple(HeaderRoute(route.header, route.value, route.version) for route in traffic.routes)
    policy = given.spec.version_policy
    change = TrafficChange(
        weights=dict(traffic.weights) if "traffic.weights" in paths else None,
        routes=routes if "traffic.routes" in paths else None,
        shadow=Shadow(traffic.shadow.version, traffic.shadow.percent) if "traffic.shadow" in paths else None,
        policy=policy_from_proto("deployment.spec.version_policy", policy) if "spec.version_policy" in paths else None,
    )
    return given.name, check_change(change), given.etag


def traffic_to_proto(deployment: Deployment) -> pb.Traffic:
    shadow = deployment.shadow
    return pb.Traffic(
        weights={version.number: version.weight for version in deployment.versions if version.weight},
        routes=[
            pb.HeaderRoute(header=route.header, value=route.value, version=route.version) for route in deployment.routes
        ],
        shadow=pb.Shadow(version=shadow.version, percent=shadow.percent) if shadow else None,
    )


# --- Rollouts ---
# Converts between messages of a roll-out and of the version policy, and plain values.


def rollout_change_from_proto(request: pb.RolloutRequest) -> RolloutChange:
    """Returns the checked roll-out; raises `InvalidArgument` for the spec's fields."""
    if not request.HasField("spec"):
        raise invalid_field("spec", None, "say at least which checkpoint to roll out")
    check_count("spec.steps", request.spec.steps, MAX_STEPS)
    spec, limits = request.spec, request.spec.limits
    return RolloutChange(
        name=request.name,
        plan=check_plan(
            checkpoint=spec.checkpoint,
            steps=[RolloutStep(step.percent, seconds_of(step.interval)) for step in spec.steps],
            limits=RolloutLimits(
                max_error_share=limits.max_error_share if limits.HasField("max_error_share") else None,
                max_p99_s=seconds_of(limits.max_p99_latency) if limits.HasField("max_p99_latency") else None,
                max_p99_ratio=limits.max_p99_ratio or None,
                min_requests=limits.min_requests or DEFAULT_REQUESTS,
                window_s=seconds_of(limits.window) if limits.HasField("window") else DEFAULT_WINDOW_S,
            ),
            allow_new_signature=spec.allow_new_signature,
            comparison=_comparison_from_proto(spec.comparison) if spec.HasField("comparison") else None,
        ),
        etag=request.etag,
        request_id=request.request_id,
        digest=body_digest(request),
        validate_only=request.validate_only,
    )


def rollout_to_proto(rollout: Rollout) -> rollout_pb2.Rollout:
    message = rollout_pb2.Rollout(
        state=getattr(rollout_pb2.Rollout, f"STATE_{rollout.state}"),
        version=rollout.version,
        operation=rollout.operation,
        spec=_plan_to_proto(rollout.plan),
        step=rollout.step,
        create_time=timestamp(rollout.create_time),
    )
    if rollout.step_time:
        message.step_time.CopyFrom(timestamp(rollout.step_time))
    if rollout.end_time:
        message.end_time.CopyFrom(timestamp(rollout.end_time))
    if rollout.compared is not None:
        seen = rollout.compared
        message.compared.CopyFrom(rollout_pb2.Compared(**known_of(seen)))
    if rollout.error is not None:
        message.error.CopyFrom(status_proto_from_record(rollout.error))
    return message


def _comparison_from_proto(comparison: rollout_pb2.Comparison) -> Comparison:
    names.parse("spec.comparison.dataset_version", comparison.dataset_version, "datasets/{d}/versions/{v}")
    return Comparison(
        dataset_version=comparison.dataset_version,
        split=comparison.split,
        max_rows=comparison.max_rows or DEFAULT_ROWS,
        min_agreement=comparison.min_agreement if comparison.HasField("min_agreement") else None,
        max_difference=comparison.max_difference if comparison.HasField("max_difference") else None,
    )


def policy_from_proto(field: str, policy: pb.VersionPolicy) -> VersionPolicy:
    """Returns the version policy; raises `InvalidArgument`."""
    chosen = policy.WhichOneof("choice")
    if chosen == "all":
        return VersionPolicy(Kept.ALL)
    if chosen == "named":
        return named_policy(field, policy.named.versions)
    return latest_policy(field, policy.latest.count)


def policy_to_proto(policy: VersionPolicy) -> pb.VersionPolicy:
    if policy.kept is Kept.ALL:
        return pb.VersionPolicy(all=pb.VersionPolicy.All())
    if policy.kept is Kept.NAMED:
        return pb.VersionPolicy(named=pb.VersionPolicy.Named(versions=policy.named))
    return pb.VersionPolicy(latest=pb.VersionPolicy.Latest(count=policy.count))


def seconds_of(duration: Duration) -> float:
    # Not ToTimedelta, which overflows for some valid Durations.
    return float(duration.seconds + duration.nanos / 1e9)


def timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def _plan_to_proto(plan: RolloutPlan) -> rollout_pb2.RolloutSpec:
    limits = plan.limits
    message = rollout_pb2.RolloutSpec(
        checkpoint=plan.checkpoint,
        steps=[
            rollout_pb2.RolloutStep(percent=step.percent, interval=_duration(step.interval_s)) for step in plan.steps
        ],
        limits=rollout_pb2.RolloutLimits(
            max_error_share=limits.max_error_share,
            max_p99_ratio=limits.max_p99_ratio,
            min_requests=limits.min_requests,
            window=_duration(limits.window_s),
        ),
        allow_new_signature=plan.allow_new_signature,
    )
    if limits.max_p99_s is not None:
        message.limits.max_p99_latency.CopyFrom(_duration(limits.max_p99_s))
    if plan.comparison is not None:
        message.comparison.CopyFrom(rollout_pb2.Comparison(**known_of(plan.comparison)))
    return message


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration
