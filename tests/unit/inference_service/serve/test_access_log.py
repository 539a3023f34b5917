"""What an operator can filter the log by: which model and version answered, with what status, and how long it took."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from shared.logging_and_tracing import JsonFormatter
from tests.support.grpc_kit import call_error, everything
from tests.support.inference_server import ask, inference_server, until

ACCESS = ("shared.grpc_server.interceptor", "inference_service.serve.infer")
Line = dict[str, Any]


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    """Those of the access log, as they would be written."""
    found: list[Line] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = json.loads(JsonFormatter("inference").format(record))
            if "status" in line:
                found.append(line)

    handler, loggers = Lines(), [logging.getLogger(name) for name in ACCESS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    yield found
    for logger, level in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def said(line: Line, *names: str) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in names)


async def test_a_call_is_logged_with_its_model_version_status_and_time(lines: list[Line]) -> None:
    async with inference_server() as server:
        await server.stub.ModelInfer(ask(1), metadata=(("x-request-id", "r1"),))
        # With a deadline, which the server need not set.
        await server.stub.ModelInfer(ask(1), timeout=60)
        wrong = ask(1)
        wrong.inputs[0].datatype = "FP64"
        await call_error(server.stub.ModelInfer(wrong))
        await call_error(server.stub.ModelInfer(ask(1, model="nobody")))
        await until(lambda: len(lines) == 4, "a line for each")
        assert [said(line, "model", "model_version", "status") for line in lines] == [
            ("m", "1", "OK"),
            ("m", "1", "OK"),
            ("m", "1", "INVALID_ARGUMENT"),
            (None, None, "NOT_FOUND"),
        ]
        assert lines[0]["request_id"] == "r1"
        assert all(line["duration_ms"] > 0 for line in lines)


async def test_each_request_of_a_stream_is_logged_with_its_own_outcome(lines: list[Line]) -> None:
    async with inference_server() as server:
        requests = [ask(1, id="a"), ask(2, id="b", model="nobody"), ask(3, id="c" * 1000)]
        await everything(server.stub.ModelStreamInfer(iter(requests), metadata=(("x-request-id", "r1"),)))
        await until(lambda: len(lines) == 4, "a line for each, and for the stream")
        assert {line["request_id"] for line in lines} == {"r1"}
        of_requests = sorted((line for line in lines if "id" in line), key=lambda line: str(line["id"]))
        assert [said(line, "id", "model", "model_version", "status") for line in of_requests] == [
            ("a", "m", "1", "OK"),
            ("b", None, None, "NOT_FOUND"),
            ("c" * 100, "m", "1", "OK"),
        ]
        assert of_requests[1]["message"].endswith("model 'nobody' does not exist")
        (of_the_stream,) = (line for line in lines if "id" not in line)
        # It may ask for many models.
        assert said(of_the_stream, "model", "status") == (None, "OK")
        assert all(line["duration_ms"] > 0 for line in lines)


async def test_a_request_of_a_stream_that_its_client_leaves_is_logged_as_cancelled(lines: list[Line]) -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        stream = server.stub.ModelStreamInfer(iter([ask(1, id="a")]))
        await until(lambda: server.model.at_work == 1, "the model is at work")
        stream.cancel()
        await until(lambda: len(lines) == 2, "a line for the request, and for the stream")
        assert {said(line, "id", "status") for line in lines} == {("a", "CANCELLED"), (None, "CANCELLED")}
