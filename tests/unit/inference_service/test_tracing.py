"""What the frontend records in a trace of its requests, over a real server and a real receiver."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from inference_service.domain.signature import Outputs, Rows
from inference_service.serve.ray_serve import ServeModel
from inference_service.serve.sockets import LocalReplicas, ReplicaLost
from shared import logging_and_tracing
from shared.logging_and_tracing import JsonFormatter
from shared.otlp_tracing import OtlpTracing
from tests.support.grpc_kit import call_error, everything
from tests.support.inference_server import Classifier, ask, inference_server, until
from tests.support.otlp_receiver import OtlpReceiver, Seen, otlp_receiver

CALL = "inference.GRPCInferenceService/ModelInfer"
STREAM = "inference.GRPCInferenceService/ModelStreamInfer"
PARENT = "b" * 16


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """This process exports to it."""
    with otlp_receiver() as one:
        for name, value in one.environ.items():
            monkeypatch.setenv(name, value)
        made = OtlpTracing("test")
        monkeypatch.setattr(logging_and_tracing, "_tracing", made)
        yield one
        made.close()


def traced(letter: str, flags: str = "01") -> dict[str, Any]:
    """Options of a call whose client has a trace of that letter."""
    return {"metadata": (("traceparent", f"00-{letter * 32}-{PARENT}-{flags}"),)}


async def arrived(receiver: OtlpReceiver, trace: str, *names: str) -> dict[str, Seen]:
    """The spans of a trace by name, once those names are there; the server goes on meanwhile."""
    await until(lambda: {*names} <= {one.name for one in receiver.spans(trace)}, f"{names} of {trace}")
    return {one.name: one for one in receiver.spans(trace)}


def ids_of(receiver: OtlpReceiver, *letters: str) -> int:
    """How many spans there are of these traces. On a busy machine an export that was answered late comes twice."""
    return len({one.id for letter in letters for one in receiver.spans(letter * 32)})


async def test_a_request_has_a_span_and_parts_of_it_for_the_queue_and_the_batch(receiver: OtlpReceiver) -> None:
    async with inference_server() as server:
        await server.stub.ModelInfer(ask(1, 2), **traced("a"))
        await until(lambda: ids_of(receiver, "a") == 3, "three spans")
        by_name = await arrived(receiver, "a" * 32, CALL, "queue", "batch")
        call, queue, batch = by_name[CALL], by_name["queue"], by_name["batch"]
        assert (call.kind, call.parent, call.failed) == ("SERVER", PARENT, False)
        assert call.attributes["millrace.model"] == "m"
        assert call.attributes["millrace.model_version"] == "1"
        assert queue.parent == batch.parent == call.id
        assert (batch.links, call.links) == ((call.id,), (batch.id,))
        assert queue.attributes["millrace.rows"] == batch.attributes["millrace.rows"] == 2
        assert call.began_ns <= queue.began_ns <= queue.ended_ns <= batch.ended_ns <= call.ended_ns


async def test_a_batch_is_a_part_of_its_first_request_and_linked_with_all_that_are_recorded(
    receiver: OtlpReceiver,
) -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        first = server.stub.ModelInfer(ask(1), **traced("a"))
        await until(lambda: server.model.at_work == 1, "the model works")
        calls = [first]
        for number, (letter, flags) in enumerate((("b", "00"), ("c", "01"), ("d", "01")), 1):
            calls.append(server.stub.ModelInfer(ask(1), **traced(letter, flags)))
            await until(lambda n=number: sum(one.queued_rows for one in server.models.listed()) == n, "it waits")  # type: ignore[misc]
        server.model.may_work.set()
        for call in calls:
            await call
        assert server.model.batches == [[1], [1, 1, 1]]
        await until(lambda: ids_of(receiver, "c", "d") == 5, "five spans")
        one = await arrived(receiver, "c" * 32, CALL, "queue", "batch")
        other = await arrived(receiver, "d" * 32, CALL, "queue")
        batch = one["batch"]
        assert batch.parent == one[CALL].id
        assert batch.links == (one[CALL].id, other[CALL].id)
        assert (batch.attributes["millrace.rows"], batch.attributes["millrace.requests"]) == (3, 2)
        assert one[CALL].links == other[CALL].links == (batch.id,)
        assert receiver.spans("b" * 32) == []


class Handle:
    """Of Ray Serve: the replicas of `model`, of which the first `deaths` die. It remembers the spans that it got."""

    def __init__(self, model: Classifier, deaths: int = 0) -> None:
        self._model = model
        self._deaths = deaths
        self.traces: list[Any] = []
        self.forward = self

    async def remote(self, rows: Rows) -> Outputs:
        self.traces.append(rows.trace)
        if len(self.traces) <= self._deaths:
            raise ReplicaLost
        return await self._model.forward(rows)


async def test_an_unrecorded_span_is_no_part_of_a_recorded_trace(receiver: OtlpReceiver) -> None:
    model = Classifier()
    handle: Any = Handle(model)

    async with inference_server(model=ServeModel(handle, LocalReplicas(None))) as server:
        model.may_work.clear()
        recorded = server.stub.ModelInfer(ask(*range(16)), **traced("a"))  # two batches
        await until(lambda: model.at_work == 1, "the model works")
        # It goes between them, so its batch is sent by the end of a recorded one whose request still waits.
        urgent = ask(*[99] * 8, parameters={"priority": {"uint64_param": 1}})
        other = server.stub.ModelInfer(urgent, **traced("b", "00"))
        await until(lambda: sum(one.queued_rows for one in server.models.listed()) == 16, "it waits")
        model.may_work.set()
        await recorded
        await other
        assert [batch[0] for batch in model.batches] == [0, 99, 8]
        assert [one is None for one in handle.traces] == [False, True, False]
        await arrived(receiver, "a" * 32, CALL)
        assert [one.name for one in receiver.spans("a" * 32)].count("replica") == 2
        assert receiver.spans("b" * 32) == []


async def test_each_request_of_a_stream_has_a_span_in_that_of_the_stream(receiver: OtlpReceiver) -> None:
    async with inference_server() as server:
        bad = ask(2, model="nobody")
        await everything(server.stub.ModelStreamInfer(iter([ask(1), bad, ask(3)]), **traced("a")))
        stream = (await arrived(receiver, "a" * 32, STREAM))[STREAM]
        requests = [one for one in receiver.spans("a" * 32) if one.name == "request"]
        assert (stream.parent, {one.parent for one in requests}) == (PARENT, {stream.id})
        assert not any(one.failed for one in requests), "that there is no such model is the client's fault"
        waited = {one.parent for one in receiver.spans("a" * 32) if one.name == "queue"}
        assert len(requests) == 3
        assert len(waited) == 2
        assert waited < {one.id for one in requests}


async def test_a_request_that_leaves_the_queue_ends_its_span(receiver: OtlpReceiver) -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        first = server.stub.ModelInfer(ask(1))
        await until(lambda: server.model.at_work == 1, "the model works")
        # A timeout that the server keeps: the client's own may pass before the server has read the request.
        own = {"timeout": {"int64_param": 200_000}}
        late = await call_error(server.stub.ModelInfer(ask(2, parameters=own), **traced("a")))
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        by_name = await arrived(receiver, "a" * 32, CALL, "queue")
        assert by_name["queue"].parent == by_name[CALL].id
        assert by_name[CALL].failed
        assert "batch" not in by_name
        server.model.may_work.set()
        await first


async def test_a_batch_that_is_sent_again_has_a_span_for_each_replica(receiver: OtlpReceiver) -> None:
    handle: Any = Handle(Classifier(), deaths=1)

    async with inference_server(model=ServeModel(handle, LocalReplicas(None))) as server:
        await server.stub.ModelInfer(ask(1), **traced("a"))
        by_name = await arrived(receiver, "a" * 32, CALL, "batch", "replica")
        lost, answered = sorted(
            (one for one in receiver.spans("a" * 32) if one.name == "replica"), key=lambda one: one.began_ns
        )
        assert (lost.failed, answered.failed) == (True, False)
        assert lost.parent == answered.parent == by_name["batch"].id
        assert (answered.kind, answered.attributes["millrace.way"]) == ("CLIENT", "handle")
        assert [one["traceparent"].split("-")[2] for one in handle.traces] == [lost.id, answered.id]


async def test_every_line_of_a_calls_log_names_its_trace(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[dict[str, str]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonFormatter("inference").format(record)))

    logger, handler = logging.getLogger("shared.grpc_server.interceptor"), Lines()
    with caplog.at_level(logging.INFO, logger.name):
        logger.addHandler(handler)
        try:
            async with asyncio.timeout(240), inference_server() as server:
                await server.stub.ModelInfer(ask(1), **traced("a"))
                await server.stub.ModelInfer(ask(1), **traced("b", "00"))
                await until(lambda: len([one for one in lines if CALL in one["message"]]) == 2, "two lines")
                recorded, other = (one for one in lines if CALL in one["message"])
                call = (await arrived(receiver, "a" * 32, CALL))[CALL]
                assert (recorded["trace_id"], recorded["span_id"]) == ("a" * 32, call.id)
                assert recorded["request_id"]
                assert other["trace_id"] == "b" * 32
        finally:
            logger.removeHandler(handler)
