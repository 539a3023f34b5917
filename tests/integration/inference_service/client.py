"""A client of the inference service that knows only the protos."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference import grpc_service_pb2 as oip
from inference import grpc_service_pb2_grpc as oip_grpc
from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import deployment_service_pb2_grpc as pb_grpc
from shared.settings import StoreSettings
from tests.support.service_process import store_environ

READY_TIMEOUT_S = 180.0
LOADED_TIMEOUT_S = 240.0

T = TypeVar("T")
Array = npt.NDArray[Any]


def eventually(poll: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """The first answer of `poll` that is not None or False."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        found = poll()
        if found is not None and found is not False:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def environment(store: StoreSettings, ray_address: str) -> dict[str, str]:
    return {**store_environ(store), "RAY_ADDRESS": ray_address, "MILLRACE_LOG_LEVEL": "WARNING"}


def durable(deployment: pb.Deployment) -> pb.Deployment:
    """What the log says: without how many replicas run at this moment."""
    kept = pb.Deployment()
    kept.CopyFrom(deployment)
    for version in kept.versions:
        version.ClearField("replicas")
    return kept


class Client:
    """Stubs over one channel, with a connection of its own: of several frontends one answers it."""

    def __init__(self, target: str) -> None:
        options = [
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self.channel = grpc.insecure_channel(target, options=options)
        self.inference = oip_grpc.GRPCInferenceServiceStub(self.channel)
        self.deployments = pb_grpc.DeploymentServiceStub(self.channel)
        self.operations = operations_pb2_grpc.OperationsStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def is_healthy(self) -> bool:
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=10)  # type: ignore[attr-defined]
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_until_healthy(self) -> None:
        eventually(self.is_healthy, READY_TIMEOUT_S, "health is SERVING")

    def create(self, deployment_id: str, checkpoint: str, **spec: Any) -> operations_pb2.Operation:
        request_id = spec.pop("request_id", "")
        return self.deployments.CreateDeployment(
            pb.CreateDeploymentRequest(
                deployment_id=deployment_id,
                spec=pb.DeploymentSpec(checkpoint=checkpoint, **spec),
                request_id=request_id,
            ),
            timeout=60,
        )

    def wait(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """The operation when it is done."""

        def done() -> operations_pb2.Operation | None:
            # Much shorter than the call's own deadline, which a busy machine may miss by seconds.
            asked = operations_pb2.WaitOperationRequest(name=operation.name, timeout=duration_pb2.Duration(seconds=10))
            now = self.operations.WaitOperation(asked, timeout=60)
            return now if now.done else None

        return eventually(done, LOADED_TIMEOUT_S, f"{operation.name} is done")

    def deploy(self, deployment_id: str, checkpoint: str, **spec: Any) -> pb.Deployment:
        operation = self.wait(self.create(deployment_id, checkpoint, **spec))
        assert not operation.HasField("error"), operation.error
        deployment = pb.Deployment()
        assert operation.response.Unpack(deployment)
        return deployment

    def get(self, name: str) -> pb.Deployment:
        found: pb.Deployment = self.deployments.GetDeployment(pb.GetDeploymentRequest(name=name), timeout=60)
        return found

    def delete(self, name: str) -> None:
        """Delete it, and wait until it is gone."""
        self.deployments.DeleteDeployment(pb.DeleteDeploymentRequest(name=name), timeout=60)

        def gone() -> bool:
            try:
                self.get(name)
            except grpc.RpcError as error:
                return bool(error.code() is grpc.StatusCode.NOT_FOUND)
            return False

        eventually(gone, 180, f"{name} is gone")

    def ready_versions(self, model: str) -> list[str]:
        """Those that requests which name them are answered by."""
        index = self.inference.RepositoryIndex(oip.RepositoryIndexRequest(ready=True), timeout=60)
        return [one.version for one in index.models if one.name == model]

    def infer(self, model: str, image: Array, timeout_s: float = 60) -> oip.ModelInferResponse:
        request = infer_request(model, image)
        answer: oip.ModelInferResponse = self.inference.ModelInfer(request, timeout=timeout_s)
        return answer


def infer_request(model: str, image: Array, **fields: Any) -> oip.ModelInferRequest:
    datatype = {"uint8": "UINT8", "float32": "FP32"}[image.dtype.name]
    tensor = oip.ModelInferRequest.InferInputTensor(name="image", datatype=datatype, shape=image.shape)
    return oip.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[image.tobytes()], **fields)


def outputs(response: oip.ModelInferResponse) -> Mapping[str, Array]:
    dtypes = {"FP32": "<f4", "INT64": "<i8"}
    return {
        output.name: np.frombuffer(raw, dtypes[output.datatype]).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def assert_same_answer(given: Array, expected: Array) -> None:
    """Each replica lays images out as is faster where it runs, which shows in the last digits."""
    np.testing.assert_allclose(given, expected, rtol=0, atol=1e-5)
