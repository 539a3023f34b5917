"""What a request's parameters and requested outputs do, over a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from inference import grpc_service_pb2 as oip
from inference import model_config_pb2
from inference_service.domain.signature import Outputs, Rows, TensorSpec
from tests.support.grpc_kit import call_error, everything
from tests.support.inference_server import IMAGES, Server, ask, deployment, inference_server, served, until

REGION = {"shared_memory_region": {"string_param": "r"}}


def parameters(**values: int) -> dict[str, Any]:
    return {name: {"int64_param": value} for name, value in values.items()}


def waits(server: Server, rows: int) -> bool:
    return [one.queued_rows for one in server.models.listed()] == [rows]


def raw_strings(raw: bytes) -> list[str]:
    strings = []
    while raw:
        length = int.from_bytes(raw[:4], "little")
        strings.append(raw[4 : 4 + length].decode())
        raw = raw[4 + length :]
    return strings


async def test_the_more_urgent_of_what_waits_goes_first_and_what_is_as_urgent_in_its_order() -> None:
    async with inference_server(max_rows=1) as server:
        server.model.may_work.clear()
        calls = [asyncio.ensure_future(server.stub.ModelInfer(ask(0)))]
        await until(lambda: server.model.at_work == 1, "the model is at work")
        for number, priority in enumerate([10, 0, 1, 5, 11, 2, 1], 1):
            request = ask(number, parameters=parameters(priority=priority))
            calls.append(asyncio.ensure_future(server.stub.ModelInfer(request)))
            await until(partial(waits, server, number), "it waits")
        server.model.may_work.set()
        await asyncio.gather(*calls)
        # 0 is the default, 5, and so is what is above the last level.
        assert [batch[0] for batch in server.model.batches] == [0, 3, 7, 6, 2, 4, 5, 1]


async def test_a_request_that_waits_longer_than_its_timeout_never_reaches_the_model() -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        first = asyncio.ensure_future(server.stub.ModelInfer(ask(0)))
        await until(lambda: server.model.at_work == 1, "the model is at work")
        late = await call_error(server.stub.ModelInfer(ask(1, parameters=parameters(timeout=30_000))))
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        server.model.may_work.set()
        await first
        assert server.model.batches == [[0]]


async def test_a_timeout_of_zero_is_none() -> None:
    async with inference_server() as server:
        assert (await server.stub.ModelInfer(ask(1, parameters=parameters(timeout=0)))).outputs


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"parameters": parameters(priority=-1)}, "parameters.priority"),
        ({"parameters": parameters(timeout=-1)}, "parameters.timeout"),
        ({"parameters": {"timeout": {"string_param": "1"}}}, "parameters.timeout"),
        ({"parameters": {"priority": {"bool_param": True}}}, "parameters.priority"),
        ({"outputs": [{"name": "label", "parameters": parameters(classification=1)}]}, "outputs[0]"),
        ({"outputs": [{"name": "logits", "parameters": parameters(classification=-1)}]}, "outputs[0]"),
        ({"outputs": [{"name": "logits", "parameters": REGION}]}, "outputs[0].parameters.shared_memory_region"),
    ],
)
async def test_a_parameter_that_makes_no_sense_is_refused_by_its_name(fields: dict[str, Any], field: str) -> None:
    async with inference_server() as server:
        refusal = await call_error(server.stub.ModelInfer(ask(1, **fields)))
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.violations[0][0].startswith(field)
        assert server.model.batches == []


async def test_an_input_in_shared_memory_is_refused_naming_the_tensor() -> None:
    async with inference_server() as server:
        request = ask(1)
        request.inputs[0].parameters["shared_memory_region"].string_param = "region"
        refusal = await call_error(server.stub.ModelInfer(request))
        assert refusal.violations == [
            (
                "inputs[0].parameters.shared_memory_region",
                "'region': tensor 'image': shared memory is not served; send tensors in the messages",
            )
        ]


async def test_a_parameter_without_a_value_and_those_that_mean_nothing_here_are_ignored() -> None:
    async with inference_server() as server:
        request = ask(1, parameters=parameters(sequence_id=7, mine=1))
        request.parameters["priority"].SetInParent()
        assert (await server.stub.ModelInfer(request)).outputs


async def test_a_classification_is_the_greatest_numbers_of_each_row_beside_the_outputs_themselves() -> None:
    async with inference_server() as server:
        asked: list[Any] = [
            {"name": "label"},
            {"name": "logits", "parameters": parameters(classification=2)},
        ]
        answer = await server.stub.ModelInfer(ask(9, 0, outputs=asked))
        label, logits = answer.outputs
        assert (label.datatype, list(label.shape)) == ("INT64", [2])
        assert (logits.datatype, list(logits.shape)) == ("BYTES", [2, 2])
        strings = ["9.000000:0", "3.000000:3", "3.000000:3", "2.000000:2"]
        assert raw_strings(answer.raw_output_contents[1]) == strings
        typed = ask(9, 0, outputs=asked)
        typed.inputs[0].contents.uint_contents.extend(typed.raw_input_contents[0])
        del typed.raw_input_contents[:]
        answer = await server.stub.ModelInfer(typed)
        assert [one.decode() for one in answer.outputs[1].contents.bytes_contents] == strings


async def test_no_more_classes_are_reported_than_there_are() -> None:
    async with inference_server() as server:
        output = oip.ModelInferRequest.InferRequestedOutputTensor(name="logits")
        output.parameters["classification"].int64_param = 2**62
        answer = await server.stub.ModelInfer(ask(0, outputs=[output]))
        assert list(answer.outputs[0].shape) == [1, 4]


NAMED = replace(
    IMAGES,
    outputs=(
        TensorSpec("logits", "FP32", (-1, 4), class_names=("zero", "einß", "two")),
        TensorSpec("label", "INT64", (-1,)),
    ),
)


def name_wanted(*names: str, **parameters_: Any) -> list[Any]:
    return [{"name": name, **parameters_} for name in names]


@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
async def test_names_of_labels_come_where_they_are_asked_for_and_only_there(typed: bool) -> None:
    def rows(**fields: Any) -> oip.ModelInferRequest:
        # The greatest numbers are the second, the first, and the last, whose class has no name.
        values = np.array([[1, 9, 2, 3], [9, 1, 2, 3], [0, 1, 2, 9]], np.uint8)
        request = oip.ModelInferRequest(model_name="m", **fields)
        tensor = request.inputs.add(name="image", datatype="UINT8", shape=values.shape)
        if typed:
            tensor.contents.uint_contents.extend(values.ravel().tolist())
        else:
            request.raw_input_contents.append(values.tobytes())
        return request

    async with inference_server(deployment("m", NAMED)) as server:
        everything_else = await server.stub.ModelInfer(rows())
        assert [one.name for one in everything_else.outputs] == ["logits", "label"]
        answer = await server.stub.ModelInfer(rows(outputs=name_wanted("label_name", "label")))
        assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [
            ("label_name", "BYTES", [3]),
            ("label", "INT64", [3]),
        ]
        if typed:
            assert [one.decode() for one in answer.outputs[0].contents.bytes_contents] == ["einß", "zero", ""]
            assert list(answer.outputs[1].contents.int64_contents) == [1, 0, 3]
        else:
            assert raw_strings(answer.raw_output_contents[0]) == ["einß", "zero", ""]
        alone = await server.stub.ModelInfer(rows(outputs=name_wanted("label_name")))
        assert [one.name for one in alone.outputs] == ["label_name"]
        wanted = name_wanted("label_name", parameters=parameters(classification=1))
        refusal = await call_error(server.stub.ModelInfer(rows(outputs=wanted)))
        assert refusal.violations[0][0] == "outputs[0].parameters.classification"


def test_names_of_labels_are_in_metadata_and_configuration_of_a_model_whose_classes_have_some() -> None:
    async def outputs_of(server: Server) -> list[Any]:
        metadata = await server.stub.ModelMetadata(oip.ModelMetadataRequest(name="m"))
        config = (await server.stub.ModelConfig(oip.ModelConfigRequest(name="m"))).config
        assert [one.name for one in config.output] == [one.name for one in metadata.outputs]
        return [(one.name, one.datatype, list(one.shape)) for one in metadata.outputs]

    async def with_names(server: Server) -> None:
        assert (await outputs_of(server))[-1] == ("label_name", "BYTES", [-1])
        config = (await server.stub.ModelConfig(oip.ModelConfigRequest(name="m"))).config
        assert config.output[-1].data_type == model_config_pb2.TYPE_STRING

    async def without(server: Server) -> None:
        assert [name for name, *_ in await outputs_of(server)] == ["logits", "label"]
        refusal = await call_error(server.stub.ModelInfer(ask(1, outputs=name_wanted("label_name"))))
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.violations[0][0] == "outputs[0].name"

    served(with_names, deployment("m", NAMED))
    served(without)


async def test_names_that_no_message_has_room_for_are_refused_before_the_model_sees_the_request() -> None:
    long = replace(
        IMAGES,
        outputs=(
            TensorSpec("logits", "FP32", (-1, 4), class_names=("x" * 40_000_000, "y")),
            TensorSpec("label", "INT64", (-1,)),
        ),
    )

    async with inference_server(deployment("m", long)) as server:
        assert (await server.stub.ModelInfer(ask(1, 2))).outputs
        server.model.batches.clear()
        refusal = await call_error(server.stub.ModelInfer(ask(1, 2, outputs=name_wanted("label_name"))))
        assert refusal.violations[0][0] == "outputs"
        assert server.model.batches == []


def ended(server: Server) -> tuple[dict[str, int], int]:
    """How many of the only version's requests ended how, and how many of them a rollout takes for its fault."""
    (one,) = server.models.listed()
    by_status = {status: histogram.count for status, histogram in one.statistics.requests.items()}
    return by_status, one.statistics.recent.seen(time.time(), 60.0).faults


async def test_a_call_without_a_deadline_that_a_version_never_answers_counts_as_late() -> None:
    async with inference_server(default_deadline_s=0.1) as server:
        server.model.may_work.clear()
        assert (await call_error(server.stub.ModelInfer(ask(1)))).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: server.model.at_work == 0, "the batch is given up")
        assert ended(server) == ({"DEADLINE_EXCEEDED": 1}, 1)


@pytest.mark.parametrize("timeout_s", [0.5, 2.001])
async def test_a_call_whose_deadline_passes_counts_as_late_and_one_that_is_cancelled_does_not(timeout_s: float) -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        calls = 0
        while not server.model.batches:  # on a busy machine a deadline may pass before the server has read the call
            calls += 1
            late = await call_error(server.stub.ModelInfer(ask(1), timeout=timeout_s))
            assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: server.model.at_work == 0, "the batch is given up")
        by_status, faults = ended(server)
        assert by_status.keys() == {"DEADLINE_EXCEEDED"}
        assert 1 <= faults <= by_status["DEADLINE_EXCEEDED"] <= calls
        call = server.stub.ModelInfer(ask(1), timeout=60)
        await until(lambda: server.model.at_work == 1, "the model is at work")
        call.cancel()
        await until(lambda: server.model.at_work == 0, "the batch is given up")
        assert ended(server) == ({**by_status, "CANCELLED": 1}, faults)


@pytest.mark.parametrize("timeout_s", [None, 1.0])
async def test_a_request_of_a_stream_that_a_version_never_answers_counts_as_late(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    if timeout_s is None:
        monkeypatch.setattr("inference_service.servicer.STREAM_REQUEST_TIMEOUT_S", 0.1)

    async with inference_server() as server:
        server.model.may_work.clear()

        async def one_and_no_end() -> AsyncIterator[oip.ModelInferRequest]:
            yield ask(1)
            await asyncio.Event().wait()

        calls = 0
        while not server.model.batches:  # on a busy machine a deadline may pass before the server has read the request
            calls += 1
            stream = server.stub.ModelStreamInfer(one_and_no_end(), timeout=timeout_s)
            await until(lambda one=stream: bool(server.model.batches) or one.done(), "the model is at work")  # type: ignore[misc]
        await until(lambda: server.model.at_work == 0, "the batch is given up")
        by_status, faults = ended(server)
        assert by_status.keys() == {"DEADLINE_EXCEEDED"}
        assert 1 <= faults <= by_status["DEADLINE_EXCEEDED"] <= calls
        stream.cancel()


WIDTH = 1_000_000
WIDE = replace(IMAGES, outputs=(TensorSpec("logits", "FP32", (-1, WIDTH)), TensorSpec("label", "INT64", (-1,))))


class Wide:
    def __init__(self) -> None:
        self.batches: list[int] = []

    async def forward(self, rows: Rows) -> Outputs:
        self.batches.append(len(rows))
        logits = np.arange(WIDTH, dtype=np.float32)
        return Outputs([np.broadcast_to(logits, (len(rows), WIDTH)), np.zeros(len(rows), np.int64)])


async def test_an_answer_that_no_message_has_room_for_is_refused_before_the_model_sees_the_request() -> None:
    model = Wide()

    async with inference_server(deployment(signature=WIDE), model=model, max_rows=20) as server:
        refusal = await call_error(server.stub.ModelInfer(ask(*range(17))))
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.violations[0][0] == "outputs"
        assert "send at most 16 rows, or ask for fewer outputs" in refusal.message
        assert model.batches == []
        assert len((await server.stub.ModelInfer(ask(*range(17), outputs=[{"name": "label"}]))).outputs) == 1
        answer = await server.stub.ModelInfer(ask(*range(16)))
        assert len(answer.raw_output_contents[0]) == 16 * WIDTH * 4
        (streamed,) = await everything(server.stub.ModelStreamInfer(iter([ask(*range(16))])))
        assert len(streamed.infer_response.raw_output_contents[0]) == 16 * WIDTH * 4
        assert model.batches == [17, 16, 16]
        assert ended(server)[0] == {"INVALID_ARGUMENT": 1, "OK": 3}


async def test_a_large_answer_in_typed_contents_is_whole() -> None:
    async with inference_server(deployment(signature=WIDE), model=Wide()) as server:
        typed = ask(1)
        typed.inputs[0].contents.uint_contents.extend(typed.raw_input_contents[0])
        del typed.raw_input_contents[:]
        logits, label = (await server.stub.ModelInfer(typed)).outputs
        assert np.array_equal(logits.contents.fp32_contents, np.arange(WIDTH, dtype=np.float32))
        assert list(label.contents.int64_contents) == [0]


async def test_a_large_answer_waits_for_no_thread_that_waits_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_service.serve.infer.CONVERTED_AT_ONCE", 0)

    async with inference_server() as server:
        unresponsive = threading.Event()
        with ThreadPoolExecutor(1) as only:
            asyncio.get_running_loop().set_default_executor(only)
            waits = asyncio.create_task(asyncio.to_thread(unresponsive.wait, 120))
            try:
                await server.stub.ModelInfer(ask(1), timeout=60)
            finally:
                unresponsive.set()
                await waits


async def test_classifications_that_no_message_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_service.serve.infer.CLASSIFIED_AT_ONCE", 0)
    monkeypatch.setattr("inference_service.serve.infer.MAX_ANSWER_BYTES", 1000)

    async with inference_server() as server:
        asked: Any = {"name": "logits", "parameters": parameters(classification=4)}
        assert (await server.stub.ModelInfer(ask(1, outputs=[asked]))).outputs
        refusal = await call_error(server.stub.ModelInfer(ask(*range(50), outputs=[asked])))
        assert (refusal.code, refusal.violations[0][0]) == (grpc.StatusCode.INVALID_ARGUMENT, "outputs")
        assert ended(server)[0] == {"OK": 1, "INVALID_ARGUMENT": 1}
