"""Reading a version's Arrow stream, and waiting for an import, on a real server."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from millrace.data.v1 import data_service_pb2_grpc, resources_pb2
from millrace_client import calls, connect, errors, idx_source
from millrace_client.calls import Operation
from millrace_client.data import image_rows
from tests.support.fake_servicers import OneVersion
from tests.support.grpc_answers import bad_field, error_info, serving, status
from tests.support.ports import free_ports

VERSION = "datasets/d/versions/v1"


@pytest.fixture
def table() -> pa.Table:
    images = np.arange(20 * 4, dtype=np.uint8).reshape(20, 2, 2)
    return pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(images), "label": range(20)})


@pytest.fixture
def done() -> operations_pb2.Operation:
    operation = operations_pb2.Operation(name="operations/o", done=True)
    operation.response.Pack(resources_pb2.DatasetVersion(name=VERSION))
    return operation


def register(servicer: Any) -> Any:
    def add(server: grpc.Server) -> None:
        data_service_pb2_grpc.add_DataServiceServicer_to_server(servicer, server)
        operations_pb2_grpc.add_OperationsServicer_to_server(servicer, server)

    return add


@pytest.mark.parametrize("cut", [1, 64, 1 << 20])
def test_a_table_comes_back_however_its_stream_was_cut(table: pa.Table, cut: int) -> None:
    with serving(register(OneVersion(table, cut=cut))) as address, connect(data=address) as millrace:
        assert millrace.data.read_table(VERSION).equals(table)
        assert [batch.num_rows for batch in millrace.data.read_batches(VERSION)] == [7, 7, 6]


def test_images_come_as_one_array_of_their_shape(table: pa.Table) -> None:
    with serving(register(OneVersion(table))) as address, connect(data=address) as millrace:
        images, labels = image_rows(millrace.data.read_table(VERSION))
    assert images.shape == (20, 2, 2)
    assert labels is not None
    assert labels.tolist() == list(range(20))


def test_an_error_in_the_middle_of_a_stream_keeps_its_kind(table: pa.Table) -> None:
    servicer = OneVersion(table, error=status(grpc.StatusCode.DATA_LOSS, "a file is damaged"))
    with (
        serving(register(servicer)) as address,
        connect(data=address) as millrace,
        pytest.raises(errors.DataLoss, match="damaged"),
    ):
        millrace.data.read_table(VERSION)


def test_waiting_for_an_import_shows_progress_and_returns_the_version(
    table: pa.Table, done: operations_pb2.Operation
) -> None:
    seen = []
    with serving(register(OneVersion(table, outcome=done))) as address, connect(data=address) as millrace:
        operation = millrace.data.import_version("datasets/d", [idx_source("train", "a", "b")])
        version = operation.wait(on_progress=lambda now: seen.append(now.metadata.rows_read))
    assert version.name == VERSION
    assert seen[:2] == [1, 2]


def test_a_failed_operation_raises_what_a_failed_call_would(table: pa.Table) -> None:
    failed = operations_pb2.Operation(name="operations/o", done=True)
    failed.error.CopyFrom(
        status(
            grpc.StatusCode.INVALID_ARGUMENT,
            "a source is truncated",
            error_info("BAD_SOURCE"),
            bad_field("sources[0]", "truncated"),
        )
    )
    with (
        serving(register(OneVersion(table, outcome=failed))) as address,
        connect(data=address) as millrace,
        pytest.raises(errors.InvalidArgument, match="truncated") as raised,
    ):
        millrace.data.import_version("datasets/d", [idx_source("train", "a", "b")]).wait()
    assert raised.value.reason == "BAD_SOURCE"
    assert raised.value.field_violations[0].field == "sources[0]"


# Longer than gRPC itself tries again.
AWAY_S = 2.0


def test_waiting_goes_on_while_the_server_restarts(table: pa.Table, done: operations_pb2.Operation) -> None:
    add = register(OneVersion(table, outcome=done))
    seen: list[int] = []
    with ExitStack() as before, ExitStack() as after:
        (port,) = free_ports(1)
        address = before.enter_context(serving(add, port))
        back = threading.Timer(AWAY_S, lambda: after.enter_context(serving(add, port)))

        def restart(now: Operation[resources_pb2.DatasetVersion]) -> None:
            seen.append(now.metadata.rows_read)
            if len(seen) == 1:
                before.close()
                back.start()

        with connect(data=address) as millrace:
            operation = millrace.data.import_version("datasets/d", [idx_source("train", "a", "b")])
            assert operation.wait(on_progress=restart).name == VERSION
        back.join()
    assert seen[:2] == [1, 2]


@pytest.mark.parametrize(
    ("outage_timeout_s", "timeout_s", "error"), [(0.2, 60.0, errors.Unavailable), (60.0, 1.5, errors.DeadlineExceeded)]
)
def test_waiting_for_a_server_that_stays_away_ends(
    table: pa.Table,
    done: operations_pb2.Operation,
    monkeypatch: pytest.MonkeyPatch,
    outage_timeout_s: float,
    timeout_s: float,
    error: type[errors.MillraceError],
) -> None:
    monkeypatch.setattr(calls, "OUTAGE_TIMEOUT_S", outage_timeout_s)
    with serving(register(OneVersion(table, outcome=done)), *free_ports(1)) as address:
        millrace = connect(data=address)
        operation = millrace.data.import_version("datasets/d", [idx_source("train", "a", "b")])
    with millrace, pytest.raises(error):
        operation.wait(timeout_s=timeout_s)
