"""Whatever a request holds, it is answered or refused by a documented status that names what is wrong, and the server
goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from inference import grpc_service_pb2 as oip
from inference_service.domain.deployment import State
from inference_service.domain.signature import Outputs, Rows, TensorSpec
from tests.support.cpu_time import cpu_at_most
from tests.support.grpc_kit import call_error, everything
from tests.support.inference_server import deployment, inference_server
from tests.support.table_model import SIGNATURE, TABLE, Zeros, request, still_serves
from tests.support.wire_bytes import inside

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def changed(index: int, raw: bytes | None = None, **fields: Any) -> oip.ModelInferRequest:
    """The request with some fields of one tensor replaced."""
    made = request()
    tensor = made.inputs[index]
    for name, value in fields.items():
        if name == "shape":
            tensor.shape[:] = value
        else:
            setattr(tensor, name, value)
    if raw is not None:
        made.raw_input_contents[index] = raw
    return made


def typed(index: int, field: str, values: list[Any]) -> oip.ModelInferRequest:
    """The request in typed contents, one of them with `values` in `field`; FP16 has none, so its column is not sent."""
    made = request()
    del made.raw_input_contents[:], made.inputs[4]
    made.inputs[0].contents.bytes_contents.extend([b"a", b"bc"])
    made.inputs[1].contents.fp32_contents.extend([1, 2])
    made.inputs[2].contents.int64_contents.extend(range(8))
    made.inputs[3].contents.int_contents.extend([1, 2])
    made.inputs[index].contents.Clear()
    getattr(made.inputs[index].contents, field).extend(values)
    half = made.inputs.add(name="half", datatype="FP16", shape=[2])
    half.contents.fp32_contents.extend([1, 2])
    return made


def without(index: int) -> oip.ModelInferRequest:
    made = request()
    del made.inputs[index], made.raw_input_contents[index]
    return made


def with_raw(count: int) -> oip.ModelInferRequest:
    made = request()
    made.raw_input_contents[:] = [*made.raw_input_contents, b""][:count]
    return made


def both() -> oip.ModelInferRequest:
    made = request()
    made.inputs[1].contents.fp32_contents.extend([1, 2])
    return made


def flagged(**fields: Any) -> oip.ModelInferRequest:
    made = request()
    tensor = {"name": "age.null", "datatype": "BOOL", "shape": [2], **fields}
    made.inputs.add(**{name: value for name, value in tensor.items() if name != "raw"})
    made.raw_input_contents.append(fields.get("raw", b"\0\1"))
    return made


def parameters(count: int, tag: bytes = b"\x22") -> bytes:
    """So many, each with a name of its own, and `true`."""
    return b"".join(inside(tag, inside(b"\x0a", str(number).encode()) + b"\x12\x02\x08\x01") for number in range(count))


# What is sent, the field that is refused, and the tensor that the error names.
BAD: list[tuple[str, oip.ModelInferRequest, str, str]] = [
    ("too few bytes", changed(1, raw=b"\0" * 7), "inputs[1].raw_input_contents", "'age'"),
    ("too many bytes", changed(2, raw=b"\0" * 65), "inputs[2].raw_input_contents", "'grid'"),
    ("no bytes", changed(3, raw=b""), "inputs[3].raw_input_contents", "'small'"),
    ("a negative dimension", changed(1, shape=[-2]), "inputs[1].shape", "'age'"),
    ("the free dimension of the metadata", changed(1, shape=[-1]), "inputs[1].shape", "'age'"),
    ("the least of all dimensions", changed(1, shape=[-(2**63)]), "inputs[1].shape", "'age'"),
    ("dimensions that overflow", changed(2, shape=[2**62, 2, 2]), "inputs[2].shape", "'grid'"),
    ("dimensions that overflow to nothing", changed(2, shape=[2**63 - 1, 2**63 - 1, 0]), "inputs[2].shape", "'grid'"),
    ("no dimensions", changed(1, shape=[]), "inputs[1].shape", "'age'"),
    ("a thousand dimensions", changed(1, shape=[1] * 1000), "inputs[1].shape", "'age'"),
    ("no rows", changed(1, shape=[0], raw=b""), "inputs[1].shape", "'age'"),
    ("too many rows", changed(1, shape=[101], raw=b"\0" * 404), "inputs[1].shape", "'age'"),
    ("other rows than the first tensor", changed(1, shape=[1], raw=b"\0" * 4), "inputs[1].shape", "'age'"),
    ("an unknown datatype", changed(1, datatype="FP33"), "inputs[1].datatype", "'age'"),
    ("a datatype in small letters", changed(1, datatype="fp32"), "inputs[1].datatype", "'age'"),
    ("no datatype", changed(1, datatype=""), "inputs[1].datatype", "'age'"),
    ("another datatype", changed(1, datatype="FP64"), "inputs[1].datatype", "'age'"),
    ("a wrong name", changed(1, name="ages"), "inputs[1].name", "'age'"),
    ("no name", changed(1, name=""), "inputs[1].name", "'age'"),
    ("a name of a megabyte", changed(1, name="x" * 2**20), "inputs[1].name", "'age'"),
    ("a name twice", changed(2, name="age"), "inputs[2].name", "'age'"),
    ("a missing input", without(2), "inputs", "'grid'"),
    ("no inputs", oip.ModelInferRequest(model_name="t"), "inputs", "'text'"),
    ("raw contents without inputs", oip.ModelInferRequest(model_name="t", raw_input_contents=[b""]), "raw_input", ""),
    ("fewer raw contents than inputs", with_raw(4), "raw_input_contents", ""),
    ("more raw contents than inputs", with_raw(6), "raw_input_contents", ""),
    ("both contents", both(), "inputs[1].contents", "'age'"),
    ("a string that reaches beyond the end", changed(0, raw=b"\xff\xff\xff\xffa"), "inputs[0].raw_input", "'text'"),
    ("a string whose length is cut", changed(0, raw=b"\1\0\0\0a\1\0"), "inputs[0].raw_input", "'text'"),
    ("too few strings", changed(0, raw=b"\1\0\0\0a"), "inputs[0].raw_input", "'text'"),
    ("too many strings", changed(0, raw=b"\0\0\0\0" * 3), "inputs[0].raw_input", "'text'"),
    ("typed contents of another kind", typed(1, "fp64_contents", [1, 2]), "inputs[1].contents", "'age'"),
    ("too few typed numbers", typed(1, "fp32_contents", [1]), "inputs[1].contents.fp32_contents", "'age'"),
    ("a typed number beyond its type", typed(3, "int_contents", [1, 128]), "inputs[3].contents.int", "'small'"),
    ("typed numbers for a type that has none", typed(1, "fp32_contents", [1, 2]), "inputs[4].contents", "'half'"),
    ("flags of nulls of another type", flagged(datatype="UINT8"), "inputs[5].datatype", "'age.null'"),
    ("a flag that is neither 0 nor 1", flagged(raw=b"\0\2"), "inputs[5].raw_input_contents", "'age.null'"),
    ("flags of a tensor that has no nulls", flagged(name="grid.null"), "inputs[5].name", "'grid'"),
    (
        "an output that there is not",
        oip.ModelInferRequest(model_name="t", outputs=[{"name": "y"}]),
        "outputs[0]",
        "'y'",
    ),
]


@pytest.fixture(autouse=True)
def no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> Any:
    with caplog.at_level(logging.ERROR):
        yield
    assert "unexpected exception" not in caplog.text


async def test_every_malformed_tensor_is_refused_by_its_name_and_field() -> None:
    async with inference_server(TABLE, model=Zeros()) as server:
        await still_serves(server)
        for what, bad, field, tensor in BAD:
            refusal = await call_error(server.stub.ModelInfer(bad))
            assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT, what
            assert refusal.violations[0][0].startswith(field), what
            assert tensor in refusal.message, what
            assert len(refusal.message) < 1500, what
        await still_serves(server)


async def test_a_model_that_is_unknown_or_not_ready_is_refused_by_its_state() -> None:
    async with inference_server(TABLE, model=Zeros()) as server:
        loading = deployment("loading", signature=None, state=State.LOADING)
        lost = deployment("lost", SIGNATURE)  # READY, and its replicas are not back yet
        failed = deployment("failed", signature=None, state=State.FAILED, error={"message": "no weights"})
        going, away = deployment("going", state=State.DELETING), deployment("away", state=State.UNLOADED)
        server.models.replace([TABLE, loading, failed, going, away, lost])
        for name, version, code in (
            ("loading", "", grpc.StatusCode.UNAVAILABLE),
            ("failed", "", grpc.StatusCode.FAILED_PRECONDITION),
            ("away", "", grpc.StatusCode.FAILED_PRECONDITION),
            ("going", "", grpc.StatusCode.UNAVAILABLE),
            ("lost", "", grpc.StatusCode.UNAVAILABLE),
            ("x" * 2**20, "", grpc.StatusCode.NOT_FOUND),
            ("deployments/t", "", grpc.StatusCode.NOT_FOUND),
            ("t", "2", grpc.StatusCode.NOT_FOUND),
            ("t", "x" * 2**20, grpc.StatusCode.NOT_FOUND),
            ("", "", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            bad = request()
            bad.model_name, bad.model_version = name, version
            refusal = await call_error(server.stub.ModelInfer(bad))
            assert refusal.code is code, name[:20]
            assert (name or "model_name")[:20] in refusal.message, name[:20]
            assert version[:20] in refusal.message, name[:20]
            assert len(refusal.message) < 1500, name[:20]
        await still_serves(server)


async def test_a_message_over_the_limit_and_a_flood_of_metadata_are_refused_and_the_server_goes_on() -> None:
    async with inference_server(TABLE, model=Zeros()) as server:
        large = changed(1, raw=b"\0" * (65 * 2**20))
        assert (await call_error(server.stub.ModelInfer(large))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        flood = tuple((f"x-{number}", "y" * 1000) for number in range(200))
        refusal = await call_error(server.stub.ModelInfer(request(), metadata=flood))
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        for requests, metadata in (([large], ()), ([], flood)):
            refusal = await call_error(everything(server.stub.ModelStreamInfer(iter(requests), metadata=metadata)))
            assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await still_serves(server)


# What is sent beside a good request, the field that is refused, and what the error says of how many there are.
MANY: list[tuple[str, bytes, str, str]] = [
    ("inputs", b"\x2a\x00" * 2000, "inputs", "2005 entries"),
    ("raw contents", b"\x3a\x00" * 2000, "raw_input_contents", "2005 entries"),
    ("outputs", b"\x32\x00" * 2000, "outputs", "2000 entries"),
    ("parameters", parameters(2000), "parameters", "2000 entries"),
    ("an input's parameters", inside(b"\x2a", parameters(2000, b"\x22")), "inputs[5].parameters", "2000 entries"),
    ("an output's parameters", inside(b"\x32", parameters(2000, b"\x12")), "outputs[0].parameters", "2000 entries"),
    ("dimensions", inside(b"\x2a", inside(b"\x1a", b"\x01" * 1_000_000)), "raw_input_contents", "5 entries"),
]
# Refused before they are parsed.
FAR_TOO_MANY: list[tuple[str, bytes, str]] = [
    ("inputs", b"\x2a\x00" * 1_000_000, "inputs"),
    ("raw contents", b"\x3a\x00" * 1_000_000, "raw_input_contents"),
    ("an input's parameters", inside(b"\x2a", parameters(1, b"\x22") * 500_000), "inputs.parameters"),
]


async def test_too_many_of_anything_are_refused_by_their_number_in_streams_too() -> None:
    async with inference_server(TABLE, model=Zeros()) as server:
        good = request().SerializeToString()
        for what, more, field, count in MANY:
            refusal = await call_error(server.kit.raw.unary_unary(INFER)(good + more))
            assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT, what
            assert refusal.violations[0][0] == field, what
            assert count in refusal.message, what
            stream = server.kit.raw.stream_stream(STREAM, None, oip.ModelStreamInferResponse.FromString)
            bad, fine = await everything(stream(iter([good + more, good])))
            assert bad.error_message.startswith(f"INVALID_ARGUMENT: {field}"), what
            assert not fine.error_message, what


@pytest.mark.timed
async def test_far_too_many_of_anything_are_refused_before_they_cost_anybody_time() -> None:
    async with inference_server(TABLE, model=Zeros()) as server:
        for what, bad, field in FAR_TOO_MANY:
            for call in (
                server.kit.raw.unary_unary(INFER)(bad),
                everything(server.kit.raw.stream_stream(STREAM)(iter([bad]))),
            ):
                with cpu_at_most(1.5, time.process_time):
                    refusal = await call_error(call)
                assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT, what
                assert refusal.violations[0][0] == field, what
        await still_serves(server)


@pytest.mark.timed
async def test_many_classes_of_many_rows_keep_no_other_request_waiting() -> None:
    wide = replace(SIGNATURE, outputs=(TensorSpec("logits", "FP32", (-1, 4000)),))
    async with inference_server(deployment("t", wide), model=ManyClasses()) as server:
        many = request()
        for tensor in many.inputs:
            tensor.shape[0] = 100
        many.raw_input_contents[:] = [data * 50 for data in many.raw_input_contents]
        many.outputs.add(name="logits").parameters["classification"].int64_param = 4000
        slow = asyncio.ensure_future(server.stub.ModelInfer(many))
        longest_s = 0.0
        while not slow.done():
            started_s = time.thread_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - started_s)
        assert len((await slow).raw_output_contents) == 1
        # Of CPU, between two turns of the event loop.
        assert longest_s < 0.25


class ManyClasses:
    async def forward(self, rows: Rows) -> Outputs:
        return Outputs([np.zeros((len(rows), 4000), np.float32)])
