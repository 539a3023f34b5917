"""Sources of all formats from each kind of place."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from data_service.formats import interface, open_sources
from data_service.storage import local_files
from data_service.storage.source_files import SourceFiles
from shared.errors import Cancelled, InvalidArgument, NotFound, Unavailable
from tests.support.idx import digits, write_idx
from tests.support.images import encoded, tar_of
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


class BrokenFile(io.BytesIO):
    """A file of a disk that fails after some reads."""

    def __init__(self, data: bytes, reads: int) -> None:
        super().__init__(data)
        self._reads_left = reads

    def read(self, size: int | None = -1) -> bytes:
        if not self._reads_left:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._reads_left -= 1
        return super().read(size)

    def close(self) -> None: ...


def write_source(folder: Path, kind: str) -> dict[str, str]:
    """Write a source of one file, or of a pair; return its URIs."""
    path = folder / "rows"
    uris = {f"{kind}.uri": path.as_uri()}
    match kind:
        case "parquet":
            pq.write_table(pa.table({"n": range(3000)}), path, row_group_size=1000)
        case "arrow":
            with pa.ipc.new_file(path, pa.schema({"n": pa.int64()})) as writer:
                writer.write_table(pa.table({"n": range(3000)}), max_chunksize=1000)
        case "csv":
            path.write_bytes(b"n\n" + b"1234567\n" * 1000)
        case "json_lines":
            path.write_bytes(b'{"n": 1234567}\n' * 1000)
        case "idx":
            images, labels = digits(30)
            uris = {
                "idx.images_uri": write_idx(folder / "images", images),
                "idx.labels_uri": write_idx(folder / "labels", labels),
            }
        case "image_folder":
            (folder / "all" / "a").mkdir(parents=True)
            (folder / "all" / "a" / "0.png").write_bytes(encoded())
            uris = {"image_folder.uri": f"{(folder / 'all').as_uri()}/"}
        case _:
            path.write_bytes(tar_of({f"a/{number}.png": encoded() for number in range(10)}))
    return uris


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "json_lines", "idx", "image_folder", "image_tar"])
def test_a_disk_that_fails_while_rows_are_read_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After any number of reads, until a source can be opened and read without an error."""
    monkeypatch.setattr(interface, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(interface, "BUFFER_BYTES", 2000)
    source = source_of(write_source(tmp_path, kind), kind)
    openings = local_files.LocalFiles.open
    messages = []
    for reads in range(1000):

        def open_broken(files: Any, field: str, uri: str, path: str, reads: int = reads) -> BinaryIO:
            opened = openings(files, field, uri, path)
            broken = cast(Any, BrokenFile(opened.read(), reads))
            broken.fileno = opened.fileno
            return cast(BinaryIO, broken)

        monkeypatch.setattr(local_files.LocalFiles, "open", open_broken)
        try:
            for one in opened(tmp_path, source):
                table_of(one.rows)
        except Unavailable as error:
            messages.append(error.message)
        else:
            break
    assert messages
    assert all("cannot be read at present" in message for message in messages)
