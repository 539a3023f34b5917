"""The data service: datasets, their immutable versions, and reading them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf import empty_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import resources_pb2
from millrace_client.arrow_stream import ArrowBytes, read_method
from millrace_client.calls import Caller, every_page
from millrace_client.data_datasets import DatasetCalls
from millrace_client.data_making import MakingCalls
from millrace_client.data_uploads import UploadCalls

if TYPE_CHECKING:
    import pyarrow as pa

DELETE_TIMEOUT_S = 300.0


class DataClient(DatasetCalls, UploadCalls, MakingCalls):
    """Names: `datasets/{d}` and `datasets/{d}/versions/{v}`."""

    def __init__(self, caller: Caller) -> None:
        super().__init__(caller)
        self._read_version = read_method(caller.channel)

    def delete_version(self, name: str, *, etag: str = "") -> None:
        """With its files. Raises `FailedPrecondition` while it is being made, or somebody uses it."""
        request = pb.DeleteVersionRequest(name=name, etag=etag)
        # A version of many files takes a while.
        self._caller.unary(self._stub.DeleteVersion, request, empty_pb2.Empty, timeout_s=DELETE_TIMEOUT_S)

    def verify_version(self, name: str) -> Iterator[pb.VerifyVersionResponse]:
        """Has every stored byte read again, and yields how far that is; each message has the damage found since the
        one before."""
        yield from self._caller.stream(self._stub.VerifyVersion, pb.VerifyVersionRequest(name=name))

    def read_quarantine(self, name: str) -> Iterator[dict[str, Any]]:
        """The rows that were left out of a version: `source`, `place`, `reason` and `excerpt` of each."""
        left = b""
        for message in self._caller.stream(self._stub.ReadQuarantine, pb.ReadQuarantineRequest(name=name)):
            *lines, left = (left + message.json_lines).split(b"\n")
            yield from map(json.loads, lines)

    def get_version(self, name: str) -> resources_pb2.DatasetVersion:
        return self._caller.unary(self._stub.GetVersion, pb.GetVersionRequest(name=name), resources_pb2.DatasetVersion)

    def list_versions(self, dataset: str) -> Iterator[resources_pb2.DatasetVersion]:
        """All versions of `datasets/{d}`, in any state, in the order of their names."""
        request = pb.ListVersionsRequest(parent=dataset)
        return every_page(self._caller, self._stub.ListVersions, request, "versions")

    def preview_version(self, name: str, *, rows_per_split: int = 0) -> pb.PreviewVersionResponse:
        """The first rows of each split as an Arrow stream, the quality report, and a contact sheet of image columns.

        The version is whole; the server's answer may not have room for all of it.
        """
        request = pb.PreviewVersionRequest(name=name, rows_per_split=rows_per_split)
        preview = self._caller.unary(self._stub.PreviewVersion, request, pb.PreviewVersionResponse)
        preview.version.CopyFrom(self.get_version(name))
        return preview

    def read_batches(
        self, name: str, *, split: str = "", columns: Sequence[str] = (), offset: int = 0, limit: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Rows in the order of their row ids, as they arrive. Empty `split` or `columns`: all; `limit` 0: no limit."""
        with self._reader(name, split, columns, offset, limit) as reader:
            yield from reader

    def read_table(
        self, name: str, *, split: str = "", columns: Sequence[str] = (), offset: int = 0, limit: int = 0
    ) -> pa.Table:
        """The same rows as one table in memory."""
        with self._reader(name, split, columns, offset, limit) as reader:
            return reader.read_all()

    def _reader(self, name: str, split: str, columns: Sequence[str], offset: int, limit: int) -> Any:
        import pyarrow as pa

        request = pb.ReadVersionRequest(name=name, split=split, columns=columns, offset=offset, limit=limit)
        return pa.ipc.open_stream(ArrowBytes(self._caller.stream(self._read_version, request)))
