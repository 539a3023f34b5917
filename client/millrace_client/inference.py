"""The clients of the inference service: of the Open Inference Protocol, and of deployments.

Requests are single, concurrent or streamed over one stream (`ModelStreamInfer`), and models report their metadata.
Arrays are sent as raw contents. An `Answer` has a model's outputs and lineage. Deployments are served checkpoints;
policies keep versions loaded without traffic.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import grpc
import numpy as np
import numpy.typing as npt
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc, model_config_pb2
from millrace.common.v1.lineage_pb2 import Lineage
from millrace.inference.v1 import deployment_service_pb2 as deployment_pb
from millrace.inference.v1 import deployment_service_pb2_grpc
from millrace.inference.v1 import rollout_pb2 as pb_rollout
from millrace_client.calls import Caller, Headers, Operation, every_page, new_request_id, was_never_sent
from millrace_client.errors import KINDS, MillraceError, ResourceExhausted, Unavailable, from_rpc_error

# --- InferenceClient ---

# A full queue answers at once, with the time after which to try again.
QUEUE_RETRIES = 20
# For `infer_many`: the limit of requests in flight and answers held back, as a multiple of `in_flight`.
ANSWERS_HELD = 4
# A model loads in seconds to minutes.
LOAD_TIMEOUT_S = 600.0


class InferenceClient:
    """Sends inference requests. A model's name is the id of its deployment."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(caller.channel)

    def server_live(self) -> bool:
        return bool(self._caller.unary(self._stub.ServerLive, pb.ServerLiveRequest(), pb.ServerLiveResponse).live)

    def server_ready(self) -> bool:
        return bool(self._caller.unary(self._stub.ServerReady, pb.ServerReadyRequest(), pb.ServerReadyResponse).ready)

    def model_ready(self, model: str, *, version: str = "") -> bool:
        """Return whether a model answers. An unknown model is not ready."""
        request = pb.ModelReadyRequest(name=model, version=version)
        return bool(self._caller.unary(self._stub.ModelReady, request, pb.ModelReadyResponse).ready)

    def server_metadata(self) -> pb.ServerMetadataResponse:
        return self._caller.unary(self._stub.ServerMetadata, pb.ServerMetadataRequest(), pb.ServerMetadataResponse)

    def model_metadata(self, model: str, *, version: str = "") -> pb.ModelMetadataResponse:
        """Return the names, types and shapes of a model's inputs and outputs; -1 is a free dimension."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return self._caller.unary(self._stub.ModelMetadata, request, pb.ModelMetadataResponse)

    def model_config(self, model: str, *, version: str = "") -> model_config_pb2.ModelConfig:
        """Return the model's configuration for Triton's clients, including `max_batch_size`.

        A server without it answers `Unimplemented`.
        """
        request = pb.ModelConfigRequest(name=model, version=version)
        return self._caller.unary(self._stub.ModelConfig, request, pb.ModelConfigResponse).config

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Send one request with arrays by input name, e.g. `{"image": uint8 array of shape (N, 28, 28)}`.

        `options` are `version`, `outputs` (default: all but `label_name`, the labels' names as bytes), `priority`,
        `server_timeout_s` and `headers`; see `millrace_client.inference.infer_request`. The client gives up after
        `timeout_s`.
        """
        request = infer_request(model, inputs, request_id=new_request_id(), **options)
        started = time.perf_counter()
        response = self._caller.unary(self._stub.ModelInfer, request, pb.ModelInferResponse, timeout_s=timeout_s)
        return answer_of(response, time.perf_counter() - started)

    def infer_many(
        self,
        model: str,
        requests: Iterable[Mapping[str, npt.ArrayLike]],
        *,
        in_flight: int = 64,
        timeout_s: float = 30.0,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Answer]:
        """Yield answers in the order of the requests, with at most `in_flight` requests at once.

        Later requests are answered while an earlier one takes long, until `ANSWERS_HELD` times `in_flight` are
        outstanding or held back. A request that meets a full queue is sent again after the time that the server asks
        for. A request that found no server, and so was never sent, is repeated within its timeout. The first other
        error ends the iteration. `options` are as in `infer`.
        """
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}: let at least one request be on its way")
        slots = threading.BoundedSemaphore(in_flight)
        waiting: deque[_InFlight] = deque()
        try:
            for inputs in requests:
                request = infer_request(model, inputs, request_id=new_request_id(), **options)
                if len(waiting) == ANSWERS_HELD * in_flight:
                    yield self._settle(waiting.popleft(), timeout_s)
                slots.acquire()
                waiting.append(
                    _InFlight(self._stub.ModelInfer, request, self._caller.headers(request.id), timeout_s, slots)
                )
                while waiting and waiting[0].done():
                    yield self._settle(waiting.popleft(), timeout_s)
            while waiting:
                yield self._settle(waiting.popleft(), timeout_s)
        finally:
            for one in waiting:
                one.cancel()

    def infer_stream(
        self,
        model: str,
        requests: Iterable[Mapping[str, npt.ArrayLike]],
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[Answer | MillraceError, None, None]:
        """Send requests over one stream, and yield each one's answer or error, in order.

        The stream continues after an error of one request. Requests are taken from the iterable as the server reads
        them. `timeout_s` is for the whole stream; unset: none. `options` are as in `infer`. Raises errors of the stream
        itself.
        """
        made = (infer_request(model, inputs, request_id=new_request_id(), **options) for inputs in requests)
        return streamed_answers(self._caller, self._stub.ModelStreamInfer, made, timeout_s)

    def model_statistics(self, model: str = "", *, version: str = "") -> list[pb.ModelStatistics]:
        """Return the number and duration of each version's answers; of all models if none is named."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return list(self._caller.unary(self._stub.ModelStatistics, request, pb.ModelStatisticsResponse).model_stats)

    def repository_index(self, *, ready: bool = False) -> list[pb.RepositoryIndexResponse.ModelIndex]:
        """Yield every version of every model with its state; with `ready` only those that answer."""
        request = pb.RepositoryIndexRequest(ready=ready)
        return list(self._caller.unary(self._stub.RepositoryIndex, request, pb.RepositoryIndexResponse).models)

    def load_model(self, model: str, *, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Load an unloaded deployment again, and return once it answers."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        self._caller.unary(self._stub.RepositoryModelLoad, request, pb.RepositoryModelLoadResponse, timeout_s=timeout_s)

    def unload_model(self, model: str) -> None:
        """Take a deployment out of service until `load_model`. Requests in flight are answered first."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        self._caller.unary(self._stub.RepositoryModelUnload, request, pb.RepositoryModelUnloadResponse)

    def _settle(self, in_flight: _InFlight, timeout_s: float) -> Answer:
        pause_s = 0.0
        try:
            return answer_of(in_flight.result(self._caller.address), in_flight.latency_s())
        except ResourceExhausted as full:
            pause_s = _pause_of(full)
        except Unavailable:
            if not in_flight.was_never_sent():
                raise
        turns = 0
        while True:
            time.sleep(pause_s)
            started = time.perf_counter()
            try:
                response = self._caller.unary(
                    self._stub.ModelInfer, in_flight.request, pb.ModelInferResponse, timeout_s=timeout_s
                )
            except ResourceExhausted as full:
                turns += 1
                if turns == QUEUE_RETRIES:
                    raise
                pause_s = _pause_of(full)
            else:
                return answer_of(response, time.perf_counter() - started)


def _pause_of(full: ResourceExhausted) -> float:
    """Return the pause before a place may be free.

    Raises the error if no server has given a time: a message that is too large, for example, stays too large.
    """
    if full.retry_after_s is None:
        raise full
    return full.retry_after_s


class _InFlight:
    """One request in flight. It frees its place as soon as its answer arrives."""

    def __init__(
        self,
        method: Any,
        request: pb.ModelInferRequest,
        headers: Headers,
        timeout_s: float,
        slots: threading.BoundedSemaphore,
    ) -> None:
        # None once it is answered, because it is not sent again.
        self.request: pb.ModelInferRequest | None = request
        self._request_id = request.id
        self._slots = slots
        self._started = self._ended = time.perf_counter()
        self._arrived = threading.Event()
        self._call = method.future(request, timeout=timeout_s, metadata=headers)
        self._call.add_done_callback(self._on_done)

    def _on_done(self, _: Any) -> None:
        self._ended = time.perf_counter()
        if self._call.code() is grpc.StatusCode.OK:
            self.request = None
        self._arrived.set()
        self._slots.release()

    def done(self) -> bool:
        return self._arrived.is_set()

    def was_never_sent(self) -> bool:
        return isinstance(self._call, grpc.RpcError) and was_never_sent(self._call)

    def latency_s(self) -> float:
        return self._ended - self._started

    def result(self, address: str) -> pb.ModelInferResponse:
        self._arrived.wait()
        try:
            response = self._call.result()
        except grpc.RpcError as error:
            raise from_rpc_error(error, address=address, request_id=self._request_id) from None
        assert isinstance(response, pb.ModelInferResponse)
        return response

    def cancel(self) -> None:
        self._call.cancel()


# --- Tensors on the wire ---

# Row-major and little-endian, as the protocol demands for raw contents. numpy has no type for BF16.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<I")
# The limit of int64.
_MAX_MICROSECONDS = 2**63 - 1


class RequestOptions(TypedDict, total=False):
    """The fields of a request besides its tensors; see `infer_request`."""

    version: str
    outputs: Mapping[str, int] | None
    priority: int
    server_timeout_s: float | None
    headers: Mapping[str, str] | None


def infer_request(
    model: str,
    inputs: Mapping[str, npt.ArrayLike],
    *,
    version: str = "",
    request_id: str = "",
    outputs: Mapping[str, int] | None = None,
    priority: int = 0,
    server_timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> pb.ModelInferRequest:
    """Make one request.

    `outputs` are the requested outputs; none means all. 0 requests the tensor itself; a number n requests each row's n
    greatest numbers, as strings "value:index:name" (Triton's classification).

    `priority` is 1, the most urgent, to 10; 0 is the server's default. `server_timeout_s` is the time from the
    request's arrival within which the server must answer. `headers` may route the request to a version, if the
    deployment has routes by header; they have no effect together with `version`.

    Bytes and text are sent in full from lists and object arrays. An array of numpy's own strings has already lost
    trailing zero bytes.

    Raises `TypeError` for an array of a type that the protocol does not have, and for an object that is neither text
    nor bytes; `ValueError` for a `server_timeout_s` that is not above 0 and finite.
    """
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    if priority:
        request.parameters["priority"].int64_param = priority
    if server_timeout_s is not None:
        if not 0 < server_timeout_s * 1e6 < _MAX_MICROSECONDS:
            raise ValueError(f"server_timeout_s is {server_timeout_s}: use a finite number of seconds above 0, or None")
        # Rounded up, because 0 microseconds mean no limit.
        request.parameters["timeout"].int64_param = math.ceil(server_timeout_s * 1e6)
    if headers:
        request.parameters["headers"].string_param = json.dumps(dict(headers))
    for name, value in inputs.items():
        array = _array(value)
        datatype, raw = _encode(name, array)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw)
    for name, top in (outputs or {}).items():
        wanted = request.outputs.add(name=name)
        if top:
            wanted.parameters["classification"].int64_param = top
    return request


def output_arrays(response: pb.ModelInferResponse) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs by name. Raw contents become read-only views of the message."""
    arrays = {}
    for index, tensor in enumerate(response.outputs):
        shape = tuple(tensor.shape)
        if response.raw_output_contents:
            arrays[tensor.name] = _decode(tensor.datatype, response.raw_output_contents[index], shape)
        else:
            arrays[tensor.name] = _typed(tensor).reshape(shape)
    return arrays


def _array(value: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if isinstance(value, np.ndarray) or array.dtype.kind not in "SU":
        return array
    # numpy's own strings lose trailing zero bytes, and numbers among them have become text.
    return np.array(value, dtype=object)


def _encode(name: str, array: npt.NDArray[Any]) -> tuple[str, bytes]:
    if array.dtype.kind in "OSU":
        elements = [_bytes(name, one) for one in array.reshape(-1)]
        return "BYTES", b"".join(_LENGTH.pack(len(one)) + one for one in elements)
    little = array.dtype.newbyteorder("<")
    datatype = _NAMES.get(little)
    if datatype is None:
        raise TypeError(f"input {name!r}: the protocol has no type for {array.dtype}; use one of {', '.join(DTYPES)}")
    return datatype, array.astype(little, copy=False).tobytes()


def _bytes(name: str, element: object) -> bytes:
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, bytes | bytearray | memoryview):
        return bytes(element)
    raise TypeError(f"input {name!r}: an element is {element!r:.40}; give text or bytes, or an array of numbers")


def _decode(datatype: str, raw: bytes, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if datatype == "BYTES":
        elements, at = [], 0
        while at < len(raw):
            (length,) = _LENGTH.unpack_from(raw, at)
            elements.append(raw[at + _LENGTH.size : at + _LENGTH.size + length])
            at += _LENGTH.size + length
        return np.array(elements, dtype=object).reshape(shape)
    return np.frombuffer(raw, dtype=DTYPES[datatype]).reshape(shape)


def _typed(tensor: pb.ModelInferResponse.InferOutputTensor) -> npt.NDArray[Any]:
    """Convert contents in typed fields, which servers other than Millrace may send."""
    dtype = DTYPES.get(tensor.datatype, np.dtype(object))
    (values,) = (value for _, value in tensor.contents.ListFields()) if tensor.contents.ListFields() else ([],)
    return np.array(list(values), dtype=dtype)


# --- Answers ---

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response: its output arrays by name, and the model's lineage."""

    outputs: Arrays
    lineage: Lineage
    model: str
    version: str
    # The time from sending the answered request to its answer.
    latency_s: float


def answer_of(response: pb.ModelInferResponse, latency_s: float) -> Answer:
    parameters = {key: value.string_param for key, value in response.parameters.items()}
    return Answer(
        outputs=output_arrays(response),
        lineage=Lineage(**{field: parameters.get(field, "") for field in Lineage.DESCRIPTOR.fields_by_name}),
        model=response.model_name,
        version=response.model_version,
        latency_s=latency_s,
    )


# --- Streams ---


def streamed_answers(
    caller: Caller, method: Any, requests: Iterable[pb.ModelInferRequest], timeout_s: float | None
) -> Generator[Answer | MillraceError, None, None]:
    """Yield an answer or error for each request, in order. The stream continues after an error of one request.

    Raises errors of the stream itself, `Unavailable` if it ends before all requests are answered, and what `requests`
    raises. Closing the iterator ends the call.
    """
    sending = _Sending(requests)
    try:
        with closing(caller.stream(method, sending.requests(), timeout_s=timeout_s)) as responses:
            for response in responses:
                latency_s = time.perf_counter() - sending.sent_s.popleft()
                if response.error_message:
                    yield _error_of(response)
                else:
                    yield answer_of(response.infer_response, latency_s)
        if sending.sent_s or not sending.all_sent:
            raise Unavailable(
                f"{caller.address} ended the stream before all requests were answered",
                remedy="ask again for those that have no answer",
            )
    except MillraceError:
        # gRPC reports only that there was an exception.
        if sending.failure is not None:
            raise sending.failure from None
        raise


class _Sending:
    """The requests as gRPC takes them, in its own thread.

    It records when each unanswered request was sent, whether all were sent, and the error of making one.
    """

    def __init__(self, requests: Iterable[pb.ModelInferRequest]) -> None:
        self._requests = requests
        self.sent_s: deque[float] = deque()
        self.all_sent = False
        self.failure: Exception | None = None

    def requests(self) -> Iterator[pb.ModelInferRequest]:
        try:
            for request in self._requests:
                self.sent_s.append(time.perf_counter())
                yield request
            self.all_sent = True
        except Exception as failure:
            self.failure = failure
            raise


def _error_of(response: pb.ModelStreamInferResponse) -> MillraceError:
    """Parse "STATUS_NAME: text"; other servers send only the text."""
    status, colon, text = response.error_message.partition(": ")
    if not colon or status not in KINDS:
        status, text = "", response.error_message
    return KINDS.get(status, MillraceError)(text, request_id=response.infer_response.id)


# --- Deployments ---


class DeploymentClient:
    """Creates and manages deployments, `deployments/{m}`.

    `m` is the model's name in the Open Inference Protocol.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = deployment_service_pb2_grpc.DeploymentServiceStub(caller.channel)

    def create_deployment(
        self, deployment_id: str, checkpoint: str, **fields: Any
    ) -> Operation[deployment_pb.Deployment]:
        """Start to serve `trainingJobs/{j}/checkpoints/{c}`, or the best checkpoint of `trainingJobs/{j}`.

        `fields` are further fields of `DeploymentSpec`, e.g. `num_replicas=2`, `max_batch_size=64`,
        `autoscaling=mc.autoscaling(1, 4)`, `version_policy=mc.keep_latest(2)`, or `allow_non_finite=True`. For a
        checkpoint that a program reported, `predictor="serve:Predictor"` names the class of its bundle that serves it.
        """
        request = deployment_pb.CreateDeploymentRequest(
            deployment_id=deployment_id,
            spec=deployment_pb.DeploymentSpec(checkpoint=checkpoint, **fields),
            request_id=new_request_id(),
        )
        operation = self._caller.unary(self._stub.CreateDeployment, request, operations_pb2.Operation)
        return Operation(self._caller, operation, deployment_pb.Deployment, deployment_pb.DeploymentMetadata)

    def get_deployment(self, name: str) -> deployment_pb.Deployment:
        return self._caller.unary(
            self._stub.GetDeployment, deployment_pb.GetDeploymentRequest(name=name), deployment_pb.Deployment
        )

    def list_deployments(self) -> Iterator[deployment_pb.Deployment]:
        """Yield all deployments in the order of their names."""
        request = deployment_pb.ListDeploymentsRequest()
        return every_page(self._caller, self._stub.ListDeployments, request, "deployments")

    def rollout(
        self,
        name: str,
        checkpoint: str,
        *,
        steps: Sequence[tuple[int, float]] = (),
        max_error_share: float | None = None,
        max_p99_s: float | None = None,
        max_p99_ratio: float = 0.0,
        min_requests: int = 0,
        window_s: float | None = None,
        allow_new_signature: bool = False,
        compare: tuple[str, str] | None = None,
        min_agreement: float | None = None,
        max_difference: float | None = None,
        etag: str = "",
    ) -> Operation[deployment_pb.Deployment]:
        """Move a deployment's traffic to another checkpoint, without a dropped request.

        `steps` are (percent, seconds) each. Beyond a limit the service rolls back, and `wait` raises. Limits are the
        share of failed requests (0 to 1), the time in which 99 % are answered, and that time relative to the old
        version's. They apply once there are `min_requests` within `window_s`. Fields that are not given have the
        server's defaults. `compare` names rows, (dataset version, split), that both versions answer before any traffic
        moves; give the share of equal labels or the difference of outputs that is required.
        """
        limits = pb_rollout.RolloutLimits(
            max_error_share=max_error_share, max_p99_ratio=max_p99_ratio, min_requests=min_requests
        )
        if max_p99_s is not None:
            limits.max_p99_latency.CopyFrom(duration(max_p99_s))
        if window_s is not None:
            limits.window.CopyFrom(duration(window_s))
        comparison = None
        if compare is not None:
            comparison = pb_rollout.Comparison(
                dataset_version=compare[0],
                split=compare[1],
                min_agreement=min_agreement,
                max_difference=max_difference,
            )
        spec = pb_rollout.RolloutSpec(
            checkpoint=checkpoint,
            steps=[pb_rollout.RolloutStep(percent=percent, interval=duration(wait_s)) for percent, wait_s in steps],
            limits=limits,
            allow_new_signature=allow_new_signature,
            comparison=comparison,
        )
        request = deployment_pb.RolloutRequest(name=name, spec=spec, etag=etag, request_id=new_request_id())
        operation = self._caller.unary(self._stub.Rollout, request, operations_pb2.Operation)
        return Operation(self._caller, operation, deployment_pb.Deployment, deployment_pb.RolloutMetadata)

    def update_traffic(
        self,
        name: str,
        *,
        weights: Mapping[str, int] | None = None,
        routes: Sequence[tuple[str, str, str]] | None = None,
        shadow: tuple[str, int] | None = None,
        version_policy: deployment_pb.VersionPolicy | None = None,
        etag: str = "",
    ) -> deployment_pb.Deployment:
        """Redistribute the requests that name no version. Arguments that are not given change nothing.

        `weights` are by version number, `routes` are (header, value, version), and `shadow` is a version and the
        percentage of requests that are copied to it, 0 for no shadow. `version_policy` selects the versions that stay
        loaded without traffic: `mc.keep_latest(2)`, `mc.keep_all()` or `mc.keep_named("1", "3")`.
        """
        traffic = deployment_pb.Traffic(
            weights=weights,
            routes=[
                deployment_pb.HeaderRoute(header=header, value=value, version=to) for header, value, to in routes or ()
            ],
            shadow=deployment_pb.Shadow(version=shadow[0], percent=shadow[1]) if shadow else None,
        )
        spec = deployment_pb.DeploymentSpec(version_policy=version_policy)
        changes = {
            "traffic.weights": weights,
            "traffic.routes": routes,
            "traffic.shadow": shadow,
            "spec.version_policy": version_policy,
        }
        request = deployment_pb.UpdateDeploymentRequest(
            deployment=deployment_pb.Deployment(name=name, etag=etag, traffic=traffic, spec=spec),
            update_mask=FieldMask(paths=[path for path, change in changes.items() if change is not None]),
        )
        return self._caller.unary(self._stub.UpdateDeployment, request, deployment_pb.Deployment)

    def watch_deployment(self, name: str) -> Iterator[deployment_pb.Deployment]:
        """Yield the deployment now and after each change, until it is deleted. Closing the iterator ends the call."""
        return self._caller.stream(self._stub.WatchDeployment, deployment_pb.WatchDeploymentRequest(name=name))

    def rollback(self, name: str, *, etag: str = "") -> deployment_pb.Deployment:
        """Return the traffic at once to the versions that had it before the newest rollout."""
        request = deployment_pb.RollbackRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.Rollback, request, deployment_pb.Deployment)

    def delete_deployment(self, name: str, *, etag: str = "") -> None:
        """Take a deployment out of service. Requests in flight are answered first.

        If `etag` is set, it must be the present one.
        """
        request = deployment_pb.DeleteDeploymentRequest(name=name, etag=etag)
        self._caller.unary(self._stub.DeleteDeployment, request, deployment_pb.DeleteDeploymentResponse)


def autoscaling(
    min_replicas: int,
    max_replicas: int,
    *,
    rows_per_replica: int = 0,
    scale_up_after_s: float | None = None,
    scale_down_after_s: float | None = None,
) -> deployment_pb.Autoscaling:
    """Scale with the load: one replica for each `rows_per_replica` waiting or running rows.

    Arguments that are not given have the server's defaults.
    """
    return deployment_pb.Autoscaling(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        rows_per_replica=rows_per_replica,
        scale_up_after=None if scale_up_after_s is None else duration(scale_up_after_s),
        scale_down_after=None if scale_down_after_s is None else duration(scale_down_after_s),
    )


def duration(seconds: float) -> Duration:
    """Convert seconds to a Duration, to the nearest microsecond."""
    message = Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


# --- Version policies ---


def keep_latest(count: int) -> deployment_pb.VersionPolicy:
    """Keep `count` newest versions loaded. With 2, a rollout that succeeded can be rolled back."""
    return deployment_pb.VersionPolicy(latest=deployment_pb.VersionPolicy.Latest(count=count))


def keep_all() -> deployment_pb.VersionPolicy:
    """Keep every version loaded."""
    return deployment_pb.VersionPolicy(all=deployment_pb.VersionPolicy.All())


def keep_named(*versions: str) -> deployment_pb.VersionPolicy:
    """Keep the versions of these numbers loaded, and no others."""
    return deployment_pb.VersionPolicy(named=deployment_pb.VersionPolicy.Named(versions=versions))
