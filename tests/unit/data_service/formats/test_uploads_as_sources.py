"""Uploads as sources: whole ones, and those that are still open."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.formats import OpenSource, open_sources
from data_service.storage.source_files import SourceFiles
from data_service.uploads.uploads import Uploads
from shared.errors import Cancelled, DataLoss, NotFound
from shared.storage import ObjectStore
from tests.support.images import encoded, tar_of
from tests.support.import_sources import Quarantine, source_of, table_of
from tests.support.upload_calls import committed, send_all, sha256, started
from tests.support.upload_server import uploads_of

ROWS = pa.table({"n": np.arange(400)})


def waits() -> None:
    raise Cancelled("waited for more")


def arrow_bytes() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, ROWS.schema) as writer:
        writer.write_table(ROWS, max_chunksize=50)
    return sink.getvalue()


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pq.write_table(ROWS, sink)
    return sink.getvalue()


CONTENTS = {
    "arrow": arrow_bytes(),
    "parquet": parquet_bytes(),
    "csv": b"n\n" + b"".join(b"%d\n" % n for n in range(400)),
    "json_lines": b"".join(b'{"n": %d}\n' % n for n in range(400)),
}


@pytest.fixture
def uploads(store: ObjectStore) -> Uploads:
    return uploads_of(store)


def source(store: ObjectStore, name: str, kind: str, on_wait: Callable[[], None] = waits) -> OpenSource:
    (one,) = open_sources([source_of(name, kind)], SourceFiles([], None, store, on_wait=on_wait), {})
    return one


@pytest.mark.parametrize("kind", CONTENTS)
def test_each_format_is_read_from_an_upload(store: ObjectStore, uploads: Uploads, kind: str) -> None:
    name = committed(uploads, CONTENTS[kind], chunk_bytes=1000)
    assert table_of(source(store, name, kind).rows)["n"].to_pylist() == list(range(400))


def test_a_stray_quote_in_an_upload_costs_one_line(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, b'n,s\n1,x\n2,"y\n3,z\n', chunk_bytes=5)
    bad = Quarantine()
    assert table_of(source(store, name, "csv").rows, bad).to_pydict() == {"n": [1, 3], "s": ["x", "z"]}
    assert bad.places == ["line 3"]


def test_rows_of_an_open_upload_come_before_its_end(store: ObjectStore, uploads: Uploads) -> None:
    name, data = started(uploads), CONTENTS["arrow"]
    cut = len(data) // 2
    send_all(uploads, name, data[:cut], chunk_bytes=300)
    tables = source(store, name, "arrow", lambda: None).rows.tables(Quarantine(fail=True))
    assert next(tables).num_rows == 50
    # And what comes meanwhile is read on.
    send_all(uploads, name, data, chunk_bytes=300, offset=cut)
    uploads.commit(name, len(data), sha256(data))
    assert sum(table.num_rows for table in tables) == 350


def test_the_wait_for_an_open_upload_can_be_ended(store: ObjectStore, uploads: Uploads) -> None:
    name, data = started(uploads), CONTENTS["arrow"]
    send_all(uploads, name, data[: len(data) // 2], chunk_bytes=300)
    tables = source(store, name, "arrow").rows.tables(Quarantine(fail=True))
    with pytest.raises(Cancelled, match="waited for more"):
        list(tables)


@pytest.mark.parametrize("kind", ["parquet", "csv", "json_lines"])
def test_a_format_that_needs_the_whole_upload_waits_for_it(store: ObjectStore, uploads: Uploads, kind: str) -> None:
    name, data = started(uploads), CONTENTS[kind]
    send_all(uploads, name, data, chunk_bytes=1000)
    with pytest.raises(Cancelled, match="waited for more"):
        source(store, name, kind)


@pytest.mark.parametrize("kind", CONTENTS)
def test_bytes_that_are_not_those_committed_are_data_loss(store: ObjectStore, uploads: Uploads, kind: str) -> None:
    data = CONTENTS[kind]
    name = committed(uploads, data, chunk_bytes=len(data))
    (stored,) = store.list(f"{name}/chunks")
    damaged = bytearray(store.get(stored.key))
    at = damaged.rindex(b"39") if kind in ("csv", "json_lines") else damaged.rindex(np.int64(399).tobytes())
    damaged[at] ^= 1
    store.put(stored.key, bytes(damaged))
    with pytest.raises(DataLoss, match="not those that were committed"):
        table_of(source(store, name, kind).rows)


def test_parquet_written_over_after_its_proof_is_data_loss(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, CONTENTS["parquet"], chunk_bytes=500)
    rows = source(store, name, "parquet").rows
    second = sorted(info.key for info in store.list(f"{name}/chunks"))[1]
    store.put(second, bytes(byte ^ 1 for byte in store.get(second)))
    with pytest.raises(DataLoss):
        table_of(rows)


def test_a_tar_of_images_is_read_from_an_upload(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, tar_of({"cat/a.png": encoded()}), chunk_bytes=1000)
    assert table_of(source(store, name, "image_tar").rows)["path"].to_pylist() == ["cat/a.png"]


def test_an_upload_that_is_not_there_is_not_found(store: ObjectStore) -> None:
    with pytest.raises(NotFound, match="uploads/absent"):
        source(store, "datasets/d/uploads/absent", "csv")
