"""A page of versions is one message that clients take, whatever the versions are made of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from data_service.servicer import DataServicer
from data_service.versions import ActiveVersion
from millrace.data.v1 import data_service_pb2, resources_pb2
from shared import paging
from shared.dataset_version import DatasetVersion
from shared.dataset_version.manifest import Column, DataFile, Manifest, Split
from shared.jobs import JobRecord, JobState

DATASET = "datasets/d"
# What gRPC's clients take, where nobody told them otherwise.
CLIENT_BYTES = 4 * 1024 * 1024


def version(number: int, *, columns: int = 1, files: int = 1, learnt: int = 1) -> ActiveVersion:
    name = f"{DATASET}/versions/v{number:03d}"
    names = [f"category {n}" for n in range(learnt)]
    manifest = Manifest(
        columns=[Column(name=f"c{n}", arrow_type="int64", shape=[], value_names=names) for n in range(columns)],
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


def test_a_version_is_listed_without_what_only_getting_it_tells() -> None:
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
