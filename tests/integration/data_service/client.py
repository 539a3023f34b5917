"""The service as a foreign client sees it: generated stubs, and nothing of ours behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pyarrow as pa
from google.longrunning import operations_pb2, operations_pb2_grpc

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc
from millrace.data.v1.resources_pb2 import DatasetVersion

IMPORT_TIMEOUT_S = 400.0


class DataClient:
    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address)
        self.data = data_service_pb2_grpc.DataServiceStub(self._channel)
        self.operations = operations_pb2_grpc.OperationsStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def send_raw(self, method: str, data: bytes) -> bytes:
        """Call a unary method of the data service with these bytes for a request."""
        call: Callable[..., bytes] = self._channel.unary_unary(f"/millrace.data.v1.DataService/{method}")
        return call(data, timeout=60)

    def wait(self, operation: Any, timeout_s: float = IMPORT_TIMEOUT_S) -> Any:
        """The operation once it is done; a single wait ends after a minute at most."""
        until = time.monotonic() + timeout_s
        while not operation.done:
            assert time.monotonic() < until, operation
            request = operations_pb2.WaitOperationRequest(name=operation.name)
            operation = self.operations.WaitOperation(request, timeout=65)
        return operation

    def cancel(self, operation: Any) -> None:
        self.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name), timeout=60)

    def import_version(self, request: pb.ImportVersionRequest) -> DatasetVersion:
        """Import and wait; fail unless the version became ACTIVE."""
        return imported(self.wait(self.data.ImportVersion(request, timeout=60)))

    def read(self, name: str, **selection: Any) -> pa.Table:
        return table_of(self.stream(name, **selection))

    def stream(self, name: str, **selection: Any) -> list[bytes]:
        request = pb.ReadVersionRequest(name=name, **selection)
        return [message.arrow_ipc for message in self.data.ReadVersion(request, timeout=60)]


def table_of(pieces: Sequence[bytes]) -> pa.Table:
    return pa.ipc.open_stream(b"".join(pieces)).read_all()


def idx(split: str, images_uri: str, labels_uri: str) -> pb.ImportSource:
    return pb.ImportSource(split=split, idx=pb.IdxSource(images_uri=images_uri, labels_uri=labels_uri))


def parquet(split: str, uri: str) -> pb.ImportSource:
    return pb.ImportSource(split=split, parquet=pb.ParquetSource(uri=uri))


def imported(operation: Any) -> DatasetVersion:
    assert operation.WhichOneof("result") == "response", operation
    version = DatasetVersion()
    assert operation.response.Unpack(version)
    return version


def metadata_of(operation: Any) -> pb.ImportVersionMetadata:
    metadata = pb.ImportVersionMetadata()
    assert operation.metadata.Unpack(metadata)
    return metadata
