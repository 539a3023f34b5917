"""ModelStreamInfer, over a real server."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from inference import grpc_service_pb2 as oip
from inference_service.domain.signature import Outputs, Rows
from inference_service.serve.infer import InFlightBytes
from inference_service.servicer import in_order
from shared.grpc_server import server as grpc_server
from tests.support.garbage import uncollected
from tests.support.grpc_kit import call_error, everything
from tests.support.inference_server import Server, ask, attach, deployment, inference_server, served, until
from tests.support.process_states import stop_process

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def waiting(server: Server) -> int:
    return sum(one.queued_rows for one in server.models.listed())


def being_read() -> int:
    """Streams whose requests the server reads."""
    coroutines: list[Any] = [task.get_coro() for task in asyncio.all_tasks()]
    return sum(one.__qualname__ == "in_order.<locals>.read" for one in coroutines)


def ids(answers: list[Any]) -> list[str]:
    return [answer.infer_response.id for answer in answers]


async def test_answers_come_in_the_order_of_the_requests_with_their_own_ids() -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        # More urgent than what came before it, so it enters the model earlier, and is answered no earlier.
        urgent = ask(2, id="b", parameters={"priority": {"uint64_param": 1}})
        stream = server.stub.ModelStreamInfer(iter([ask(1, id="a"), ask(3, id="c"), urgent]))
        await until(lambda: waiting(server) == 2, "two requests wait for the first")
        server.model.may_work.set()
        answers = await everything(stream)
        assert server.model.batches == [[1], [2, 3]]
        assert ids(answers) == ["a", "c", "b"]
        assert [answer.infer_response.model_version for answer in answers] == ["1"] * 3
        assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers)
        assert not any(answer.error_message for answer in answers)


async def test_a_request_that_fails_is_answered_with_its_error_and_the_stream_goes_on() -> None:
    async with inference_server() as server:
        wrong = ask(2, id="wrong")
        wrong.inputs[0].name = "picture"
        requests = [ask(1, id="a"), ask(2, id="unknown", model="nobody"), wrong, ask(3, id="b")]
        answers = await everything(server.stub.ModelStreamInfer(iter(requests)))
        assert ids(answers) == ["a", "unknown", "wrong", "b"]
        assert answers[1].error_message == "NOT_FOUND: model 'nobody' does not exist"
        assert answers[1].infer_response.model_name == "nobody"
        assert answers[2].error_message.startswith("INVALID_ARGUMENT: inputs[0].name: 'picture'")
        assert [bool(answer.infer_response.outputs) for answer in answers] == [True, False, False, True]


async def test_a_request_that_fails_in_a_way_that_nobody_expected_is_answered_without_its_internals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        async def forward(self, rows: Rows) -> Outputs:
            raise RuntimeError(f"a secret about {list(rows.values)}")

    async with inference_server() as server:
        server.models.put(deployment("broken"))
        attach(server.models, deployment("broken"), Broken())
        requests = [ask(1, id="a"), ask(2, id="b", model="broken"), ask(3, id="c")]
        answers = await everything(server.stub.ModelStreamInfer(iter(requests)))
        assert ids(answers) == ["a", "b", "c"]
        message = answers[1].error_message
        assert message.startswith("INTERNAL: internal error; quote the correlation id ")
        assert message.removeprefix("INTERNAL: internal error; quote the correlation id ") in caplog.text
        assert "a secret" in caplog.text
        assert [answer.error_message for answer in (answers[0], answers[2])] == ["", ""]


async def test_an_answer_comes_while_the_client_has_more_to_ask() -> None:
    async with inference_server() as server:
        stream = server.stub.ModelStreamInfer()
        for first in (1, 2, 3):
            await stream.write(ask(first, id=str(first)))
            assert (await stream.read()).infer_response.id == str(first)
        await stream.done_writing()
        assert await stream.read() is aio.EOF


async def test_bytes_that_are_no_message_end_the_stream_after_the_answers_before_them() -> None:
    async with inference_server() as server:
        stream = server.kit.raw.stream_stream(STREAM)(iter([ask(1).SerializeToString(), b"\xff\xff"]))
        seen: list[bytes] = []

        async def read() -> None:
            async for answer in stream:
                seen.append(answer)  # noqa: PERF401 - the list must be there when it raises

        answer = await call_error(read())
        assert [bool(oip.ModelStreamInferResponse.FromString(one).infer_response.outputs) for one in seen] == [True]
        assert (answer.code, answer.info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


async def to_its_end(stream: Any) -> None:
    while await stream.read() is not aio.EOF:
        pass


async def test_the_streams_deadline_ends_it_and_takes_its_rows_from_the_queue() -> None:
    async with inference_server() as server:
        server.model.may_work.clear()

        async def two_and_no_end() -> AsyncIterator[oip.ModelInferRequest]:
            yield ask(1)
            yield ask(2)
            # Its client does not close it: else it would be over once both requests are told that they are late.
            await asyncio.Event().wait()

        while not server.model.batches:  # on a busy machine a deadline may pass before the server has read a request
            stream = server.stub.ModelStreamInfer(two_and_no_end(), timeout=0.5)
            assert (await call_error(to_its_end(stream))).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: server.model.at_work == 0, "the batch is given up")
        await until(lambda: waiting(server) == 0, "nothing waits")


async def test_a_request_of_a_stream_may_have_a_timeout_of_its_own() -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        late = ask(1, id="late", parameters={"timeout": {"int64_param": 50_000}})
        stream = server.stub.ModelStreamInfer()
        await stream.write(late)
        answer = await stream.read()
        assert answer.error_message.startswith("DEADLINE_EXCEEDED: ")
        server.model.may_work.set()
        await stream.write(ask(2, id="next"))
        assert not (await stream.read()).error_message
        stream.cancel()


async def test_a_thousand_streams_whose_client_leaves_cost_nothing_lasting() -> None:
    async with inference_server() as server:
        # One finished stream first: what a server keeps for good is there afterwards.
        await everything(server.stub.ModelStreamInfer(iter([ask(1)])))
        before = len(asyncio.all_tasks())
        server.model.may_work.clear()
        async with aio.insecure_channel(server.kit.address) as channel:
            open_stream = channel.stream_stream(
                STREAM,
                request_serializer=oip.ModelInferRequest.SerializeToString,
                response_deserializer=oip.ModelStreamInferResponse.FromString,
            )
            streams = [open_stream() for _ in range(1000)]
            await asyncio.gather(*(stream.write(ask(1)) for stream in streams[:100]))
            await until(lambda: being_read() == 1000, "all streams are open")
            await until(lambda: waiting(server) == 99, "requests wait")
        await until(lambda: len(asyncio.all_tasks()) <= before, f"at most {before} tasks are left")
        assert (being_read(), waiting(server), server.model.at_work) == (0, 0, 0)
        server.model.may_work.set()
        assert (await everything(server.stub.ModelStreamInfer(iter([ask(1, id="a")]))))[0].infer_response.id == "a"


HANGING_CLIENT = """
import sys, time
import grpc
channel = grpc.insecure_channel(sys.argv[1])
stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter(lambda: time.sleep(3600), 0))
time.sleep(3600)
"""


async def test_the_stream_of_a_client_that_no_longer_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "KEEPALIVE_EVERY_S", 1.0)
    monkeypatch.setattr(grpc_server, "KEEPALIVE_TIMEOUT_S", 3.0)  # one that lives answers sooner on a busy machine

    async with inference_server() as server:
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", HANGING_CLIENT, server.kit.address)
        try:
            await until(lambda: being_read() == 1, "its stream is open")
            # Its kernel still answers for it, as that of a machine behind a proxy would; it itself does not.
            await asyncio.to_thread(stop_process, client.pid)
            await until(lambda: being_read() == 0, "its stream is given up")
        finally:
            client.kill()
            await client.wait()


async def same(number: int) -> int:
    return number


async def endless(read: list[int]) -> AsyncIterator[int]:
    while True:
        read.append(len(read))
        yield read[-1]
        await asyncio.sleep(0)


async def test_a_client_that_takes_no_answers_is_not_read_any_further() -> None:
    read: list[int] = []

    answers = in_order(endless(read), same, most=3)
    assert [await anext(answers) for _ in range(2)] == [0, 1]
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(read) <= 2 + 3 + 1
    await answers.aclose()


async def test_answers_that_nobody_takes_count_like_requests() -> None:
    read: list[int] = []

    answers = in_order(endless(read), same, most=1000, answer_bytes=lambda _: 40, max_bytes=100)
    assert [await anext(answers) for _ in range(2)] == [0, 1]
    for _ in range(200):
        await asyncio.sleep(0)
    # What was read while the first answers were on their way, and no more.
    assert len(read) <= 10
    before = len(read)
    assert await anext(answers) == 2
    assert [await anext(answers) for _ in range(before)] == list(range(3, before + 3))
    await answers.aclose()


async def test_the_work_of_a_closed_stream_has_ended() -> None:
    ended: list[int] = []

    async def answer(number: int) -> int:
        try:
            await asyncio.sleep(0 if number == 0 else 3600)
        finally:
            ended.append(number)
        return number

    answers = in_order(endless([]), answer, most=3)
    assert await anext(answers) == 0
    await asyncio.sleep(0)
    await answers.aclose()
    assert sorted(ended)[:2] == [0, 1]
    assert len(asyncio.all_tasks()) == 1


async def test_an_error_of_reading_comes_after_the_answers_before_it() -> None:
    async def two() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise RuntimeError("broken")

    async def twice(number: int) -> int:
        return 2 * number

    answers = in_order(two(), twice, most=8)
    assert [await anext(answers) for _ in range(2)] == [2, 4]
    with pytest.raises(RuntimeError, match="broken"):
        await anext(answers)


async def test_no_other_request_is_read_while_those_that_are_worked_on_are_large() -> None:
    read: list[int] = []

    answers = in_order(endless(read), same, most=64, size_bytes=lambda _: 10, max_bytes=25)
    for taken in range(1, 4):
        assert await anext(answers) == taken - 1
        for _ in range(50):
            await asyncio.sleep(0)
        # Three are held, since the one that was taken counts until the next is asked for.
        assert len(read) == taken + 2
    await answers.aclose()


async def test_one_request_that_is_larger_than_all_may_be_is_answered() -> None:
    answers = in_order(endless([]), same, most=64, size_bytes=lambda _: 10, max_bytes=1)
    assert [await anext(answers) for _ in range(3)] == [0, 1, 2]
    await answers.aclose()


async def test_a_stream_of_large_requests_is_read_only_as_far_as_they_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference_service.servicer.STREAM_BYTES_AT_ONCE", 3 * ask(0).ByteSize())

    async with inference_server() as server:
        server.model.may_work.clear()
        stream = server.stub.ModelStreamInfer()
        for number in range(9):
            await stream.write(ask(number))
        await until(lambda: waiting(server) == 2, "two wait for the first")
        await asyncio.sleep(0.1)
        assert waiting(server) == 2
        server.model.may_work.set()
        await stream.done_writing()
        assert len(await everything(stream)) == 9


def test_a_stream_that_is_idle_keeps_none_of_its_requests() -> None:
    arrays: list[weakref.ref[Any]] = []

    class Noting:
        async def forward(self, rows: Rows) -> Outputs:
            (values,) = rows.values.values()
            arrays.append(weakref.ref(values))
            return Outputs([values.astype(np.float32), np.zeros(len(values), np.int64)])

    async def scenario(server: Server) -> None:
        stream = server.stub.ModelStreamInfer()
        for number in range(3):
            await stream.write(ask(number))
            await stream.read()
        await until(lambda: not any(array() is not None for array in arrays), "none is kept")
        assert len(arrays) == 3
        stream.cancel()

    with uncollected():
        served(scenario, model=Noting())


async def test_streams_of_large_requests_together_hold_no_more_than_the_process_may() -> None:
    async with inference_server(held=InFlightBytes(8)) as server:
        server.model.may_work.clear()
        stream = server.stub.ModelStreamInfer(iter([ask(number, id=str(number)) for number in range(3)]))
        await until(lambda: server.model.at_work == 1, "the model is at work")
        await until(lambda: waiting(server) == 1, "the second waits")
        await asyncio.sleep(0.1)
        server.model.may_work.set()
        answers = await everything(stream)
        assert ids(answers) == ["0", "1", "2"]
        assert answers[2].error_message.startswith("RESOURCE_EXHAUSTED: requests of 8 bytes wait already")
        assert [answer.error_message for answer in answers[:2]] == ["", ""]
