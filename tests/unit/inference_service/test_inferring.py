"""What a request's parameters and requested outputs do, over a real server."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc
import pytest

from inference import grpc_service_pb2 as oip
from tests.support.grpc_kit import told
from tests.support.inference_server import Server, ask, served, until

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


def test_the_more_urgent_of_what_waits_goes_first_and_what_is_as_urgent_in_its_order() -> None:
    async def scenario(server: Server) -> None:
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

    served(scenario, max_rows=1)


def test_a_request_that_waits_longer_than_its_timeout_never_reaches_the_model() -> None:
    async def scenario(server: Server) -> None:
        server.model.may_work.clear()
        first = asyncio.ensure_future(server.stub.ModelInfer(ask(0)))
        await until(lambda: server.model.at_work == 1, "the model is at work")
        late = await told(server.stub.ModelInfer(ask(1, parameters=parameters(timeout=30_000))))
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        server.model.may_work.set()
        await first
        assert server.model.batches == [[0]]

    served(scenario)


def test_a_timeout_of_zero_is_none() -> None:
    async def scenario(server: Server) -> None:
        assert (await server.stub.ModelInfer(ask(1, parameters=parameters(timeout=0)))).outputs

    served(scenario)


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
def test_a_parameter_that_makes_no_sense_is_refused_by_its_name(fields: dict[str, Any], field: str) -> None:
    async def scenario(server: Server) -> None:
        refusal = await told(server.stub.ModelInfer(ask(1, **fields)))
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.violations[0][0].startswith(field)
        assert server.model.batches == []

    served(scenario)


def test_an_input_in_shared_memory_is_refused_naming_the_tensor() -> None:
    async def scenario(server: Server) -> None:
        request = ask(1)
        request.inputs[0].parameters["shared_memory_region"].string_param = "region"
        refusal = await told(server.stub.ModelInfer(request))
        assert refusal.violations == [
            (
                "inputs[0].parameters.shared_memory_region",
                "'region': tensor 'image': shared memory is not served; send tensors in the messages",
            )
        ]

    served(scenario)


def test_a_parameter_without_a_value_and_those_that_mean_nothing_here_are_ignored() -> None:
    async def scenario(server: Server) -> None:
        request = ask(1, parameters=parameters(sequence_id=7, mine=1))
        request.parameters["priority"].SetInParent()
        assert (await server.stub.ModelInfer(request)).outputs

    served(scenario)


def test_a_classification_is_the_greatest_numbers_of_each_row_beside_the_outputs_themselves() -> None:
    async def scenario(server: Server) -> None:
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

    served(scenario)


def test_no_more_classes_are_told_than_there_are() -> None:
    async def scenario(server: Server) -> None:
        output = oip.ModelInferRequest.InferRequestedOutputTensor(name="logits")
        output.parameters["classification"].int64_param = 2**62
        answer = await server.stub.ModelInfer(ask(0, outputs=[output]))
        assert list(answer.outputs[0].shape) == [1, 4]

    served(scenario)
