"""A child reads the rows of files as this process would, within limits, and with nothing but descriptors and bytes."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from ray import cloudpickle

from data_service.domain.import_spec import Source
from data_service.formats import OpenSource, RowSource, interface, open_sources
from data_service.imports import reader as reader_module
from data_service.imports.plan import identity_of
from data_service.imports.reader import ChildRows, leased_reader, open_in_child
from data_service.imports.reader_child import GROUP, GROUP_BYTES, grouped
from data_service.settings import ReaderLimits, reader_limits
from data_service.storage.source_files import SourceFile, SourceFiles
from shared.errors import Cancelled, InvalidArgument, MillraceError, Unavailable
from shared.settings import SettingsError
from shared.storage import ObjectStore
from tests.support import hostile_files
from tests.support.idx import digits, idx_bytes
from tests.support.images import encoded, tar_of
from tests.support.import_sources import Quarantine, source_of
from tests.support.process_states import stop_process
from tests.support.upload_calls import committed
from tests.support.upload_server import uploads_of

Open = Callable[[list[Source], SourceFiles, dict[str, str]], list[OpenSource]]


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def arrow_bytes(table: pa.Table, new: Any = pa.ipc.new_file, rows: int = 100) -> bytes:
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


TABLE = pa.table(
    {
        "n": pa.array([*range(299), None]),
        "word": [f"word {row}" for row in range(300)],
        "when": pa.array(range(300), pa.timestamp("us", "UTC")),
        "code": pa.array(["a", "b", None] * 100).dictionary_encode(),
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(1200, dtype=np.uint8).reshape(300, 2, 2)),
    }
)
CSV = b"n,word\n" + b"".join(b"%d,w%d\n" % (row, row) for row in range(300)) + b'7\n8,"open\n9,x\n'
LINES = (
    b"".join(json.dumps({"n": row, "w": [row, 1]}).encode() + b"\n" for row in range(300)) + b'{"n": \n{"n": 1e400}\n'
)
IMAGES = {"ants/a.png": encoded(), "bees/b.png": encoded(colour=3), "bees/c.png": b"none", "d.png": encoded()}
FIXED = "fixed_shape_tensor[value_type=float, shape=[2]]"

# name: (format, the files' content by their paths, column_types)
CORPUS: dict[str, tuple[str, dict[str, bytes], dict[str, str]]] = {
    "parquet": ("parquet", {"a": parquet_bytes(TABLE), "b": parquet_bytes(TABLE)}, {}),
    "parquet in row groups": ("parquet", {"a": parquet_bytes(TABLE, row_group_size=50)}, {}),
    "partitions": ("parquet", {f"day={day}/a": parquet_bytes(TABLE.select(["n"])) for day in (1, 2)}, {}),
    "a cast with misfits": ("parquet", {"a": parquet_bytes(TABLE.select(["n", "word"]))}, {"n": "int8"}),
    "arrow file": ("arrow", {"a": arrow_bytes(TABLE)}, {}),
    "arrow stream": ("arrow", {"a": arrow_bytes(TABLE, pa.ipc.new_stream)}, {}),
    "csv": ("csv", {"a": CSV}, {}),
    "csv in gzip": ("csv", {"a": gzip.compress(CSV)}, {"n": "double"}),
    "json lines": ("json_lines", {"a": LINES}, {"w": FIXED}),
    "image tar": ("image_tar", {"a": tar_of(IMAGES)}, {}),
    "image folder": ("image_folder", IMAGES, {}),
    "unknown column": ("csv", {"a": CSV}, {"m": "int64"}),
    "other columns": ("csv", {"a": CSV, "b": b"m\n1\n"}, {}),
    "damaged parquet": ("parquet", {"a": parquet_bytes(TABLE)[:-40]}, {}),
    "truncated parquet": ("parquet", {"a": parquet_bytes(TABLE)[100:]}, {}),
    "truncated arrow": ("arrow", {"a": arrow_bytes(TABLE, pa.ipc.new_stream)[:-400]}, {}),
    "parquet bomb": ("parquet", {"a": hostile_files.parquet_bomb()}, {}),
    "parquet that claims rows": ("parquet", {"a": hostile_files.parquet_that_claims(2**62, 2**62)}, {}),
    "arrow that claims rows": ("arrow", {"a": hostile_files.arrow_that_claims(2**62, 3, pa.int64())}, {}),
    "arrow that claims nulls": ("arrow", {"a": hostile_files.arrow_that_claims(2**62, 3, pa.null())}, {}),
    "many pixels": ("image_folder", {"ants/a.png": hostile_files.many_pixels()}, {}),
    "tar that leads out": ("image_tar", {"a": hostile_files.tar_with("ants/../../../x.png")}, {}),
    "no format at all": ("image_tar", {"a": b"none of it"}, {}),
}


def written(folder: Path, name: str) -> tuple[Source, dict[str, str]]:
    kind, files, types = CORPUS[name]
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return source_of(f"{folder.as_uri()}/**", kind), types


def outcome(open_them: Open, source: Source, files: SourceFiles, types: dict[str, str]) -> Any:
    """What the import would have of the source, as it is and in parts: columns, tables, bad rows; or its error."""
    found: list[Any] = []
    try:
        for one in open_them([source], files, types):
            facts = [(rows.row_count, rows.size_bytes) for rows in (one.rows, *one.rows.parts())]
            found.append((one.index, one.split, one.rows.schema, one.rows.class_names, facts))
            for rows in (one.rows, *one.rows.parts()):
                bad = Quarantine()
                found += [bad.rows, pa.concat_tables([rows.schema.empty_table(), *rows.tables(bad)]).combine_chunks()]
    except MillraceError as error:
        found.append(error.as_record())
    return found


@pytest.mark.parametrize("name", CORPUS)
def test_a_child_reads_what_this_process_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 2000)
    source, types = written(tmp_path, name)
    files = SourceFiles([PurePosixPath(tmp_path)], None)
    assert outcome(open_in_child, source, files, types) == outcome(open_sources, source, files, types)


@pytest.mark.parametrize("name", ["parquet in row groups", "arrow stream", "csv", "image folder"])
def test_a_child_asks_for_the_bytes_of_objects(tmp_path: Path, name: str) -> None:
    (tmp_path / "bucket").mkdir()
    source, types = written(tmp_path / "bucket", name)
    source = source_of("s3://bucket/", source.format)
    files = SourceFiles([], fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))
    assert outcome(open_in_child, source, files, types) == outcome(open_sources, source, files, types)


@pytest.mark.parametrize("name", ["parquet", "arrow file", "csv", "json lines", "image tar"])
def test_a_child_asks_for_the_bytes_of_uploads(store: ObjectStore, name: str) -> None:
    kind, contents, types = CORPUS[name]
    upload = committed(uploads_of(store), contents["a"], chunk_bytes=5000)
    files = SourceFiles([], None, store)
    source = source_of(upload, kind)
    assert outcome(open_in_child, source, files, types) == outcome(open_sources, source, files, types)


def test_a_child_reads_a_pair_of_idx_files(tmp_path: Path) -> None:
    images, labels = digits(30)
    (tmp_path / "images").write_bytes(gzip.compress(idx_bytes(images)))
    (tmp_path / "labels").write_bytes(idx_bytes(labels))
    uris = {f"idx.{name}_uri": (tmp_path / name).as_uri() for name in ("images", "labels")}
    files = SourceFiles([PurePosixPath(tmp_path)], None)
    source = source_of(uris, "idx")
    assert outcome(open_in_child, source, files, {}) == outcome(open_sources, source, files, {})


def test_files_that_are_opened_ahead_fail_where_their_turn_comes(tmp_path: Path) -> None:
    for number in range(40):  # more than are opened at once
        (tmp_path / "ants").mkdir(exist_ok=True)
        (tmp_path / "ants" / f"{number:02}.png").write_bytes(encoded(colour=number))
    files = SourceFiles([PurePosixPath(tmp_path)], None)
    source = source_of(f"{tmp_path.as_uri()}/", "image_folder")
    rows = [open_them([source], files, {})[0].rows for open_them in (open_in_child, open_sources)]
    there, here = (pa.concat_tables(one.tables(Quarantine())) for one in rows)
    assert there == here
    (tmp_path / "ants" / "02.png").write_bytes(b"no image")
    (tmp_path / "ants" / "35.png").write_bytes(encoded(size=(9, 9)))
    for one in rows:
        with pytest.raises(InvalidArgument, match=r"02\.png cannot be imported: it changed while it was read"):
            list(one.tables(Quarantine()))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give children the time to stop that a busy machine needs."""
    monkeypatch.setattr(reader_module, "STOP_S", 120.0)


def large_rows(folder: Path, rows: int = 400_000) -> ChildRows:
    """Tables that together exceed what a socket holds."""
    pq.write_table(pa.table({"n": np.random.default_rng(0).integers(0, 2**62, rows)}), folder / "large.parquet")
    files = SourceFiles([PurePosixPath(folder)], None)
    source = source_of((folder / "large.parquet").as_uri(), "parquet")
    (opened,) = open_in_child([source], files, {})
    assert isinstance(opened.rows, ChildRows)
    return opened.rows


def test_a_part_is_read_in_another_process_and_has_the_identity_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 2000)
    source, types = written(tmp_path, "parquet in row groups")
    files = SourceFiles([PurePosixPath(tmp_path)], None)
    (here,), (there,) = (open_them([source], files, types) for open_them in (open_sources, open_in_child))
    parts = there.rows.parts()
    assert len(parts) > 2
    sent: list[RowSource] = cloudpickle.loads(cloudpickle.dumps(parts))  # type: ignore[no-untyped-call]
    for own, part, copy in zip(here.rows.parts(), parts, sent, strict=True):
        assert isinstance(part, ChildRows)
        assert part.identity == identity_of(own)
        assert identity_of(part) == identity_of(copy)
        assert list(copy.tables(Quarantine())) == list(own.tables(Quarantine()))


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "reader_limits", lambda _: ReaderLimits(memory_bytes=64 << 20))


def test_the_file_whose_bytes_end_the_child_is_named_though_files_were_opened_ahead(tmp_path: Path) -> None:
    good = parquet_bytes(pa.table({"n": [1, None, 3]}), compression="none")
    for name in "abd":
        (tmp_path / name).write_bytes(good)
    (tmp_path / "c").write_bytes(hostile_files.parquet_that_aborts())
    with pytest.raises(InvalidArgument, match=r"/c cannot be imported: its bytes ended the process .* by SIGABRT"):
        open_in_child([source_of(f"{tmp_path.as_uri()}/", "parquet")], SourceFiles([PurePosixPath(tmp_path)], None), {})


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_file_that_takes_more_memory_is_refused_and_the_next_one_is_read(tmp_path: Path, kind: str) -> None:
    zeros = pa.table({"n": np.zeros(20_000_000, np.int64)})  # 160 MB, of which zstd leaves kilobytes
    bomb_path = tmp_path / f"bomb.{kind}"
    if kind == "arrow":
        with pa.ipc.new_stream(bomb_path, zeros.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(zeros)
    else:
        one_page = {"data_page_size": 1 << 30, "row_group_size": 1 << 30, "max_rows_per_page": 1 << 30}
        pq.write_table(zeros, bomb_path, use_dictionary=False, compression="zstd", **one_page)
    files = SourceFiles([PurePosixPath(tmp_path)], None)
    uri = bomb_path.as_uri()
    (bomb,) = open_in_child([source_of(uri, kind)], files, {})
    with leased_reader() as reader:
        pid = reader.pid
    with pytest.raises(InvalidArgument) as refused:
        list(bomb.rows.tables(Quarantine()))
    assert refused.value.specific_reason == "SOURCE_OVER_LIMIT"
    assert refused.value.metadata == {"field": f"sources[0].{kind}.uri", "uri": uri}
    assert "takes more than 64 MiB of memory" in refused.value.message
    assert "MILLRACE_READER_MEMORY_MIB" in refused.value.message
    assert not Path(f"/proc/{pid}").exists()
    source, _ = written(tmp_path / "good", "csv")
    (good,) = open_in_child([source], files, {})
    assert sum(table.num_rows for table in good.rows.tables(Quarantine())) == 301


def without_progress(folder: Path, patch: pytest.MonkeyPatch) -> ChildRows:
    """Return rows whose child is stopped, and may make no progress for 0.3 s."""
    rows = large_rows(folder)
    with leased_reader() as reader:
        stop_process(reader.pid)
        patch.setattr(reader, "limits", ReaderLimits(timeout_s=0.3))
    patch.setattr(reader_module, "reader_limits", lambda _: ReaderLimits(timeout_s=0.3))
    return rows


def test_a_file_that_a_child_computes_on_without_progress_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = without_progress(tmp_path, monkeypatch)
    seconds = count()
    monkeypatch.setattr(reader_module, "cpu_seconds_of", lambda _: float(next(seconds)))
    with pytest.raises(
        InvalidArgument, match=r"large.parquet .* for 0.3 s nothing was read .* MILLRACE_READER_TIMEOUT_S"
    ):
        list(rows.tables(Quarantine()))


def test_a_child_that_waits_without_progress_is_ended_and_another_attempt_may_read_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = without_progress(tmp_path, monkeypatch)
    with leased_reader() as reader:
        pass
    with pytest.raises(Unavailable, match=r"large.parquet has waited for its bytes") as raised:
        list(rows.tables(Quarantine()))
    assert raised.value.specific_reason == "READER_STALLED"
    assert not Path(f"/proc/{reader.pid}").exists()


def test_a_child_that_cannot_be_started_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with leased_reader() as reader:
        reader.end()
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(Unavailable, match="/no/python") as raised, leased_reader():
        pass
    assert raised.value.specific_reason == "READER_NOT_STARTED"


class GrowingFile(io.RawIOBase):
    """An upload's bytes so far; reads of later ones are noted in `waits`."""

    def __init__(self, data: bytes, waits: list[int]) -> None:
        self._data, self._position, self._waits = data, 0, waits

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0
        self._position = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        data = self._data[self._position : self._position + size]
        self._position += len(data)
        if not data:
            self._waits.append(self._position)
        return data


def test_a_growing_upload_whose_rows_are_no_longer_needed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = arrow_bytes(TABLE.select(["n"]), pa.ipc.new_stream)
    waits: list[int] = []

    def open_growing() -> BinaryIO:
        return cast(BinaryIO, GrowingFile(whole[: len(whole) // 2], waits))

    upload = SourceFile("sources[0].arrow.uri", "upload", None, open_growing, upload_uid="u")
    monkeypatch.setattr(SourceFiles, "find_all", lambda *_: [upload])
    monkeypatch.setattr(SourceFiles, "find", lambda *_: upload)
    (opened,) = open_in_child([source_of("upload", "arrow")], SourceFiles([], None), {})
    tables = opened.rows.tables(Quarantine())
    assert next(tables).num_rows == 100
    assert isinstance(tables, Generator)
    tables.close()
    assert waits == []


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (signal.SIGABRT, InvalidArgument, "its bytes ended the process that read it, by SIGABRT"),
        (signal.SIGKILL, Unavailable, "SIGKILL ended the process that read"),
    ],
)
def test_the_error_of_a_child_that_a_signal_ends_names_the_file(
    tmp_path: Path, number: int, error: type[MillraceError], text: str
) -> None:
    rows = large_rows(tmp_path, 2_000_000)  # more than the buffers of any socket
    with leased_reader() as reader:
        pid = reader.pid
    tables = rows.tables(Quarantine())
    next(tables)
    os.kill(pid, number)
    with pytest.raises(error, match=text) as raised:
        list(tables)
    assert "large.parquet" in raised.value.message
    assert sum(table.num_rows for table in rows.tables(Quarantine())) == 2_000_000


def test_a_child_that_is_asked_for_no_more_tables_takes_the_next_call(tmp_path: Path) -> None:
    rows = large_rows(tmp_path)
    with leased_reader() as reader:
        pid = reader.pid
    with closing(rows.tables(Quarantine())) as tables:
        next(tables)
    assert sum(table.num_rows for table in rows.tables(Quarantine())) == 400_000
    with leased_reader() as reader:
        assert reader.pid == pid


def test_a_bad_row_that_is_not_allowed_ends_the_call_alone(tmp_path: Path) -> None:
    source, types = written(tmp_path, "csv")
    (one,) = open_in_child([source], SourceFiles([PurePosixPath(tmp_path)], None), types)
    with leased_reader() as reader:
        pid = reader.pid
    with pytest.raises(InvalidArgument, match="line 302"):
        list(one.rows.tables(Quarantine(fail=True)))
    with leased_reader() as reader:
        assert reader.pid == pid


def test_a_job_that_is_to_stop_ends_the_child_at_once(tmp_path: Path) -> None:
    source, _ = written(tmp_path, "csv")
    stopped = Cancelled("v1 is CANCELLING")
    with leased_reader() as reader:
        stop_process(reader.pid)  # as if it read for long

    def stop() -> None:
        raise stopped

    with pytest.raises(Cancelled) as raised:
        open_in_child([source], SourceFiles([PurePosixPath(tmp_path)], None), {}, on_wait=stop)
    assert raised.value is stopped
    assert not Path(f"/proc/{reader.pid}").exists()


def test_errors_of_this_process_come_back_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = written(tmp_path, "csv")
    outage = Unavailable("the disk does not answer", retry_after_s=2.0)

    def fail(*_: object) -> list[Any]:
        raise outage

    monkeypatch.setattr(SourceFiles, "find_all", fail)
    with pytest.raises(Unavailable) as raised:
        open_in_child([source], SourceFiles([PurePosixPath(tmp_path)], None), {})
    assert raised.value is outage


def test_a_child_that_was_idle_for_long_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = large_rows(tmp_path)
    with leased_reader() as reader:
        pid = reader.pid
    monkeypatch.setattr(reader_module, "IDLE_S", 0.0)
    with leased_reader() as reader:
        assert reader.pid != pid
    assert not Path(f"/proc/{pid}").exists()
    assert sum(table.num_rows for table in rows.tables(Quarantine())) == 400_000


def test_calls_at_the_same_time_have_a_child_each(tmp_path: Path) -> None:
    rows = large_rows(tmp_path)
    both: Iterator[tuple[pa.Table, pa.Table]] = zip(rows.tables(Quarantine()), rows.tables(Quarantine()), strict=True)
    assert all(one == other for one, other in both)


@pytest.mark.skipif(os.getuid() != 0, reason="the kernel shows a process in a user namespace to root alone")
def test_a_child_has_one_socket_and_neither_environment_nor_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_S3_SECRET_KEY", "secret of the store")
    with leased_reader() as reader:
        reader.end()  # the next one begins with this environment
    large_rows(tmp_path)
    with leased_reader() as reader:
        process = Path(f"/proc/{reader.pid}")
        assert b"secret" not in (process / "environ").read_bytes()
        links = sorted(str(one.readlink()) for one in (process / "fd").iterdir())
        assert [link for link in links if link != "/dev/null"] == [links[-1]]
        assert links[-1].startswith("socket:")
        has_same_network = (process / "ns" / "net").readlink() == Path("/proc/self/ns/net").readlink()
        assert reader.has_network == has_same_network


@pytest.mark.parametrize("text", ["1", "many", "-5"])
def test_a_limit_that_is_none_is_refused_by_its_name(text: str) -> None:
    for name in ("MILLRACE_READER_MEMORY_MIB", "MILLRACE_READER_TIMEOUT_S"):
        with pytest.raises(SettingsError, match=f"{name}: '{text}': use a number from"):
            reader_limits({name: text})
    assert reader_limits({"MILLRACE_READER_MEMORY_MIB": "512"}).memory_bytes == 512 << 20


def test_objects_travel_in_groups_by_the_bytes_that_they_do_not_share() -> None:
    shared = bytes(2 * GROUP_BYTES)
    assert [len(group) for group, _, _ in grouped([(shared, number) for number in range(GROUP + 6)])] == [GROUP, 6]
    own = [(shared, os.urandom(GROUP_BYTES // 3)) for _ in range(7)]
    groups = list(grouped(own))
    assert [one for group, _, _ in groups for one in group] == own
    assert max(len(group) for group, _, _ in groups) == 2
    assert [len(group) for group, _, _ in grouped([os.urandom(2 * GROUP_BYTES), b"small"])] == [2]
