"""Converts between messages and plain values.

The messages are those of the Open Inference Protocol, and those of `DeploymentService`: deployments, traffic, and
rollouts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from inference import grpc_service_pb2 as pb
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
from inference_service.domain.signature import (
    FREE,
    LABEL_NAME,
    MAX_DIMENSIONS,
    Array,
    Parameters,
    RequestedOutput,
    Signature,
    TensorSpec,
    WireTensor,
    check_no_shared_memory,
    classified,
    decode_ahead,
    encode_raw,
    encode_typed,
    has_typed_form,
    named,
    requested_output,
)
from inference_service.serve.models import Answer, find_version
from millrace.common.v1 import lineage_pb2
from millrace.inference.v1 import deployment_service_pb2 as deployment_pb
from millrace.inference.v1 import rollout_pb2
from shared import names
from shared.durable import known_of
from shared.errors import MillraceError, check_count, invalid_field
from shared.grpc_errors import status_code, status_proto_from_record
from shared.resource_log import body_digest

# --- Messages ---

# The limit of each parameter map.
MAX_PARAMETERS = 64
# The excess over the model's own tensors that is refused at once.
TOO_MANY_TENSORS = 100
# The numbers that are put into a message in one call, which blocks all other threads.
TYPED_AT_ONCE = 64 * 1024
PLATFORM = "millrace_pytorch"
LINEAGE = (
    *("dataset_version", "training_job", "checkpoint", "checkpoint_sha256", "deployment", "model_version"),
    "code_bundle",
)


def check_tensor_counts(request: pb.ModelInferRequest, signature: Signature | None) -> None:
    """Raise `InvalidArgument` for far more tensors than the model has.

    Each tensor takes time to check, so this comes first. If there are only a few too many, a later check names the
    wrong one.
    """
    inputs, outputs = (0, 0) if signature is None else (signature.max_inputs, len(signature.offered))
    remedy = f"the model takes at most {inputs} tensors"
    check_count("inputs", request.inputs, inputs + TOO_MANY_TENSORS, remedy)
    check_count("raw_input_contents", request.raw_input_contents, inputs + TOO_MANY_TENSORS, remedy)
    check_count("outputs", request.outputs, outputs + TOO_MANY_TENSORS, f"the model gives {outputs}")


def inputs_from_proto(request: pb.ModelInferRequest) -> list[WireTensor]:
    """Return the input tensors, which are not yet checked themselves.

    Raises `InvalidArgument` if the raw contents do not match the inputs, or a tensor is in shared memory.
    """
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{index}]"
        check_no_shared_memory(field, tensor.name, parameters_from_proto(tensor.parameters, f"{field}.parameters"))
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid_field(
            "raw_input_contents", f"{len(raw)} entries", f"send one for each of the {len(request.inputs)} inputs"
        )
    return [
        WireTensor(
            field=f"inputs[{index}]",
            name=tensor.name,
            datatype=tensor.datatype,
            # One dimension beyond the limit is enough to detect that there are too many.
            shape=tuple(tensor.shape[: MAX_DIMENSIONS + 1]),
            raw=raw[index] if raw else None,
            typed={field.name: values for field, values in tensor.contents.ListFields()},
        )
        for index, tensor in enumerate(request.inputs)
    ]


def outputs_from_proto(request: pb.ModelInferRequest) -> list[RequestedOutput]:
    """Return the requested outputs; raise `InvalidArgument` for an output's parameters."""
    return [
        requested_output(
            f"outputs[{index}]", output.name, parameters_from_proto(output.parameters, f"outputs[{index}].parameters")
        )
        for index, output in enumerate(request.outputs)
    ]


def parameters_from_proto(parameters: Mapping[str, pb.InferParameter], field: str = "parameters") -> Parameters:
    """Return the parameters that have a value.

    Raises `InvalidArgument` naming `field` if there are too many.
    """
    if not parameters:
        return {}
    check_count(field, parameters, MAX_PARAMETERS)
    chosen = ((name, parameter, parameter.WhichOneof("parameter_choice")) for name, parameter in parameters.items())
    return {name: getattr(one, field) for name, one, field in chosen if field}


def answer_to_proto(
    request: pb.ModelInferRequest, answer: Answer, requested: Sequence[RequestedOutput] = ()
) -> pb.ModelInferResponse:
    """Convert an answer.

    Outputs are raw or typed like the inputs, and classified if `requested`.
    """
    tops = {output.name: output.top for output in requested}
    outputs = [_in_words(*output, tops[output[0].name]) if tops else output for output in answer.outputs]
    response = pb.ModelInferResponse()
    response.CopyFrom(_lineage(*_lineage_of(answer)))
    response.model_name, response.model_version, response.id = request.model_name, answer.version.number, request.id
    typed = not request.raw_input_contents and all(has_typed_form(spec.datatype) for spec, _ in outputs)
    for spec, values in outputs:
        output = response.outputs.add(name=spec.name, datatype=spec.datatype, shape=values.shape)
        if typed:
            flat = values.ravel()
            for start in range(0, flat.size, TYPED_AT_ONCE):
                field, elements = encode_typed(spec.datatype, flat[start : start + TYPED_AT_ONCE])
                getattr(output.contents, field).extend(elements)
        else:
            response.raw_output_contents.append(encode_raw(spec.datatype, values))
    return response


def streamed_answer(response: pb.ModelInferResponse) -> pb.ModelStreamInferResponse:
    """Return the answer as a message of a stream.

    No request has several answers, so it is marked as the final one.
    """
    streamed = pb.ModelStreamInferResponse(infer_response=response)
    streamed.infer_response.parameters["triton_final_response"].bool_param = True
    return streamed


def streamed_error(request: pb.ModelInferRequest, error: MillraceError) -> pb.ModelStreamInferResponse:
    answer = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    streamed = streamed_answer(answer)
    streamed.error_message = f"{status_code(error).name}: {error.message}"
    return streamed


def model_metadata_to_proto(deployment: Deployment, signature: Signature) -> pb.ModelMetadataResponse:
    """Return a model's metadata.

    Inputs are in the raw form, a tensor for each column; the prepared form and null flags are accepted, too. Versions
    are those that can be requested by number: loaded, and not retired.
    """
    return pb.ModelMetadataResponse(
        name=deployment.model_name,
        versions=[
            version.number
            for version in deployment.versions
            if version.signature is not None and version.retired_at is None
        ],
        platform=PLATFORM,
        inputs=[_tensor(given) for given in signature.raw],
        outputs=[_tensor(output) for output in signature.offered],
    )


def _in_words(spec: TensorSpec, values: Array, top: int) -> tuple[TensorSpec, Array]:
    """Convert label names and classifications to text; leave other outputs as they are."""
    if spec.name == LABEL_NAME:
        return spec, named(values, spec.class_names)
    if not top:
        return spec, values
    return TensorSpec(spec.name, "BYTES", (FREE, FREE)), classified(values, top, spec.class_names)


def _lineage_of(answer: Answer) -> tuple[str, ...]:
    """Return the values in the order of `LINEAGE`."""
    version = answer.version
    return (
        version.dataset_version,
        version.training_job,
        version.checkpoint,
        version.checkpoint_sha256,
        answer.deployment.name,
        version.number,
        version.code_bundle,
    )


@functools.lru_cache(maxsize=256)
def _lineage(*values: str) -> pb.ModelInferResponse:
    """Return the common start of a version's answers.

    It has the fields of `millrace.common.v1.Lineage` as parameters.
    """
    response = pb.ModelInferResponse()
    for name, value in zip(LINEAGE, values, strict=True):
        if value or name != "code_bundle":  # most models have no code bundle
            response.parameters[name].string_param = value
    return response


def _tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)


# --- Typed contents ---
# Decodes large typed contents to arrays, so that no other request waits for them.
#
# Both ways may run in any thread, and let others run meanwhile. Fixed-size numbers are packed on the wire, in the same
# layout as in protobuf's memory. So the field is serialized again, at hardly more than the cost of a copy, and an array
# views its bytes. For 57 MiB of FP32 that takes 0.07 s of CPU, while reading number by number takes 0.7 s in one call,
# during which no other thread can run. Integers are varints on the wire: they are read piece by piece, which is faster
# than to decode varints with numpy (0.08 s instead of 0.4 s for 3.2 million).

# The numbers that are converted to an array within a millisecond, one by one.
FEW_ELEMENTS = 16 * 1024
# The memory layout of fixed-size numbers, and of integers once they are read.
FIXED = {"bool_contents": "?", "fp32_contents": "<f4", "fp64_contents": "<f8"}
INTEGERS = {"int_contents": "<i8", "int64_contents": "<i8", "uint_contents": "<u8", "uint64_contents": "<u8"}


def many_elements(tensors: Sequence[WireTensor]) -> int:
    """Return the number of typed elements if they take long to decode; else 0."""
    counts = [sum(map(len, tensor.typed.values())) for tensor in tensors]
    return sum(counts) if max(counts, default=0) > FEW_ELEMENTS else 0


def decode_typed(request: pb.ModelInferRequest, tensors: Sequence[WireTensor]) -> list[WireTensor]:
    """Return the request's `tensors`, all `decoded`."""
    return [
        decode_ahead(replace(tensor, typed={**tensor.typed, **_array(given.contents, tensor)}))
        for given, tensor in zip(request.inputs, tensors, strict=True)
    ]


def _array(contents: pb.InferTensorContents, tensor: WireTensor) -> dict[str, Array]:
    """Return the only typed field as an array.

    Return nothing if there are several, which is an error, or if it holds bytes.
    """
    if len(tensor.typed) != 1:
        return {}
    ((field, values),) = tensor.typed.items()
    if field in FIXED:
        return {field: _packed(contents, len(values), np.dtype(FIXED[field]))}
    if field not in INTEGERS:
        return {}
    array = np.empty(len(values), INTEGERS[field])
    for start in range(0, len(values), FEW_ELEMENTS):
        array[start : start + FEW_ELEMENTS] = values[start : start + FEW_ELEMENTS]
    return {field: array}


def _packed(contents: pb.InferTensorContents, count: int, dtype: np.dtype[np.generic]) -> Array:
    """Return the numbers of the only known field; unknown fields may follow it."""
    data = contents.SerializeToString()
    # The data begins with the field's tag, one byte, and its length as a varint, whose last byte is below 128.
    begin = next(at for at in range(1, len(data)) if data[at] < 0x80) + 1
    return np.frombuffer(data, dtype, count, begin)


# --- Deployments ---


def creation_from_proto(request: deployment_pb.CreateDeploymentRequest) -> Creation:
    """Return the checked creation; raise `InvalidArgument` for the spec's numbers."""
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
) -> deployment_pb.Deployment:
    """Convert a deployment.

    `replicas` returns a version's present replicas, None if unknown.
    """
    version = find_version(deployment, "")
    assert version is not None
    message = deployment_pb.Deployment(
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


def _state_to_proto(state: State) -> deployment_pb.Deployment.State:
    # A deleted deployment appears only in the result of an operation.
    shown = State.DELETING if state is State.GONE else state
    found: deployment_pb.Deployment.State = getattr(deployment_pb.Deployment, f"STATE_{shown}")
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


def _version_to_proto(
    deployment: Deployment, version: ModelVersion, replicas: int | None
) -> deployment_pb.ModelVersion:
    state = deployment_pb.ModelVersion.STATE_READY if version.signature else deployment_pb.ModelVersion.STATE_LOADING
    if version.retired_at is not None:
        state = deployment_pb.ModelVersion.STATE_RETIRING
    return deployment_pb.ModelVersion(
        number=version.number,
        state=state,
        weight=version.weight,
        lineage=lineage_to_proto(deployment, version),
        replicas=replicas,
    )


def rollout_metadata_to_proto(deployment: Deployment) -> deployment_pb.RolloutMetadata:
    assert deployment.rollout is not None
    return deployment_pb.RolloutMetadata(deployment=deployment.name, rollout=rollout_to_proto(deployment.rollout))


def metadata_to_proto(deployment: Deployment) -> deployment_pb.DeploymentMetadata:
    return deployment_pb.DeploymentMetadata(deployment=deployment.name, create_time=timestamp(deployment.create_time))


def _autoscaling_from_proto(message: deployment_pb.Autoscaling) -> Autoscaling:
    up, down = message.HasField("scale_up_after"), message.HasField("scale_down_after")
    return Autoscaling(
        min_replicas=message.min_replicas,
        max_replicas=message.max_replicas,
        rows_per_replica=message.rows_per_replica,
        up_after_s=seconds_of(message.scale_up_after) if up else DEFAULT_UP_S,
        down_after_s=seconds_of(message.scale_down_after) if down else DEFAULT_DOWN_S,
    )


def _autoscaling_to_proto(autoscaling: Autoscaling) -> deployment_pb.Autoscaling:
    message = deployment_pb.Autoscaling(
        min_replicas=autoscaling.min_replicas,
        max_replicas=autoscaling.max_replicas,
        rows_per_replica=autoscaling.rows_per_replica,
    )
    message.scale_up_after.FromMicroseconds(round(autoscaling.up_after_s * 1e6))
    message.scale_down_after.FromMicroseconds(round(autoscaling.down_after_s * 1e6))
    return message


def _spec_to_proto(spec: Spec) -> deployment_pb.DeploymentSpec:
    message = deployment_pb.DeploymentSpec(
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


def change_from_proto(request: deployment_pb.UpdateDeploymentRequest) -> tuple[str, TrafficChange, str]:
    """Return the deployment's name, the change and the etag; raise `InvalidArgument`."""
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


def traffic_to_proto(deployment: Deployment) -> deployment_pb.Traffic:
    shadow = deployment.shadow
    return deployment_pb.Traffic(
        weights={version.number: version.weight for version in deployment.versions if version.weight},
        routes=[
            deployment_pb.HeaderRoute(header=route.header, value=route.value, version=route.version)
            for route in deployment.routes
        ],
        shadow=deployment_pb.Shadow(version=shadow.version, percent=shadow.percent) if shadow else None,
    )


# --- Rollouts ---
# Converts between messages of a rollout and of the version policy, and plain values.


def rollout_change_from_proto(request: deployment_pb.RolloutRequest) -> RolloutChange:
    """Return the checked rollout; raise `InvalidArgument` for the spec's fields."""
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


def policy_from_proto(field: str, policy: deployment_pb.VersionPolicy) -> VersionPolicy:
    """Return the version policy; raise `InvalidArgument`."""
    chosen = policy.WhichOneof("choice")
    if chosen == "all":
        return VersionPolicy(Kept.ALL)
    if chosen == "named":
        return named_policy(field, policy.named.versions)
    return latest_policy(field, policy.latest.count)


def policy_to_proto(policy: VersionPolicy) -> deployment_pb.VersionPolicy:
    if policy.kept is Kept.ALL:
        return deployment_pb.VersionPolicy(all=deployment_pb.VersionPolicy.All())
    if policy.kept is Kept.NAMED:
        return deployment_pb.VersionPolicy(named=deployment_pb.VersionPolicy.Named(versions=policy.named))
    return deployment_pb.VersionPolicy(latest=deployment_pb.VersionPolicy.Latest(count=policy.count))


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
