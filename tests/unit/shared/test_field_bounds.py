"""Messages of very many fields are refused before they are parsed, and others are not."""

from __future__ import annotations

import pytest

from inference import grpc_service_pb2 as oip
from shared.errors import InvalidArgument
from shared.grpc_server.interceptor import MAX_FIELDS, check_fields
from tests.support.cpu_time import cpu_at_most
from tests.support.wire_bytes import inside

REQUEST = oip.ModelInferRequest.DESCRIPTOR


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\x2a\x00" * 1_000_000, "inputs"),
        (b"\x32\x00" * 1_000_000, "outputs"),
        (b"\x3a\x00" * 1_000_000, "raw_input_contents"),
        (b"\x22\x03\x0a\x01a" * 1_000_000, "parameters"),
        (b"\x0a\x01m" + inside(b"\x2a", b"\x22\x03\x0a\x01a" * 1_000_000), "inputs.parameters"),
        (b"\x0a\x01m" + inside(b"\x32", b"\x12\x03\x0a\x01a" * 1_000_000), "outputs.parameters"),
        (inside(b"\x2a", b"\x18\x01" * 1_000_000), "inputs.shape"),
    ],
)
@pytest.mark.timed
def test_a_message_of_too_many_fields_is_refused_by_the_one_that_has_them(data: bytes, field: str) -> None:
    # Half a minute is what the parser would take.
    with cpu_at_most(10), pytest.raises(InvalidArgument) as refused:
        check_fields(data, REQUEST)
    assert refused.value.fields[0][0] == field
    assert f"more than {MAX_FIELDS} fields" in refused.value.message


def test_large_requests_that_mean_something_pass() -> None:
    columns = range(20_000)
    table = oip.ModelInferRequest(
        model_name="m",
        inputs=[{"name": f"column {number}", "datatype": "FP32", "shape": [1]} for number in columns],
        raw_input_contents=[b"1234"] * len(columns),
    )
    text = oip.ModelInferRequest(inputs=[{"name": "s", "contents": {"bytes_contents": [b"text"] * 200_000}}])
    pixels = oip.ModelInferRequest(inputs=[{"name": "i"}], raw_input_contents=[bytes(2**22)])
    for one in (table, text, pixels):
        check_fields(one.SerializeToString(), REQUEST)


def test_bytes_that_are_no_message_are_left_to_the_parser() -> None:
    for data in (b"\xff" * 300_000, inside(b"\x2a", b"\x2a" * 300_000), b"\x2a" + b"\xff" * 300_000):
        check_fields(data, REQUEST)
