"""ReadVersion and PreviewVersion: what comes over the wire, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import grpc
import pyarrow as pa
import pytest
from PIL import Image

from millrace.data.v1 import data_service_pb2 as pb
from tests.integration.data_service.client import DataClient, idx, table_of
from tests.integration.data_service.conftest import TEST_ROWS, TRAIN_ROWS, DataStack, Digits
from tests.support.refusals import refused

ROWS = TRAIN_ROWS + TEST_ROWS
MIB = 1024 * 1024


@pytest.fixture
def name(digits_version: Digits) -> str:
    return str(digits_version.version.name)


def test_columns_have_their_logical_types(client: DataClient, name: str) -> None:
    schema = client.read(name, limit=1).schema
    assert schema == pa.schema(
        [
            pa.field("image", pa.fixed_shape_tensor(pa.uint8(), [28, 28]), nullable=False),
            pa.field("label", pa.int64(), nullable=False),
        ]
    )


def test_a_message_is_smaller_than_what_any_client_takes(client: DataClient, name: str) -> None:
    assert max(map(len, client.stream(name))) < 4 * MIB


@pytest.mark.parametrize(
    ("selection", "row_ids"),
    [
        ({}, range(ROWS)),
        ({"split": "test"}, range(1170, 1470)),
        ({"offset": 1000, "limit": 300}, range(1000, 1300)),
        ({"split": "validation", "offset": 129}, range(1599, 1600)),
        ({"split": "train", "offset": 256, "limit": 256}, range(256, 512)),
        ({"offset": ROWS}, range(0)),
        ({"offset": 2**62, "limit": 2**62}, range(0)),
        ({"limit": 2**63 - 1}, range(ROWS)),
    ],
)
def test_a_selection_gives_exactly_its_rows(
    client: DataClient, name: str, selection: dict[str, object], row_ids: range
) -> None:
    table = client.read(name, columns=["_row_id"], **selection)
    assert table["_row_id"].to_pylist() == list(row_ids)


def test_columns_come_in_the_order_asked_for(client: DataClient, name: str) -> None:
    assert client.read(name, columns=["_row_id", "label"], limit=1).schema.names == ["_row_id", "label"]


@pytest.mark.parametrize(
    ("selection", "field"),
    [
        ({"split": "absent"}, "split"),
        ({"columns": ["absent"]}, "columns[0]"),
        ({"columns": ["label", "label"]}, "columns[1]"),
        ({"offset": -1}, "offset"),
        ({"limit": -1}, "limit"),
    ],
)
def test_a_bad_selection_is_refused_by_field(
    client: DataClient, name: str, selection: dict[str, object], field: str
) -> None:
    refusal = refused(lambda: client.stream(name, **selection))
    assert (refusal.code, set(refusal.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, {field})


def test_a_preview_shows_each_split(client: DataClient, name: str) -> None:
    preview = client.data.PreviewVersion(pb.PreviewVersionRequest(name=name, rows_per_split=3), timeout=60)
    table = table_of([preview.arrow_ipc])
    assert table.schema.names == ["split", "image", "label"]
    assert table["split"].to_pylist() == ["train"] * 3 + ["test"] * 3 + ["validation"] * 3
    assert table["label"].to_pylist()[3:6] == client.read(name, split="test", limit=3)["label"].to_pylist()
    assert Image.open(io.BytesIO(preview.contact_sheet_png)).format == "PNG"
    # Not as it was made: other tests tried to delete it.
    assert preview.version == client.data.GetVersion(pb.GetVersionRequest(name=name), timeout=60)


def test_a_preview_has_ten_rows_unless_asked(client: DataClient, name: str) -> None:
    preview = client.data.PreviewVersion(pb.PreviewVersionRequest(name=name), timeout=60)
    assert table_of([preview.arrow_ipc]).num_rows == 30


@pytest.mark.parametrize("rows", [-1, 101])
def test_a_preview_of_too_many_rows_is_refused(client: DataClient, name: str, rows: int) -> None:
    request = pb.PreviewVersionRequest(name=name, rows_per_split=rows)
    refusal = refused(lambda: client.data.PreviewVersion(request, timeout=60))
    assert (refusal.code, set(refusal.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, {"rows_per_split"})


def calls(client: DataClient, name: str) -> dict[str, Callable[[], Any]]:
    return {
        "GetVersion": lambda: client.data.GetVersion(pb.GetVersionRequest(name=name), timeout=60),
        "PreviewVersion": lambda: client.data.PreviewVersion(pb.PreviewVersionRequest(name=name), timeout=60),
        "ReadVersion": lambda: client.data.ReadVersion(pb.ReadVersionRequest(name=name), timeout=60),
    }


@pytest.mark.parametrize("method", ["GetVersion", "PreviewVersion", "ReadVersion"])
@pytest.mark.parametrize("bad", ["", "datasets/d", "datasets/D/versions/v1", "datasets/../versions/v1", "v" * 5000])
def test_a_malformed_name_is_refused(client: DataClient, method: str, bad: str) -> None:
    refusal = refused(calls(client, bad)[method])
    assert (refusal.code, set(refusal.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, {"name"})


@pytest.mark.parametrize("method", ["GetVersion", "PreviewVersion", "ReadVersion"])
def test_an_unknown_version_is_not_found(client: DataClient, dataset: str, method: str) -> None:
    refusal = refused(calls(client, f"{dataset}/versions/v9")[method])
    assert (refusal.code, refusal.metadata["resource"]) == (grpc.StatusCode.NOT_FOUND, f"{dataset}/versions/v9")


@pytest.mark.parametrize("method", ["PreviewVersion", "ReadVersion"])
def test_a_version_that_is_not_active_cannot_be_read(
    client: DataClient, stack: DataStack, dataset: str, method: str
) -> None:
    missing = (stack.inputs / "never").as_uri()
    request = pb.ImportVersionRequest(parent=dataset, sources=[idx("train", missing, missing)])
    started = client.data.ImportVersion(request, timeout=60)
    refusal = refused(calls(client, f"{dataset}/versions/v1")[method])
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_NOT_ACTIVE")
    client.wait(started)


def test_a_damaged_file_is_data_loss_and_never_wrong_rows(
    client: DataClient, stack: DataStack, digits_version: Digits
) -> None:
    version = digits_version.version
    (key,) = [info.key for info in stack.store.list(f"{version.name}/data") if "/validation-" in info.key]
    whole = stack.store.get(key)
    try:
        stack.store.put(key, whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
        refusal = refused(lambda: client.stream(version.name, split="validation"))
    finally:
        stack.store.put(key, whole)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.DATA_LOSS, "DAMAGED_FILE")
    assert refusal.metadata == {"resource": version.name, "file": "validation-00000.parquet"}
