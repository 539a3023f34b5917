"""Sources of all formats from each kind of place."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from data_service.formats import open_sources
from data_service.storage.source_files import SourceFiles
from shared.errors import Cancelled, InvalidArgument, NotFound
from tests.support.images import encoded
from tests.support.import_sources import opened, source_of, table_of


def test_a_pattern_gives_one_source_for_each_file_in_order(tmp_path: Path) -> None:
    for index in (2, 0, 1):
        pq.write_table(pa.table({"n": [index]}), tmp_path / f"{index}.parquet")
    last = source_of(f"{tmp_path.as_uri()}/0.parquet", "parquet", "test")
    found = opened(tmp_path, source_of(f"{tmp_path.as_uri()}/*.parquet", "parquet"), last)
    assert [(one.index, one.split, table_of(one.rows)["n"][0].as_py()) for one in found] == [
        (0, "train", 0),
        (0, "train", 1),
        (0, "train", 2),
        (1, "test", 0),
    ]


def test_a_given_type_is_used_by_every_source_that_has_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("n\n2\n")
    sources = [source_of((tmp_path / "a.parquet").as_uri(), "parquet"), source_of((tmp_path / "b.csv").as_uri(), "csv")]
    assert {one.rows.schema.field("n").type for one in opened(tmp_path, *sources, types={"n": "int16"})} == {pa.int16()}


def test_an_unknown_column_is_refused_by_the_place_of_its_type(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidArgument, match=r"column_types\[1\].column: 'm'"):
        opened(tmp_path, source_of((tmp_path / "a.parquet").as_uri(), "parquet"), types={"n": "int8", "m": "int8"})


@pytest.fixture
def bucket(tmp_path: Path) -> SourceFiles:
    """A file system in place of S3: `S3Objects` asks no more of it."""
    (tmp_path / "bucket").mkdir()
    return SourceFiles([], fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))


def test_objects_are_found_by_prefix_and_pattern(tmp_path: Path, bucket: SourceFiles) -> None:
    for name in ("in/b.csv", "in/a b.csv", "in/x/c.csv", "in/_d.csv"):
        (tmp_path / "bucket" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bucket" / name).write_text(f"n\n{ord(name[3])}\n")
    below = bucket.find_all("f", "s3://bucket/in/")
    assert [file.uri for file in below] == [
        "s3://bucket/in/a%20b.csv",
        "s3://bucket/in/b.csv",
        "s3://bucket/in/x/c.csv",
    ]
    assert [file.uri for file in bucket.find_all("f", "s3://bucket/*/*.csv")] == [file.uri for file in below[:2]]
    (first, *_) = open_sources([source_of("s3://bucket/in/", "csv")], bucket, {})
    assert table_of(first.rows)["n"].to_pylist() == [97]
    assert bucket.find("f", below[0].uri).size_bytes == below[0].size_bytes
    for absent in ("s3://bucket/out/", "s3://bucket/in/*.txt"):
        with pytest.raises(NotFound, match="f: s3://bucket/"):
            bucket.find_all("f", absent)


def test_an_image_folder_may_be_of_objects(tmp_path: Path, bucket: SourceFiles) -> None:
    (tmp_path / "bucket" / "cat").mkdir()
    (tmp_path / "bucket" / "cat" / "x.png").write_bytes(encoded())
    (one,) = open_sources([source_of("s3://bucket/", "image_folder")], bucket, {})
    assert table_of(one.rows).select(["label", "path"]).to_pylist() == [{"label": 0, "path": "cat/x.png"}]


def test_without_a_store_no_upload_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no upload can be read"):
        SourceFiles([PurePosixPath(tmp_path)], None).find("f", "datasets/d/uploads/u")


@pytest.mark.parametrize(("kind", "content"), [("csv", "n\n1\n"), ("json_lines", '{"n":1}\n')])
def test_who_no_longer_wants_the_rows_need_not_wait_for_their_types(tmp_path: Path, kind: str, content: str) -> None:
    (tmp_path / "rows").write_text(content)

    def stop() -> None:
        raise Cancelled("nobody wants it")

    files = SourceFiles([PurePosixPath(tmp_path)], None, on_read=stop)
    with pytest.raises(Cancelled):
        open_sources([source_of((tmp_path / "rows").as_uri(), kind)], files, {})
