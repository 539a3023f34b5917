"""Versions whose files are in pages: imported, appended to, transformed, read and shown."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service import convert
from data_service import servicer as servicers
from data_service.convert import version_message
from data_service.datasets import ActiveVersion, Versions
from data_service.domain.import_spec import Base, ImportSpec
from data_service.domain.splits import SplitRange
from data_service.imports import plan
from data_service.imports.plan import BaseRows
from data_service.reading import Selection, read_stream
from data_service.servicer import DataServicer
from data_service.version_attempt import columns_of, commit_version
from millrace.data.v1 import data_service_pb2
from shared.dataset_version import RowGroup, SplitWriter, VersionReader, load_version, pages
from shared.dataset_version.manifest import DataFile
from shared.dataset_version.pages import open_files
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import DataLoss
from shared.jobs import Jobs
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.paged_versions import make_versions_paged
from tests.support.transforming import SOURCE, commit_tables, rows_of, transform_here
from tests.unit.data_service.imports.test_following import made, parquet, rows

NUMBERS = pa.table({"n": np.arange(20_000)})


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    make_versions_paged(monkeypatch)


def read_ids(store: ObjectStore, **selection: Any) -> list[int]:
    chosen = Selection(**{"split": "", "columns": ["_row_id"], "offset": 0, "limit": 0, **selection})
    messages = read_stream(VersionReader(store, load_version(store, SOURCE)), chosen)
    parts = [data_service_pb2.ReadVersionResponse.FromString(message).arrow_ipc for message in messages]
    ids: list[int] = pa.ipc.open_stream(b"".join(parts)).read_all()["_row_id"].to_pylist()
    return ids


def test_the_commit_writes_pages_first_and_the_manifest_last(store: ObjectStore, tmp_path: Path) -> None:
    writer = SplitWriter(store, "v", tmp_path, schema=NUMBERS.schema, split="train", first_row_id=0)
    writer.write(NUMBERS)
    files = writer.close()
    counting = CountingStore(store)
    commit_version(
        counting,
        "v",
        columns=columns_of(NUMBERS.schema, {}),
        ranges=[SplitRange("train", 0, len(NUMBERS))],
        files=files[::-1],
        report={},
        quarantine=None,
        quarantined_row_count=0,
    )
    written = [request for request in counting.requests if request.startswith("put ")]
    assert written[-1] == "put v/manifest.json"
    assert sum("/pages/0-" in request for request in written) == -(-len(files) // 2) > 2
    assert any("/pages/1-" in request for request in written)


def without(files: list[DataFile], index: int) -> list[DataFile]:
    return [*files[:index], *files[index + 1 :]]


@pytest.mark.parametrize(
    "changed",
    [
        lambda files: without(files, 0),
        lambda files: without(files, 2),
        lambda files: without(files, -1),
        lambda files: [*files, files[1]],
        lambda files: [*files, replace(files[-1], path="more", first_row_id=len(NUMBERS))],
        lambda files: [*files, replace(files[-1], split="other")],
    ],
    ids=["no first file", "a gap", "no last file", "a file twice", "too many rows", "another split"],
)
def test_files_that_do_not_have_each_row_once_are_not_committed(
    store: ObjectStore, tmp_path: Path, changed: Callable[[list[DataFile]], list[DataFile]]
) -> None:
    writer = SplitWriter(store, "v", tmp_path, schema=NUMBERS.schema, split="train", first_row_id=0)
    writer.write(NUMBERS)
    files = changed(writer.close())
    with pytest.raises(DataLoss, match=r"do not have each of its rows once: .*start it anew") as caught:
        commit_version(
            store,
            "v",
            columns=columns_of(NUMBERS.schema, {}),
            ranges=[SplitRange("train", 0, len(NUMBERS))],
            files=files,
            report={},
            quarantine=None,
            quarantined_row_count=0,
        )
    assert caught.value.specific_reason == "FILES_INCOMPLETE"
    assert not store.exists("v/manifest.json")


def test_a_version_is_appended_to(store: ObjectStore, tmp_path: Path) -> None:
    n = NUMBERS["n"].to_pylist()
    first = made(store, tmp_path, "v1", ImportSpec(sources=[parquet(tmp_path, "a", "train", n=n)], hold_outs=[]))
    assert first.manifest.pages is not None
    assert first.manifest.file_count > 4
    more = ImportSpec(
        sources=[parquet(tmp_path, "b", "train", n=[7])], hold_outs=[], base=Base(version=first.name, mode="append")
    )
    second = made(store, tmp_path, "v2", more)
    assert rows(store, second, "train") == {"n": [*n, 7]}
    again = made(store, tmp_path, "v3", ImportSpec(sources=[parquet(tmp_path, "c", "train", n=n)], hold_outs=[]))
    assert again.manifest_sha256 == first.manifest_sha256


def test_the_rows_of_a_base_are_divided_as_those_of_one_without_pages(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_PART_BYTES", 50_000)
    texts = pa.table({"text": [f"{number:0{number % 60}d}" for number in range(12_000)]})
    tables = {"train": texts, "test": texts.slice(0, 700)}
    commit_tables(store, tables)
    monkeypatch.setattr(pages, "MAX_INLINE_FILES", 256)
    commit_tables(store, tables, name="datasets/d/versions/whole")
    paged, whole = load_version(store, SOURCE), load_version(store, "datasets/d/versions/whole")
    assert paged.manifest.pages is not None
    for split in tables:
        # Each run ends with the group with which it reaches the size.
        expected: list[tuple[list[RowGroup], int]] = [([], 0)]
        for group in VersionReader(store, whole).row_groups(split):
            file = whole.manifest.files[group.file_index]
            groups, size_bytes = expected.pop()
            expected.append(([*groups, group], size_bytes + file.size_bytes * group.row_count // file.row_count))
            if expected[-1][1] >= 50_000:
                expected.append(([], 0))
        expected = [run for run in expected if run[0]]
        for version in (paged, whole):
            runs = list(plan._base_runs(split, BaseRows(store, version)))
            assert [(list(run.groups), run.size_bytes) for run in runs] == expected
        if split == "train":
            assert len(expected) > 2
        for run in runs:
            sent = pickle.loads(pickle.dumps(run))
            assert (sent, pickle.dumps(sent)) == (run, pickle.dumps(run))
    assert list(plan._base_runs("other", BaseRows(store, paged))) == []


def test_a_version_is_transformed(store: ObjectStore) -> None:
    commit_tables(store, {"train": NUMBERS, "test": NUMBERS.slice(0, 3000)})
    job = transform_here(store, [{"column": "n", "standardize": {}}])
    assert load_version(store, job.name).manifest.pages is not None
    values = rows_of(store, job.name)
    assert list(map(len, (values["train"]["n"], values["test"]["n"]))) == [20_000, 3000]
    train = np.asarray(values["train"]["n"])
    assert np.allclose(train, (np.arange(20_000) - 9999.5) / np.arange(20_000).std())


def test_rows_are_read_from_any_offset(store: ObjectStore) -> None:
    commit_tables(store, {"train": NUMBERS, "test": NUMBERS.slice(0, 3000)})
    assert read_ids(store) == list(range(23_000))
    for offset in (0, 4095, 4096, 12_345, 19_999, 20_000, 22_999):
        assert read_ids(store, offset=offset, limit=10) == list(range(23_000))[offset : offset + 10]
    assert read_ids(store, split="test", offset=100, limit=3) == [20_100, 20_101, 20_102]
    assert read_ids(store, offset=23_000) == []


def test_the_event_loop_neither_reads_pages_nor_converts_reports(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_tables(store, {"train": NUMBERS})
    given: Any = None
    servicer = DataServicer(given, given, Versions(store, Jobs(store, IMPORT_KIND), given), given, given, given)
    threads: list[int] = []

    def noted(name: str) -> None:
        function = getattr(servicers, name)

        def call(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*arguments, **options)

        monkeypatch.setattr(servicers, name, call)

    noted("version_message")
    noted("bound_answer")
    whole = asyncio.run(servicer.GetVersion(data_service_pb2.GetVersionRequest(name=SOURCE), given))
    shown = asyncio.run(servicer.PreviewVersion(data_service_pb2.PreviewVersionRequest(name=SOURCE), given))
    assert shown.version == whole
    assert len(threads) == 3
    assert threading.get_ident() not in threads


def test_a_version_is_shown_with_its_first_files_and_their_number(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "MAX_LISTED_FILES", 3)
    commit_tables(store, {"train": NUMBERS})
    version = Versions(store, Jobs(store, IMPORT_KIND), None).get(SOURCE)  # type: ignore[arg-type]
    assert isinstance(version, ActiveVersion)
    files = list(open_files(store, version.reader.version))
    message = version_message(version)
    assert message.file_count == len(files) > 4
    assert [file.path for file in message.files] == [file.path for file in files[:3]]
    assert message.size_bytes == sum(file.size_bytes for file in files)
    assert message.row_count == 20_000
    brief = version_message(version, brief=True)
    assert (len(brief.files), brief.file_count) == (0, len(files))
