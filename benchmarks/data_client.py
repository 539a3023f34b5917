"""The tasks of the client's process: ours through the SDK, and the peers of pyarrow alone. Each returns seconds."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import millrace_client
from benchmarks.data_rows import MEAN, STD, digits
from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace_client import specs, steps
from millrace_client.calls import Operation
from millrace_client.uploads import stream_of
from shared.dataset_version.manifest import to_stored
from shared.settings import StoreSettings
from shared.storage import open_store

# The options of our own files. Dictionaries do not pay if each value is an image.
WRITER_OPTIONS: dict[str, Any] = {
    "compression": "lz4",
    "row_group_size": 256,
    "write_page_checksum": True,
    "use_dictionary": False,
    "write_statistics": ["label"],
}
COLUMNS = ["image", "label"]


@lru_cache(maxsize=1)
def rows_in_memory(row_count: int) -> pa.Table:
    return digits(row_count)


def warm_up(row_count: int) -> None:
    """Create the rows in advance, so that no contender is charged for them."""
    rows_in_memory(row_count)


def ingest(address: str, dataset: str, row_count: int, compression: str | None) -> tuple[float, str]:
    """Upload the rows as an Arrow stream and import it while it arrives; also returns the ACTIVE version's name."""
    table = rows_in_memory(row_count)
    upload_id = f"u{uuid.uuid4().hex[:12]}"
    operations: list[Operation[DatasetVersion]] = []
    with millrace_client.connect(data=address) as client:

        def follow(*_: int | None) -> None:
            # The upload exists and is open: its import continues to read as chunks arrive.
            if not operations:
                source = specs.arrow_source("train", f"{dataset}/uploads/{upload_id}")
                operations.append(client.data.import_version(dataset, [source]))

        began = time.perf_counter()
        client.data.upload(dataset, stream_of(table, compression), upload_id=upload_id, on_progress=follow)
        version = operations[0].wait()
        took_s = time.perf_counter() - began
        client.data.abort_upload(f"{dataset}/uploads/{upload_id}")
    assert version.row_count == row_count
    return took_s, version.name


def write_with_pyarrow(settings: StoreSettings, row_count: int, as_bytes: bool) -> float:
    """Write the same rows to the same store with pyarrow.

    It writes the table that ours uploads, whose tensors Parquet writes as lists. With `as_bytes`, images are bytes of a
    fixed size, as in our files, which Parquet writes and reads much faster.
    """
    table, store = rows_in_memory(row_count), open_store(settings)
    store.filesystem().create_dir("peers", recursive=True)
    began = time.perf_counter()
    table = to_stored(table) if as_bytes else table
    pq.write_table(table, "peers/rows.parquet", filesystem=store.filesystem(), **WRITER_OPTIONS)
    took_s = time.perf_counter() - began
    store.delete_folder("peers")
    return took_s


def size_with_pyarrow(settings: StoreSettings, row_count: int) -> int:
    """Return the bytes of the same rows, images as bytes of a fixed size, as pyarrow writes them by default."""
    store = open_store(settings)
    store.filesystem().create_dir("peers", recursive=True)
    pq.write_table(to_stored(rows_in_memory(row_count)), "peers/plain.parquet", filesystem=store.filesystem())
    size_bytes = store.size("peers/plain.parquet")
    store.delete_folder("peers")
    return int(size_bytes or 0)


def transform(address: str, source: str) -> tuple[float, str]:
    """Run our normalising pipeline, until the new version is ACTIVE."""
    with millrace_client.connect(data=address) as client:
        began = time.perf_counter()
        operation = client.data.transform_version(
            source, [steps.to_float("image"), steps.normalize(MEAN, STD, "image")]
        )
        version = operation.wait()
        return time.perf_counter() - began, version.name


def delete(address: str, version: str) -> None:
    with millrace_client.connect(data=address) as client:
        client.data.delete_version(version)


def read(address: str, version: str, row_count: int) -> float:
    """Read the version with `ReadVersion` into one Arrow table."""
    with millrace_client.connect(data=address) as client:
        began = time.perf_counter()
        table = client.data.read_table(version, columns=COLUMNS)
        took_s = time.perf_counter() - began
    assert table.num_rows == row_count
    return took_s


def read_with_pyarrow(settings: StoreSettings, paths: Sequence[str], row_count: int, together: bool) -> float:
    """Read the same files with page checksums verified: one after the other, or as one dataset."""
    filesystem = open_store(settings).filesystem()
    options: dict[str, Any] = {"columns": COLUMNS, "filesystem": filesystem, "page_checksum_verification": True}
    began = time.perf_counter()
    if together:
        table = pq.read_table(list(paths), **options)
    else:
        table = pa.concat_tables([pq.read_table(path, **options) for path in paths])
    took_s = time.perf_counter() - began
    assert table.num_rows == row_count
    return took_s
