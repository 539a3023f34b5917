"""Large typed contents are decoded beside the event loop, to the same arrays and errors as small ones."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from inference import grpc_service_pb2 as oip
from inference_service import convert
from inference_service.convert import FEW_ELEMENTS, decode_typed, inputs_from_proto, many_elements
from inference_service.domain.signature import DATATYPES, decode
from inference_service.serve import infer
from inference_service.serve.infer import InFlightBytes
from shared.errors import InvalidArgument
from tests.support.grpc_kit import call_error
from tests.support.inference_server import CLASSES, ask, deployment, inference_server, until

TYPED = [one for one in DATATYPES.values() if one.contents_field and one.name != "BYTES"]
MANY = FEW_ELEMENTS + 3


def _request(datatype: str, values: Any, field: str = "") -> oip.ModelInferRequest:
    tensor = oip.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, field or DATATYPES[datatype].contents_field).extend(values)
    return oip.ModelInferRequest.FromString(oip.ModelInferRequest(inputs=[tensor]).SerializeToString())


def _numbers(dtype: np.dtype[Any], count: int) -> list[Any]:
    generator = np.random.default_rng(1)
    if dtype.kind in "iu":
        limits = np.iinfo(np.dtype(dtype.str))
        inside = generator.integers(limits.min, limits.max, count - 2, dtype.str, endpoint=True)
        return [limits.min, limits.max, *inside.tolist()]
    found: list[Any] = (
        generator.random(count) * 2 - 1 if dtype.kind == "f" else generator.random(count) < 0.5
    ).tolist()
    return found


@pytest.mark.parametrize("datatype", TYPED, ids=lambda one: one.name)
@pytest.mark.parametrize("count", [2, MANY, 2 * MANY])
def test_many_numbers_are_those_that_a_few_would_be(datatype: Any, count: int) -> None:
    request = _request(datatype.name, _numbers(datatype.dtype, count))
    tensors = inputs_from_proto(request)

    (ahead,) = decode_typed(request, tensors)

    expected = decode(tensors[0])
    found = decode(ahead)
    assert found.dtype == expected.dtype == datatype.dtype
    np.testing.assert_array_equal(found, expected)
    assert many_elements(tensors) == (count if count > FEW_ELEMENTS else 0)


@pytest.mark.parametrize(
    ("datatype", "values", "field"),
    [
        ("UINT8", [0] * MANY + [256], ""),
        ("INT8", [-129] + [0] * MANY, ""),
        ("FP32", [1] * MANY, "int_contents"),
        ("FP16", [1.0] * MANY, "fp32_contents"),
        ("COLOUR", [1.0] * MANY, "fp32_contents"),
        ("FP32", [b"x"] * MANY, "bytes_contents"),
    ],
)
def test_an_error_among_many_numbers_is_reported_as_among_few(datatype: str, values: list[Any], field: str) -> None:
    request = _request(datatype, values, field)
    tensors = inputs_from_proto(request)

    (ahead,) = decode_typed(request, tensors)

    with pytest.raises(InvalidArgument) as expected:
        decode(tensors[0])
    with pytest.raises(InvalidArgument) as found:
        decode(ahead)
    assert found.value.as_record() == expected.value.as_record()


@pytest.mark.parametrize("shape", [[MANY - 1], [MANY, 2], [-1]])
def test_numbers_that_do_not_fill_their_shape_are_refused(shape: list[int]) -> None:
    request = _request("FP32", [1.0] * MANY)
    del request.inputs[0].shape[:]
    request.inputs[0].shape.extend(shape)

    (ahead,) = decode_typed(request, inputs_from_proto(request))

    with pytest.raises(InvalidArgument, match="tensor 'x'"):
        decode(ahead)


def test_contents_of_two_kinds_are_refused() -> None:
    request = _request("FP32", [1.0] * MANY)
    request.inputs[0].contents.bool_contents.append(True)

    (ahead,) = decode_typed(request, inputs_from_proto(request))

    with pytest.raises(InvalidArgument, match="bool_contents"):
        decode(ahead)


ROWS = FEW_ELEMENTS // CLASSES + 1


def _deep() -> dict[str, Any]:
    """Options of a server whose model takes so many rows at once."""
    one = deployment()
    return {
        "one": replace(one, spec=replace(one.spec, max_queued_rows=2 * ROWS)),
        "max_queued_rows": 2 * ROWS,
        "max_rows": ROWS,
    }


def _large() -> oip.ModelInferRequest:
    tensor = oip.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=[ROWS, CLASSES])
    tensor.contents.uint_contents.extend([0, 0, 7, 0] * ROWS)
    return oip.ModelInferRequest(model_name="m", inputs=[tensor])


class Held:
    """Decodes once it may, as it would otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.begun = 0
        monkeypatch.setattr(infer, "decode_typed", self.decode)

    def decode(self, *arguments: Any) -> Any:
        self.begun += 1
        assert self.may_go_on.wait(240)
        return convert.decode_typed(*arguments)


async def test_other_requests_are_answered_while_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    try:
        async with asyncio.timeout(240), inference_server(**_deep()) as server:
            large = server.stub.ModelInfer(_large(), timeout=60)
            await until(lambda: held.begun == 1, "the large one to be decoded")
            small = await server.stub.ModelInfer(ask(1), timeout=60)
            held.may_go_on.set()
            answer = await large

            assert small.outputs[0].shape == [1, CLASSES]
            assert answer.outputs[0].shape == [ROWS, CLASSES]
    finally:
        held.may_go_on.set()


async def test_a_request_whose_time_passes_or_whose_client_goes_before_it_is_decoded_reaches_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)

    try:
        async with asyncio.timeout(240), inference_server(**_deep()) as server:
            while held.begun < 1:  # on a busy machine a deadline may pass before the server has read the call
                late = asyncio.ensure_future(call_error(server.stub.ModelInfer(_large(), timeout=0.5)))
                await until(lambda one=late: held.begun > 0 or one.done(), "the first to be decoded")  # type: ignore[misc]
            timed = _large()
            timed.parameters["timeout"].int64_param = 500_000
            given_up = server.stub.ModelInfer(_large(), timeout=60)
            await until(lambda: held.begun == 2, "two to be decoded")
            waiting = server.stub.ModelInfer(timed, timeout=60)
            given_up.cancel()

            assert (await late).code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await call_error(waiting)).code is grpc.StatusCode.DEADLINE_EXCEEDED
            held.may_go_on.set()
            await server.stub.ModelInfer(ask(1), timeout=60)
            await asyncio.wrap_future(infer.DECODING.submit(int))
            assert held.begun == 2
            assert [len(batch) for batch in server.model.batches] == [1]
    finally:
        held.may_go_on.set()


async def test_a_large_request_that_is_refused_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    try:
        async with asyncio.timeout(240), inference_server(**_deep()) as server:
            server.model.may_work.clear()
            at_work = server.stub.ModelInfer(ask(1), timeout=60)
            await until(lambda: server.model.at_work == 1, "the model to be busy")
            waiting = [server.stub.ModelInfer(ask(*[1] * ROWS), timeout=60) for _ in range(2)]
            (batcher,) = (server.models.find_batcher(name) for name in server.models.attached())
            await until(lambda: batcher is not None and batcher.queued_rows == 2 * ROWS, "the queue to be full")

            refused = await call_error(server.stub.ModelInfer(_large(), timeout=60))

            assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "rows wait already" in refused.message
            assert held.begun == 0
            server.model.may_work.set()
            await asyncio.gather(at_work, *waiting)
    finally:
        held.may_go_on.set()


async def test_requests_waiting_to_be_decoded_count_as_bytes_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    try:
        async with asyncio.timeout(240), inference_server(**_deep(), held=InFlightBytes(12 * ROWS * CLASSES)) as server:
            large = server.stub.ModelInfer(_large(), timeout=60)
            await until(lambda: held.begun == 1, "the first one to be decoded")

            refused = await call_error(server.stub.ModelInfer(_large(), timeout=60))

            assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "of all models" in refused.message
            large.cancel()
            await asyncio.wait([asyncio.ensure_future(call_error(large))])
            held.may_go_on.set()
            for _ in range(2):  # what the first one held is free, and what the second one holds is after its answer
                answer = await server.stub.ModelInfer(_large(), timeout=60)
                assert answer.outputs[0].shape == [ROWS, CLASSES]
    finally:
        held.may_go_on.set()


async def test_a_request_that_is_refused_is_not_decoded_and_others_that_came_while_one_was_can_refuse_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)

    try:
        async with asyncio.timeout(240), inference_server(**_deep()) as server:
            batcher = server.models.batcher(server.models.deployments()[0], server.models.deployments()[0].versions[0])
            server.model.may_work.clear()
            running = server.stub.ModelInfer(ask(1), timeout=60)
            await until(lambda: server.model.at_work == 1, "the model to be at work")
            decoded = server.stub.ModelInfer(_large(), timeout=60)
            await until(lambda: held.begun == 1, "the large one to be decoded")
            queued = [server.stub.ModelInfer(ask(*[1] * ROWS), timeout=60) for _ in range(2)]
            await until(lambda: batcher.queued_rows == 2 * ROWS, "the queue to be full")

            refused = await call_error(server.stub.ModelInfer(_large(), timeout=60))
            assert (refused.code, held.begun) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)
            held.may_go_on.set()
            assert (await call_error(decoded)).code is grpc.StatusCode.RESOURCE_EXHAUSTED
            server.model.may_work.set()
            await asyncio.gather(running, *queued)
    finally:
        held.may_go_on.set()
