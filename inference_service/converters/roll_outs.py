"""Between the messages of a roll-out, of the version policy, and plain values."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from inference_service.domain.roll_out import (
    DEFAULT_REQUESTS,
    DEFAULT_ROWS,
    DEFAULT_WINDOW_S,
    MAX_STEPS,
    Comparison,
    Plan,
    RollOut,
    RollOutLimits,
    RollOutWish,
    Step,
    check_plan,
)
from inference_service.domain.version_policy import Kept, VersionPolicy, latest_policy, named_policy
from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import roll_out_pb2
from shared import names
from shared.durable import known_of
from shared.errors import check_count, invalid_field
from shared.grpc_errors import status_proto_from_record
from shared.requests import body_digest


def roll_out_wish_from_proto(request: pb.RollOutRequest) -> RollOutWish:
    """Raises `InvalidArgument` for the spec's fields."""
    if not request.HasField("spec"):
        raise invalid_field("spec", None, "say at least which checkpoint to roll out")
    check_count("spec.steps", request.spec.steps, MAX_STEPS)
    spec, limits = request.spec, request.spec.limits
    return RollOutWish(
        name=request.name,
        plan=check_plan(
            checkpoint=spec.checkpoint,
            steps=[Step(step.percent, seconds_of(step.interval)) for step in spec.steps],
            limits=RollOutLimits(
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


def roll_out_to_proto(roll_out: RollOut) -> roll_out_pb2.RollOut:
    message = roll_out_pb2.RollOut(
        state=getattr(roll_out_pb2.RollOut, f"STATE_{roll_out.state}"),
        version=roll_out.version,
        operation=roll_out.operation,
        spec=_plan_to_proto(roll_out.plan),
        step=roll_out.step,
        create_time=timestamp(roll_out.create_time),
    )
    if roll_out.step_time:
        message.step_time.CopyFrom(timestamp(roll_out.step_time))
    if roll_out.end_time:
        message.end_time.CopyFrom(timestamp(roll_out.end_time))
    if roll_out.compared is not None:
        seen = roll_out.compared
        message.compared.CopyFrom(roll_out_pb2.Compared(**known_of(seen)))
    if roll_out.error is not None:
        message.error.CopyFrom(status_proto_from_record(roll_out.error))
    return message


def _comparison_from_proto(given: roll_out_pb2.Comparison) -> Comparison:
    names.parse("spec.comparison.dataset_version", given.dataset_version, "datasets/{d}/versions/{v}")
    return Comparison(
        dataset_version=given.dataset_version,
        split=given.split,
        max_rows=given.max_rows or DEFAULT_ROWS,
        min_agreement=given.min_agreement if given.HasField("min_agreement") else None,
        max_difference=given.max_difference if given.HasField("max_difference") else None,
    )


def policy_from_proto(field: str, policy: pb.VersionPolicy) -> VersionPolicy:
    """Raises `InvalidArgument`."""
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
    # Not ToTimedelta, which overflows on what a Duration can hold.
    return float(duration.seconds + duration.nanos / 1e9)


def timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def _plan_to_proto(plan: Plan) -> roll_out_pb2.RollOutSpec:
    limits = plan.limits
    message = roll_out_pb2.RollOutSpec(
        checkpoint=plan.checkpoint,
        steps=[roll_out_pb2.RollOutStep(percent=one.percent, interval=_duration(one.interval_s)) for one in plan.steps],
        limits=roll_out_pb2.RollOutLimits(
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
        message.comparison.CopyFrom(roll_out_pb2.Comparison(**known_of(plan.comparison)))
    return message


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration
