"""Folders `name=value` as columns, as pyarrow.dataset has them."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from data_service.formats import open_sources
from data_service.storage.source_files import SourceFiles
from shared.errors import InvalidArgument
from tests.support.images import encoded
from tests.support.import_sources import Quarantine, opened, source_of, table_of, whole

NULL = "__HIVE_DEFAULT_PARTITION__"


def write(path: Path, rows: pa.Table) -> None:
    """In the format that the path's suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(rows, path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(rows, path)
    elif path.suffix == ".arrow":
        pyarrow.feather.write_feather(rows, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))


def written(folder: Path, *names: str) -> str:
    """One file of one row each, `n` counting them. The folder's URI."""
    for number, name in enumerate(names):
        write(folder / name, pa.table({"n": [number]}))
    return f"{folder.as_uri()}/"


@pytest.mark.parametrize(
    ("kind", "suffix"), [("parquet", "parquet"), ("csv", "csv"), ("arrow", "arrow"), ("json_lines", "jsonl")]
)
def test_folders_are_columns_behind_the_files_own_in_every_format_of_rows(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    names = [f"country={country}/month={month}/x.{suffix}" for country in ("de", "fr") for month in (1, 2)]
    table, bad = whole(tmp_path, source_of(written(tmp_path, *names), kind))
    assert not bad.rows
    assert table.schema == pa.schema({"n": pa.int64(), "country": pa.string(), "month": pa.int32()})
    assert table.to_pydict() == {"n": [0, 1, 2, 3], "country": ["de", "de", "fr", "fr"], "month": [1, 2, 1, 2]}


@pytest.mark.parametrize(
    ("values", "read", "arrow_type"),
    [
        (["1", "-2"], [-2, 1], pa.int32()),
        (["01", "02"], [1, 2], pa.int32()),
        (["1", "x"], ["1", "x"], pa.string()),
        (["1", "2147483648"], ["1", "2147483648"], pa.string()),
        (["1.5"], ["1.5"], pa.string()),
        (["2024-01-02"], ["2024-01-02"], pa.string()),
        (["+1"], ["+1"], pa.string()),
        (["true"], ["true"], pa.string()),
        ([""], [""], pa.string()),
        ([NULL, "3"], [3, None], pa.int32()),
        ([NULL, "a"], [None, "a"], pa.string()),
        (["a%2Fb", "%20c", "b=c", "%zz"], [" c", "%zz", "a/b", "b=c"], pa.string()),
    ],
)
def test_values_have_the_type_that_pyarrow_finds_in_all_of_them(
    tmp_path: Path, values: list[str], read: list[object], arrow_type: pa.DataType
) -> None:
    uri = written(tmp_path, *(f"a={value}/x.parquet" for value in values))
    table, _ = whole(tmp_path, source_of(uri, "parquet"))
    assert table.schema.field("a").type == arrow_type
    assert table["a"].to_pylist() == read
    theirs = pyarrow.dataset.dataset(tmp_path, partitioning="hive").to_table()
    assert theirs.schema.field("a").type == arrow_type
    assert sorted(theirs["a"].to_pylist(), key=str) == sorted(read, key=str)


@settings(max_examples=30)
@given(
    values=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8), min_size=1, unique=True
    )
)
def test_partitions_that_pyarrow_writes_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("hive")
    table = pa.table({"n": range(len(values)), "käse": values})
    pq.write_to_dataset(table, folder, partition_cols=["käse"])
    read, _ = whole(folder, source_of(f"{folder.as_uri()}/", "parquet"), types={"käse": "string"})
    assert sorted(read.to_pylist(), key=str) == sorted(table.to_pylist(), key=str)


def test_a_column_of_nothing_but_nulls_is_of_strings(tmp_path: Path) -> None:
    table, _ = whole(tmp_path, source_of(written(tmp_path, f"a={NULL}/x.csv"), "csv"))
    assert (table.schema.field("a").type, table["a"].to_pylist()) == (pa.string(), [None])


def test_folders_of_other_names_may_lie_between_and_the_files_name_is_no_folder(tmp_path: Path) -> None:
    uri = written(tmp_path, "raw/a=1/plain/b=x/n=7.parquet", "raw/a=2/=3/b=y/n=8.parquet")
    table, _ = whole(tmp_path, source_of(uri, "parquet"))
    assert table.to_pydict() == {"n": [0, 1], "a": [1, 2], "b": ["x", "y"]}


def test_folders_within_the_uri_are_no_columns(tmp_path: Path) -> None:
    root = written(tmp_path, "a=1/b=x/0.parquet", "a=2/b=y/1.parquet")
    for below, names in {
        "": "nab",
        "a=1/": "nb",
        "a=1/b=x/": "n",
        "a=?/": "nab",
        "*/b=x/*": "nab",
        "**/0*": "nab",
    }.items():
        table, _ = whole(tmp_path, source_of(root + below, "parquet"))
        assert "".join(table.column_names) == names, below
    table, _ = whole(tmp_path, source_of(f"{root}a=1/b=x/0.parquet", "parquet"))
    assert table.column_names == ["n"]


def test_folders_are_nothing_but_folders_where_partitioning_is_none(tmp_path: Path) -> None:
    uri = written(tmp_path, "n=1/x.csv", "n=2/m=1/x.csv")
    found = open_sources([source_of(uri, "csv")], SourceFiles([PurePosixPath(tmp_path)], None), {}, "none")
    assert [table_of(one.rows).to_pydict() for one in found] == [{"n": [0]}, {"n": [1]}]


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_column_that_the_file_has_too_is_refused_with_both_names(tmp_path: Path, suffix: str) -> None:
    uri = written(tmp_path, f"n=1/a=2/x.{suffix}")
    with pytest.raises(
        InvalidArgument, match=rf"n%3D1/a%3D2/x.{suffix} cannot be imported: it has a column 'n', and"
    ) as error:
        whole(tmp_path, source_of(uri, suffix))
    assert error.value.fields[0][0] == f"sources[0].{suffix}.uri"
    assert "PARTITIONING_NONE" in str(error.value)


@pytest.mark.parametrize(
    "names",
    [
        ["a=1/x.csv", "x.csv"],
        ["a=1/x.csv", "b=1/x.csv"],
        ["a=1/b=1/x.csv", "a=2/x.csv"],
        ["a=1/b=1/x.csv", "b=1/a=1/x.csv"],
    ],
)
def test_files_with_other_partition_folders_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=r"its folders make the columns .*, and those of file:"):
        whole(tmp_path, source_of(written(tmp_path, *names), "csv"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a=1/a=2/x.csv", "two of its folders give column 'a' a value"),
        ("a=%ff/x.csv", "the name of its folder 'a=%ff' is no UTF-8"),
        ("a%00=1/x.csv", "zero byte"),
    ],
)
def test_names_that_make_no_columns_are_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        whole(tmp_path, source_of(written(tmp_path, name), "csv"))


@pytest.mark.parametrize(
    ("arrow_type", "text", "value"),
    [
        ("string", "01", "01"),
        ("int64", "2147483648", 2**31),
        ("double", "1.5", 1.5),
        ("halffloat", "1.5", 1.5),
        ("bool", "true", True),
        ("date32[day]", "2024-01-02", datetime.date(2024, 1, 2)),
        ("timestamp[us]", "2024-01-02 03:04:05", datetime.datetime(2024, 1, 2, 3, 4, 5)),
        ("decimal128(5, 2)", "1.25", Decimal("1.25")),
        ("binary", "ab", b"ab"),
        ("fixed_size_binary[2]", "ab", b"ab"),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_column_can_be_given_any_scalar_type(
    tmp_path: Path, suffix: str, arrow_type: str, text: str, value: object
) -> None:
    uri = written(tmp_path, f"a={quote(text)}/x.{suffix}", f"a={NULL}/x.{suffix}")
    table, bad = whole(tmp_path, source_of(uri, suffix), types={"a": arrow_type, "n": "int8"})
    assert not bad.rows
    assert str(table.schema.field("a").type) == arrow_type
    assert table.schema.field("n").type == pa.int8()
    assert sorted(table["a"].to_pylist(), key=str) == sorted([value, None], key=str)


def test_a_type_that_no_text_has_is_refused_by_its_field(tmp_path: Path) -> None:
    uri = written(tmp_path, "a=1/x.csv")
    with pytest.raises(InvalidArgument, match=r"column_types\[0\].arrow_type"):
        whole(tmp_path, source_of(uri, "csv"), types={"a": "fixed_shape_tensor[value_type=float, shape=[2]]"})


def test_rows_of_a_folder_whose_value_does_not_fit_its_given_type_are_bad(tmp_path: Path) -> None:
    uri = written(tmp_path, "a=1/x.parquet", "a=300/x.parquet")
    write(tmp_path / "a=300/y.parquet", pa.table({"n": list(range(2000))}))
    table, bad = whole(tmp_path, source_of(uri, "parquet"), types={"a": "int8"})
    assert table.to_pydict() == {"n": [0], "a": [1]}
    assert sum(row.rows for row in bad.rows) == 2001
    assert (bad.rows[0].place, bad.rows[0].excerpt) == ("row 1", "a=300")
    assert bad.places[1:] == ["rows 1 to 1024", "rows 1025 to 2000"]
    assert {row.reason for row in bad.rows} == {"column 'a' is no int8"}


def test_bad_rows_of_partitioned_files_keep_their_places(tmp_path: Path) -> None:
    (tmp_path / "a=1").mkdir()
    (tmp_path / "a=1" / "x.csv").write_text('n,s\n1,x\n2,"y\n3,z\n4\n')
    table, bad = whole(tmp_path, source_of(f"{tmp_path.as_uri()}/", "csv"))
    assert table.to_pydict() == {"n": [1, 3], "s": ["x", "z"], "a": [1, 1]}
    assert bad.places == ["line 3", "line 5"]


def test_sources_can_be_read_again(tmp_path: Path) -> None:
    (one,) = opened(tmp_path, source_of(written(tmp_path, "a=1/x.csv"), "csv"))
    assert table_of(one.rows, Quarantine()) == table_of(one.rows, Quarantine())


def test_objects_have_the_columns_of_their_prefixes(tmp_path: Path) -> None:
    written(tmp_path / "bucket" / "t", "a=x%20y/0.parquet", "a=z/1.parquet")
    files = SourceFiles([], fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))
    found = open_sources([source_of("s3://bucket/t/", "parquet")], files, {})
    assert [table_of(one.rows)["a"].to_pylist() for one in found] == [["x y"], ["z"]]


def test_images_take_no_columns_from_their_folders(tmp_path: Path) -> None:
    (tmp_path / "class=cat").mkdir()
    (tmp_path / "class=cat" / "x.png").write_bytes(encoded())
    (one,) = opened(tmp_path, source_of(f"{tmp_path.as_uri()}/", "image_folder"))
    assert one.rows.schema.names == ["image", "label", "path"]
    assert one.rows.class_names == ["class=cat"]
