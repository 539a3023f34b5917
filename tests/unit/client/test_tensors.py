"""Arrays to the wire and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from inference import grpc_service_pb2 as pb
from millrace_client.inference import DTYPES, infer_request, output_arrays


def echoed(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """The inputs of a request as the outputs of a response."""
    outputs = [
        pb.ModelInferResponse.InferOutputTensor(name=one.name, datatype=one.datatype, shape=one.shape)
        for one in request.inputs
    ]
    return pb.ModelInferResponse(outputs=outputs, raw_output_contents=request.raw_input_contents)


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_type_comes_back_as_it_was_sent(datatype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(DTYPES[datatype])
    request = infer_request("m", {"x": array})
    assert request.inputs[0].datatype == datatype
    np.testing.assert_array_equal(output_arrays(echoed(request))["x"], array)


def test_bytes_and_text_travel_as_length_prefixed_elements() -> None:
    request = infer_request("m", {"x": np.array([["a", "ß"], ["", "abc"]], dtype=object)})
    assert request.raw_input_contents[0][:5] == b"\x01\x00\x00\x00a"
    back = output_arrays(echoed(request))["x"]
    assert back.tolist() == [[b"a", "ß".encode()], [b"", b"abc"]]


@pytest.mark.parametrize(
    "given",
    [
        [b"a\0", b"b"],
        ["a\0", "b"],
        (b"a\0", "b"),
        np.array([b"a\0", b"b"], object),
    ],
    ids=["bytes", "text", "both", "objects"],
)
def test_zeros_that_bytes_and_text_end_in_arrive(given: Any) -> None:
    request = infer_request("m", {"x": given})
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("BYTES", [2])
    assert output_arrays(echoed(request))["x"].tolist() == [b"a\0", b"b"]


@pytest.mark.parametrize("given", [np.array([5], object), [b"a", 5], ["a", None]], ids=["objects", "number", "none"])
def test_an_element_that_is_neither_text_nor_bytes_is_refused_by_its_input_s_name(given: Any) -> None:
    with pytest.raises(TypeError, match=r"'x'.*give text or bytes"):
        infer_request("m", {"x": given})


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1.0, math.nan, math.inf, 1e300, 9.3e12])
def test_a_time_that_is_no_limit_is_refused_by_its_name(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"server_timeout_s is .*: use a finite number of seconds above 0"):
        infer_request("m", {}, server_timeout_s=timeout_s)


@pytest.mark.parametrize(("timeout_s", "microseconds"), [(1e-9, 1), (0.05, 50_000), (9e12, 9 * 10**18)])
def test_a_time_goes_in_microseconds_rounded_up(timeout_s: float, microseconds: int) -> None:
    request = infer_request("m", {}, server_timeout_s=timeout_s)
    assert request.parameters["timeout"].int64_param == microseconds


def test_outputs_are_asked_for_by_name_some_of_them_as_classes() -> None:
    first, second = infer_request("m", {}, outputs={"label": 0, "logits": 2}).outputs
    assert (first.name, dict(first.parameters)) == ("label", {})
    assert (second.name, second.parameters["classification"].int64_param) == ("logits", 2)


def test_strided_and_big_endian_arrays_are_sent_row_major_and_little_endian() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    request = infer_request("m", {"x": array})
    assert list(request.inputs[0].shape) == [3, 2]
    assert request.raw_input_contents[0] == np.ascontiguousarray(array).astype("<i4").tobytes()


def test_typed_contents_of_other_servers_are_read_too() -> None:
    tensor = pb.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=[1, 2])
    tensor.contents.fp32_contents.extend([0.5, 1.5])
    back = output_arrays(pb.ModelInferResponse(outputs=[tensor]))["y"]
    assert back.dtype == np.float32
    assert back.tolist() == [[0.5, 1.5]]


def test_an_array_without_a_type_in_the_protocol_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'x'.*complex"):
        infer_request("m", {"x": np.zeros(2, complex)})
