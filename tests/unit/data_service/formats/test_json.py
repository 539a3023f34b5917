from __future__ import annotations

import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.formats import interface
from data_service.formats import json as json_rows
from shared.errors import InvalidArgument
from tests.support.damage import truncations
from tests.support.import_sources import Quarantine, source_of, whole


def read(folder: Path, *contents: bytes | str, types: dict[str, str] | None = None) -> tuple[pa.Table, Quarantine]:
    for index, one in enumerate(contents):
        (folder / f"{index}.jsonl").write_bytes(one.encode() if isinstance(one, str) else one)
    return whole(folder, source_of(f"{folder.as_uri()}/*.jsonl", "json_lines"), types=types)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_columns_are_those_of_all_rows_of_all_files(tmp_path: Path) -> None:
    table, bad = read(tmp_path, lines({"a": 1}, {"b": "x"}), lines({"c": True, "a": 2.5}, {}))
    assert not bad.rows
    assert table.to_pydict() == {
        "a": [1.0, None, 2.5, None],
        "b": [None, "x", None, None],
        "c": [None, None, True, None],
    }
    assert table.schema.types == [pa.float64(), pa.string(), pa.bool_()]


@pytest.mark.parametrize(
    ("values", "inferred", "read_back"),
    [
        ([True, None], pa.bool_(), [True, None]),
        ([1, None, 2**63 - 1], pa.int64(), [1, None, 2**63 - 1]),
        ([1, 2**63], pa.string(), ["1", "9223372036854775808"]),
        ([2**64 - 1, 2**64 - 2], pa.string(), ["18446744073709551615", "18446744073709551614"]),
        ([2**64, -(2**63) - 1], pa.string(), ["18446744073709551616", "-9223372036854775809"]),
        ([10**30, 0.5], pa.string(), ["1" + 30 * "0", "0.5"]),
        ([1e30, 1], pa.float64(), [1e30, 1.0]),
        ([2**53 + 1, 0.5], pa.string(), ["9007199254740993", "0.5"]),
        ([2**53, 0.5], pa.float64(), [2.0**53, 0.5]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        (["2024-01-01", "1"], pa.string(), ["2024-01-01", "1"]),
        ([1, "x", True, 2.5, None], pa.string(), ["1", "x", "true", "2.5", None]),
        ([None], pa.string(), [None]),
    ],
)
def test_a_column_has_the_type_that_all_its_values_fit(
    tmp_path: Path, values: list[Any], inferred: pa.DataType, read_back: list[Any]
) -> None:
    table, bad = read(tmp_path, lines(*({"x": value} for value in values)))
    assert not bad.rows
    assert table.schema.field("x").type == inferred
    assert table["x"].to_pylist() == read_back


def test_lists_of_numbers_become_tensors_and_others_bad_rows(tmp_path: Path) -> None:
    rows = [[1, 2], [3, 4.5], [5], [6, None], None, [7, "8"], 9, [[1], [2]], [True, 2], [10, 11]]
    table, bad = read(tmp_path, lines(*({"x": value, "n": index} for index, value in enumerate(rows))))
    assert table.schema.field("x").type == pa.fixed_shape_tensor(pa.float64(), [2])
    assert table["x"].combine_chunks().to_numpy_ndarray().tolist() == [[1, 2], [3, 4.5], [10, 11]]
    assert table["n"].to_pylist() == [0, 1, 9]
    assert bad.places == [f"line {index}" for index in range(3, 10)]
    assert bad.rows[0].reason == "key 'x' is no list of 2 numbers"


def test_a_list_with_a_whole_number_that_would_be_rounded_is_a_bad_row(tmp_path: Path) -> None:
    lists: list[Any] = [[1, 0.5], [2**53 + 1, 0.5], [2**53 + 1, 2], [2**63, 1], [2**64, 0.5], [2**53, 2], [1e30, 1]]
    table, bad = read(tmp_path, lines(*({"x": value} for value in lists)))
    assert table["x"].combine_chunks().to_numpy_ndarray().tolist() == [[1, 0.5], [2**53, 2], [1e30, 1]]
    assert bad.places == ["line 2", "line 3", "line 4", "line 5"]


@pytest.mark.parametrize(
    ("arrow_type", "good", "rounded"),
    [
        ("double", [0.5, 2**60, 2**63], [2**53 + 1, 2**64 - 1, 10**30]),
        ("float", [0.5, 7], [2**53 + 1, 2**64 - 1, 1e39]),
        ("int64", [2**53 + 1], [2**63, 2**64, 0.5]),
        ("uint64", [2**64 - 1, 2**64 - 2], [2**64, -1]),
    ],
)
def test_a_number_that_a_given_type_would_change_is_a_bad_row(
    tmp_path: Path, arrow_type: str, good: list[Any], rounded: list[Any]
) -> None:
    table, bad = read(tmp_path, lines(*({"x": value} for value in [*good, *rounded])), types={"x": arrow_type})
    assert table["x"].to_pylist() == good
    assert len(bad.rows) == len(rounded)


def test_long_digits_within_texts_and_fractions_are_left_alone(tmp_path: Path) -> None:
    table, bad = read(tmp_path, '{"s": "12345678901234567890123", "d": 0.1234567890123456789012}\n')
    assert table.to_pylist() == [{"s": "12345678901234567890123", "d": 0.1234567890123456789012}]
    assert not bad.rows


def test_a_deep_line_with_long_digits_is_a_bad_row(tmp_path: Path) -> None:
    table, bad = read(tmp_path, '{"a": 1}\n{"a": 12345678901234567890123, "b": ' + "[" * 1020 + "]" * 1020 + "}\n")
    assert table["a"].to_pylist() == [1]
    assert [(row.place, row.reason) for row in bad.rows] == [("line 2", "it is nested too deep")]


def test_one_odd_list_does_not_make_a_column_of_lists(tmp_path: Path) -> None:
    table, bad = read(tmp_path, lines({"x": [1]}, {"x": 2}, {"x": 3}))
    assert table["x"].to_pylist() == [2, 3]
    assert bad.places == ["line 1"]


@pytest.mark.parametrize(
    "bad_line",
    [
        b"{",
        b"[1]",
        b"1",
        b"null",
        b'{"a": NaN}',
        b'{"a": 01}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"": 1}',
        b'{"a": {"b": 1}}',
        b'{"a": [1, 2]}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": 1} {"a": 2}',
        b"\0",
    ],
    ids=lambda line: repr(line[:20]),
)
def test_a_line_that_is_no_row_is_a_bad_one(tmp_path: Path, bad_line: bytes) -> None:
    table, bad = read(tmp_path, b'{"a": 1}\n\n' + bad_line + b'\r\n{"a": 2}')
    assert table["a"].to_pylist() == [1, 2]
    assert bad.places == ["line 3"]


def test_the_last_of_equal_keys_counts(tmp_path: Path) -> None:
    table, _ = read(tmp_path, '{"a": 1, "a": 2}\n')
    assert table["a"].to_pylist() == [2]


def test_gzip_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    table, bad = read(tmp_path, gzip.compress(b'\xef\xbb\xbf{"a": 1}\n'))
    assert table["a"].to_pylist() == [1]
    assert not bad.rows


def test_types_can_be_given(tmp_path: Path) -> None:
    content = lines(
        {"i": 1, "t": "2024-01-02", "x": [1, 2], "s": 5}, {"i": 300, "t": "2024-01-02", "x": [1, 2], "s": "y"}
    )
    types = {
        "i": "int8",
        "t": "timestamp[us]",
        "x": "fixed_shape_tensor[value_type=float, shape=[2,1]]",
        "s": "string",
    }
    table, bad = read(tmp_path, content, types=types)
    assert table["i"].to_pylist() == [1]
    assert table["t"].to_pylist() == [datetime.datetime(2024, 1, 2)]
    assert table["s"].to_pylist() == ["5"]
    assert table.schema.field("x").type == pa.fixed_shape_tensor(pa.float32(), [2, 1])
    assert [(row.place, row.reason) for row in bad.rows] == [("line 2", "key 'i' is no int8")]


def test_whole_doubles_fit_a_given_integer_type(tmp_path: Path) -> None:
    table, bad = read(tmp_path, lines({"i": 1.0}, {"i": 1.5}), types={"i": "int64"})
    assert table["i"].to_pylist() == [1]
    assert bad.places == ["line 2"]


def test_a_given_type_that_does_not_fit_a_list_is_refused_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"column_types\[0\].arrow_type"):
        read(tmp_path, lines({"x": [1, 2]}), types={"x": "int64"})


def test_a_line_beyond_all_bounds_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "MAX_LINE_BYTES", 5000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 1000)
    table, bad = read(tmp_path, lines({"a": 1}, {"a": "x" * 20_000}, {"a": 2}))
    assert table["a"].to_pylist() == [1, 2]
    assert bad.places == ["line 2"]


def test_more_keys_than_columns_may_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "MAX_COLUMNS", 100)
    with pytest.raises(InvalidArgument, match="more than 100 different keys"):
        read(tmp_path, lines(*({f"k{i}": 1} for i in range(101))))


@pytest.mark.parametrize("content", ["", "\n", "{}\n"])
def test_files_without_a_column_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidArgument, match="needs columns"):
        read(tmp_path, content)


def test_a_truncated_file_loses_its_last_row_and_says_so(tmp_path: Path) -> None:
    content = lines(*({"a": index, "b": "text"} for index in range(100))).encode()
    for size, part in truncations(content):
        if size == 0:
            continue
        table, bad = read(tmp_path, part)
        assert table.num_rows == part.count(b"\n")
        assert len(bad.rows) == (not part.endswith(b"\n"))


scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8"), max_size=5)
)


@given(
    rows=st.lists(st.dictionaries(st.sampled_from("abc"), scalars, min_size=1), min_size=1, max_size=9),
    block=st.integers(1, 50),
)
def test_scalars_come_back_whatever_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], block: int
) -> None:
    folder = tmp_path_factory.mktemp("json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "BLOCK_BYTES", block)
        table, bad = read(folder, lines(*rows))
    assert not bad.rows
    for found, row in zip(table.to_pylist(), rows, strict=True):
        for name, value in found.items():
            given_value = row.get(name)
            as_text = given_value if given_value is None or isinstance(given_value, str) else json.dumps(given_value)
            assert value in (given_value, as_text)


@given(data=st.binary(max_size=300))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    table, _ = read(tmp_path_factory.mktemp("json"), b'{"a": 1}\n' + data)
    assert table.num_rows >= 1


def test_a_line_of_very_many_lists_is_a_bad_row_and_never_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "MAX_CONTAINERS", 10)
    table, bad = read(tmp_path, '{"a":1}\n{"a":[' + "[],{}," * 5 + "1]}\n")
    assert table["a"].to_pylist() == [1]
    assert bad.places == ["line 2"]
    assert bad.rows[0].reason == "it has more than 10 lists and objects"


def test_a_line_that_is_no_json_is_reported_once_and_where_it_goes_wrong(tmp_path: Path) -> None:
    _, bad = read(tmp_path, '{"a": 1}\n{"a": x}\n')
    assert bad.places == ["line 2"]
    assert bad.rows[0].reason == "it is no JSON: unexpected character, expected a JSON value at character 7"


def test_a_file_without_any_row_reports_its_first_bad_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no line of it is a row; of line 2, it is no JSON object"):
        read(tmp_path, "\n[1]\nnope\n")


def test_a_block_without_a_good_line_has_only_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "BLOCK_BYTES", 10)
    table, bad = read(tmp_path, b'{"a": 1}\n[1, 2, 3, 4]\n{"a": 3}\n', types={"a": "int8"})
    assert table["a"].to_pylist() == [1, 3]
    assert bad.places == ["line 2"]
