"""Versions, imports and uploads. Simulated: the store, and versions whose files are one real file under many names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest import mock

import numpy as np
import pyarrow as pa
from pyarrow import fs

from benchmarks.scale.measuring import Costs
from benchmarks.scale.simulated_store import SimulatedStore
from data_service.datasets import Datasets
from data_service.domain.statistics import SplitStatistics
from data_service.preview import preview
from data_service.reading import Selection, read_stream
from data_service.storage.source_files import SourceFiles
from data_service.transforms.plan import plan_parts
from data_service.uploads import chunks
from data_service.uploads.record import UploadRecord, log_of
from data_service.uploads.uploads import Uploads
from shared.dataset_version import DatasetVersion, SplitWriter, VersionReader
from shared.dataset_version import writer as writing
from shared.dataset_version.manifest import FORMAT, Manifest
from tests.support.versions import columns_of

ROWS_A_GROUP, GROUPS_A_FILE = 256, 2500
MIB = 1024 * 1024


def import_files(costs: Costs, scale: int) -> None:
    """Finds the files of an import: 1,000 at 1x, in folders of 1,000.

    Simulated: the S3 endpoint's listing.
    """
    files = 1000 * scale
    found = SourceFiles([PurePosixPath("/")], cast(fs.FileSystem, _Listing(files)))
    with costs.measured("import_files", units=files):
        assert len(found.find_all("uri", "s3://bucket/data/**/*.csv", most=10**7)) == files


class _Listing:
    """The part of an Arrow file system that finds files."""

    def __init__(self, files: int) -> None:
        self._folders = files // 1000

    def get_file_info(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        folder = selector.base_dir.rstrip("/")
        if folder.endswith("data"):
            names = [(f"{folder}/part-{number:05d}", fs.FileType.Directory) for number in range(self._folders)]
        else:
            names = [(f"{folder}/{number:04d}.csv", fs.FileType.File) for number in range(1000)]
        return [fs.FileInfo(path, kind, size=1000) for path, kind in names]


def version(costs: Costs, scale: int) -> None:
    """Opens a version of 100,000 row groups at 1x, reads ten rows and a preview, and plans a transform.

    Simulated: all its files have the bytes of one of 2,500 groups.
    """
    store = SimulatedStore()
    data, digest = _manifest(store, 100_000 * scale)
    store.put("v/manifest.json", data)
    del data
    with costs.measured("open_version", store):
        opened = Manifest.from_json(store.get("v/manifest.json"), digest)
    reader = VersionReader(store, DatasetVersion("datasets/d/versions/v", opened, digest, "v"))
    selection = Selection(split="", columns=(), offset=0, limit=10)
    with costs.measured("read_ten_rows", store):
        assert len(b"".join(read_stream(reader, selection)))
    middle = Selection(split="", columns=(), offset=opened.row_count // 2, limit=10)
    with costs.measured("read_ten_rows_of_the_middle", store):
        assert len(b"".join(read_stream(reader, middle)))
    with costs.measured("preview", store):
        assert preview(reader, 10).arrow_ipc
    with costs.measured("plan_transform", store, units=100_000 * scale):
        assert plan_parts(reader, reader.select(None))


def _manifest(store: SimulatedStore, groups: int) -> tuple[bytes, str]:
    """Returns a manifest of one split, and its digest.

    The bytes are assembled as text, since as objects they would take the most memory.
    """
    schema = pa.schema([("text", pa.string())])
    rows = ROWS_A_GROUP * GROUPS_A_FILE
    # All files have groups as at the beginning of a version: the smallest, and the same in each.
    with TemporaryDirectory() as scratch, mock.patch.object(writing, "GROWN_GROUP_ROWS", ROWS_A_GROUP):
        real = SimulatedStore()
        writer = SplitWriter(real, "v", Path(scratch), schema=schema, split="train", first_row_id=0)
        real.upload_file = lambda path, key: real.put(key, path.read_bytes())  # type: ignore[method-assign]
        writer.write(pa.table({"text": [f"row {row}" for row in range(rows)]}))
        (file,) = writer.close()
        store.put_alias(".parquet", real.get(f"v/{file.path}"))
    assert file.row_groups == [ROWS_A_GROUP] * GROUPS_A_FILE
    files = groups // GROUPS_A_FILE
    record = json.loads(Manifest(columns=columns_of(schema), splits=[], files=[]).to_json())
    assert record["format"] == FORMAT
    record["splits"] = [{"name": "train", "first_row_id": 0, "row_count": rows * files}]
    head = json.dumps({**record, "files": []})
    pattern = json.dumps({**asdict(file), "path": "PATH", "first_row_id": "FIRST"})

    def described() -> Iterator[str]:
        for number in range(files):
            yield pattern.replace("PATH", f"{number:06d}.parquet").replace('"FIRST"', str(rows * number))

    data = head.replace('"files": []', '"files": [' + ",".join(described()) + "]").encode()
    return data, hashlib.sha256(data).hexdigest()


def upload_commit(costs: Costs, scale: int) -> None:
    """Commits an upload of 1 GB at 1x without a cached digest.

    Simulated: its bytes are zeros, and beyond 1x they are not hashed: `hash_upload` is the hashing of 1 GB.
    """
    store, size_bytes = SimulatedStore(), 1000 * MIB * scale
    name = "datasets/d/uploads/u"
    record = UploadRecord(name=name, uid="u", create_time=0.0, update_time=0.0)
    log_of(store, name).append(None, record.as_state())
    part_bytes = 8 * MIB
    for offset in range(0, size_bytes, part_bytes):
        store.put_zeros(f"{record.chunks_prefix}/{offset:020d}", min(part_bytes, size_bytes - offset))
    wanted = hashlib.sha256()
    with costs.measured("hash_upload", units=1000):
        for _ in range(1000):
            wanted.update(bytes(MIB))
    parts = -(-size_bytes // part_bytes)
    with ExitStack() as patched:
        if scale > 1:
            patched.enter_context(mock.patch.object(chunks.RunningDigest, "update", _not_hashed))
            known = chunks.RunningDigest(0, wanted)
            patched.enter_context(mock.patch.object(chunks.RunningDigest, "empty", known.copy))
        with costs.measured("upload_commit", store, units=parts) as cost:
            Uploads(store, cast(Datasets, None), None).commit(name, size_bytes, wanted.hexdigest())
    assert cost.bytes < 1.1 * size_bytes, "each byte is read once"


def _not_hashed(digest: chunks.RunningDigest, data: bytes) -> None:
    digest.end += len(data)


def columns(costs: Costs, scale: int) -> None:
    """Computes statistics and a preview of 1,024 rows of 5 columns at 1x.

    Only the store is simulated.
    """
    count, store = 5 * scale, SimulatedStore()
    rng = np.random.default_rng(0)
    table = pa.table({f"c{number}": rng.random(1024) for number in range(count)})
    statistics = SplitStatistics(table.schema)
    with costs.measured("column_statistics", units=count):
        statistics.update(table, 0)
        assert len(statistics.result("train")) == count
    store.upload_file = lambda path, key: store.put(key, path.read_bytes())  # type: ignore[method-assign]
    with TemporaryDirectory() as scratch:
        writer = SplitWriter(store, "v", Path(scratch), schema=table.schema, split="train", first_row_id=0)
        with costs.measured("column_write", store, units=count):
            writer.write(table)
            files = writer.close()
    described: Any = columns_of(table.schema)
    split = {"name": "train", "first_row_id": 0, "row_count": 1024}
    bare = json.loads(Manifest(columns=described, splits=[], files=files).to_json())
    data = json.dumps({**bare, "splits": [split]}).encode()
    digest = hashlib.sha256(data).hexdigest()
    opened = Manifest.from_json(data, digest)
    with costs.measured("column_preview", store, units=count):
        assert preview(VersionReader(store, DatasetVersion("v", opened, digest, "v")), 10).arrow_ipc
