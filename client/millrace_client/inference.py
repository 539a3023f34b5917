"""Inference through the Open Inference Protocol: one request, many in flight or in a stream; which models there are."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Unpack

import grpc
import numpy.typing as npt

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc, model_config_pb2
from millrace_client.addresses import Headers
from millrace_client.answers import Answer, answer_of
from millrace_client.calls import Caller, new_request_id, was_never_sent
from millrace_client.errors import MillraceError, ResourceExhausted, Unavailable, from_rpc_error
from millrace_client.streaming import streamed_answers
from millrace_client.tensors import RequestOptions, infer_request

# A full queue is told at once, with the time after which to try again.
QUEUE_RETRIES = 20
# Of `infer_many`: for each that may be on the way so many are, or are answered and wait for one before them.
ANSWERS_HELD = 4
# A model loads in seconds to minutes.
LOAD_TIMEOUT_S = 600.0


class InferenceClient:
    """A model's name is the id of its deployment."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(caller.channel)

    def server_live(self) -> bool:
        return bool(self._caller.unary(self._stub.ServerLive, pb.ServerLiveRequest(), pb.ServerLiveResponse).live)

    def server_ready(self) -> bool:
        return bool(self._caller.unary(self._stub.ServerReady, pb.ServerReadyRequest(), pb.ServerReadyResponse).ready)

    def model_ready(self, model: str, *, version: str = "") -> bool:
        """Whether it answers; an unknown model is not ready."""
        request = pb.ModelReadyRequest(name=model, version=version)
        return bool(self._caller.unary(self._stub.ModelReady, request, pb.ModelReadyResponse).ready)

    def server_metadata(self) -> pb.ServerMetadataResponse:
        return self._caller.unary(self._stub.ServerMetadata, pb.ServerMetadataRequest(), pb.ServerMetadataResponse)

    def model_metadata(self, model: str, *, version: str = "") -> pb.ModelMetadataResponse:
        """The names, types and shapes of its inputs and outputs; -1 is a free dimension."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return self._caller.unary(self._stub.ModelMetadata, request, pb.ModelMetadataResponse)

    def model_config(self, model: str, *, version: str = "") -> model_config_pb2.ModelConfig:
        """What Triton's clients know it by, its `max_batch_size` among it. A server without that is `Unimplemented`."""
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
        """One request with arrays by input name, e.g. `{"image": uint8 array of shape (N, 28, 28)}`.

        `options` are `version`, `outputs` (where none is named all but `label_name`, the labels' names as bytes),
        `priority`, `server_timeout_s` and `headers`: see `millrace_client.tensors.infer_request`. The client gives up
        after `timeout_s`.
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
        """Answers in the order of the requests, with at most `in_flight` of them on the way at once. Behind one that
        takes long others are answered meanwhile; once these are `ANSWERS_HELD` times as many, no more are sent.

        A request that meets a full queue is sent again after the time that the server asks for, and one that found no
        server, and so was never sent, as long as its time lasts. The first other error ends it. `options` as in
        `infer`.
        """
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}: let at least one request be on its way")
        room = threading.BoundedSemaphore(in_flight)
        waiting: deque[_InFlight] = deque()
        try:
            for inputs in requests:
                request = infer_request(model, inputs, request_id=new_request_id(), **options)
                if len(waiting) == ANSWERS_HELD * in_flight:
                    yield self._settle(waiting.popleft(), timeout_s)
                room.acquire()
                waiting.append(
                    _InFlight(self._stub.ModelInfer, request, self._caller.headers(request.id), timeout_s, room)
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
        """Over one stream: for each request, in their order, its answer, or the error that it failed with; the stream
        goes on behind that one. Requests are taken from the iterable as the server reads them.

        `timeout_s` is of the whole stream, unset: none. `options` as in `infer`. Raises what ends the stream itself.
        """
        made = (infer_request(model, inputs, request_id=new_request_id(), **options) for inputs in requests)
        return streamed_answers(self._caller, self._stub.ModelStreamInfer, made, timeout_s)

    def model_statistics(self, model: str = "", *, version: str = "") -> list[pb.ModelStatistics]:
        """What each version has answered, and how long that took; of all models where none is named."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return list(self._caller.unary(self._stub.ModelStatistics, request, pb.ModelStatisticsResponse).model_stats)

    def repository_index(self, *, ready: bool = False) -> list[pb.RepositoryIndexResponse.ModelIndex]:
        """Every version of every model with its state; with `ready` only those that answer."""
        request = pb.RepositoryIndexRequest(ready=ready)
        return list(self._caller.unary(self._stub.RepositoryIndex, request, pb.RepositoryIndexResponse).models)

    def load_model(self, model: str, *, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Brings a deployment that was unloaded back, and returns once it answers."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        self._caller.unary(self._stub.RepositoryModelLoad, request, pb.RepositoryModelLoadResponse, timeout_s=timeout_s)

    def unload_model(self, model: str) -> None:
        """Takes a deployment out of service, until `load_model`; requests in flight are answered first."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        self._caller.unary(self._stub.RepositoryModelUnload, request, pb.RepositoryModelUnloadResponse)

    def _settle(self, one: _InFlight, timeout_s: float) -> Answer:
        pause_s = 0.0
        try:
            return answer_of(one.result(self._caller.address), one.latency_s())
        except ResourceExhausted as full:
            pause_s = _pause_of(full)
        except Unavailable:
            if not one.was_never_sent():
                raise
        turns = 0
        while True:
            time.sleep(pause_s)
            started = time.perf_counter()
            try:
                response = self._caller.unary(
                    self._stub.ModelInfer, one.request, pb.ModelInferResponse, timeout_s=timeout_s
                )
            except ResourceExhausted as full:
                turns += 1
                if turns == QUEUE_RETRIES:
                    raise
                pause_s = _pause_of(full)
            else:
                return answer_of(response, time.perf_counter() - started)


def _pause_of(full: ResourceExhausted) -> float:
    """When a place may be free. Raises the error where no server has said that: a message that is too large, say, is so
    each time."""
    if full.retry_after_s is None:
        raise full
    return full.retry_after_s


class _InFlight:
    """One request on its way. It gives its place back as soon as its answer is there, whoever waits for it."""

    def __init__(
        self,
        method: Any,
        request: pb.ModelInferRequest,
        headers: Headers,
        timeout_s: float,
        room: threading.BoundedSemaphore,
    ) -> None:
        # None once it is answered: nobody sends it again.
        self.request: pb.ModelInferRequest | None = request
        self._request_id = request.id
        self._room = room
        self._started = self._ended = time.perf_counter()
        self._arrived = threading.Event()
        self._call = method.future(request, timeout=timeout_s, metadata=headers)
        self._call.add_done_callback(self._on_done)

    def _on_done(self, _: Any) -> None:
        self._ended = time.perf_counter()
        if self._call.code() is grpc.StatusCode.OK:
            self.request = None
        self._arrived.set()
        self._room.release()

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
