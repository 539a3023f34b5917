"""Many requests of the SDK over one stream, on the inference service's own servicer and batcher."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grpc
import numpy as np
import pytest

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc
from millrace_client import Millrace, connect, errors
from millrace_client.inference import Answer
from tests.support.grpc_answers import abort, serving, status
from tests.support.inference_client import image, with_client
from tests.support.inference_server import Server


def test_a_stream_answers_in_order_and_goes_on_behind_a_request_that_fails() -> None:
    def scenario(_: Server, millrace: Millrace) -> None:
        requests = [image(1), {"picture": np.zeros((1, 4), np.uint8)}, image(250)]
        first, second, third = millrace.inference.infer_stream("m", requests)
        assert isinstance(first, Answer)
        assert isinstance(third, Answer)
        assert [int(one.outputs["label"][0]) for one in (first, third)] == [3, 0]
        assert first.lineage.training_job == "trainingJobs/j"
        assert first.latency_s > 0
        assert isinstance(second, errors.InvalidArgument)
        assert "'picture'" in second.message
        assert second.request_id

    with_client(scenario)


def test_answers_of_a_stream_come_before_its_last_request_is_there() -> None:
    first_came = threading.Event()

    def requests() -> Iterator[dict[str, Any]]:
        yield image(1)
        assert first_came.wait(60)
        yield image(2)

    def scenario(server: Server, millrace: Millrace) -> None:
        answers = millrace.inference.infer_stream("m", requests())
        assert isinstance(next(answers), Answer)
        first_came.set()
        assert len(list(answers)) == 1
        assert server.model.batches == [[1], [2]]

    with_client(scenario)


class Leaving(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Goes away behind the first request of each stream."""

    def __init__(self) -> None:
        self.streams = 0

    def ModelStreamInfer(self, requests: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.streams += 1
        next(requests)
        abort(context, status(grpc.StatusCode.UNAVAILABLE, "going away"))


def test_a_stream_that_breaks_raises_and_is_not_sent_again() -> None:
    servicer = Leaving()

    def register(server: grpc.Server) -> None:
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)

    with (
        serving(register) as address,
        connect(inference=address) as millrace,
        pytest.raises(errors.Unavailable, match="going away"),
    ):
        list(millrace.inference.infer_stream("m", [image(1)]))
    assert servicer.streams == 1


class Ending(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers two requests of each stream, and ends it as if there were no more."""

    def ModelStreamInfer(self, requests: Any, _: grpc.ServicerContext) -> Any:  # noqa: N802
        for request in islice(requests, 2):
            yield pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=request.id))


@pytest.mark.parametrize("sent", [2, 5])
def test_a_stream_that_ends_before_all_requests_are_answered_raises(sent: int) -> None:
    has_ended = threading.Event()

    def requests() -> Iterator[dict[str, Any]]:
        yield from [image(1)] * sent
        assert has_ended.wait(60)
        yield image(6)

    def register(server: grpc.Server) -> None:
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Ending(), server)

    with serving(register) as address, connect(inference=address) as millrace:
        answers = millrace.inference.infer_stream("m", requests())
        assert isinstance(next(answers), Answer)
        assert isinstance(next(answers), Answer)
        with pytest.raises(errors.Unavailable, match="ended the stream before all requests were answered"):
            next(answers)
        has_ended.set()


def test_a_stream_that_cannot_be_answered_raises() -> None:
    with connect(inference="127.0.0.1:1") as millrace, pytest.raises(errors.Unavailable, match="no service answers"):
        list(millrace.inference.infer_stream("m", [image(1)]))


def test_an_error_of_the_iterator_of_requests_is_raised_unchanged() -> None:
    def requests() -> Iterator[dict[str, Any]]:
        yield image(1)
        raise KeyError("no such file")

    def scenario(_: Server, millrace: Millrace) -> None:
        with pytest.raises(KeyError, match="no such file"):
            list(millrace.inference.infer_stream("m", requests()))
        with pytest.raises(TypeError, match="the protocol has no type for complex128"):
            list(millrace.inference.infer_stream("m", [{"image": np.zeros((1, 4), complex)}]))

    with_client(scenario)


def test_a_client_may_stop_reading_a_stream() -> None:
    is_closed = threading.Event()

    def requests() -> Iterator[dict[str, Any]]:
        yield image(1)
        assert is_closed.wait(60)
        for _ in range(500):
            yield image(2)

    def scenario(server: Server, millrace: Millrace) -> None:
        answers = millrace.inference.infer_stream("m", requests())
        assert isinstance(next(answers), Answer)
        answers.close()
        is_closed.set()
        assert millrace.inference.infer("m", image(9)).outputs["label"].tolist() == [0]
        assert server.model.batches == [[1], [9]]

    with_client(scenario)
