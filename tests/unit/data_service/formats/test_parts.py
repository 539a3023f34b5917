"""A source divided into parts yields what the whole yields: the same rows, and bad rows with the same places."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle

from data_service.domain.import_spec import CsvOptions
from data_service.formats import RowSource, arrow, interface, open_sources
from data_service.formats import images as images_module
from data_service.formats.parquet import ParquetRows
from data_service.storage.source_files import SourceFiles
from data_service.uploads import upload as reader
from shared.errors import DataLoss, InvalidArgument
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.idx import digits, idx_bytes, write_idx
from tests.support.images import encoded, tar_of
from tests.support.import_sources import Bad, Quarantine, found_file, opened, source_of, table_of
from tests.support.upload_calls import committed
from tests.support.upload_server import uploads_of


def read(*parts: RowSource) -> tuple[pa.Table, list[Bad]]:
    bad = Quarantine()
    return pa.concat_tables([table_of(part, bad) for part in parts]).combine_chunks(), bad.rows


def parts_of(rows: RowSource, at_least: int = 2) -> list[RowSource]:
    """The parts, each as it is in another process, after a look at what they say of themselves."""
    parts = [cloudpickle.loads(cloudpickle.dumps(part)) for part in rows.parts()]  # type: ignore[no-untyped-call]
    assert len(parts) >= at_least
    for part in parts:
        assert part.schema == rows.schema
        assert part.class_names == rows.class_names
        assert len(part.parts()) == 1
        table, bad = read(part)
        if part.row_count is not None:
            assert table.num_rows <= part.row_count <= table.num_rows + sum(row.rows for row in bad)
    counts = [part.row_count for part in parts]
    assert rows.row_count in (None, sum(count or 0 for count in counts))
    assert None not in counts or len(parts) == 1
    return parts


def rewrite(path: Path, data: bytes) -> None:
    """Change the content, and neither the size nor the time."""
    found = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_size == found.st_size


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "json_lines", "idx", "image_folder", "image_tar"])
def test_no_part_reads_a_file_that_replaced_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 1000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 500)
    monkeypatch.setattr(images_module, "PART_IMAGES", 2)
    path = tmp_path / "rows"
    uris: dict[str, str] | str = path.as_uri()
    match kind:
        case "parquet":
            pq.write_table(TYPED, path, row_group_size=170)
        case "arrow":
            write_arrow(path, TYPED)
        case "csv":
            path.write_bytes(b"n\n" + b"123\n" * 999)
        case "json_lines":
            path.write_bytes(b'{"n": 123}\n' * 999)
        case "idx":
            images, labels = digits(30)
            uris = {
                "idx.images_uri": write_idx(tmp_path / "images", images),
                "idx.labels_uri": write_idx(path, labels),
            }
        case "image_folder":
            for name, data in IMAGES.items():
                (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "all" / name).write_bytes(data)
            path, uris = tmp_path / "all" / "wasps/6.png", f"{(tmp_path / 'all').as_uri()}/"
        case _:
            path.write_bytes(tar_of(IMAGES))
    (one,) = opened(tmp_path, source_of(uris, kind))
    last = parts_of(one.rows)[-1]
    read(last)
    time = path.stat().st_mtime_ns
    (tmp_path / "other").write_bytes(path.read_bytes())
    (tmp_path / "other").replace(path)
    os.utime(path, ns=(0, time + 1))  # within one tick of the disk's clock
    with pytest.raises(InvalidArgument, match="it changed while it was read") as refused:
        read(last)
    assert refused.value.specific_reason == "SOURCE_CHANGED"


# --- Typed files ---

TYPED = pa.table(
    {
        "n": np.arange(3000) * 22,
        "s": [f"text {i % 7}" for i in range(3000)],
        "t": pa.FixedSizeListArray.from_arrays(pa.array([None if i % 900 == 1 else float(i) for i in range(6000)]), 2),
    }
)


def test_parquet_is_divided_into_runs_of_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 20_000)
    pq.write_table(TYPED, tmp_path / "t.parquet", row_group_size=170)
    rows = ParquetRows(found_file(tmp_path / "t.parquet"))
    parts = parts_of(rows, at_least=3)
    table, bad = read(rows)
    assert read(*parts) == (table, bad)
    assert len(bad) == 7
    assert len(parts) < 18  # some have several row groups
    assert sum(part.size_bytes for part in parts) <= rows.size_bytes


def test_a_row_group_that_is_larger_is_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 1)
    pq.write_table(TYPED, tmp_path / "t.parquet", row_group_size=1000)
    parts = parts_of(ParquetRows(found_file(tmp_path / "t.parquet")))
    assert [part.row_count for part in parts] == [1000, 1000, 1000]


@dataclass
class CountedOpenings:
    path: Path
    count: int = 0

    def __call__(self) -> BinaryIO:
        self.count += 1
        return self.path.open("rb")


def test_a_small_or_empty_parquet_file_is_one_part_that_is_not_opened_to_divide_it(tmp_path: Path) -> None:
    for table in (TYPED, TYPED.slice(0, 0)):
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=170)
        opened_files = CountedOpenings(tmp_path / "t.parquet")
        rows = ParquetRows(replace(found_file(tmp_path / "t.parquet"), open=opened_files))
        opened_files.count = 0
        assert len(rows.parts()) == 1
        assert opened_files.count == 0
        assert rows.row_count == table.num_rows


def test_a_part_of_a_file_that_was_written_anew_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 20_000)
    pq.write_table(TYPED, tmp_path / "t.parquet", row_group_size=170)
    # Of a disk that shows no change.
    file = replace(found_file(tmp_path / "t.parquet"), open=lambda: (tmp_path / "t.parquet").open("rb"))
    last = ParquetRows(file).parts()[-1]
    pq.write_table(TYPED.slice(0, 2999), tmp_path / "t.parquet", row_group_size=170)
    with pytest.raises(InvalidArgument, match="it changed while it was read"):
        table_of(last)


def test_a_cast_counts_the_rows_that_the_file_left_out(tmp_path: Path) -> None:
    values = pa.FixedSizeListArray.from_arrays(pa.array([None, 1, 2, 3, 4, 5, None, 7]), 2)
    pq.write_table(pa.table({"n": [1, 300, 3, 300], "t": values}), tmp_path / "t.parquet")
    (one,) = opened(tmp_path, source_of((tmp_path / "t.parquet").as_uri(), "parquet"), types={"n": "int8"})
    table, bad = read(one.rows)
    assert table["n"].to_pylist() == [3]
    assert [row.place for row in bad] == ["row 1", "row 4", "row 2"]


def test_casts_and_partitions_are_those_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 20_000)
    (tmp_path / "day=3").mkdir()
    pq.write_table(TYPED, tmp_path / "day=3" / "t.parquet", row_group_size=170)
    (one,) = opened(tmp_path, source_of(f"{tmp_path.as_uri()}/", "parquet"), types={"n": "uint16", "day": "int16"})
    table, bad = read(one.rows)
    assert table.num_rows == 2972
    parted, parted_bad = read(*parts_of(one.rows, at_least=3))
    assert parted == table
    # A file's own bad rows come first in each table, and tables end elsewhere in parts.
    assert sorted(parted_bad, key=lambda row: row.place) == sorted(bad, key=lambda row: row.place)
    assert len({row.place for row in bad}) == len(bad)


def test_parts_of_an_upload_do_not_read_it_whole(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 200_000)
    monkeypatch.setattr(reader, "BUFFER_BYTES", 1000)
    sink = pa.BufferOutputStream()
    numbers = np.random.default_rng(0).integers(0, 2**60, 100_000)
    pq.write_table(pa.table({"n": numbers}), sink, row_group_size=10_000, use_dictionary=False)
    uploads = uploads_of(store)
    name = committed(uploads, sink.getvalue().to_pybytes(), chunk_bytes=20_000)
    counting = CountingStore(store)
    (one,) = open_sources([source_of(name, "parquet")], SourceFiles([], None, counting), {})
    assert read(*parts_of(one.rows)) == read(one.rows)
    last = one.rows.parts()[-1]
    counting.forget()
    assert table_of(last)["n"].to_pylist() == numbers[-20_000:].tolist()
    chunks = {request for request in counting.requests if request.startswith("get") and "/chunks/" in request}
    assert 0 < len(chunks) < len(list(store.list(f"{name}/chunks"))) // 2


def write_arrow(path: Path, table: pa.Table, rows: int = 170, **options: Any) -> None:
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_an_arrow_file_is_divided_into_runs_of_record_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 9000)
    write_arrow(tmp_path / "t.arrow", TYPED, compression=compression)
    (one,) = opened(tmp_path, source_of((tmp_path / "t.arrow").as_uri(), "arrow"), types={"n": "uint16"})
    table, bad = read(one.rows)
    parted, parted_bad = read(*parts_of(one.rows, at_least=3))
    assert parted == table
    assert sorted(parted_bad, key=lambda row: row.place) == sorted(bad, key=lambda row: row.place)
    assert len(bad) == 28


def test_arrow_that_cannot_be_divided_is_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 5000)
    with pa.ipc.new_stream(tmp_path / "stream", TYPED.schema) as writer:
        writer.write_table(TYPED, max_chunksize=170)
    write_arrow(tmp_path / "dictionary", pa.table({"s": TYPED["s"].dictionary_encode(), "n": TYPED["n"]}))
    for name in ("stream", "dictionary"):
        (one,) = opened(tmp_path, source_of((tmp_path / name).as_uri(), "arrow"))
        assert len(one.rows.parts()) == 1


def test_a_damaged_arrow_file_fails_in_parts_as_it_does_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 5000)
    path = tmp_path / "t.arrow"
    write_arrow(path, TYPED.select(["n"]), rows=500)
    data = path.read_bytes()
    (one,) = opened(tmp_path, source_of(path.as_uri(), "arrow"))
    for place in (*range(len(data) - 400, len(data), 7), 1000, len(data) // 2 // 8 * 8):
        rewrite(path, data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        whole, parted = outcome([one.rows]), outcome(one.rows.parts())
        # A footer is of no use to the whole, which is read from front to back, so it may accept more.
        assert whole == parted or parted == "refused", place


def test_an_arrow_message_that_claims_to_end_far_beyond_its_file_is_no_failing_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 5000)
    path = tmp_path / "t.arrow"
    write_arrow(path, TYPED.select(["n"]), rows=500)
    body_bytes = struct.pack("<q", 4000)
    data = path.read_bytes()
    assert data.count(body_bytes) > 2
    for claimed in (2**44, 2**62):
        rewrite(path, data.replace(body_bytes, struct.pack("<q", claimed)))
        (one,) = opened(tmp_path, source_of(path.as_uri(), "arrow"))
        (part,) = one.rows.parts()
        with pytest.raises(InvalidArgument, match="it is not a whole Arrow file"):
            table_of(part)


def test_an_arrow_body_of_fewer_than_zero_bytes_is_damage_and_makes_no_messages_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 5000)
    path = tmp_path / "t.arrow"
    write_arrow(path, TYPED.select(["n"]), rows=500)
    data = path.read_bytes()
    rewrite(path, data.replace(struct.pack("<q", 4000), struct.pack("<q", -8)))
    (one,) = opened(tmp_path, source_of(path.as_uri(), "arrow"))
    (part,) = one.rows.parts()
    assert part is one.rows
    with pytest.raises(InvalidArgument, match="it is not a whole Arrow file"):
        table_of(part)


def test_an_arrow_file_with_more_behind_its_end_marker_than_a_footer_takes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "MAX_END_BYTES", 1000)
    path = tmp_path / "t.arrow"
    write_arrow(path, TYPED.select(["n"]), rows=500)
    data = path.read_bytes()
    path.write_bytes(data[:-6] + bytes(1000) + data[-6:])
    (one,) = opened(tmp_path, source_of(path.as_uri(), "arrow"))
    with pytest.raises(InvalidArgument, match="more than 1000 bytes follow its end marker"):
        table_of(one.rows)


def outcome(parts: Sequence[RowSource]) -> pa.Table | str:
    try:
        return read(*parts)[0]
    except InvalidArgument:
        return "refused"


def test_an_uploaded_arrow_file_is_verified_before_it_is_divided(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 9000)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, TYPED.schema) as writer:
        writer.write_table(TYPED, max_chunksize=170)
    name = committed(uploads_of(store), sink.getvalue().to_pybytes(), chunk_bytes=2000)
    (one,) = open_sources([source_of(name, "arrow")], SourceFiles([], None, store), {})
    parts = parts_of(one.rows)
    assert read(*parts) == read(one.rows)
    third = sorted(info.key for info in store.list(f"{name}/chunks"))[2]
    store.put(third, bytes(byte ^ 1 for byte in store.get(third)))
    with pytest.raises(DataLoss):
        read(*parts)
    (again,) = open_sources([source_of(name, "arrow")], SourceFiles([], None, store), {})
    with pytest.raises(DataLoss):
        again.rows.parts()


# --- Images ---


def test_idx_is_divided_into_ranges_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 28 * 28 * 7)
    images, labels = digits(30)
    uris = {
        "idx.images_uri": write_idx(tmp_path / "images", images),
        "idx.labels_uri": write_idx(tmp_path / "labels", labels.astype("i4") * 100),
    }
    (one,) = opened(tmp_path, source_of(uris, "idx"), types={"label": "int8"})
    table, bad = read(one.rows)
    assert read(*parts_of(one.rows)) == (table, bad)
    assert [part.row_count for part in one.rows.parts()] == [7, 7, 7, 7, 2]
    assert bad


@pytest.mark.parametrize("damaged", ["images", "labels"])
def test_an_uploaded_idx_pair_is_verified_before_it_is_divided(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 400_000)
    values = np.random.default_rng(0).integers(0, 256, (600_000, 2, 2), np.uint8)  # more than a header's read buffers
    contents = {"images": idx_bytes(values), "labels": idx_bytes(values[:, 0, 0].astype("i4"))}
    uploads = uploads_of(store)
    names = {name: committed(uploads, data, upload_id=name, chunk_bytes=300_000) for name, data in contents.items()}
    source = source_of({f"idx.{name}_uri": upload for name, upload in names.items()}, "idx")
    (one,) = open_sources([source], SourceFiles([], None, store), {})
    parts = parts_of(one.rows)
    assert read(*parts) == read(one.rows)
    chunk = sorted(info.key for info in store.list(f"{names[damaged]}/chunks"))[-2]
    store.put(chunk, bytes([store.get(chunk)[0] ^ 1]) + store.get(chunk)[1:])
    with pytest.raises(DataLoss):
        read(*parts)
    (again,) = open_sources([source], SourceFiles([], None, store), {})
    with pytest.raises(DataLoss):
        again.rows.parts()


def test_idx_whose_header_does_not_fit_its_size_is_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 100)
    images, labels = digits(30)
    uris = {
        "idx.images_uri": write_idx(tmp_path / "images", images),
        "idx.labels_uri": write_idx(tmp_path / "labels", labels),
    }
    for name in ("images", "labels"):
        data = (tmp_path / name).read_bytes()
        for damaged in (data[:-1], data + b"x"):
            (tmp_path / name).write_bytes(damaged)
            (one,) = opened(tmp_path, source_of(uris, "idx"))
            assert len(one.rows.parts()) == 1
            with pytest.raises(InvalidArgument, match=f"{name}_uri"):
                read(one.rows)
        (tmp_path / name).write_bytes(data)


def test_an_idx_header_that_claims_four_billion_rows_makes_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 784 * 100_000)
    (tmp_path / "images").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 28, 28) + b"\0" * 784)
    (tmp_path / "labels").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 2**32 - 1) + b"\0")
    uris = {f"idx.{name}_uri": (tmp_path / name).as_uri() for name in ("images", "labels")}
    (one,) = opened(tmp_path, source_of(uris, "idx"))
    assert len(one.rows.parts()) == 1


def test_compressed_idx_is_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 28 * 28 * 7)
    images, labels = digits(30)
    uris = {
        "idx.images_uri": write_idx(tmp_path / "images", images),
        "idx.labels_uri": write_idx(tmp_path / "labels.gz", labels),
    }
    (one,) = opened(tmp_path, source_of(uris, "idx"))
    assert len(one.rows.parts()) == 1


IMAGES = {
    "ants/1.png": encoded(colour=1),
    "ants/2.png": b"no image",
    "bees/readme.txt": b"none",
    "bees/3.png": encoded(colour=3),
    f"bees/{'long' * 40}.png": encoded(colour=4),
    "5.png": encoded(colour=5),
    "wasps/6.png": encoded(colour=6),
}


@pytest.mark.parametrize(("limit", "value"), [("PART_BYTES", 1), ("PART_IMAGES", 2)])
def test_a_folder_and_a_tar_of_images_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(interface if limit == "PART_BYTES" else images_module, limit, value)
    for name, data in IMAGES.items():
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / name).write_bytes(data)
    (tmp_path / "all.tar").write_bytes(tar_of(IMAGES))
    for source in (
        source_of((tmp_path / "all").as_uri() + "/", "image_folder"),
        source_of((tmp_path / "all.tar").as_uri(), "image_tar"),
    ):
        (one,) = opened(tmp_path, source, types={"label": "bool"})
        table, bad = read(one.rows)
        parted, parted_bad = read(*parts_of(one.rows, at_least=3))
        assert parted == table
        assert table.num_rows
        assert sorted(parted_bad, key=lambda row: row.place) == sorted(bad, key=lambda row: row.place)


def test_a_compressed_tar_is_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 1)
    (tmp_path / "all.tgz").write_bytes(gzip.compress(tar_of(IMAGES)))
    (one,) = opened(tmp_path, source_of((tmp_path / "all.tgz").as_uri(), "image_tar"))
    assert len(one.rows.parts()) == 1


def test_the_place_of_an_image_whose_label_does_not_fit_is_its_path(tmp_path: Path) -> None:
    names = [f"{number:03}" for number in range(130)]
    (tmp_path / "all.tar").write_bytes(tar_of({f"{name}/1.png": encoded() for name in names}))
    (one,) = opened(tmp_path, source_of((tmp_path / "all.tar").as_uri(), "image_tar"), types={"label": "int8"})
    assert [row.place for row in read(one.rows)[1]] == ["image 128/1.png", "image 129/1.png"]


# --- Texts ---

CSV_LINES = [b'"', b'""', b'"""', b'x,"', b'",y', b'x",",', b'"x"', b"x,y", b"", b'y"z', b'"",', b"1,\xff", b"2,3"]
JSON_LINES = [b'{"a": 1}', b'{"a": "x", "b": [1, 2]}', b"", b"[]", b"{", b'{"b": [3, 4.5]}', b'{"a": 1234567890123456}']


def texts(lines: list[bytes]) -> st.SearchStrategy[bytes]:
    """Lines with ends of each kind, and perhaps a byte-order mark before and a line without an end after them."""
    ended = st.tuples(st.sampled_from(lines), st.sampled_from([b"\n", b"\r\n", b"\r"])).map(b"".join)
    return st.tuples(
        st.sampled_from([b"", b"\xef\xbb\xbf"]),
        st.lists(ended, max_size=30).map(b"".join),
        st.sampled_from([b"", lines[0], lines[3]]),
    ).map(b"".join)


def shortened(row: Bad) -> Bad:
    """Without the rest of a long line: with such small limits it depends on the block how much of it was read."""
    return replace(row, excerpt=row.excerpt[:8]) if "too long" in row.reason or "more than" in row.reason else row


def same_in_parts(folder: Path, data: bytes, kind: str, types: dict[str, str], csv: CsvOptions | None = None) -> int:
    """Compare the parts with the whole; return their number."""
    (folder / "rows").write_bytes(data)
    try:
        (one,) = opened(folder, source_of((folder / "rows").as_uri(), kind, csv=csv), types=types)
    except InvalidArgument:  # no line is a row
        return 0
    (table, bad), (parts_table, parts_bad) = read(one.rows), read(*one.rows.parts())
    assert parts_table == table
    assert list(map(shortened, parts_bad)) == list(map(shortened, bad))
    return len(parts_of(one.rows, at_least=1))


SIZES = {"PART_BYTES": st.integers(1, 60), "MAX_LINE_BYTES": st.integers(12, 60), "BLOCK_BYTES": st.integers(3, 12)}


@settings(max_examples=60)
@given(data=texts(CSV_LINES), sizes=st.fixed_dictionaries(SIZES), given_type=st.sampled_from(["", "a", "ab"]))
def test_parts_of_csv_are_cut_between_records(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, sizes: dict[str, int], given_type: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(interface, name, value)
        types = dict.fromkeys(given_type, "int8")
        same_in_parts(tmp_path_factory.mktemp("csv"), data, "csv", types, CsvOptions(column_names=["a", "b"]))


@settings(max_examples=60)
@given(data=texts(JSON_LINES), sizes=st.fixed_dictionaries(SIZES), given_type=st.sampled_from(["", "a"]))
def test_parts_of_json_lines_are_cut_between_lines(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, sizes: dict[str, int], given_type: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(interface, name, value)
        types = dict.fromkeys(given_type, "int8")
        same_in_parts(tmp_path_factory.mktemp("json"), data, "json_lines", types)


ROWS = [b'%d,"some, text\nof two lines"\n' % n if n % 50 == 0 else b"%d,plain text\n" % n for n in range(999)]


@pytest.mark.parametrize("types", [{}, {"n": "int8", "s": "string"}], ids=["inferred", "given"])
def test_a_csv_file_with_a_header_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: dict[str, str]
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 2000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 500)
    assert same_in_parts(tmp_path, b"n,s\n" + b"".join(ROWS) + b'5,"never closed\n6,x\n7,y', "csv", types) > 5


@pytest.mark.parametrize("kind", ["csv", "json_lines"])
def test_a_compressed_text_is_one_part_of_a_known_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 100)
    line = {"csv": b"1,2\n", "json_lines": b'{"a": 1}\n'}[kind]
    (tmp_path / "rows").write_bytes(gzip.compress(line * 999))
    (one,) = opened(tmp_path, source_of((tmp_path / "rows").as_uri(), kind))
    assert len(one.rows.parts()) == 1
    assert one.rows.row_count == {"csv": 998, "json_lines": 999}[kind]


def test_csv_in_another_encoding_is_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 100)
    data = ("a,b\n" + "1,é\n" * 99).encode("utf-16")
    assert same_in_parts(tmp_path, data, "csv", {}, CsvOptions(encoding="utf-16")) == 1


def test_a_part_that_no_longer_begins_a_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 100)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 50)
    (tmp_path / "rows").write_bytes(b"n\n" + b"123\n" * 99)
    (one,) = opened(tmp_path, source_of((tmp_path / "rows").as_uri(), "csv"))
    last = one.rows.parts()[-1]
    rewrite(tmp_path / "rows", b"n\n" + b"1" * 395 + b"\n")
    with pytest.raises(InvalidArgument, match="it changed while it was read"):
        table_of(last)


@pytest.mark.parametrize("kind", ["csv", "json_lines"])
def test_parts_of_a_text_that_was_uploaded_are_verified(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 1000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 500)
    data = {"csv": b"n\n" + b"123\n" * 999, "json_lines": b'{"n": 123}\n' * 999}[kind]
    name = committed(uploads_of(store), data, chunk_bytes=700)
    (one,) = open_sources([source_of(name, kind)], SourceFiles([], None, store), {})
    parts = parts_of(one.rows, at_least=3)
    assert read(*parts) == read(one.rows)
    assert one.rows.size_bytes > 2000
    third = sorted(info.key for info in store.list(f"{name}/chunks"))[2]
    store.put(third, store.get(third).replace(b"123", b"124"))
    with pytest.raises(DataLoss, match="not those that were committed"):
        read(*parts)
