"""The two gRPC services: convert, delegate, convert.

`inference.GRPCInferenceService` is the Open Inference Protocol, with Triton's extensions.
`millrace.inference.v1.DeploymentService` says which checkpoints are served.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from google.longrunning import operations_pb2
from grpc import aio

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc as pb_grpc
from inference_service.convert import (
    change_from_proto,
    creation_from_proto,
    deployment_to_proto,
    model_metadata_to_proto,
    rollout_change_from_proto,
)
from inference_service.deploy.deployments import (
    DeploymentManager,
    checked_operation,
    checked_rollout_operation,
    operation_of,
    rollout_operation_of,
)
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import Deployment, ModelVersion
from inference_service.serve.infer import Inference
from inference_service.serve.models import Models
from inference_service.serve.repository import ModelRepository, SummedStatistics, config_to_proto, index_to_proto
from millrace.inference.v1 import deployment_service_pb2 as deployment_pb
from millrace.inference.v1 import deployment_service_pb2_grpc as deployment_pb_grpc
from shared.errors import NotFound, Unimplemented, invalid_field
from shared.grpc_server import message_bytes
from shared.names import MAX_MESSAGE_BYTES
from shared.streaming import Watches

# --- Deployments ---

Context = aio.ServicerContext[Any, Any]


class DeploymentServicer(deployment_pb_grpc.DeploymentServiceServicer):
    """Serves `DeploymentService`.

    `changed` is called with each deployment whose log was written, so that the change takes effect at once. `replicas`
    returns a version's present replicas, None if unknown.
    """

    def __init__(
        self,
        manager: DeploymentManager,
        rollouts: RolloutManager,
        changed: Callable[[Deployment], None],
        replicas: Callable[[Deployment, ModelVersion], int | None],
    ) -> None:
        self._manager = manager
        self._rollouts = rollouts
        self._changed = changed
        self._replicas = replicas
        self._watches = Watches(manager.follow)

    async def CreateDeployment(
        self, request: deployment_pb.CreateDeploymentRequest, context: Context
    ) -> operations_pb2.Operation:
        deployment = await asyncio.to_thread(self._manager.create, creation_from_proto(request))
        if request.validate_only:
            return checked_operation(deployment)
        self._changed(deployment)
        return operation_of(deployment)

    async def GetDeployment(
        self, request: deployment_pb.GetDeploymentRequest, context: Context
    ) -> deployment_pb.Deployment:
        return self._as_message(await asyncio.to_thread(self._manager.get, request.name))

    async def WatchDeployment(
        self, request: deployment_pb.WatchDeploymentRequest, context: Context
    ) -> AsyncIterator[deployment_pb.Deployment]:
        async with self._watches.watching(request.name) as watch:
            now = first = await watch.fresh()
            last = None
            while now.uid == first.uid:
                # The number of replicas changes without a record.
                message = self._as_message(now)
                if message != last:
                    last = message
                    yield message
                try:
                    now = await watch.next()
                except NotFound:  # the deployment was deleted, which ends the stream
                    return

    async def ListDeployments(
        self, request: deployment_pb.ListDeploymentsRequest, context: Context
    ) -> deployment_pb.ListDeploymentsResponse:
        found, token = await asyncio.to_thread(self._manager.page, request.page_size, request.page_token)
        return deployment_pb.ListDeploymentsResponse(deployments=map(self._as_message, found), next_page_token=token)

    async def DeleteDeployment(
        self, request: deployment_pb.DeleteDeploymentRequest, context: Context
    ) -> deployment_pb.DeleteDeploymentResponse:
        self._changed(await asyncio.to_thread(self._manager.delete, request.name, request.etag))
        return deployment_pb.DeleteDeploymentResponse()

    async def Rollout(self, request: deployment_pb.RolloutRequest, context: Context) -> operations_pb2.Operation:
        deployment = await asyncio.to_thread(self._rollouts.begin, rollout_change_from_proto(request))
        if request.validate_only:
            return checked_rollout_operation(deployment)
        # If the request is repeated after its rollout has ended, nothing changes.
        if deployment.rollout is not None and deployment.rollout.under_way:
            self._changed(deployment)
        return rollout_operation_of(deployment)

    async def UpdateDeployment(
        self, request: deployment_pb.UpdateDeploymentRequest, context: Context
    ) -> deployment_pb.Deployment:
        deployment = await asyncio.to_thread(self._rollouts.change, *change_from_proto(request))
        self._changed(deployment)
        return self._as_message(deployment)

    async def Rollback(self, request: deployment_pb.RollbackRequest, context: Context) -> deployment_pb.Deployment:
        deployment = await asyncio.to_thread(self._rollouts.back, request.name, request.etag)
        self._changed(deployment)
        return self._as_message(deployment)

    def _as_message(self, deployment: Deployment) -> deployment_pb.Deployment:
        return deployment_to_proto(deployment, self._replicas)


# --- Servicer ---


SERVER_NAME = "millrace"
# Triton's names of the extensions that are fully supported.
EXTENSIONS = ("classification", "model_configuration", "model_repository", "schedule_policy", "statistics")
# A parameter of `RepositoryModelUnload`. No model here depends on another, so it has no effect.
UNLOAD_DEPENDENTS = "unload_dependents"
STREAM_REQUESTS_AT_ONCE = 64
# One request may have as many bytes. While the requests in progress have this many, no other is read.
STREAM_BYTES_AT_ONCE = MAX_MESSAGE_BYTES
STREAM_REQUEST_TIMEOUT_S = 60.0


class OpenInferenceServicer(pb_grpc.GRPCInferenceServiceServicer):
    """Serves the Open Inference Protocol.

    `changed` is called with each deployment whose log was written, so that the change takes effect at once.
    """

    def __init__(
        self,
        models: Models,
        inference: Inference,
        repository: ModelRepository,
        statistics: SummedStatistics,
        changed: Callable[[Deployment], None],
    ) -> None:
        self._models = models
        self._inference = inference
        self._repository = repository
        self._statistics = statistics
        self._changed = changed
        self._version = importlib.metadata.version("millrace")

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._models.all_ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._models.is_ready(request.name, request.version))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=self._version, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        deployment, _, signature = self._models.signature(request.name, request.version)
        return model_metadata_to_proto(deployment, signature)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        # gRPC cancels a call at its deadline. To a call without one the interceptor gives the server's own, so
        # `time_remaining` is a number here.
        return await self._inference.answer(
            request, context.time_remaining(), context.invocation_metadata, ends_itself=True
        )

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async def answer(request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
            left_s = context.time_remaining()
            timeout_s = STREAM_REQUEST_TIMEOUT_S if left_s is None else min(left_s, STREAM_REQUEST_TIMEOUT_S)
            return await self._inference.streamed(request, timeout_s, context.invocation_metadata)

        answered = in_order(
            request_iterator,
            answer,
            most=STREAM_REQUESTS_AT_ONCE,
            size_bytes=lambda _: message_bytes(),
            answer_bytes=pb.ModelStreamInferResponse.ByteSize,
            max_bytes=STREAM_BYTES_AT_ONCE,
        )
        async with aclosing(answered) as answers:
            async for one in answers:
                yield one
                del one  # as in `in_order`

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        return pb.ModelConfigResponse(config=config_to_proto(*self._models.signature(request.name, request.version)))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        return pb.ModelStatisticsResponse(model_stats=self._statistics.statistics_of(request.name, request.version))

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        _check_repository(request.repository_name)
        return index_to_proto(self._models.listed_of("", ""), ready_only=request.ready)

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        _check_repository(request.repository_name)
        if request.parameters:
            remedy = "a deployment's configuration is fixed by CreateDeployment; send no parameters"
            raise invalid_field("parameters", f"{len(request.parameters)} entries", remedy)
        self._changed(await asyncio.to_thread(self._repository.load, request.model_name))
        await self._models.wait_until_ready(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        _check_repository(request.repository_name)
        if others := {*request.parameters} - {UNLOAD_DEPENDENTS}:
            raise invalid_field("parameters", min(others), f"send none but {UNLOAD_DEPENDENTS}")
        self._changed(await asyncio.to_thread(self._repository.unload, request.model_name))
        return pb.RepositoryModelUnloadResponse()


def _check_repository(name: str) -> None:
    if name:
        raise Unimplemented(
            f"there is one repository, without a name; leave repository_name={name[:100]!r} out",
            reason="REPOSITORIES_NOT_SERVED",
        )


# --- Streaming ---
# Answers many requests of one stream.

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


async def in_order(
    requests: AsyncIterator[Asked],
    answer: Callable[[Asked], Awaitable[Answered]],
    *,
    most: int,
    size_bytes: Callable[[Asked], int] = lambda _: 0,
    answer_bytes: Callable[[Answered], int] = lambda _: 0,
    max_bytes: float = math.inf,
) -> AsyncGenerator[Answered, None]:
    """Yield the answers in the order of the requests.

    At most `most` requests are in progress or wait to be taken, and none is read while these have `max_bytes`, so a
    client that takes no answers is not read any further. The larger of `size_bytes` of a request and `answer_bytes` of
    its answer counts until the answer is taken. `size_bytes` is called in the reading task, as soon as the request is
    read.

    Ends with the requests. An error of reading them is raised after the answers before it. If this generator is closed
    or cancelled, the requests in progress are cancelled, and have ended when it returns.
    """
    waiting: asyncio.Queue[asyncio.Task[tuple[Answered, int]] | None] = asyncio.Queue()
    working: set[asyncio.Task[tuple[Answered, int]]] = set()
    held = in_flight_bytes = 0
    taken = asyncio.Event()

    async def work(request: Asked, size: int) -> tuple[Answered, int]:
        nonlocal in_flight_bytes
        answered = await answer(request)
        larger = max(size, answer_bytes(answered))
        in_flight_bytes += larger - size
        return answered, larger

    async def read() -> None:
        nonlocal held, in_flight_bytes
        try:
            async for request in requests:
                size = size_bytes(request)
                held, in_flight_bytes = held + 1, in_flight_bytes + size
                task = asyncio.create_task(work(request, size))
                working.add(task)
                task.add_done_callback(working.discard)
                waiting.put_nowait(task)
                # Releases the references: the code waits here and below, and a stream may be idle for hours.
                del request, task
                while held >= most or in_flight_bytes >= max_bytes:
                    taken.clear()
                    await taken.wait()
        finally:
            waiting.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (task := await waiting.get()) is not None:
            answered, size = await task
            del task
            yield answered
            del answered
            held, in_flight_bytes = held - 1, in_flight_bytes - size
            taken.set()
        await reader
    finally:
        left = [reader, *working]
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)
