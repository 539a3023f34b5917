from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_service.deletion import Deletions
from data_service.reading import Damage, Verified, verify
from shared.dataset_version import DatasetVersion, VersionReader, load_version
from shared.dataset_version.manifest import Attachment, sha256_hex
from shared.dataset_version.pages import open_files, page_path
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import NotFound
from shared.jobs import Jobs
from shared.storage import ObjectStore
from tests.support.paged_versions import make_versions_paged
from tests.support.versions import commit_version, striped_digits

VERSION = "datasets/d/versions/v1"


@pytest.fixture
def version(store: ObjectStore) -> DatasetVersion:
    commit_version(store, VERSION, {"train": striped_digits(600), "test": striped_digits(100)})
    return load_version(store, VERSION)


def verified(store: ObjectStore, version: DatasetVersion) -> tuple[list[Damage], Verified]:
    """All damage, and the last message."""
    messages = list(verify(store, version))
    return [damage for message in messages for damage in message.damages], messages[-1]


def key(version: DatasetVersion, index: int = 0) -> str:
    return f"{version.folder}/{version.manifest.files[index].path}"


def flip(store: ObjectStore, path: str, position: int) -> None:
    data = bytearray(store.get(path))
    data[position] ^= 1
    store.put(path, data)


def test_a_good_version_is_read_to_its_last_byte(store: ObjectStore, version: DatasetVersion) -> None:
    damages, last = verified(store, version)
    assert damages == []
    assert (last.files_checked, last.files_total) == (3, 3)
    manifest_bytes = store.size(f"{version.folder}/manifest.json")
    assert manifest_bytes is not None
    assert last.bytes_checked == version.manifest.size_bytes + manifest_bytes
    assert last.rows_checked == 700


def test_a_flipped_byte_is_reported_with_its_row_group(store: ObjectStore, version: DatasetVersion) -> None:
    footer = VersionReader(store, version).footer(0)
    column: Any = footer.row_group(1).column(0)
    flip(store, key(version), column.data_page_offset + column.total_compressed_size - 5)
    damages, last = verified(store, version)
    assert [one.path for one in damages] == ["train-00000.parquet"] * 2
    assert damages[0].description.startswith("its SHA-256 is ")
    assert damages[1].description == "row group 1: a page's checksum is wrong"
    assert last.files_checked == 3
    assert last.rows_checked == 700 - 256


def test_a_damaged_footer_is_reported(store: ObjectStore, version: DatasetVersion) -> None:
    flip(store, key(version, 1), -12)
    damages, last = verified(store, version)
    assert {one.path for one in damages} == {"test-00000.parquet"}
    assert "footer" in damages[-1].description
    assert last.rows_checked == 600


def test_a_file_that_is_gone_is_reported_once_and_the_others_are_checked(
    store: ObjectStore, version: DatasetVersion
) -> None:
    store.delete(key(version))
    damages, last = verified(store, version)
    assert damages == [Damage("train-00000.parquet", "is gone")]
    assert (last.files_checked, last.rows_checked) == (3, 100)


@pytest.fixture
def paged(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> DatasetVersion:
    """Seven files of 256 rows and fewer, in pages of two; each page has two pages above level 0."""
    make_versions_paged(monkeypatch, file_bytes=100_000)
    commit_version(store, VERSION, {"train": striped_digits(1500), "test": striped_digits(100)})
    return load_version(store, VERSION)


def test_a_good_version_in_pages_is_read_to_its_last_byte(store: ObjectStore, paged: DatasetVersion) -> None:
    assert paged.manifest.pages is not None
    pages = list(open_files(store, paged).page_paths())
    assert len(pages) == paged.manifest.pages.page_count > 4
    damages, last = verified(store, paged)
    assert damages == []
    assert last.files_checked == last.files_total == 1 + len(pages) + paged.manifest.file_count
    stored = [store.size(f"{paged.folder}/{path}") or 0 for path in ["manifest.json", *pages]]
    assert last.bytes_checked == paged.manifest.size_bytes + sum(stored)
    assert last.rows_checked == 1600


def test_a_damaged_page_is_reported_and_the_files_of_the_others_are_checked(
    store: ObjectStore, paged: DatasetVersion
) -> None:
    path = page_path(0, 1)
    flip(store, f"{paged.folder}/{path}", 70)
    damages, last = verified(store, paged)
    assert [one.path for one in damages] == [path, path]
    assert damages[0].description.startswith("its SHA-256 is ")
    assert damages[1].description == "names files that cannot be checked"
    assert last.rows_checked == 1600 - 512


def test_a_page_that_is_gone_is_reported(store: ObjectStore, paged: DatasetVersion) -> None:
    store.delete(f"{paged.folder}/{page_path(1, 0)}")
    damages, _ = verified(store, paged)
    assert damages == [
        Damage(page_path(1, 0), "is gone"),
        Damage(page_path(1, 0), "names files that cannot be checked"),
    ]


@pytest.mark.parametrize("messages", [1, 2, 3], ids=["its manifest", "a file", "the next file"])
def test_a_version_that_is_deleted_while_it_is_verified_is_not_damaged(
    store: ObjectStore, version: DatasetVersion, messages: int
) -> None:
    states = verify(store, version)
    for _ in range(messages):
        next(states)
    Deletions(store, Jobs(store, IMPORT_KIND)).delete(VERSION)
    with pytest.raises(NotFound, match="deleted while it was read"):
        list(states)


def test_a_version_that_is_deleted_while_a_file_is_read_again_is_not_damaged(
    store: ObjectStore, version: DatasetVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest was checked; its rows cannot be."""
    size, polls = store.size, 0

    def then_deleted(path: str) -> int | None:
        nonlocal polls
        polls += path == key(version, 1)
        if polls == 2:
            monkeypatch.undo()
            Deletions(store, Jobs(store, IMPORT_KIND)).delete(VERSION)
        return size(path)

    monkeypatch.setattr(store, "size", then_deleted)
    with pytest.raises(NotFound, match="deleted while it was read"):
        verified(store, version)


def test_a_manifest_that_changed_is_reported(store: ObjectStore, version: DatasetVersion) -> None:
    flip(store, f"{version.folder}/manifest.json", 10)
    damages, last = verified(store, version)
    assert [one.path for one in damages] == ["manifest.json"]
    assert last.rows_checked == 700


def test_attachments_are_checked_like_files(store: ObjectStore, version: DatasetVersion) -> None:
    report = Attachment(path="report.json", size_bytes=2, sha256=sha256_hex(b"{}"))
    version = replace(version, manifest=replace(version.manifest, attachments=[report]))
    store.put(f"{version.folder}/report.json", b"{}")
    assert not [one for one in verified(store, version)[0] if one.path == "report.json"]
    store.put(f"{version.folder}/report.json", b"[]")
    (damage,) = [one for one in verified(store, version)[0] if one.path == "report.json"]
    assert "SHA-256" in damage.description


def test_a_truncated_file_is_reported_with_its_size(store: ObjectStore, version: DatasetVersion) -> None:
    data = store.get(key(version))
    store.put(key(version), data[:-10])
    damages, _ = verified(store, version)
    assert damages[0] == Damage("train-00000.parquet", f"has {len(data) - 10:,} bytes, not {len(data):,}")


def test_row_ids_that_do_not_follow_each_other_are_reported(
    store: ObjectStore, version: DatasetVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = VersionReader.read

    def shifted(self: VersionReader, group: Any, columns: Any = None) -> Any:
        table = whole(self, group, columns)
        if group.first_row_id != 256:
            return table
        return table.take([1, 0, *range(2, table.num_rows)])

    monkeypatch.setattr(VersionReader, "read", shifted)
    damages, _ = verified(store, version)
    assert damages == [Damage("train-00000.parquet", "row group 1: row 0 has the id 257, not 256")]


def test_progress_comes_before_the_end(
    store: ObjectStore, version: DatasetVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_service.reading.READ_BYTES", 10_000)
    monkeypatch.setattr("data_service.reading.REPORT_EVERY_BYTES", 20_000)
    messages = list(verify(store, version))
    assert messages[0] == Verified(files_total=3)
    seen = [message.bytes_checked for message in messages]
    assert seen == sorted(seen)
    assert len(set(seen)) > 4


def test_the_files_are_parquet_with_checksums(store: ObjectStore, version: DatasetVersion) -> None:
    """What is verified is there to be verified."""
    import io

    metadata = pq.read_metadata(io.BytesIO(store.get(key(version))))
    assert metadata.num_row_groups == 3
