"""The smallest servicers that show how the client behaves; each fails or answers in one way."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from inference import grpc_service_pb2, grpc_service_pb2_grpc
from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc
from millrace.data.v1 import resources_pb2 as data_resources_pb2
from millrace.train.v1 import resources_pb2, train_service_pb2, train_service_pb2_grpc
from tests.support.grpc_answers import abort, status

Job = resources_pb2.TrainingJob


class Refusing(train_service_pb2_grpc.TrainServiceServicer):
    """Fails every GetTrainingJob with the status it was given; remembers the metadata it was called with."""

    def __init__(self, status: status_pb2.Status) -> None:
        self._status = status
        self.called_with: dict[str, Any] = {}

    def GetTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.called_with = dict(context.invocation_metadata())
        return abort(context, self._status)


class BreakingStreams(train_service_pb2_grpc.TrainServiceServicer):
    """Sends `events` events in all, and breaks each stream after `per_stream` of them."""

    def __init__(self, events: int, per_stream: int, final: Job.State) -> None:
        self._events, self._per_stream, self._final = events, per_stream, final
        self.asked_after: list[int] = []

    def WatchTrainingJob(
        self, request: train_service_pb2.WatchTrainingJobRequest, context: grpc.ServicerContext
    ) -> Iterator[train_service_pb2.WatchTrainingJobResponse]:
        self.asked_after.append(request.after_sequence)
        yield train_service_pb2.WatchTrainingJobResponse(job=Job(name=request.name, state=Job.STATE_RUNNING))
        last = min(request.after_sequence + self._per_stream, self._events)
        for sequence in range(request.after_sequence + 1, last + 1):
            yield train_service_pb2.WatchTrainingJobResponse(event=train_service_pb2.TrainingEvent(sequence=sequence))
        if last < self._events:
            abort(context, status(grpc.StatusCode.UNAVAILABLE, "going away"))
        yield train_service_pb2.WatchTrainingJobResponse(job=Job(name=request.name, state=self._final))


class UnknownJob(train_service_pb2_grpc.TrainServiceServicer):
    """Knows no job."""

    def WatchTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        abort(context, status(grpc.StatusCode.NOT_FOUND, f"{request.name} does not exist"))
        yield  # a generator, as the contract's streams are


class OneVersion(data_service_pb2_grpc.DataServiceServicer, operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    """Streams `table` in messages of `cut` bytes, and fails with `error` after them; imports end as `outcome`."""

    def __init__(self, table: pa.Table, *, cut: int = 100, error: Any = None, outcome: Any = None) -> None:
        self._table, self._cut, self._error, self._outcome = table, cut, error, outcome
        self.waits = 0

    def ReadVersion(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, self._table.schema) as writer:
            writer.write_table(self._table, max_chunksize=7)
        stream = sink.getvalue()
        for at in range(0, len(stream) if self._error is None else len(stream) // 2, self._cut):
            yield data_service_pb2.ReadVersionResponse(arrow_ipc=stream[at : at + self._cut])
        if self._error is not None:
            abort(context, self._error)

    def ImportVersion(self, request: Any, context: grpc.ServicerContext) -> operations_pb2.Operation:
        return operations_pb2.Operation(name="operations/o")

    def WaitOperation(self, request: Any, context: grpc.ServicerContext) -> operations_pb2.Operation:
        self.waits += 1
        running = operations_pb2.Operation(name=request.name)
        running.metadata.Pack(
            data_service_pb2.ImportVersionMetadata(version="datasets/d/versions/v1", rows_read=self.waits)
        )
        return running if self.waits < 3 else self._outcome


class Doubling(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with twice the input, every third request only at the second try; counts what is in flight, and what it
    answered. `hangs_at` waits for `go_on`."""

    def __init__(self, *, full_every: int = 0, hangs_at: int | None = None) -> None:
        self._full_every = full_every
        self._hangs_at = hangs_at
        self.go_on = threading.Event()
        self.answered = 0
        self._lock = threading.Lock()
        self._now = 0
        self._refused: set[str] = set()
        self.max_in_flight = 0

    def ModelInfer(self, request: grpc_service_pb2.ModelInferRequest, context: grpc.ServicerContext) -> Any:
        with self._lock:
            self._now += 1
            self.max_in_flight = max(self.max_in_flight, self._now)
        try:
            return self._answer(request, context)
        finally:
            with self._lock:
                self._now -= 1

    def _answer(self, request: grpc_service_pb2.ModelInferRequest, context: grpc.ServicerContext) -> Any:
        value = int(np.frombuffer(request.raw_input_contents[0], np.int64)[0])
        if value < 0:
            abort(context, status(grpc.StatusCode.INVALID_ARGUMENT, "x is below zero"))
        if self._full_every and value % self._full_every == 0 and request.id not in self._refused:
            self._refused.add(request.id)
            retry = error_details_pb2.RetryInfo(retry_delay=Duration(nanos=1_000_000))
            abort(context, status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry))
        if value == self._hangs_at:
            self.go_on.wait(300)
        with self._lock:
            self.answered += 1
        response = grpc_service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.outputs.add(name="y", datatype="INT64", shape=[1])
        response.raw_output_contents.append(np.int64(2 * value).tobytes())
        response.parameters["training_job"].string_param = "trainingJobs/j"
        return response


class OnePreview(data_service_pb2_grpc.DataServiceServicer):
    """Answers every PreviewVersion with `preview`, but for what is long of its version, which GetVersion has."""

    def __init__(self, preview: data_service_pb2.PreviewVersionResponse) -> None:
        self._preview = preview

    def PreviewVersion(self, request: Any, context: grpc.ServicerContext) -> data_service_pb2.PreviewVersionResponse:
        answer = data_service_pb2.PreviewVersionResponse()
        answer.CopyFrom(self._preview)
        answer.version.ClearField("transform")
        answer.version.ClearField("files")
        for column in answer.version.columns:
            column.ClearField("value_names")
        return answer

    def GetVersion(self, request: Any, context: grpc.ServicerContext) -> data_resources_pb2.DatasetVersion:
        return self._preview.version
