"""Imports that cannot work: refused at once where the request shows it, else failed, and nothing of them readable."""

from __future__ import annotations

import gzip
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.longrunning import operations_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from tests.integration.data_service.client import DataClient, idx, parquet
from tests.integration.data_service.conftest import DataStack, Digits, digits_request
from tests.support.idx import digits, idx_bytes
from tests.support.refusals import Refusal, refusal_of, refused
from tests.support.stores import S3_IN_CHAOS

# The store has no say in what is wrong with a source.
ON_S3_IN_CHAOS = pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)

NOT_FOUND, INVALID = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT


@dataclass(frozen=True)
class Failed:
    version: str
    refusal: Refusal


# What the operation fails with: code, reason and field.
CASES = {
    "absent": (NOT_FOUND, "SOURCE_NOT_FOUND", "sources[0].idx.images_uri"),
    "truncated": (INVALID, "CORRUPT_SOURCE", "sources[0].idx.images_uri"),
    "truncated gzip": (INVALID, "CORRUPT_SOURCE", "sources[0].idx.images_uri"),
    "lying header": (INVALID, "CORRUPT_SOURCE", "sources[0].idx.images_uri"),
    "swapped pair": (INVALID, "CORRUPT_SOURCE", "sources[0].idx.images_uri"),
    "fewer labels": (INVALID, "CORRUPT_SOURCE", "sources[0].idx.labels_uri"),
    "link out of the root": (INVALID, "INVALID_FIELD", "sources[0].parquet.uri"),
    "not parquet": (INVALID, "CORRUPT_SOURCE", "sources[0].parquet.uri"),
    "damaged page": (INVALID, "CORRUPT_SOURCE", "sources[0].parquet.uri"),
    "row ids": (INVALID, "CORRUPT_SOURCE", "sources[0].parquet.uri"),
    "other columns": (INVALID, "SCHEMA_MISMATCH", "sources[1]"),
    "no rows": (INVALID, "EMPTY_SPLIT", "sources"),
    "hold-out of everything": (INVALID, "EMPTY_SPLIT", "hold_outs[0].fraction"),
}


@pytest.fixture(scope="package")
def failed(stack: DataStack) -> dict[str, Failed]:
    """Every case, imported side by side: one after the other each would take seconds."""
    parent = stack.new_dataset()
    started = {}
    for index, (case, request) in enumerate(bad_requests(stack).items()):
        request.parent, request.version_id = parent, f"case-{index}"
        started[case] = stack.client.data.ImportVersion(request, timeout=60)
    found = {}
    for index, (case, operation) in enumerate(started.items()):
        done = stack.client.wait(operation)
        assert done.WhichOneof("result") == "error", (case, done)
        found[case] = Failed(f"{parent}/versions/case-{index}", refusal_of(done.error))
    return found


def bad_requests(stack: DataStack) -> dict[str, pb.ImportVersionRequest]:
    def put(name: str, data: bytes) -> str:
        path = stack.inputs / name
        path.write_bytes(data)
        return path.as_uri()

    def table(name: str, **columns: Any) -> str:
        path = stack.inputs / name
        pq.write_table(pa.table(columns), path, write_page_checksum=True, use_dictionary=False, compression="none")
        return path.as_uri()

    def asked(*sources: pb.ImportSource, hold_outs: list[pb.HoldOut] | None = None) -> pb.ImportVersionRequest:
        return pb.ImportVersionRequest(sources=sources, hold_outs=hold_outs or [])

    images, labels = (idx_bytes(values) for values in digits(600))
    images_uri, labels_uri = put("bad-images", images), put("bad-labels", labels)
    lying = b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 28, 28) + b"\0" * 784
    many_labels = b"\0\0\x08\x01" + struct.pack(">I", 2**32 - 1) + b"\0"
    damaged = table("bad-damaged.parquet", n=np.arange(10_000))
    flip(stack.inputs / "bad-damaged.parquet", 40_000)
    outside = stack.inputs.parent / "outside.parquet"
    pq.write_table(pa.table({"n": [1]}), outside)
    (stack.inputs / "bad-link").symlink_to(outside)
    everything = pb.HoldOut(from_split="train", to_split="rest", fraction=0.999, seed=1)
    one_row = table("bad-one.parquet", n=[1])
    return {
        "absent": asked(idx("train", (stack.inputs / "absent").as_uri(), labels_uri)),
        "truncated": asked(idx("train", put("bad-cut", images[:-1]), labels_uri)),
        "truncated gzip": asked(idx("train", put("bad-cut.gz", gzip.compress(images)[:-20]), labels_uri)),
        "lying header": asked(idx("train", put("bad-lying", lying), put("bad-many", many_labels))),
        "swapped pair": asked(idx("train", labels_uri, images_uri)),
        "fewer labels": asked(idx("train", images_uri, put("bad-few", idx_bytes(np.zeros(599, np.uint8))))),
        "link out of the root": asked(parquet("train", (stack.inputs / "bad-link").as_uri())),
        "not parquet": asked(parquet("train", images_uri)),
        "damaged page": asked(parquet("train", damaged)),
        "row ids": asked(parquet("train", table("bad-ids.parquet", _row_id=[1]))),
        "other columns": asked(parquet("train", one_row), parquet("test", table("bad-other.parquet", m=[1]))),
        "no rows": asked(parquet("train", table("bad-none.parquet", n=pa.array([], pa.int64())))),
        "hold-out of everything": asked(parquet("train", one_row), hold_outs=[everything]),
    }


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@ON_S3_IN_CHAOS
@pytest.mark.parametrize("case", CASES)
def test_a_bad_source_fails_the_operation_by_name(failed: dict[str, Failed], case: str) -> None:
    code, reason, field = CASES[case]
    refusal = failed[case].refusal
    assert (refusal.code, refusal.reason) == (code, reason)
    assert set(refusal.fields) == {field}
    assert refusal.metadata["field"] == field


@ON_S3_IN_CHAOS
@pytest.mark.parametrize("case", CASES)
def test_a_failed_version_says_why_and_has_no_file(
    client: DataClient, stack: DataStack, failed: dict[str, Failed], case: str
) -> None:
    name = failed[case].version
    version = client.data.GetVersion(pb.GetVersionRequest(name=name), timeout=60)
    assert version.state == DatasetVersion.STATE_FAILED
    assert refusal_of(version.error) == failed[case].refusal
    assert not version.files
    assert list(stack.store.list(f"{name}/data")) == []
    refusal = refused(lambda: client.stream(name))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_NOT_ACTIVE")


@ON_S3_IN_CHAOS
def test_versions_in_any_state_are_listed_in_pages(client: DataClient, failed: dict[str, Failed]) -> None:
    parent = next(iter(failed.values())).version.rsplit("/", 2)[0]
    names, token = [], ""
    while True:
        request = pb.ListVersionsRequest(parent=parent, page_size=5, page_token=token)
        page = client.data.ListVersions(request, timeout=60)
        assert len(page.versions) <= 5
        names += [version.name for version in page.versions]
        if not (token := page.next_page_token):
            break
    assert names == sorted(one.version for one in failed.values())


GOOD = parquet("train", "file:///in/a")
CUT = pb.HoldOut(from_split="train", to_split="validation", fraction=0.5)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        ({}, {"sources"}),
        ({"sources": [GOOD] * 65}, {"sources"}),
        ({"sources": [pb.ImportSource(split="train")]}, {"sources[0]"}),
        ({"sources": [parquet("Train", "")]}, {"sources[0].split", "sources[0].parquet.uri"}),
        ({"sources": [idx("train", "", "x" * 3000)]}, {"sources[0].idx.images_uri", "sources[0].idx.labels_uri"}),
        ({"sources": [parquet("train", "http://example.org/a")]}, {"sources[0].parquet.uri"}),
        ({"sources": [parquet("train", "file:///etc/passwd")]}, {"sources[0].parquet.uri"}),
        ({"sources": [parquet("train", "file:///in/../etc/passwd")]}, {"sources[0].parquet.uri"}),
    ],
)
def test_bad_fields_are_named_and_nothing_is_made(
    client: DataClient, stack: DataStack, dataset: str, request_: dict[str, Any], fields: set[str]
) -> None:
    before = stack.stored_keys()
    request = pb.ImportVersionRequest(parent=dataset, request_id=str(uuid.uuid4()), **request_)
    refusal = refused(lambda: client.data.ImportVersion(request, timeout=60))
    assert (refusal.code, refusal.reason) == (INVALID, "INVALID_FIELD")
    assert set(refusal.fields) == fields
    assert stack.made_since(before) == []


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"parent": ""}, {"parent"}),
        ({"parent": "datasets/../d"}, {"parent"}),
        ({"version_id": "V1"}, {"version_id"}),
        ({"version_id": "v" * 64}, {"version_id"}),
        ({"request_id": "1"}, {"request_id"}),
        ({"hold_outs": [CUT] * 65}, {"hold_outs"}),
        ({"hold_outs": [pb.HoldOut(from_split="x", to_split="y", fraction=0.5)]}, {"hold_outs[0].from_split"}),
        ({"hold_outs": [pb.HoldOut(from_split="train", to_split="train", fraction=0.5)]}, {"hold_outs[0].to_split"}),
        (
            {"hold_outs": [pb.HoldOut(from_split="train", to_split="Y", fraction=float("inf"))]},
            {"hold_outs[0].to_split", "hold_outs[0].fraction"},
        ),
    ],
)
def test_bad_fields_beside_good_sources_are_named(
    client: DataClient, stack: DataStack, dataset: str, change: dict[str, Any], fields: set[str]
) -> None:
    before = stack.stored_keys()
    good = {"parent": dataset, "sources": [parquet("train", (stack.inputs / "a").as_uri())]}
    refusal = refused(lambda: client.data.ImportVersion(pb.ImportVersionRequest(**{**good, **change}), timeout=60))
    assert refusal.code is INVALID
    assert set(refusal.fields) == fields
    assert stack.made_since(before) == []


def test_an_unknown_dataset_is_not_found(client: DataClient, stack: DataStack) -> None:
    before = stack.stored_keys()
    request = digits_request(stack, "datasets/never")
    request.request_id = str(uuid.uuid4())
    refusal = refused(lambda: client.data.ImportVersion(request, timeout=60))
    assert (refusal.code, refusal.metadata["resource"]) == (NOT_FOUND, "datasets/never")
    listing = refused(lambda: client.data.ListVersions(pb.ListVersionsRequest(parent="datasets/never"), timeout=60))
    assert listing.code is NOT_FOUND
    assert stack.made_since(before) == []


def test_a_taken_version_id_is_refused(client: DataClient, stack: DataStack, digits_version: Digits) -> None:
    before = stack.stored_keys()
    request = pb.ImportVersionRequest()
    request.CopyFrom(digits_version.request)
    request.version_id, request.request_id = "v1", str(uuid.uuid4())
    for validate_only in (True, False):
        request.validate_only = validate_only
        refusal = refused(lambda: client.data.ImportVersion(request, timeout=60))
        assert (refusal.code, refusal.metadata["resource"]) == (
            grpc.StatusCode.ALREADY_EXISTS,
            digits_version.version.name,
        )
    assert stack.made_since(before) == []


def test_the_same_request_id_with_another_body_is_refused(client: DataClient, stack: DataStack, dataset: str) -> None:
    request = digits_request(stack, dataset)
    request.request_id = str(uuid.uuid4())
    client.wait(client.data.ImportVersion(request, timeout=60))
    request.hold_outs[0].fraction = 0.2
    refusal = refused(lambda: client.data.ImportVersion(request, timeout=60))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    versions = client.data.ListVersions(pb.ListVersionsRequest(parent=dataset), timeout=60).versions
    assert len(versions) == 1


@pytest.mark.parametrize("name", ["", "operations/", "operations/A", "jobs/a", "operations/a/b"])
def test_a_malformed_operation_name_is_refused(client: DataClient, name: str) -> None:
    for call in (
        lambda: client.operations.GetOperation(operations_pb2.GetOperationRequest(name=name), timeout=60),
        lambda: client.operations.WaitOperation(operations_pb2.WaitOperationRequest(name=name), timeout=60),
        lambda: client.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=name), timeout=60),
    ):
        refusal = refused(call)
        assert (refusal.code, set(refusal.fields)) == (INVALID, {"name"})


def test_an_unknown_operation_is_not_found(client: DataClient) -> None:
    name = "operations/import-never"
    for call in (
        lambda: client.operations.GetOperation(operations_pb2.GetOperationRequest(name=name), timeout=60),
        lambda: client.operations.WaitOperation(operations_pb2.WaitOperationRequest(name=name), timeout=60),
        lambda: client.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=name), timeout=60),
    ):
        refusal = refused(call)
        assert (refusal.code, refusal.metadata["resource"]) == (NOT_FOUND, name)
