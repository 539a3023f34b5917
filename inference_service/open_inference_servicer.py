"""`inference.GRPCInferenceService`: the Open Inference Protocol."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from grpc import aio

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc as pb_grpc
from inference_service.models import Models
from inference_service.open_inference_converters import answer_to_proto, inputs_from_proto, metadata_to_proto

Context = aio.ServicerContext[Any, Any]

SERVER_NAME = "millrace"


class OpenInferenceServicer(pb_grpc.GRPCInferenceServiceServicer):
    def __init__(self, models: Models) -> None:
        self._models = models
        self._version = importlib.metadata.version("millrace")

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._models.all_ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._models.is_ready(request.name, request.version))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=self._version, extensions=[])

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        return metadata_to_proto(*self._models.signature(request.name, request.version))

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        answer = await self._models.infer(
            request.model_name,
            request.model_version,
            inputs_from_proto(request),
            [output.name for output in request.outputs],
            context.time_remaining(),
        )
        return answer_to_proto(request, answer)
