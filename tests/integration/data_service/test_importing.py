"""Imports that work: what is made, and that it is made the same again."""

from __future__ import annotations

import uuid
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.longrunning import operations_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from tests.integration.data_service.client import DataClient, idx, imported, metadata_of, parquet
from tests.integration.data_service.conftest import TEST_ROWS, TRAIN_ROWS, DataStack, Digits, digits_request
from tests.support.idx import digits
from tests.support.real_data import real_data
from tests.support.refusals import refusal_of
from tests.support.stores import KINDS, S3_IN_CHAOS

# A server whose store is file:// has no S3 endpoint to read from; that it refuses s3:// is in domain/test_uris.py.
ON_S3 = pytest.mark.parametrize("stack", [kind for kind in KINDS if kind != "file"], indirect=True)
ON_S3_IN_CHAOS = pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)


def test_idx_pairs_become_a_version_with_splits(client: DataClient, digits_version: Digits) -> None:
    version = digits_version.version
    assert metadata_of(digits_version.started).version == f"{digits_version.request.parent}/versions/v1"
    assert version == client.data.GetVersion(pb.GetVersionRequest(name=version.name), timeout=60)
    assert version.state == DatasetVersion.STATE_ACTIVE
    assert version.operation == digits_version.started.name
    assert [(column.name, list(column.shape)) for column in version.columns] == [("image", [28, 28]), ("label", [])]
    assert [(split.name, split.first_row_id, split.row_count) for split in version.splits] == [
        ("train", 0, 1170),
        ("test", 1170, 300),
        ("validation", 1470, 130),
    ]
    metadata = metadata_of(digits_version.done)
    assert version.row_count == TRAIN_ROWS + TEST_ROWS == metadata.rows_read
    assert metadata.attempt == 1
    assert version.size_bytes == sum(file.size_bytes for file in version.files)
    assert version.commit_time.seconds >= version.create_time.seconds


def test_every_row_is_in_exactly_one_split_and_keeps_its_label(client: DataClient, digits_version: Digits) -> None:
    table = client.read(digits_version.version.name, columns=["image", "label", "_row_id"])
    assert table["_row_id"].to_pylist() == list(range(TRAIN_ROWS + TEST_ROWS))
    wanted = {}
    for rows in (TRAIN_ROWS, TEST_ROWS):
        images, labels = digits(rows, seed=rows)
        wanted.update({image.tobytes(): int(label) for image, label in zip(images, labels, strict=True)})
    found = table["image"].combine_chunks().to_numpy_ndarray()
    assert {image.tobytes(): label for image, label in zip(found, table["label"].to_pylist(), strict=True)} == wanted


@ON_S3_IN_CHAOS
def test_the_same_sources_give_the_same_bytes_and_another_seed_others(
    client: DataClient, stack: DataStack, dataset: str, digits_version: Digits
) -> None:
    request = digits_request(stack, dataset)
    same = client.data.ImportVersion(request, timeout=60)
    request.hold_outs[0].seed += 1
    other = client.data.ImportVersion(request, timeout=60)
    again = imported(client.wait(same))
    assert [metadata_of(one).version for one in (same, other)] == [f"{dataset}/versions/v{i}" for i in (1, 2)]
    assert again.manifest_sha256 == digits_version.version.manifest_sha256
    assert stored_files(stack, again) == stored_files(stack, digits_version.version)
    assert imported(client.wait(other)).manifest_sha256 != again.manifest_sha256


def stored_files(stack: DataStack, version: DatasetVersion) -> list[bytes]:
    keys = sorted(info.key for info in stack.store.list(f"{version.name}/data"))
    assert len(keys) == 5  # three splits, the report and the manifest
    return [stack.store.get(key) for key in keys]


def test_parquet_files_of_one_split_follow_each_other(client: DataClient, stack: DataStack, dataset: str) -> None:
    sources = []
    for part in range(2):
        table = pa.table(
            {
                "size": pa.array([part * 100.0 + i if i else None for i in range(100)]),
                "kind": [f"k{i % 3}" for i in range(100)],
            }
        )
        path = stack.inputs / f"part-{part}.parquet"
        pq.write_table(table, path, row_group_size=7)
        sources.append(parquet("all", path.as_uri()))
    version = client.import_version(pb.ImportVersionRequest(parent=dataset, version_id="both", sources=sources))
    assert version.name == f"{dataset}/versions/both"
    assert [(column.name, column.arrow_type) for column in version.columns] == [("size", "double"), ("kind", "string")]
    table = client.read(version.name)
    assert table["size"].to_pylist()[:2] == [None, 1.0]
    assert table["size"].to_pylist()[101:103] == [101.0, 102.0]
    assert table["kind"].to_pylist() == [f"k{i % 3}" for i in range(100)] * 2


@ON_S3
def test_objects_on_the_same_endpoint_are_imported(client: DataClient, stack: DataStack, dataset: str) -> None:
    images, labels = (Path(digits_file).read_bytes() for digits_file in write_digits(stack))
    stack.store.put("elsewhere/images.gz", images)
    stack.store.put("elsewhere/labels.gz", labels)
    uris = [f"{stack.settings.url}/elsewhere/{kind}.gz" for kind in ("images", "labels")]
    version = client.import_version(pb.ImportVersionRequest(parent=dataset, sources=[idx("train", *uris)]))
    assert version.row_count == TRAIN_ROWS


@ON_S3
def test_an_absent_object_is_not_found(client: DataClient, stack: DataStack, dataset: str) -> None:
    for uri in (f"{stack.settings.url}/elsewhere/absent", "s3://no-such-bucket/absent"):
        request = pb.ImportVersionRequest(parent=dataset, sources=[parquet("train", uri)])
        refusal = refusal_of(client.wait(client.data.ImportVersion(request, timeout=60)).error)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "SOURCE_NOT_FOUND")
        assert refusal.metadata["uri"] == uri


def write_digits(stack: DataStack) -> list[str]:
    source = digits_request(stack, "datasets/any").sources[0].idx
    return [uri.removeprefix("file://") for uri in (source.images_uri, source.labels_uri)]


def test_a_repeated_request_makes_one_version(client: DataClient, stack: DataStack, dataset: str) -> None:
    request = digits_request(stack, dataset)
    request.request_id = str(uuid.uuid4())
    first, again = (client.data.ImportVersion(request, timeout=60) for _ in range(2))
    assert again.name == first.name
    client.wait(first)
    assert client.data.ImportVersion(request, timeout=60).name == first.name
    versions = client.data.ListVersions(pb.ListVersionsRequest(parent=dataset), timeout=60).versions
    assert [version.name for version in versions] == [f"{dataset}/versions/v1"]


def test_validating_makes_nothing(client: DataClient, stack: DataStack, dataset: str) -> None:
    before = stack.stored_keys()
    request = digits_request(stack, dataset)
    request.validate_only = True
    request.request_id = str(uuid.uuid4())
    operation = client.data.ImportVersion(request, timeout=60)
    assert not operation.name
    assert metadata_of(operation).version == f"{dataset}/versions/v1"
    assert stack.made_since(before) == []


def test_operations_are_listed_and_got(client: DataClient, digits_version: Digits) -> None:
    name = digits_version.started.name
    get = operations_pb2.GetOperationRequest(name=name)
    assert client.operations.GetOperation(get, timeout=60) == digits_version.done
    listed = client.operations.ListOperations(operations_pb2.ListOperationsRequest(page_size=1000), timeout=60)
    (found,) = [one for one in listed.operations if one.name == name]
    version = imported(found)
    assert (version.name, version.row_count) == (digits_version.version.name, digits_version.version.row_count)
    assert not version.files
    # Cancelling what is over changes nothing.
    client.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=name), timeout=60)
    assert client.operations.GetOperation(get, timeout=60) == digits_version.done


@ON_S3_IN_CHAOS
def test_mnist_itself_is_imported(client: DataClient, stack: DataStack, dataset: str) -> None:
    raw = real_data() / "mnist" / "MNIST" / "raw"
    sources = []
    for split, stem in (("train", "train"), ("test", "t10k")):
        uris = []
        for kind in ("images-idx3", "labels-idx1"):
            path = stack.inputs / f"{stem}-{kind}.gz"
            path.write_bytes((raw / f"{stem}-{kind}-ubyte.gz").read_bytes())
            uris.append(path.as_uri())
        sources.append(idx(split, *uris))
    version = client.import_version(pb.ImportVersionRequest(parent=dataset, sources=sources))
    assert [(split.name, split.row_count) for split in version.splits] == [("train", 7000), ("test", 1000)]
    images = client.read(version.name, columns=["image"])["image"].combine_chunks().to_numpy_ndarray()
    # MNIST's mean pixel, as everybody normalises by it.
    np.testing.assert_allclose(images.mean() / 255, 0.1307, atol=0.005)
