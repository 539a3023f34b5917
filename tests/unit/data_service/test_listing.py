"""A page of versions, or of operations, is one message that clients take, whatever the versions are made of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from google.longrunning import operations_pb2
from google.rpc import code_pb2

from data_service.convert import operation_message
from data_service.datasets import ActiveVersion, Datasets, Versions, operation_id, record_operation
from data_service.servicer import DataServicer, VersionOperations
from millrace.data.v1 import data_service_pb2, resources_pb2
from shared import names as paging
from shared.dataset_version import DatasetVersion
from shared.dataset_version.manifest import Column, DataFile, Manifest, Split
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import DataLoss
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectStore
from shared.streaming import OperationsServicer
from tests.support.versions import commit_version, striped_digits

DATASET = "datasets/d"
# What gRPC's clients take, where nobody told them otherwise.
CLIENT_BYTES = 4 * 1024 * 1024


def version(number: int, *, columns: int = 1, name_bytes: int = 1, files: int = 1, learnt: int = 1) -> ActiveVersion:
    name = f"{DATASET}/versions/v{number:03d}"
    names = [f"category {n}" for n in range(learnt)]
    manifest = Manifest(
        columns=[
            Column(name=f"c{n}".ljust(name_bytes, "_"), arrow_type="int64", shape=[], value_names=names)
            for n in range(columns)
        ],
        splits=[Split(name="train", first_row_id=0, row_count=files)],
        files=[
            DataFile(
                path=f"train-{n:05d}.parquet",
                split="train",
                first_row_id=n,
                row_count=1,
                row_groups=[1],
                size_bytes=1000,
                sha256="0" * 64,
                footer_bytes=100,
                footer_sha256="0" * 64,
            )
            for n in range(files)
        ],
        transforms=[{"steps": [{"column": "c0", "ordinalEncode": {"categories": names}}]}],
    )
    job = JobRecord(uid=f"u{number}", name=name, spec={}, create_time=1.0, update_time=2.0, state=JobState.SUCCEEDED)
    reader: Any = SimpleNamespace(version=DatasetVersion(name, manifest, "0" * 64, f"{name}/data/a"))
    return ActiveVersion(job, reader)


class Listed:
    """Has these versions, as `Versions` does."""

    def __init__(self, *versions: ActiveVersion) -> None:
        self._versions = {one.job.name.rsplit("/", 1)[-1]: one for one in versions}

    def list(self, _parent: str, page_size: int, page_token: str) -> tuple[list[ActiveVersion], str]:
        keys, token = paging.page(list(self._versions), page_size, page_token)
        return [self._versions[key] for key in keys], token

    def get(self, name: str) -> ActiveVersion:
        return self._versions[name.rsplit("/", 1)[-1]]


def servicer_of(*versions: ActiveVersion) -> DataServicer:
    given: Any = None
    listed: Any = Listed(*versions)
    return DataServicer(given, given, listed, given, given, given)


def pages_of(*versions: ActiveVersion) -> list[data_service_pb2.ListVersionsResponse]:
    servicer, given = servicer_of(*versions), None
    pages: list[data_service_pb2.ListVersionsResponse] = []
    while not pages or pages[-1].next_page_token:
        token = pages[-1].next_page_token if pages else ""
        request = data_service_pb2.ListVersionsRequest(parent=DATASET, page_token=token)
        pages.append(asyncio.run(servicer.ListVersions(request, given)))  # type: ignore[arg-type]
    return pages


@pytest.mark.parametrize(
    "made_of", [{"files": 500}, {"learnt": 5_000}, {"columns": 3_000}], ids=["files", "learnt", "columns"]
)
def test_a_page_of_large_versions_is_a_message_that_any_client_takes(made_of: dict[str, int]) -> None:
    pages = pages_of(*(version(number, **made_of) for number in range(100)))
    assert max(page.ByteSize() for page in pages) < CLIENT_BYTES
    names = [one.name for page in pages for one in page.versions]
    assert names == [f"{DATASET}/versions/v{number:03d}" for number in range(100)]
    assert len(pages) == (2 if "columns" in made_of else 1)


def test_a_version_of_more_columns_than_a_message_holds_is_listed_with_the_first_of_them() -> None:
    wide = version(1, columns=10_000, name_bytes=1024)
    pages = pages_of(version(0), wide, version(2))
    assert max(page.ByteSize() for page in pages) < CLIENT_BYTES
    first, listed, last = [one for page in pages for one in page.versions]
    names = [column.name for column in wide.reader.version.columns]
    assert 3_000 < len(listed.columns) < len(names)
    assert [column.name for column in listed.columns] == names[: len(listed.columns)]
    assert listed.splits
    assert [len(one.columns) for one in (first, last)] == [1, 1]


def test_an_operation_is_listed_with_its_version_as_versions_are() -> None:
    large = version(0, columns=10_000, name_bytes=1024, files=3)
    job = large.job
    operation = operation_message(large, {}, brief=True)
    assert operation.ByteSize() < CLIENT_BYTES
    made = resources_pb2.DatasetVersion()
    assert operation.response.Unpack(made)
    assert made == pages_of(large)[0].versions[0]
    assert (operation.name, made.name) == (f"operations/{operation_id(job)}", job.name)


def test_one_damaged_manifest_hides_no_other_operation(store: ObjectStore) -> None:
    jobs = Jobs(store, IMPORT_KIND)
    names = []
    for number in range(2):
        name = f"{DATASET}/versions/v{number}"
        commit_version(store, name, {"train": striped_digits(10)})
        job = jobs.get(name, name)
        record_operation(store, job)
        names.append(f"operations/{operation_id(job)}")
    store.put(job.result["manifest"], b"{}")
    servicer: Any = OperationsServicer(VersionOperations(store, jobs, Versions(store, jobs, Datasets(store))))
    listed = asyncio.run(servicer.ListOperations(operations_pb2.ListOperationsRequest(), None)).operations
    by_name = {one.name: one for one in listed}
    assert sorted(by_name) == sorted(names)
    assert by_name[names[0]].HasField("response")
    assert by_name[names[1]].error.code == code_pb2.DATA_LOSS
    with pytest.raises(DataLoss):
        asyncio.run(servicer.GetOperation(operations_pb2.GetOperationRequest(name=names[1]), None))


def test_a_version_is_listed_without_the_fields_that_only_get_version_returns() -> None:
    one = version(0, columns=2, files=3)
    (listed,) = pages_of(one)[0].versions
    whole: resources_pb2.DatasetVersion = asyncio.run(
        servicer_of(one).GetVersion(data_service_pb2.GetVersionRequest(name=one.job.name), None)  # type: ignore[arg-type]
    )
    assert len(whole.files) == 3
    assert whole.HasField("transform")
    for field in ("files", "transform"):
        whole.ClearField(field)
    for column in whole.columns:
        column.ClearField("value_names")
    assert listed == whole
