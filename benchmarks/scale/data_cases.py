"""Versions, imports and uploads. Simulated: the store, and versions whose files are one real file under many names."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import replace
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
from data_service.reading import Selection, preview, read_stream
from data_service.storage.source_files import SourceFiles
from data_service.transforms.passes import parts_of
from data_service.uploads import chunks
from data_service.uploads.upload import UploadRecord, log_of
from data_service.uploads.uploads import Uploads
from shared.dataset_version import DatasetVersion, SplitWriter, VersionReader, pages
from shared.dataset_version import parquet as writing
from shared.dataset_version.manifest import DataFile, FilesInPages, Manifest, Split, sha256_hex
from shared.dataset_version.version import committed_version
from shared.jobs import JobRecord, JobState
from tests.support.versions import columns_of

ROWS_A_GROUP, GROUPS_A_FILE = 256, 2500
MIB = 1024 * 1024


def import_files(costs: Costs, scale: int) -> None:
    """Find the files of an import: 1,000 at 1x, in folders of 1,000.

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
    """Commit the files of a version of 100,000 row groups at 1x, open it, read ten rows and a preview, plans a
    transform, and find all row groups as a training run does. At 1x it also does so with 10,000 row groups.

    Simulated: all its files have the bytes of one of 2,500 groups.
    """
    if scale == 1:
        _version(costs, 10_000, "_of_10_thousand_groups")
    _version(costs, 100_000 * scale)


def _version(costs: Costs, groups: int, suffix: str = "") -> None:
    store, name = SimulatedStore(), "datasets/d/versions/v"
    file, bare = _file(store)
    files = (
        replace(file, path=f"{number:06d}.parquet", first_row_id=file.row_count * number)
        for number in range(groups // GROUPS_A_FILE)
    )
    rows = file.row_count * (groups // GROUPS_A_FILE)
    manifest = replace(bare, splits=[Split(name="train", first_row_id=0, row_count=rows)])
    with costs.measured(f"commit_files{suffix}", store, units=groups):
        if groups <= pages.MAX_INLINE_GROUPS:
            manifest = replace(manifest, files=list(files))
        else:
            written = pages.write_pages(store, "v", files, manifest.splits)
            manifest = replace(manifest, files=FilesInPages(), pages=written)
        data = manifest.to_json()
        store.put("v/manifest.json", data)
    result = {"manifest": "v/manifest.json", "manifest_sha256": sha256_hex(data)}
    job = JobRecord(
        uid="u", name=name, spec={}, create_time=0.0, update_time=0.0, state=JobState.SUCCEEDED, result=result
    )
    with costs.measured(f"open_version{suffix}", store):
        opened = committed_version(store, job)

    def reader() -> VersionReader:
        return VersionReader(store, opened)

    selection = Selection(split="", columns=(), offset=0, limit=10)
    with costs.measured(f"read_ten_rows{suffix}", store):
        assert len(b"".join(read_stream(reader(), selection)))
    middle = Selection(split="", columns=(), offset=rows // 2, limit=10)
    with costs.measured(f"read_ten_rows_of_the_middle{suffix}", store):
        assert len(b"".join(read_stream(reader(), middle)))
    with costs.measured(f"preview{suffix}", store):
        assert preview(reader(), 10).arrow_ipc
    schema = reader().select(None)
    with costs.measured(f"plan_first_part{suffix}", store):
        assert next(parts_of(reader(), schema)).row_count
    with costs.measured(f"plan_all_parts{suffix}", store, units=groups):
        assert sum(part.row_count for part in parts_of(reader(), schema)) == rows
    with costs.measured(f"find_all_row_groups{suffix}", store, units=groups):
        found = reader().row_groups("train")
        assert (len(found), found.row_count) == (groups, rows)


def _file(store: SimulatedStore) -> tuple[DataFile, Manifest]:
    """Store the bytes that all files have; return one of these, and a manifest without files."""
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
    return file, Manifest(columns=columns_of(schema), splits=[], files=[])


def upload_commit(costs: Costs, scale: int) -> None:
    """Commit an upload of 1 GB at 1x without a cached digest.

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
    """Compute statistics and a preview of 1,024 rows of 5 columns at 1x.

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
