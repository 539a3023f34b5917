"""What becomes of versions and datasets once they are there: followed, verified, deleted, let go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import quality_pb2, resources_pb2
from shared.dataset_version.version import mark_used
from tests.integration.data_service.client import DataClient, imported, parquet
from tests.integration.data_service.conftest import DataStack
from tests.support.refusals import refused
from tests.support.stores import S3_IN_CHAOS

APPEND = pb.Base.MODE_APPEND


# What the store has no say in.
ON_S3_IN_CHAOS = pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)


@pytest.fixture
def source(stack: DataStack, dataset: str) -> pb.ImportSource:
    return written(stack, dataset)


def written(stack: DataStack, dataset: str) -> pb.ImportSource:
    path = stack.inputs / f"{dataset.rsplit('/', 1)[-1]}.parquet"
    pq.write_table(pa.table({"n": list(range(1000)), "kind": ["a", "b"] * 500}), path)
    return parquet("train", path.as_uri())


@pytest.fixture
def version(client: DataClient, dataset: str, source: pb.ImportSource) -> str:
    return str(client.import_version(pb.ImportVersionRequest(parent=dataset, sources=[source])).name)


@pytest.fixture(scope="module")
def kept(stack: DataStack) -> str:
    """A version of a dataset of its own, for tests that only read it."""
    dataset = stack.new_dataset()
    source = written(stack, dataset)
    return str(stack.client.import_version(pb.ImportVersionRequest(parent=dataset, sources=[source])).name)


def test_of_several_that_append_to_one_version_one_wins_and_the_others_are_aborted(
    client: DataClient, dataset: str, source: pb.ImportSource, version: str
) -> None:
    request = pb.ImportVersionRequest(parent=dataset, sources=[source], base=pb.Base(version=version, mode=APPEND))

    def append(_: int) -> object:
        try:
            return client.data.ImportVersion(request, timeout=60)
        except grpc.RpcError as error:
            return error.code()

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(append, range(4)))

    assert answers.count(grpc.StatusCode.ABORTED) == 3
    (operation,) = [answer for answer in answers if answer is not grpc.StatusCode.ABORTED]
    appended = imported(client.wait(operation))
    assert appended.row_count == 2000
    assert appended.parents[0].version == version
    again = pb.ImportVersionRequest(
        parent=dataset, sources=[source], base=pb.Base(version=appended.name, mode=APPEND), validate_only=True
    )
    client.data.ImportVersion(again, timeout=60)


@ON_S3_IN_CHAOS
def test_a_preview_carries_the_quality_report(client: DataClient, kept: str) -> None:
    preview = client.data.PreviewVersion(pb.PreviewVersionRequest(name=kept), timeout=60)

    statistics = {one.column: one for one in preview.report.columns}
    assert (statistics["n"].numbers.min, statistics["n"].numbers.max, statistics["n"].numbers.mean) == (0, 999, 499.5)
    assert [(one.value.text, one.row_count) for one in statistics["kind"].values] == [("a", 500), ("b", 500)]


@ON_S3_IN_CHAOS
def test_a_failed_check_is_reported_and_leaves_nothing(
    stack: DataStack, client: DataClient, dataset: str, source: pb.ImportSource
) -> None:
    check = quality_pb2.QualityCheck(column="n", range=quality_pb2.Range(max=10))
    request = pb.ImportVersionRequest(parent=dataset, version_id="bad", sources=[source], checks=[check])

    operation = client.wait(client.data.ImportVersion(request, timeout=60))

    assert operation.error.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert "n is not 10 or less" in operation.error.message
    assert not [key for key in stack.stored_keys() if key.startswith(f"{dataset}/versions/bad/data/")]


def test_a_version_that_is_whole_verifies_and_a_flipped_byte_is_found(
    stack: DataStack, client: DataClient, version: str
) -> None:
    def verify() -> list[pb.VerifyVersionResponse]:
        return list(client.data.VerifyVersion(pb.VerifyVersionRequest(name=version), timeout=60))

    whole = verify()
    assert whole[-1].files_checked == whole[-1].files_total
    assert whole[-1].rows_checked == 1000
    assert not any(one.damages for one in whole)

    (key,) = [key for key in stack.stored_keys() if key.startswith(version) and key.endswith(".parquet")]
    data = bytearray(stack.store.get(key))
    data[len(data) // 2] ^= 1
    stack.store.put(key, bytes(data))
    damages = [damage for one in verify() for damage in one.damages]
    assert {damage.path for damage in damages} == {Path(key).name}
    assert any("SHA-256" in damage.description for damage in damages)


def test_a_deleted_version_is_gone_and_its_id_is_free(
    stack: DataStack, client: DataClient, dataset: str, source: pb.ImportSource, version: str
) -> None:
    before = client.data.GetVersion(pb.GetVersionRequest(name=version), timeout=60)

    stale = refused(lambda: client.data.DeleteVersion(pb.DeleteVersionRequest(name=version, etag="9"), timeout=60))
    assert stale.code is grpc.StatusCode.ABORTED
    client.data.DeleteVersion(pb.DeleteVersionRequest(name=version, etag=before.etag), timeout=60)

    gone = refused(lambda: client.data.GetVersion(pb.GetVersionRequest(name=version), timeout=60))
    assert gone.code is grpc.StatusCode.NOT_FOUND
    assert not client.data.ListVersions(pb.ListVersionsRequest(parent=dataset), timeout=60).versions
    assert not [key for key in stack.stored_keys() if key.startswith(f"{version}/") and "/log/" not in key]
    version_id = version.rsplit("/", 1)[-1]
    second = client.import_version(pb.ImportVersionRequest(parent=dataset, sources=[source], version_id=version_id))
    assert second.name == version
    assert second.uid != before.uid
    assert second.manifest_sha256 == before.manifest_sha256
    assert client.read(version).num_rows == 1000


def test_a_version_in_use_is_not_deleted_and_the_error_names_the_user(
    stack: DataStack, client: DataClient, kept: str
) -> None:
    mark_used(stack.store, kept, "deployment", "u1", "deployments/m", is_job=False)

    refusal = refused(lambda: client.data.DeleteVersion(pb.DeleteVersionRequest(name=kept), timeout=60))

    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_IN_USE")
    assert "deployments/m" in refusal.message
    assert client.read(kept).num_rows == 1000


def test_a_version_that_is_being_made_is_not_deleted(client: DataClient, dataset: str) -> None:
    upload = client.data.StartUpload(pb.StartUploadRequest(parent=dataset), timeout=60)
    source = pb.ImportSource(split="train", arrow=pb.ArrowSource(uri=upload.name))
    operation = client.data.ImportVersion(
        pb.ImportVersionRequest(parent=dataset, sources=[source], version_id="slow"), timeout=60
    )

    name = f"{dataset}/versions/slow"
    refusal = refused(lambda: client.data.DeleteVersion(pb.DeleteVersionRequest(name=name), timeout=60))
    client.cancel(operation)
    client.wait(operation)

    assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
    assert operation.name in refusal.message
    client.data.DeleteVersion(pb.DeleteVersionRequest(name=name), timeout=60)


@ON_S3_IN_CHAOS
def test_a_dataset_is_updated_by_its_etag_and_deleted_once_it_is_empty(
    client: DataClient, dataset: str, version: str
) -> None:
    wanted = resources_pb2.Dataset(
        name=dataset, description="new", etag="1", retention=resources_pb2.Retention(keep_newest=2)
    )
    mask = FieldMask(paths=["description", "retention"])

    updated = client.data.UpdateDataset(pb.UpdateDatasetRequest(dataset=wanted, update_mask=mask), timeout=60)

    assert (updated.description, updated.retention.keep_newest, updated.etag) == ("new", 2, "2")
    stale = refused(
        lambda: client.data.UpdateDataset(pb.UpdateDatasetRequest(dataset=wanted, update_mask=mask), timeout=60)
    )
    assert stale.code is grpc.StatusCode.ABORTED
    full = refused(lambda: client.data.DeleteDataset(pb.DeleteDatasetRequest(name=dataset), timeout=60))
    assert full.code is grpc.StatusCode.FAILED_PRECONDITION
    assert version in full.message
    client.data.DeleteVersion(pb.DeleteVersionRequest(name=version), timeout=60)
    client.data.DeleteDataset(pb.DeleteDatasetRequest(name=dataset), timeout=60)
    assert (
        refused(lambda: client.data.GetDataset(pb.GetDatasetRequest(name=dataset), timeout=60)).code
        is grpc.StatusCode.NOT_FOUND
    )
    again = client.data.CreateDataset(pb.CreateDatasetRequest(dataset_id=dataset.rsplit("/", 1)[-1]), timeout=60)
    assert again.uid != updated.uid
