"""Columns of files as what a model's inputs take."""

from __future__ import annotations

import datetime
import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_service.formats import csv
from inference import grpc_service_pb2 as pb
from millrace_client.inference import infer_request
from millrace_client.request_builder import Request, Row, cut_by_bytes, open_table
from millrace_client.rows import NULL_VALUES, BadInput, Place, inputs_of_table, pixels_of, typed, values_of_column
from shared.names import MAX_MESSAGE_BYTES
from tests.support.broken_images import tiff_with_a_text_for_its_offsets

PLACE = Place("f")


def tensor(datatype: str, *shape: int) -> Any:
    return pb.ModelMetadataResponse.TensorMetadata(name="x", datatype=datatype, shape=[-1, *shape])


def values(wanted: Any, array: Any) -> Any:
    """As numbers and lists; nulls as None."""
    made, nulls = values_of_column(wanted, pa.chunked_array([array]), PLACE)
    return [None if nulls is not None and nulls[row] else one for row, one in enumerate(made.tolist())]


@pytest.mark.parametrize(
    ("datatype", "array", "sent"),
    [
        ("BYTES", pa.array(["a", None, "ß"]), ["a", None, "ß"]),
        ("BYTES", pa.array([b"a\0", b"\0"], pa.large_binary()), [b"a\0", b"\0"]),
        ("BYTES", pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        ("BYTES", pa.nulls(2), [None, None]),
        ("FP32", pa.nulls(1), [None]),
        ("FP32", pa.array([1, None], pa.int64()), [1.0, None]),
        ("FP32", pa.array(["1e3", "-inf", None, ".5"]), [1000.0, -np.inf, None, 0.5]),
        ("FP16", pa.array([1.5, None], pa.float64()), [1.5, None]),
        ("FP16", pa.array(["1.000488281250001", "1.00048828125", None]), [1.0009765625, 1.0, None]),
        ("FP64", pa.array(["9007199254740992", "1" + "0" * 22, "0.1"]), [2.0**53, 1e22, 0.1]),
        ("FP64", pa.array([2**63 - 2**10, -(2**63), None]), [2.0**63 - 2**10, -(2.0**63), None]),
        ("FP64", pa.array(["3.10"], pa.string()).cast(pa.decimal128(5, 2)), [3.1]),
        ("INT64", pa.array([2.0, None]), [2, None]),
        ("INT64", pa.array(["2.0", "7", None]), [2, 7, None]),
        ("UINT64", pa.array(["18446744073709551615"]), [2**64 - 1]),
        ("INT64", pa.array(["9007199254740993", "3.0"]), [2**53 + 1, 3]),
        ("INT64", pa.array(["1970-01-01T00:00:01.5"]), [1_500_000]),
        ("INT64", pa.array([3, None], pa.timestamp("ns")), [3, None]),
        ("INT32", pa.array([datetime.date(1970, 1, 3), None]), [2, None]),
        ("INT32", pa.array(["1970-01-03"]), [2]),
        ("BOOL", pa.array(["True", "0", None]), [True, False, None]),
        ("BOOL", pa.array([1, 0]), [True, False]),
        ("BOOL", pa.array([None, True]), [None, True]),
    ],
    ids=str,
)
def test_a_column_takes_the_type_of_the_input(datatype: str, array: Any, sent: list[Any]) -> None:
    assert values(tensor(datatype), array) == sent


@pytest.mark.parametrize(
    ("datatype", "array", "expected"),
    [
        ("BYTES", pa.array([5]), "column 'x' of f is int64, and the model takes text or bytes there"),
        ("INT8", pa.array([1, 128]), "f, row 2, column 'x': 128 is no INT8"),
        ("INT8", pa.array(["1", "128"]), "f, row 2, column 'x': '128' is no INT8"),
        ("INT64", pa.array([2.5]), "f, row 1, column 'x': 2.5 is no INT64"),
        ("INT64", pa.array([1.0, float("nan")]), "f, row 2, column 'x': nan is no INT64"),
        ("INT64", pa.array([2.0**63]), "is no INT64"),
        ("FP32", pa.array([1.0, 1e300]), "f, row 2, column 'x': 1e[+]300 is no FP32"),
        ("FP64", pa.array(["1e999"]), "'1e999' is no FP64"),
        ("FP64", pa.array(["0.5", "9007199254740993"]), "f, row 2, column 'x': '9007199254740993' is no FP64"),
        ("FP32", pa.array(["9007199254740993"]), "'9007199254740993' is no FP32"),
        ("FP64", pa.array([2**53, 2**53 + 1]), "f, row 2, column 'x': 9007199254740993 is no FP64"),
        ("FP64", pa.array([2**64 - 1], pa.uint64()), "18446744073709551615 is no FP64"),
        ("BOOL", pa.array(["yes"]), "'yes' is no BOOL"),
        ("INT64", pa.array([datetime.date(1970, 1, 3)]), "is date32"),
        ("FP32", pa.array([datetime.date(1970, 1, 3)]), "is date32"),
        ("INT64", pa.array([[1]]), "is list"),
    ],
    ids=str,
)
def test_a_value_that_the_input_does_not_hold_is_named_with_its_row(datatype: str, array: Any, expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        values(tensor(datatype), array)


GRID = np.arange(8, dtype=np.int64).reshape(2, 2, 2)


@pytest.mark.parametrize(
    "array",
    [
        pa.FixedShapeTensorArray.from_numpy_ndarray(GRID),
        pa.FixedShapeTensorArray.from_numpy_ndarray(GRID.astype(np.float32)),
        pa.array(GRID.reshape(2, 4).tolist(), pa.list_(pa.int32(), 4)),
        pa.array(GRID.tolist()),
        pa.array([row.astype("<i8").tobytes() for row in GRID], pa.binary(32)),
    ],
    ids=["tensors", "floats", "flat-lists", "lists", "stored"],
)
def test_rows_of_a_shape_come_as_tensors_lists_or_their_bytes(array: Any) -> None:
    assert values(tensor("INT64", 2, 2), array) == GRID.tolist()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([[1, 2, 3, 4], None]), "f, row 2, column 'x' is null, and a tensor has no place for it"),
        (pa.array([[1, 2, 3, 4], [1, None, 3, 4]]), "f, row 2, column 'x' holds a null"),
        (pa.array([[1, 2, 3, 4], [1, 2, 3]]), "f, row 2, column 'x' has another shape"),
        (pa.array([[1, 2, 3]]), r"has rows of shape \[3\], and the model takes \[2, 2\]"),
        (pa.array([[1, 2, 3, 4], [1, 2, 3, 0.5]]), "f, row 2, column 'x': 0.5 is no INT64"),
        (pa.array(["1"]), r"is string, and the model takes rows of shape \[2, 2\]"),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((1, 4))), r"rows of shape \[4\]"),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(GRID + np.array([[[0.0]], [[0.5]]])), "f, row 2: input 'x'"),
    ],
    ids=["null", "null-within", "ragged", "shape", "fraction", "text", "tensor", "tensor-fraction"],
)
def test_rows_of_another_shape_are_refused(array: Any, expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        values(tensor("INT64", 2, 2), array)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_tensors_of_one_element_are_tensors(shape: tuple[int, ...]) -> None:
    given = np.arange(2.0, dtype=np.float32).reshape(2, *shape)
    assert values(tensor("FP32", *shape), pa.FixedShapeTensorArray.from_numpy_ndarray(given)) == given.tolist()
    assert values(tensor("FP32", 1), pa.array([[1.0], [2.0]], pa.list_(pa.float32(), 1))) == [[1.0], [2.0]]


def test_a_row_of_one_element_may_have_a_dimension_more() -> None:
    assert values(tensor("FP32", 1), pa.array([1.0, None])) == [[1.0], None]


def test_nulls_are_said_beside_an_input_unless_one_has_that_name() -> None:
    table = pa.table({"x": [1.0, None], "x.null": [0, 0]})
    sent = inputs_of_table([tensor("FP32")], {}, table, PLACE, ["x"])
    assert sent["x.null"].tolist() == [False, True]
    with pytest.raises(BadInput, match=r"f, row 2, column 'x' is null, and 'x.null' is an input of its own"):
        inputs_of_table([tensor("FP32")], {}, table, PLACE, ["x", "x.null"])


@pytest.mark.parametrize(
    ("array", "wanted", "expected"),
    [
        (pa.array([0, 10**13], pa.timestamp("s")), pa.timestamp("ns"), "row 2, column 'x': 10000000000000 is no t"),
        (pa.array([1], pa.timestamp("us", "No/Zone")), pa.date32(), "row 1, column 'x': 1 is no date32"),
        (pa.array(["1970-01-01T00:00:00Z"]), pa.timestamp("us"), "'1970-01-01T00:00:00Z' is no timestamp"),
        (pa.array(["1970-01-01T00:00:00"]), pa.timestamp("us", "UTC"), "is no timestamp.us, tz=UTC"),
        (pa.array(["25:00"]), pa.time64("us"), "'25:00' is no time64"),
        (pa.array(["1500"]), pa.timestamp("ms"), "'1500' is no timestamp"),
        (pa.array([0, 86_399], pa.timestamp("s")), pa.date32(), "row 2, column 'x': datetime.* is no date32"),
        (pa.array([0], pa.timestamp("s")), pa.timestamp("s", "UTC"), "row 1, column 'x': .* is no timestamp.s, tz=UTC"),
        (pa.array([0], pa.timestamp("s", "UTC")), pa.timestamp("s"), "row 1, column 'x': .* is no timestamp.s"),
        (pa.array([0], pa.timestamp("s", "UTC")), pa.date32(), "row 1, column 'x': .* is no date32"),
        (pa.array([86_400], pa.timestamp("s")), pa.time32("s"), "row 1, column 'x': .* is no time32"),
        (pa.array([1], pa.date32()), pa.time32("s"), "row 1, column 'x': .* is no time32"),
        (pa.array([1], pa.duration("s")), pa.timestamp("s"), "row 1, column 'x': .* is no timestamp"),
    ],
    ids=[
        *("far", "zone", "zoned", "unzoned", "clock", "number"),
        *("time of day", "no zone", "a zone", "a zone's date", "date", "a date's clock", "duration"),
    ],
)
def test_a_time_that_the_model_s_column_does_not_hold_is_named_with_its_row(
    array: Any, wanted: pa.DataType, expected: str
) -> None:
    with pytest.raises(BadInput, match=expected):
        inputs_of_table([tensor("INT64")], {"x": wanted}, pa.table({"x": array}), PLACE, ["x"])


@pytest.mark.parametrize(
    ("array", "wanted", "sent"),
    [
        (pa.array([86_400, None], pa.timestamp("s")), pa.date32(), [1, None]),
        (pa.array([1, None], pa.date32()), pa.timestamp("s"), [86_400, None]),
        (pa.array([7], pa.timestamp("s", "America/New_York")), pa.timestamp("ms", "UTC"), [7000]),
        (pa.array([7]), pa.timestamp("ms", "UTC"), [7]),
        (pa.array([None], pa.timestamp("s")), pa.timestamp("ms", "UTC"), [None]),
        (pa.array([], pa.timestamp("s")), pa.timestamp("ms", "UTC"), []),
    ],
    ids=["midnight", "date", "zones", "number", "null", "none"],
)
def test_a_time_that_the_model_s_column_holds_as_well_is_sent_in_its_unit(
    array: Any, wanted: pa.DataType, sent: list[int | None]
) -> None:
    given = tensor("INT32" if wanted == pa.date32() else "INT64")
    found = inputs_of_table([given], {"x": wanted}, pa.table({"x": array}), PLACE, ["x"])
    nulls = found.get("x.null", np.zeros(len(array), bool))
    assert [None if null else value for value, null in zip(found["x"].tolist(), nulls, strict=True)] == sent


def test_a_row_leaves_room_for_what_goes_with_it_in_a_message() -> None:
    def cut(size: int) -> list[Request]:
        texts = np.empty(1, object)
        texts[0] = b"x" * size
        return list(cut_by_bytes([Request({"text": texts}, [Row("f", 1)])]))

    with pytest.raises(BadInput, match="f, row 1 takes 63 MiB, and a server takes 64 MiB in one request"):
        cut(MAX_MESSAGE_BYTES - 100)
    (largest,) = cut(MAX_MESSAGE_BYTES - 66 * 1024)
    message = infer_request("m" * 63, largest.inputs, request_id="x" * 36)
    assert message.ByteSize() < MAX_MESSAGE_BYTES


def test_numbers_of_an_array_keep_their_values_or_are_refused() -> None:
    assert typed(tensor("INT8"), np.array([1.0, -128.0])).tolist() == [1, -128]
    for datatype, one in (
        ("INT8", 128.0),
        ("UINT64", -1),
        ("UINT64", 2.0**64),
        ("FP16", 1e6),
        ("BYTES", 1),
        ("INT8", "1"),
    ):
        with pytest.raises(BadInput, match=f"input 'x' is {datatype}"):
            typed(tensor(datatype), np.array([one]))


def test_a_csv_has_the_nulls_that_an_import_finds_in_it() -> None:
    assert csv.NULL_VALUES == NULL_VALUES


@pytest.mark.parametrize("name", ["a.csv.gz", "A.CSV.GZ"])
def test_a_csv_may_have_quoted_lines_and_be_compressed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b'x,y\n"1\n2","NA"\n\n3,4\n'))
    table = open_table(tmp_path / name)
    assert [batch.to_pydict() for batch in table.read(["y", "x"])] == [{"y": [None, "4"], "x": ["1\n2", "3"]}]


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (['5,"oops', "6,x"], 3),
        (['5,"oops', '6,"x"'], 3),
        (['"a\nb",x', '5,"oops', '6,"x"'], 5),
        (['5,"oo"ps', "6,x"], 3),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_stray_quote_in_a_csv_is_refused_by_its_line(
    lines: list[str], line: int, ending: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(ending.join(["x,y", "1,2", *lines, ""]).encode("utf-8-sig")))
    with pytest.raises(BadInput, match=rf"a\.csv\.gz is no CSV .* the quotes of line {line} are malformed"):
        open_table(tmp_path / "a.csv.gz")


def test_a_csv_may_begin_with_a_byte_order_mark_and_have_long_fields(tmp_path: Path) -> None:
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(f'"x","y"\n"1","{long}"\n', encoding="utf-8-sig")
    (batch,) = open_table(tmp_path / "a.csv").read(["x", "y"])
    assert batch.to_pydict() == {"x": ["1"], "y": [long]}


def test_int96_timestamps_of_a_parquet_file_keep_their_year(tmp_path: Path) -> None:
    times = [datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31)]
    table = pa.table({"when": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    (read,) = open_table(tmp_path / "t.parquet").read(["when"])
    assert read["when"].to_pylist() == times


def test_a_file_that_is_no_image_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadInput, match=r"notes\.txt is no image"):
        pixels_of(tmp_path / "notes.txt", (28, 28), "notes.txt")


def test_a_picture_whose_decoder_fails_in_its_own_way_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="photo is no image that can be read"):
        pixels_of(io.BytesIO(tiff_with_a_text_for_its_offsets()), (4, 6, 3), "photo")


def test_pictures_come_in_the_shape_and_the_colours_that_the_model_wants() -> None:
    for shape in ((28, 28), (28, 28, 1), (28, 28, 3), (28, 28, 4)):
        file = io.BytesIO()
        Image.new("RGB", (56, 40), "white").save(file, "JPEG")
        found = pixels_of(file, shape, "white")
        assert found.shape == shape
        assert int(found.min()) >= 250
