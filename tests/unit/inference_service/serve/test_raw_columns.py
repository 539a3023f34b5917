"""Columns of every type that a version keeps, as tensors and back."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from inference_service.serve.preprocessing import column_of_tensor, tensor_of_column, values_of_column
from shared.errors import FailedPrecondition, InvalidArgument
from shared.transforms import ScalarType, TensorType

DAY = dt.date(2024, 2, 29)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
NOON = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("arrow_type", "datatype", "sent", "expected"),
    [
        (pa.int8(), "INT8", np.array([-1, 2], np.int8), [-1, 2]),
        (pa.uint64(), "UINT64", np.array([2**64 - 1, 2], np.uint64), [2**64 - 1, 2]),
        (pa.float16(), "FP16", np.array([0.5, 2], np.float16), [0.5, 2]),
        (pa.float64(), "FP64", np.array([0.1, 2.0]), [0.1, 2.0]),
        (pa.bool_(), "BOOL", np.array([True, False]), [True, False]),
        (pa.string(), "BYTES", np.array(["ä".encode(), b""], object), ["ä", ""]),
        (pa.binary(), "BYTES", np.array([b"\xff\xd8", b""], object), [b"\xff\xd8", b""]),
        (pa.binary(2), "BYTES", np.array([b"ab", b"cd"], object), [b"ab", b"cd"]),
        (pa.date32(), "INT32", np.array([19_782, 0], np.int32), [DAY, dt.date(1970, 1, 1)]),
        (pa.time32("s"), "INT32", np.array([61, 0], np.int32), [dt.time(0, 1, 1), dt.time(0)]),
        (pa.time64("us"), "INT64", np.array([1, 0]), [dt.time(0, 0, 0, 1), dt.time(0)]),
        (pa.timestamp("ms", "UTC"), "INT64", np.array([1_709_208_000_000, 0]), [NOON, EPOCH]),
    ],
)
def test_values_of_every_type_come_back_and_so_do_nulls(
    arrow_type: pa.DataType, datatype: str, sent: Any, expected: list[Any]
) -> None:
    given = ScalarType(arrow_type)
    spec = tensor_of_column("x", given)
    assert (spec.name, spec.datatype, spec.shape, spec.nullable) == ("x", datatype, (-1,), True)

    whole = column_of_tensor("x", given, sent, None)
    some = column_of_tensor("x", given, sent, np.array([False, True]))

    assert isinstance(whole, pa.Array)
    assert isinstance(some, pa.Array)
    assert (whole.type, whole.to_pylist()) == (arrow_type, expected)
    assert (some.type, some.to_pylist()) == (arrow_type, [expected[0], None])

    back, nulls = values_of_column(given, whole)
    assert (back.dtype, back.tolist(), nulls.tolist()) == (sent.dtype, sent.tolist(), [False, False])
    back, nulls = values_of_column(given, some)
    assert (back.dtype, back.tolist()[0], nulls.tolist()) == (sent.dtype, sent.tolist()[0], [False, True])


def test_times_keep_their_column_s_type_beside_their_datatype() -> None:
    for arrow_type in (pa.date32(), pa.time32("s"), pa.time64("us"), pa.timestamp("ms", "UTC")):
        assert tensor_of_column("x", ScalarType(arrow_type)).column_type == str(arrow_type)
    assert tensor_of_column("x", ScalarType(pa.int64())).column_type == ""


def test_a_nan_is_a_number_and_no_null() -> None:
    column = column_of_tensor("x", ScalarType(pa.float64()), np.array([np.nan, 1.0]), np.array([False, True]))

    assert isinstance(column, pa.Array)
    assert np.isnan(column[0].as_py())
    assert column[1].as_py() is None


def test_tensors_go_as_they_are() -> None:
    given = TensorType("uint8", (28, 28))
    rows = np.zeros((2, 28, 28), np.uint8)

    assert tensor_of_column("image", given).shape == (-1, 28, 28)
    assert not tensor_of_column("image", given).nullable
    assert column_of_tensor("image", given, rows, None) is rows
    back, nulls = values_of_column(given, rows)
    assert back is rows
    assert nulls.tolist() == [False, False]


@pytest.mark.parametrize(
    ("arrow_type", "sent"), [(pa.string(), b"\xff\xfe"), (pa.binary(2), b"abc")], ids=["no UTF-8", "too wide"]
)
def test_bytes_that_do_not_fit_the_column_are_refused_by_the_tensors_name(arrow_type: pa.DataType, sent: bytes) -> None:
    with pytest.raises(InvalidArgument, match="tensor 'x'"):
        column_of_tensor("x", ScalarType(arrow_type), np.array([sent], object), None)


def test_bytes_under_a_null_are_not_looked_at() -> None:
    sent = np.array([b"\xff\xfe"], object)

    assert column_of_tensor("x", ScalarType(pa.string()), sent, np.array([True])).null_count == 1


def test_a_type_that_the_protocol_has_no_datatype_for_is_refused_by_the_columns_name() -> None:
    assert pa.array([Decimal("1.20")]).type == pa.decimal128(3, 2)

    with pytest.raises(FailedPrecondition, match=r"column 'price' is decimal128\(3, 2\)") as refused:
        tensor_of_column("price", ScalarType(pa.decimal128(3, 2)))

    assert refused.value.specific_reason == "COLUMN_NOT_SERVABLE"
