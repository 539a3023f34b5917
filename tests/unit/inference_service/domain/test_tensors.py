from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from inference_service.domain.signature import (
    DATATYPES,
    Array,
    WireTensor,
    decode,
    encode_raw,
    encode_typed,
    has_typed_form,
)
from shared.errors import InvalidArgument

NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def tensor(
    datatype: str,
    shape: Sequence[int],
    raw: bytes | None = None,
    typed: Mapping[str, Sequence[Any]] | None = None,
) -> WireTensor:
    return WireTensor("inputs[0]", "x", datatype, tuple(shape), raw, typed or {})


def arrays(datatype: str) -> st.SearchStrategy[Array]:
    if datatype == "BYTES":
        return SHAPES.flatmap(lambda shape: hnp.arrays(object, shape, elements=st.binary(max_size=9)))
    if datatype == "BF16":
        bits = hnp.arrays("<u4", SHAPES, elements=st.integers(0, 0x7F7F).map(lambda upper: upper << 16))
        return bits.map(lambda array: array.view("<f4"))
    return hnp.arrays(DATATYPES[datatype].dtype, SHAPES)


def same(one: Array, other: Array) -> bool:
    """Bit for bit, so that a NaN equals itself."""
    if one.dtype == object:
        return one.shape == other.shape and one.ravel().tolist() == other.ravel().tolist()
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("datatype", DATATYPES)
@given(data=st.data())
def test_raw_contents_come_back_as_they_went(datatype: str, data: st.DataObject) -> None:
    values = data.draw(arrays(datatype))
    assert same(decode(tensor(datatype, values.shape, raw=encode_raw(datatype, values))), values)


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if has_typed_form(name)])
@given(data=st.data())
def test_typed_contents_come_back_as_they_went(datatype: str, data: st.DataObject) -> None:
    values = data.draw(arrays(datatype))
    field, elements = encode_typed(datatype, values)
    decoded = decode(tensor(datatype, values.shape, typed={field: elements} if elements else {}))
    if values.dtype.kind == "f":  # a NaN's payload may change on its way through a Python float
        assert np.array_equal(decoded, values, equal_nan=True)
    else:
        assert same(decoded, values)


def test_raw_numbers_are_not_copied() -> None:
    raw = np.arange(6, dtype="<f4").tobytes()
    decoded = decode(tensor("FP32", [2, 3], raw=raw))
    assert np.shares_memory(decoded, np.frombuffer(raw, "u1"))


def test_wire_bytes_are_little_endian_with_four_byte_lengths() -> None:
    assert encode_raw("UINT16", np.array([1, 0x203], ">u2")) == b"\x01\x00\x03\x02"
    assert encode_raw("BYTES", np.array([b"ab", b""], object)) == b"\x02\0\0\0ab\0\0\0\0"


@pytest.mark.parametrize(
    ("bad", "part", "what"),
    [
        (tensor("FP33", [1], raw=b"abcd"), "datatype", "use one of"),
        (tensor("", [1], raw=b"a"), "datatype", "use one of"),
        (tensor("UINT8", [2, -1], raw=b""), "shape", "0 or more"),
        (tensor("UINT8", [-2, -2], raw=b"abcd"), "shape", "0 or more"),
        (tensor("FP64", [2**62, 2**62], raw=b""), "shape", "elements"),
        (tensor("FP64", [0, 2**62, 2**62], raw=b""), "shape", "elements"),
        (tensor("UINT8", [1] * 33, raw=b"a"), "shape", "more than 32 dimensions"),
        (tensor("UINT8", [3], raw=b"ab"), "raw_input_contents", "takes 3 bytes"),
        (tensor("FP32", [1], raw=b"abcde"), "raw_input_contents", "takes 4 bytes"),
        (tensor("FP16", [2], raw=b"abc"), "raw_input_contents", "takes 4 bytes"),
        (tensor("BF16", [1], raw=b"a"), "raw_input_contents", "takes 2 bytes"),
        (tensor("BOOL", [2], raw=b"\x00\x02"), "raw_input_contents", "0 or 1"),
        (tensor("UINT8", [1], raw=b"a", typed={"uint_contents": [1]}), "contents", "not both"),
        (tensor("UINT8", [1], typed={"int_contents": [1]}), "contents", "uint_contents"),
        (tensor("UINT8", [1], typed={"uint_contents": [1], "fp32_contents": [1]}), "contents", "uint_contents"),
        (tensor("UINT8", [2], typed={"uint_contents": [1]}), "contents.uint_contents", "takes 2"),
        (tensor("UINT8", [1]), "contents.uint_contents", "takes 1"),
        (tensor("UINT8", [1], typed={"uint_contents": [256]}), "contents.uint_contents", "0 to 255"),
        (tensor("INT8", [2], typed={"int_contents": [127, -129]}), "contents.int_contents", "-128 to 127"),
        (tensor("FP16", [1], typed={"fp32_contents": [1.0]}), "contents", "no typed contents"),
        (tensor("BF16", [1], typed={"fp32_contents": [1.0]}), "contents", "no typed contents"),
        (tensor("BYTES", [1], raw=b"\x01"), "raw_input_contents", "inside the length"),
        (tensor("BYTES", [1], raw=b"\x05\0\0\0abc"), "raw_input_contents", "beyond the 7 bytes"),
        (tensor("BYTES", [1], raw=b"\xff\xff\xff\xffabc"), "raw_input_contents", "beyond"),
        (tensor("BYTES", [1], raw=b"\0\0\0\0\0\0\0\0"), "raw_input_contents", "more than 1 elements"),
        (tensor("BYTES", [2], raw=b"\0\0\0\0"), "raw_input_contents", "takes 2"),
        (tensor("BYTES", [2], typed={"bytes_contents": [b"a"]}), "contents.bytes_contents", "takes 2"),
    ],
)
def test_a_malformed_tensor_is_refused_by_name(bad: WireTensor, part: str, what: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode(bad)
    ((field, description),) = refused.value.fields
    assert field == f"inputs[0].{part}"
    assert "tensor 'x'" in description
    assert what in description


@given(
    datatype=st.sampled_from([*DATATYPES, "NONE"]),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=5),
    raw=st.none() | st.binary(max_size=64) | st.integers(0, 12).map(lambda n: struct.pack("<I", n) * 3),
)
def test_whatever_the_bytes_a_tensor_is_decoded_or_refused(datatype: str, shape: list[int], raw: bytes | None) -> None:
    try:
        decoded = decode(tensor(datatype, shape, raw=raw))
    except InvalidArgument:
        return
    assert list(decoded.shape) == shape
