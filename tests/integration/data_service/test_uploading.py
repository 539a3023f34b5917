"""Bytes from a client become a version: uploaded, committed, imported, also while they are still on their way."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import grpc
import pyarrow as pa
import pytest
from google.longrunning.operations_pb2 import GetOperationRequest

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion, Upload
from millrace_client import MillraceError, connect, csv_source, quarantine
from millrace_client.data import DataClient as Sdk
from tests.integration.data_service.client import IMPORT_TIMEOUT_S, DataClient, imported, metadata_of
from tests.integration.data_service.conftest import DataStack
from tests.support.chunk_sender import send
from tests.support.refusals import refused
from tests.support.stores import S3_IN_CHAOS
from tests.support.waiting import wait_until

# tests/contract/uploads has what the store has a say in.
ON_S3_IN_CHAOS = pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)
ROWS = pa.table({"n": pa.array(range(50_000), pa.int64()), "s": [f"row {number}" for number in range(50_000)]})


@pytest.fixture
def sdk(stack: DataStack) -> Iterator[Sdk]:
    with connect(data=stack.client.address) as millrace:
        yield millrace.data


def arrow_stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    return sink.getvalue()


def arrow(upload: str) -> pb.ImportSource:
    return pb.ImportSource(split="train", arrow=pb.ArrowSource(uri=upload))


def test_an_uploaded_arrow_stream_becomes_a_version_with_the_same_rows(
    client: DataClient, sdk: Sdk, dataset: str
) -> None:
    upload = sdk.upload(dataset, io.BytesIO(arrow_stream(ROWS)))

    version = client.import_version(pb.ImportVersionRequest(parent=dataset, sources=[arrow(upload.name)]))

    assert upload.state == Upload.STATE_COMMITTED
    assert client.read(version.name).equals(ROWS)


def test_an_import_begins_while_its_upload_is_open_and_ends_with_the_commit(
    client: DataClient, sdk: Sdk, dataset: str
) -> None:
    upload = client.data.StartUpload(pb.StartUploadRequest(parent=dataset), timeout=60)
    operation = client.data.ImportVersion(
        pb.ImportVersionRequest(parent=dataset, sources=[arrow(upload.name)]), timeout=60
    )

    sdk.resume_upload(upload.name, io.BytesIO(arrow_stream(ROWS)))

    assert client.read(imported(client.wait(operation)).name).equals(ROWS)


@ON_S3_IN_CHAOS
def test_an_import_of_an_open_upload_can_be_cancelled_and_leaves_no_file(
    stack: DataStack, client: DataClient, dataset: str
) -> None:
    data = arrow_stream(ROWS)
    upload = client.data.StartUpload(pb.StartUploadRequest(parent=dataset), timeout=60)
    send(client.data, upload.name, data, 0, len(data) // 2)
    operation = client.data.ImportVersion(
        pb.ImportVersionRequest(parent=dataset, sources=[arrow(upload.name)]), timeout=60
    )
    asked = GetOperationRequest(name=operation.name)
    wait_until(
        lambda: metadata_of(client.operations.GetOperation(asked, timeout=60)).rows_read > 0,
        "the first rows",
        IMPORT_TIMEOUT_S,
    )

    client.cancel(operation)

    assert client.wait(operation).error.code == grpc.StatusCode.CANCELLED.value[0]
    version = metadata_of(operation).version
    found = client.data.GetVersion(pb.GetVersionRequest(name=version), timeout=60)
    assert found.state == DatasetVersion.STATE_CANCELLED
    assert list(stack.store.list(f"{version}/data")) == []


def test_an_upload_that_an_import_reads_cannot_be_aborted_and_goes_afterwards(client: DataClient, dataset: str) -> None:
    upload = client.data.StartUpload(pb.StartUploadRequest(parent=dataset), timeout=60)
    operation = client.data.ImportVersion(
        pb.ImportVersionRequest(parent=dataset, sources=[arrow(upload.name)]), timeout=60
    )

    refusal = refused(lambda: client.data.AbortUpload(pb.AbortUploadRequest(name=upload.name), timeout=60))
    client.cancel(operation)
    client.wait(operation)
    client.data.AbortUpload(pb.AbortUploadRequest(name=upload.name), timeout=60)

    assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
    gone = refused(lambda: client.data.GetUpload(pb.GetUploadRequest(name=upload.name), timeout=60))
    assert gone.code is grpc.StatusCode.NOT_FOUND


@ON_S3_IN_CHAOS
def test_two_uploads_at_once_do_not_disturb_each_other(client: DataClient, sdk: Sdk, dataset: str) -> None:
    tables = {split: ROWS.slice(begin, 20_000) for split, begin in (("train", 0), ("test", 20_000))}
    uploads: dict[str, str] = {}

    def send(split: str) -> None:
        uploads[split] = sdk.upload(dataset, io.BytesIO(arrow_stream(tables[split]))).name

    threads = [threading.Thread(target=send, args=(split,)) for split in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sources = [pb.ImportSource(split=split, arrow=pb.ArrowSource(uri=uploads[split])) for split in tables]
    version = client.import_version(pb.ImportVersionRequest(parent=dataset, sources=sources))

    for split, table in tables.items():
        assert client.read(version.name, split=split).equals(table)


def test_an_upload_of_another_dataset_or_none_is_not_found(client: DataClient, sdk: Sdk, dataset: str) -> None:
    request = pb.ImportVersionRequest(parent=dataset, sources=[arrow(f"{dataset}/uploads/none")])

    refusal = refused(lambda: client.data.ImportVersion(request, timeout=60))

    assert refusal.code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(MillraceError):
        sdk.resume_upload(f"{dataset}/uploads/none", io.BytesIO(b"x"))


@ON_S3_IN_CHAOS
def test_a_table_in_memory_is_imported_in_one_call(client: DataClient, sdk: Sdk, dataset: str) -> None:
    version = sdk.import_table(dataset, ROWS, split="all").wait()

    assert client.read(version.name, split="all").equals(ROWS)


@ON_S3_IN_CHAOS
def test_rows_that_break_off_on_their_way_leave_neither_a_version_nor_an_upload(
    stack: DataStack, sdk: Sdk, dataset: str
) -> None:
    def breaking_off() -> Iterator[pa.RecordBatch]:
        yield from ROWS.to_batches(max_chunksize=1000)[:5]
        raise OSError("the source went away")

    with pytest.raises(OSError, match="went away"):
        sdk.import_table(dataset, breaking_off(), version_id="broken")

    kept = [key for key in stack.stored_keys() if key.startswith(dataset) and ("/data/" in key or "/chunks/" in key)]
    assert kept == []
    assert [one.state for one in sdk.list_versions(dataset)] == [DatasetVersion.STATE_CANCELLED]


@ON_S3_IN_CHAOS
def test_the_rows_that_were_left_out_can_be_read(client: DataClient, sdk: Sdk, dataset: str) -> None:
    lines = ["n"] + [str(n) if n % 1000 else "not a number" for n in range(20_000)]
    upload = sdk.upload(dataset, "\n".join(lines).encode())

    version = sdk.import_version(
        dataset, [csv_source("all", upload.name)], column_types={"n": "int64"}, bad_rows=quarantine()
    ).wait()

    left_out = list(sdk.read_quarantine(version.name))
    assert [row["place"] for row in left_out] == [f"line {n + 2}" for n in range(0, 20_000, 1000)]
    assert {row["excerpt"] for row in left_out} == {"not a number"}
    assert version.quarantined_row_count == 20
    assert client.read(version.name).num_rows == 20_000 - 20
