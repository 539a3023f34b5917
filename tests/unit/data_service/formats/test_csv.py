from __future__ import annotations

import csv
import datetime
import gzip
import io
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.domain.import_spec import CsvOptions
from data_service.formats import csv as csv_rows
from data_service.formats import interface
from data_service.formats.casts import InferredType
from data_service.formats.csv import CsvReader
from shared.errors import InvalidArgument
from tests.support.import_sources import Quarantine, opened, source_of, table_of, whole
from tests.support.real_data import real_data


def read(
    folder: Path, *contents: bytes | str, types: dict[str, str] | None = None, **options: object
) -> tuple[pa.Table, Quarantine]:
    for index, one in enumerate(contents):
        (folder / f"{index}.csv").write_bytes(one.encode() if isinstance(one, str) else one)
    csv = CsvOptions(**options)  # type: ignore[arg-type]
    return whole(folder, source_of(f"{folder.as_uri()}/*.csv", "csv", csv=csv), types=types)


def test_types_are_inferred_from_all_rows_of_all_files(tmp_path: Path) -> None:
    first = "b,i,d,t,s\ntrue,1,1,2024-01-02,x\n"
    second = "b,i,d,t,s\nFALSE,-2,2.5,2024-01-02T03:04:05.678,1\n,,,,\n"
    table, bad = read(tmp_path, first, second)
    assert not bad.rows
    assert table.schema.types == [pa.bool_(), pa.int64(), pa.float64(), pa.timestamp("us"), pa.string()]
    assert table["d"].to_pylist() == [1.0, 2.5, None]
    assert table["b"].to_pylist() == [True, False, None]
    assert table["t"].to_pylist()[1] == datetime.datetime(2024, 1, 2, 3, 4, 5, 678000)
    assert table["s"].to_pylist() == ["x", "1", None]


@pytest.mark.parametrize(
    ("values", "inferred"),
    [
        (["1", "true"], pa.string()),
        (["9223372036854775807"], pa.int64()),
        (["9223372036854775808"], pa.string()),
        (["9007199254740993", "0.5"], pa.string()),
        (["9007199254740992", "0.5"], pa.float64()),
        ([5000 * "0" + "9007199254740993", "0.5"], pa.string()),
        (["1e400"], pa.string()),
        (["-1e400", "0.5"], pa.string()),
        (["1e400", "inf"], pa.string()),
        (["1e-400", "Infinity"], pa.float64()),
        (["0x1F"], pa.string()),
        ([" 1"], pa.string()),
        (["1e3", "-inf"], pa.float64()),
        (["2024-02-30"], pa.string()),
        (["2024-01-01T00:00:00Z"], pa.string()),
        (["2024-01-01 10:00:00.123456789"], pa.string()),
        (["NA", "", "nan"], pa.string()),
        (["NA", "7"], pa.int64()),
        (["0", "10", "-10"], pa.int64()),
        (["1", "007"], pa.string()),
        (["-007"], pa.string()),
        (["00"], pa.string()),
        (["+7"], pa.string()),
        (["1.5", "00.5"], pa.string()),
        (["-01e3"], pa.string()),
        (["-0", "1"], pa.float64()),
        (["1.50", "1e3", "0.5", "-0.25", "0e5", "+1.5"], pa.float64()),
        (["2024-01-01", "0024-01-01"], pa.timestamp("us")),
        (["3.14159265358979323846", "1.5"], pa.string()),
        (["12345678901234567.89"], pa.string()),
        (["1234567890123456789.5"], pa.string()),
        (["9007199254740993.0"], pa.string()),
        (["-0.1234567890123456789e-7"], pa.string()),
        (["9007199254740993e0"], pa.string()),
        (["0.1000000000000000055511151231257827", "0.10000000000000000555", "-0.100000000000000006"], pa.float64()),
        (["0.10000000000000000000000000", "150000000000000000000000.0", "1e300", "1e-400"], pa.float64()),
        (["0.6931471805599453", "5e-324", "1.7976931348623157e308", "-2.2250738585072014e-308"], pa.float64()),
        (["2.225073858507201383e-308", f"0.{300 * '0'}1"], pa.float64()),
    ],
)
def test_no_value_is_changed_by_the_type_that_is_inferred(tmp_path: Path, values: list[str], inferred: object) -> None:
    table, bad = read(tmp_path, "x,y\n" + "".join(f"{value},1\n" for value in values))
    assert table.schema.field("x").type == inferred
    assert not bad.rows


@given(st.lists(st.floats(-1e308, 1e308), min_size=1, max_size=9), st.integers(0, 40))
def test_printed_doubles_are_read_as_doubles_however_many_digits(values: list[float], digits: int) -> None:
    for texts in ([repr(value) for value in values], [f"{value:.{digits}e}" for value in values]):
        inferred = InferredType()
        inferred.update(pa.array([*texts, "0.5"]))
        assert inferred.type == pa.float64()


def test_a_fraction_of_many_digits_is_rounded_where_a_double_is_asked_for_and_kept_by_a_decimal(tmp_path: Path) -> None:
    content = "x\n3.14159265358979323846\n"
    assert read(tmp_path, content, types={"x": "double"})[0]["x"].to_pylist() == [3.141592653589793]
    table, _ = read(tmp_path, content, types={"x": "decimal128(38, 20)"})
    assert table["x"].cast(pa.string()).to_pylist() == ["3.14159265358979323846"]


def test_zeros_in_front_are_kept_wherever_in_the_file_they_come_unless_a_number_is_asked_for(tmp_path: Path) -> None:
    content = "id,n\n" + "".join(f"{number},{number}\n" for number in range(70_000)) + "01067,5\n"
    table, _ = read(tmp_path, content)
    assert (table["id"][-1].as_py(), table["n"][-1].as_py()) == ("01067", 5)

    table, bad = read(tmp_path, "id,n\n01067,5\n+7,-0\n", types={"id": "double", "n": "int64"})
    assert table.to_pydict() == {"id": [1067.0, 7.0], "n": [5, 0]}
    assert not bad.rows


def test_ragged_rows_are_reported_by_their_lines(tmp_path: Path) -> None:
    table, bad = read(tmp_path, 'a,b\n1,2\n3\n\n4,5,6\n"x\ny",7\n8,9\n"q",1,2\n')
    assert table["a"].to_pylist() == ["1", "x\ny", "8"]
    assert bad.places == ["line 3", "line 5", "line 9"]
    assert bad.rows[0].reason == "it has 1 fields where 2 are named"
    assert bad.rows[1].excerpt == "4,5,6"


def test_values_that_do_not_fit_a_given_type_are_reported_by_line_and_reason(tmp_path: Path) -> None:
    table, bad = read(tmp_path, "a,b\n1,x\nzwei,y\n3,z\n300,z\n", types={"a": "int8"})
    assert table.to_pydict() == {"a": [1, 3], "b": ["x", "z"]}
    assert [(row.place, row.reason, row.excerpt) for row in bad.rows] == [
        ("line 3", "column 'a' is no int8", "zwei,y"),
        ("line 5", "column 'a' is no int8", "300,z"),
    ]


@pytest.mark.parametrize(
    ("arrow_type", "good", "bad_texts"),
    [
        ("double", ["-inf", "1.7976931348623157e308", "1000000000000000000", "nan"], ["1e400", "-1e309", "9" * 400]),
        ("double", ["9007199254740992"], ["9007199254740993", 5000 * "0" + "18446744073709551615"]),
        ("float", ["Infinity", "3.4028234e38", "0.1", "16777217"], ["3.5e38", "1e400", "18446744073709551615"]),
        ("halffloat", ["+INF", "65504"], ["65520", "-1e39", "1e400"]),
    ],
)
def test_a_number_that_a_float_cannot_hold_is_a_bad_row(
    tmp_path: Path, arrow_type: str, good: list[str], bad_texts: list[str]
) -> None:
    texts = [*good, *bad_texts]
    content = "x,y\n" + "".join(f"{text},1\n" for text in texts)
    table, bad = read(tmp_path, content, types={"x": arrow_type}, null_values=["NA"])
    assert table.num_rows == len(good)
    assert bad.places == [f"line {len(good) + 2 + index}" for index in range(len(bad_texts))]


@pytest.mark.parametrize(
    ("arrow_type", "text", "value"),
    [
        ("float", "1.5", 1.5),
        ("halffloat", "1.5", 1.5),
        ("uint8", "255", 255),
        ("bool", "1", True),
        ("string", "007", "007"),
        ("binary", "ab", b"ab"),
        ("fixed_size_binary[2]", "ab", b"ab"),
        ("date32", "2024-01-02", datetime.date(2024, 1, 2)),
        ("time64[us]", "01:02:03", datetime.time(1, 2, 3)),
        ("timestamp[us, tz=UTC]", "2024-01-02T00:00:00Z", datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)),
        ("decimal128(5, 2)", "1.25", __import__("decimal").Decimal("1.25")),
    ],
)
def test_a_column_can_be_given_any_scalar_type(tmp_path: Path, arrow_type: str, text: str, value: object) -> None:
    table, bad = read(tmp_path, f"a,b\n{text},1\n#,1\n", types={"a": arrow_type})
    assert table["a"].to_pylist()[0] == value
    assert bad.places == ([] if arrow_type in ("string", "binary") else ["line 3"])


def test_a_type_that_no_text_has_is_refused_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"column_types\[1\].arrow_type"):
        read(tmp_path, "a,b\n1,2\n", types={"a": "int8", "b": "fixed_shape_tensor[value_type=float, shape=[2]]"})


def test_a_type_for_a_column_that_is_not_there_is_refused_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"column_types\[0\].column: 'c'"):
        read(tmp_path, "a,b\n1,2\n", types={"c": "int8"})


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1", "windows-1252", "utf-8-sig", "utf-16-le-bom"])
def test_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    text = "näme,ä\n" + 'é,"ü\n,""ß"""\n' * 30_000
    codec = {"windows-1252": "cp1252", "utf-16-le-bom": "utf-16-le"}.get(encoding, encoding)
    data = (b"\xff\xfe" if encoding.endswith("bom") else b"") + text.encode(codec)
    table, bad = read(tmp_path, data, encoding=encoding.removesuffix("-sig").removesuffix("-le-bom"))
    assert not bad.rows
    assert table.column_names == ["näme", "ä"]
    assert set(table["ä"].to_pylist()) == {'ü\n,"ß"'}
    assert table.num_rows == 30_000


@pytest.mark.parametrize("line", [b"caf\xe9,1", b'"caf\xe9",1'])
def test_bytes_that_are_no_text_make_a_bad_row(tmp_path: Path, line: bytes) -> None:
    table, bad = read(tmp_path, b"a,b\nx,1\n" + line + b"\ny,2\n")
    assert table["a"].to_pylist() == ["x", "y"]
    assert table.schema.field("b").type == pa.int64()
    assert bad.places == ["line 3"]
    assert "no text in its encoding" in bad.rows[0].reason


def test_characters_that_windows_1252_lacks_make_a_bad_row(tmp_path: Path) -> None:
    _, bad = read(tmp_path, b"a,b\nx,1\n\x81,2\n", encoding="windows-1252")
    assert bad.places == ["line 3"]


def test_half_a_character_at_the_end_of_utf_16_damages_the_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="ends within a character"):
        read(tmp_path, "a,b\n1,2\n".encode("utf-16") + b"\x00", encoding="utf-16")


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_end_in_each_of_the_three_ways(tmp_path: Path, ending: str, last: bool) -> None:
    table, bad = read(tmp_path, ending.join(["a,b", "1,2", "3,4"]) + ending * last)
    assert table.to_pydict() == {"a": [1, 3], "b": [2, 4]}
    assert not bad.rows


def test_names_delimiters_and_null_values_can_be_given(tmp_path: Path) -> None:
    table, _ = read(tmp_path, "1;-\n2;x\n", column_names=["a", "b"], delimiter=";", null_values=["-"])
    assert table.to_pydict() == {"a": [1, 2], "b": [None, "x"]}


def test_gzip_and_nul_bytes_are_read(tmp_path: Path) -> None:
    table, bad = read(tmp_path, gzip.compress(b"a,b\nx\0y,1\n"))
    assert table["a"].to_pylist() == ["x\0y"]
    assert not bad.rows


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"], ids=["empty", "only ends of lines", "only a mark"])
def test_a_file_without_names_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidArgument, match="not even a line of names"):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("header", "said"), [("a,a", "name of its own"), ("a,", "name of its own"), ("_row_id,b", "_row_id")]
)
def test_names_that_no_version_can_have_are_refused(tmp_path: Path, header: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        read(tmp_path, header + "\n1,2\n")


def test_a_million_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="it has 1000000 columns; at most 10000"):
        read(tmp_path, ",".join(map(str, range(1_000_000))) + "\n")


def test_files_of_one_source_need_the_same_names(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"1.csv cannot be imported: its columns are b, a"):
        read(tmp_path, "a,b\n1,2\n", "b,a\n1,2\n")


STRAY = '5,"oops,2.5'


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("later", "said"),
    [
        ([], "no quote closes it"),
        (['14,"quoted, name",7.0'], "stands before further text"),
        (['14,x,"7.0"', '15,y,"1"'], "stands before further text"),
        (['14,"a ""word""",7.0'], "stands before further text"),
        (["14,y,7.0"] * 2000, "not closed within 5000 bytes"),
        (["14,y,7.0"] * 2000 + ['15,"z",1'], "not closed within 5000 bytes"),
        (["14,y," + "7" * 9000], "not closed within 5000 bytes"),
    ],
    ids=[
        "end of file",
        "text follows",
        "number follows",
        "doubled quotes",
        "bound",
        "bound, then a quote",
        "long line",
    ],
)
def test_a_quote_that_is_not_closed_costs_its_own_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, later: list[str], said: str
) -> None:
    monkeypatch.setattr(interface, "MAX_LINE_BYTES", 5000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 1000)
    good = [f"{number},name{number},{number * 0.5}" for number in range(200)]
    lines = ["id,name,size", *good[:5], STRAY, *good[5:], *later]
    table, bad = read(tmp_path, ending.join(lines) + ending)
    assert table["id"].to_pylist()[:200] == list(range(200))
    assert table.schema.types == [pa.int64(), pa.string(), pa.float64()]
    assert bad.rows[0].place == "line 7"
    assert bad.rows[0].excerpt == STRAY
    assert said in bad.rows[0].reason
    too_long = sum(len(line) > 5000 for line in lines)
    assert table.num_rows == len(lines) - 2 - too_long
    assert bad.places[1:] == [f"line {len(lines)}"] * too_long


def test_lines_behind_a_stray_quote_keep_their_numbers(tmp_path: Path) -> None:
    table, bad = read(tmp_path, f'id,name,size\n{STRAY}\n1,"a\nb",1\n2,x\n{STRAY}\n3,y,1\n4,y,1,2\n')
    assert table["id"].to_pylist() == [1, 3]
    assert table["name"].to_pylist() == ["a\nb", "y"]
    assert bad.places == ["line 2", "line 5", "line 6", "line 8"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_stray_quotes_cost_no_more_in_other_encodings_and_in_gzip(tmp_path: Path, encoding: str, pack: object) -> None:
    text = f"id,näme,size\n{STRAY}\n" + 'é,"ü\n""ß""",1\n' * 1000
    table, bad = read(tmp_path, pack(text.encode(encoding)), encoding=encoding)  # type: ignore[operator]
    assert (table.num_rows, bad.places) == (1000, ["line 2"])


def test_each_file_of_a_source_has_its_own_stray_quotes(tmp_path: Path) -> None:
    table, bad = read(tmp_path, f"id,name,size\n1,x,1\n{STRAY}\n", f"id,name,size\n{STRAY}\n2,y,1\n")
    assert table["id"].to_pylist() == [1, 2]
    assert [Path(row.source).name + " " + row.place for row in bad.rows] == ["0.csv line 3", "1.csv line 2"]


def test_a_bad_record_of_several_lines_counts_as_so_many(tmp_path: Path) -> None:
    content = 'id,name\n1,"a\nb"\n2,"a\nb\nc",3\n"4\n4",x\n5,y\n'
    table, bad = read(tmp_path, content, types={"id": "int64"})
    assert table["id"].to_pylist() == [1, 5]
    assert [(row.place, row.rows) for row in bad.rows] == [("lines 4 to 6", 3), ("lines 7 to 8", 2)]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ('id,"name,size', "line 1, which should name its columns, is malformed: a quoted field begins in it"),
        ('id,"na"me,size', "line 1, which should name its columns, is malformed: its quotes"),
    ],
)
def test_a_stray_quote_in_the_line_of_names_refuses_the_file(tmp_path: Path, header: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        read(tmp_path, f"{header}\n" + "1,x,2\n" * 10)


def _records(text: str, max_bytes: int) -> tuple[list[list[str]], list[int]]:
    """The good records, and the numbers of the bad lines, found by reading anew behind each line that fails."""
    lines = text.splitlines(keepends=True)
    good, bad, at = [], [], 0
    while at < len(lines):
        for count in range(1, len(lines) - at + 1):
            record = "".join(lines[at : at + count])
            if len(record) > max_bytes:
                fields = None
                break
            fields = _fields(record)
            if fields is None or not isinstance(fields, str):
                break
        if isinstance(fields, list):
            good += [fields] if lines[at] != "\n" else []
            at += count
        else:
            bad.append(at + 1)
            at += 1
    return good, bad


def _fields(record: str) -> list[str] | str | None:
    """RFC 4180 by hand; None where a quote is malformed, and a text where a field is still open."""
    fields, at = [], 0
    while True:
        field = ""
        if record.startswith('"', at):
            while True:
                end = record.find('"', at + 1)
                if end < 0:
                    return "open"
                field += record[at + 1 : end]
                at = end
                if not record.startswith('"', end + 1):
                    break
                field, at = field + '"', end + 1
            at += 1
        else:
            end = min(found for found in (record.find(",", at), record.find("\n", at), len(record)) if found >= 0)
            field, at = record[at:end], end
        fields.append(field)
        if at == len(record) or record[at] == "\n":
            return fields
        if record[at] != ",":
            return None
        at += 1


QUOTED_LINES = ['"', '""', '"""', 'x,"', '",y', 'x",",', '"x"', "x,y", "", 'y"z', '""",']


@settings(max_examples=300)
@given(
    lines=st.lists(st.sampled_from(QUOTED_LINES), max_size=30),
    max_bytes=st.integers(12, 60),
    block=st.integers(3, 40),
)
def test_bad_lines_and_records_are_those_of_reading_anew_behind_each_bad_line(
    lines: list[str], max_bytes: int, block: int
) -> None:
    text = "".join(f"{line}\n" for line in lines)
    good, bad = _records(text, max_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "MAX_LINE_BYTES", max_bytes)
        blocks = interface.line_blocks(io.BytesIO(text.encode()), "utf-8")
        patch.setattr(interface, "BLOCK_BYTES", block)
        found = list(CsvReader(blocks, ",", []).records(2))
    rows = [list(row) for records in found for row in zip(*(one.to_pylist() for one in records.columns), strict=True)]
    ragged = [one for records in found for one in records.bad if "fields where" in one.reason]
    assert rows == [[field.encode() or None for field in fields] for fields in good if len(fields) == 2]
    assert len(ragged) == sum(len(fields) != 2 for fields in good)
    assert [one.line for records in found for one in records.bad if one not in ragged] == bad


@pytest.mark.parametrize("line", ['x",",', '5,"oops', '""",', '"x"y', 'x,"",y"z,"'])
@pytest.mark.parametrize("max_bytes", [1000, 16 * 1024 * 1024])
def test_a_stray_quote_on_every_line_costs_no_more_than_a_few_readings_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, max_bytes: int
) -> None:
    monkeypatch.setattr(interface, "MAX_LINE_BYTES", max_bytes)
    lines_read = 0
    csv_reader = csv.reader

    def counting(lines: Iterator[str], **options: Any) -> Any:
        def counted() -> Iterator[str]:
            nonlocal lines_read
            for one in lines:
                lines_read += 1
                yield one

        return csv_reader(counted(), **options)

    monkeypatch.setattr(csv, "reader", counting)
    with (tmp_path / "a.csv").open("w") as file:
        file.write("a,b\n" + f"{line}\n" * 5000 + "x,y\n")
    (one,) = opened(tmp_path, source_of((tmp_path / "a.csv").as_uri(), "csv"), types={"a": "string", "b": "string"})
    lines_read = 0
    table_of(one.rows, Quarantine())
    assert lines_read <= 5 * 5000


def test_a_line_beyond_all_bounds_is_left_out_and_those_after_it_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "MAX_LINE_BYTES", 5000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 1000)
    table, bad = read(tmp_path, "a,b\n1,2\n" + "x" * 50_000 + ",2\n3,4\n5\n")
    assert table["a"].to_pylist() == [1, 3]
    assert bad.places == ["line 3", "line 5"]


def test_stray_quotes_make_a_bad_row(tmp_path: Path) -> None:
    table, bad = read(tmp_path, 'a,b\n"x"y,1\nz,2\n5" pipe,3\n')
    assert table["a"].to_pylist() == ["z", '5" pipe']
    assert bad.places == ["line 2"]


def test_a_truncated_gzip_file_is_damaged_as_a_whole(tmp_path: Path) -> None:
    data = gzip.compress(os.urandom(3000).hex().encode())
    with pytest.raises(InvalidArgument, match="gzip"):
        read(tmp_path, data[: len(data) // 2], column_names=["a"])


field_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(rows=st.lists(st.tuples(field_texts, field_texts), max_size=20), block=st.integers(4, 60))
def test_whatever_a_writer_quotes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], block: int
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    given_table = pa.table(
        {"a": [a for a, _ in rows], "b": [b for _, b in rows]}, pa.schema({"a": "string", "b": "string"})
    )
    pyarrow.csv.write_csv(given_table, folder / "0.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "BLOCK_BYTES", block)
        source = source_of((folder / "0.csv").as_uri(), "csv", csv=CsvOptions(null_values=["-"]))
        table, bad = whole(folder, source, types={"a": "string", "b": "string"})
    assert not bad.rows
    assert table.to_pylist() == [
        {name: None if value in ("", "-") else value for name, value in row.items()} for row in given_table.to_pylist()
    ]


@given(data=st.binary(max_size=300), block=st.integers(1, 40))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes, block: int) -> None:
    folder = tmp_path_factory.mktemp("csv")
    (folder / "0.csv").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "BLOCK_BYTES", block)
        source = source_of((folder / "0.csv").as_uri(), "csv", csv=CsvOptions(column_names=["a", "b"]))
        with suppress(InvalidArgument):
            whole(folder, source)


def test_sources_can_be_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n2\n")
    (one,) = opened(tmp_path, source_of((tmp_path / "a.csv").as_uri(), "csv"))
    assert table_of(one.rows) == table_of(one.rows)


def test_given_types_for_all_columns_spare_the_first_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("records", "row_counts"):
        monkeypatch.setattr(csv_rows.CsvReader, name, lambda *_: pytest.fail("read for nothing"))
    (tmp_path / "a.csv").write_text("a\n1\n")
    (one,) = opened(tmp_path, source_of((tmp_path / "a.csv").as_uri(), "csv"), types={"a": "int8"})
    monkeypatch.undo()
    assert table_of(one.rows)["a"].to_pylist() == [1]


@pytest.mark.parametrize(("name", "rows"), [("penguins", 344), ("taxis", 6433)])
def test_the_example_tables_are_read_as_arrow_reads_them(name: str, rows: int) -> None:
    folder = real_data() / "tabular"
    table, bad = whole(folder, source_of((folder / f"{name}.csv").as_uri(), "csv"))
    wanted = pyarrow.csv.read_csv(
        folder / f"{name}.csv", convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    )
    assert not bad.rows
    assert table.num_rows == rows
    assert table.to_pylist() == wanted.to_pylist()


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_byte_order_mark_is_reported_by_its_zero_bytes(tmp_path: Path, codec: str) -> None:
    table, bad = read(tmp_path, 'a,"b"\n1,\u00e9\U0001d54f\n'.encode(codec), encoding="utf-16")
    assert table.to_pydict() == {"a": [1], "b": ["\u00e9\U0001d54f"]}
    assert not bad.rows


def test_text_of_unknown_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="it has no byte-order mark"):
        read(tmp_path, "a,b\n1,2\n", encoding="utf-16")


def test_a_record_of_a_million_fields_takes_little_more_memory_than_its_fields(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        table, bad = read(tmp_path, b'a,b\n"",' + b"," * 1_000_000 + b"\n1,2\n")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.num_rows == 1
    assert bad.rows[0].reason == "it has 1000002 fields where 2 are named"
    assert peak_bytes < 40_000_000


SPLIT_LINES = [*QUOTED_LINES, '"a\nb",c', '"x""y",', '"",""', 'a,"b"', 'a,""""', "NA,1", '"NA",2', "x", 'a,"b",c', "\r"]


@settings(max_examples=100)
@given(
    lines=st.lists(st.sampled_from(SPLIT_LINES), max_size=12), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans()
)
def test_arrow_splits_regular_quotes_as_python_does(lines: list[str], end: str, last: bool) -> None:
    data = (end.join(lines) + (end if last else "")).encode()
    ends = csv_rows._record_ends(data, ",") if data else None
    if ends is None:
        return
    reader, block = CsvReader(iter([]), ",", ["NA"]), interface.LineBlock(data, 7, 0)
    arrow, python = reader._regular(block, ends, 2), reader._irregular(block, 2)
    assert arrow.columns == python.columns
    assert arrow.lines.tolist() == python.lines.tolist()
    assert arrow.line_counts.tolist() == python.line_counts.tolist()
    assert arrow.bad == python.bad
    assert [arrow.excerpt(row) for row in range(len(arrow.lines))] == [
        python.excerpt(row) for row in range(len(python.lines))
    ]


def test_only_quotes_where_they_should_be_are_regular() -> None:
    ends = csv_rows._record_ends(b'"a\nb",c\r\n\n1,""\n"x""y","z"', ",")
    assert ends is not None
    assert ends.tolist() == [9, 10, 15, 25]
    for irregular in (b'5" pipe,c\n', b'"open,c\n', b'"x"y,c\n', b"a\rb,c\n"):
        assert csv_rows._record_ends(irregular, ",") is None
