"""Open sources are sent to other processes, which open the files again."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from ray import cloudpickle

from data_service.formats import RowSource, interface, open_sources
from data_service.storage.source_files import SourceFile, SourceFiles
from data_service.uploads.uploads import Uploads
from shared.errors import Cancelled, DataLoss, Unavailable
from shared.storage import ObjectStore
from tests.support.idx import digits, write_idx
from tests.support.images import encoded, tar_of
from tests.support.import_sources import Bad, Quarantine, found_file, opened, source_of, table_of
from tests.support.upload_calls import committed
from tests.support.upload_server import uploads_of


def sent(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def read(rows: RowSource) -> tuple[pa.Table, list[Bad], list[str] | None]:
    bad = Quarantine()
    return table_of(rows, bad), bad.rows, rows.class_names


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"n": np.arange(400)}), sink, row_group_size=50)
    return sink.getvalue()


def arrow_bytes() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, pa.schema({"n": pa.int64()})) as writer:
        writer.write_table(pa.table({"n": np.arange(400)}), max_chunksize=50)
    return sink.getvalue()


FILES = {
    "parquet": parquet_bytes(),
    "arrow": arrow_bytes(),
    "csv": b"n,s\n" + b"".join(b"%d,\xc3\xa9\n" % n for n in range(390)) + b"x,y\n1,\xff\n2\n",
    "json_lines": b"".join(b'{"n": %d, "t": [1, 2.5]}\n' % n for n in range(390)) + b'{"n": "x"}\n[]\n',
    "image_tar": tar_of({"cat/a.png": encoded(), "b.png": encoded(), "dog/c.png": b"none"}),
}
TYPES = {"parquet": {"n": "int8"}, "arrow": {"n": "int8"}, "csv": {"n": "int16"}, "json_lines": {"n": "int16"}}


@pytest.mark.parametrize("kind", FILES)
def test_a_sent_source_yields_the_same_rows_and_bad_rows(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "day=1"
    folder.mkdir()
    (folder / "rows").write_bytes(FILES[kind])
    (one,) = opened(tmp_path, source_of(f"{tmp_path.as_uri()}/", kind), types=TYPES.get(kind))
    table, bad, names = read(one.rows)
    assert table.num_rows
    assert bad
    assert read(sent(one.rows)) == (table, bad, names)


def test_sent_images_keep_their_labels(tmp_path: Path) -> None:
    for name in ("ants/a.png", "bees/b.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(encoded())
    (one,) = opened(tmp_path, source_of(tmp_path.as_uri() + "/", "image_folder"))
    assert read(sent(one.rows)) == read(one.rows)
    assert sent(one.rows).class_names == ["ants", "bees"]


def test_a_sent_idx_pair_is_read(tmp_path: Path) -> None:
    images, labels = digits(30)
    uris = {
        "idx.images_uri": write_idx(tmp_path / "images", images),
        "idx.labels_uri": write_idx(tmp_path / "labels.gz", labels),
    }
    (one,) = opened(tmp_path, source_of(uris, "idx"))
    assert read(sent(one.rows)) == read(one.rows)


def test_the_callbacks_of_a_job_stay_with_it(tmp_path: Path) -> None:
    def stop() -> None:
        raise Cancelled("the job is stopped")

    (tmp_path / "rows").write_bytes(b"n\n1\n")
    file = SourceFiles([PurePosixPath(tmp_path)], None, on_read=stop).find("f", (tmp_path / "rows").as_uri())
    with pytest.raises(Cancelled):
        file.on_read()
    sent(file).on_read()


def test_a_sent_file_is_held_to_the_allowed_folders(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows").write_bytes(b"n\n1\n")
    (tmp_path / "secret").write_bytes(b"n\n2\n")
    file: SourceFile = sent(found_file(tmp_path / "in" / "rows"))
    (tmp_path / "in" / "rows").unlink()
    (tmp_path / "in" / "rows").symlink_to(tmp_path / "secret")
    with pytest.raises(Exception, match="MILLRACE_IMPORT_ROOTS"):
        file.open()


def test_an_endpoint_without_a_store_travels_itself(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "rows").write_bytes(b"n\n1\n")
    files = SourceFiles([], fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))
    (one,) = open_sources([source_of("s3://bucket/rows", "csv")], files, {})
    assert table_of(sent(one.rows))["n"].to_pylist() == [1]


# --- Uploads ---


@pytest.fixture
def uploads(store: ObjectStore) -> Uploads:
    return uploads_of(store)


def rows_of_upload(store: ObjectStore, name: str, kind: str, on_wait: Callable[[], None] = lambda: None) -> RowSource:
    (one,) = open_sources([source_of(name, kind)], SourceFiles([], None, store, on_wait=on_wait), {})
    return one.rows


@pytest.mark.parametrize("kind", FILES)
def test_an_upload_is_opened_again_by_the_settings_of_the_store(
    store: ObjectStore, uploads: Uploads, kind: str
) -> None:
    rows = rows_of_upload(store, committed(uploads, FILES[kind], chunk_bytes=1000), kind)
    pickled = cloudpickle.dumps(rows)  # type: ignore[no-untyped-call]
    assert read(cloudpickle.loads(pickled)) == read(rows)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_sent_upload_gives_the_bytes_that_were_verified(store: ObjectStore, uploads: Uploads, kind: str) -> None:
    name = committed(uploads, FILES[kind], chunk_bytes=500)
    rows = sent(rows_of_upload(store, name, kind))
    second = sorted(info.key for info in store.list(f"{name}/chunks"))[1]
    store.put(second, bytes(byte ^ 1 for byte in store.get(second)))
    with pytest.raises(DataLoss, match="not those that were committed"):
        table_of(rows, Quarantine())


# --- Pins of an upload ---

CHUNKS = 300


def csv_upload(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> tuple[str, SourceFiles, Sequence[RowSource]]:
    """An upload of many chunks, and its rows in parts."""
    monkeypatch.setattr(interface, "PART_BYTES", 1000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 500)
    data = b"n\n" + b"".join(b"%d\n" % n for n in range(1000, 2000))
    name = committed(uploads_of(store), data, chunk_bytes=-(-len(data) // CHUNKS))
    files = SourceFiles([], None, store)
    (one,) = open_sources([source_of(name, "csv")], files, {})
    parts = one.rows.parts()
    assert len(parts) > 3
    return name, files, parts


def test_the_pins_of_an_upload_travel_once_and_not_with_each_part(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, files, parts = csv_upload(store, monkeypatch)
    files.keep_pins("attempt/pins")
    assert len(list(store.list("attempt/pins"))) == 1
    pickled = [cloudpickle.dumps(part) for part in parts]  # type: ignore[no-untyped-call]
    assert max(map(len, pickled)) < 20 * CHUNKS
    listed: list[str] = []
    list_objects = ObjectStore.list

    def list_and_remember(self: ObjectStore, prefix: str = "", **named: Any) -> Any:
        listed.append(prefix)
        return list_objects(self, prefix, **named)

    monkeypatch.setattr(ObjectStore, "list", list_and_remember)
    found = [n for one in pickled for n in table_of(cloudpickle.loads(one))["n"].to_pylist()]
    assert found == list(range(1000, 2000))
    assert [prefix for prefix in listed if prefix.startswith(name)] == [], "the pins name the chunks"


def test_a_part_finds_a_change_of_its_bytes_by_the_kept_pins(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, files, parts = csv_upload(store, monkeypatch)
    files.keep_pins("attempt/pins")
    last = max(info.key for info in store.list(f"{name}/chunks"))
    store.put(last, store.get(last).replace(b"9", b"8"))
    with pytest.raises(DataLoss, match="not those that were committed"):
        table_of(sent(parts[-1]))


@pytest.mark.parametrize(("change", "error"), [("altered", DataLoss), ("deleted", Unavailable)])
def test_pins_that_were_changed_are_not_used(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, change: str, error: type[Exception]
) -> None:
    _, files, parts = csv_upload(store, monkeypatch)
    files.keep_pins("attempt/pins")
    (info,) = store.list("attempt/pins")
    if change == "deleted":
        store.delete(info.key)
    else:
        store.put(info.key, store.get(info.key).replace(b"true", b"false"))
    with pytest.raises(error):
        table_of(sent(parts[0]))


def test_few_pins_travel_with_the_part(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, FILES["csv"], chunk_bytes=1000)
    files = SourceFiles([], None, store)
    (one,) = open_sources([source_of(name, "csv")], files, {})
    files.keep_pins("attempt/pins")
    assert list(store.list("attempt/pins")) == []
    assert read(sent(one.rows)) == read(one.rows)
