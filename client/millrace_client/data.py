"""The data service: datasets, their immutable versions, and reading them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from google.longrunning import operations_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc, resources_pb2
from millrace_client.arrow_stream import ArrowBytes, read_method
from millrace_client.calls import Caller, new_request_id
from millrace_client.errors import AlreadyExists
from millrace_client.operations import Operation
from millrace_client.paging import every_page

if TYPE_CHECKING:
    import pyarrow as pa


class DataClient:
    """Names: `datasets/{d}` and `datasets/{d}/versions/{v}`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = data_service_pb2_grpc.DataServiceStub(caller.channel)
        self._read_version = read_method(caller.channel)

    def create_dataset(
        self, dataset_id: str, *, display_name: str = "", description: str = "", exist_ok: bool = False
    ) -> resources_pb2.Dataset:
        """A new, empty dataset. Raises `AlreadyExists`, unless `exist_ok`: then it is the one that exists."""
        request = pb.CreateDatasetRequest(
            dataset_id=dataset_id,
            display_name=display_name,
            description=description,
            request_id=new_request_id(),
        )
        try:
            return self._caller.unary(self._stub.CreateDataset, request, resources_pb2.Dataset)
        except AlreadyExists:
            if not exist_ok:
                raise
            return self.get_dataset(f"datasets/{dataset_id}")

    def get_dataset(self, name: str) -> resources_pb2.Dataset:
        return self._caller.unary(self._stub.GetDataset, pb.GetDatasetRequest(name=name), resources_pb2.Dataset)

    def list_datasets(self) -> Iterator[resources_pb2.Dataset]:
        """All of them, in the order of their names."""
        return every_page(self._caller, self._stub.ListDatasets, pb.ListDatasetsRequest(), "datasets")

    def import_version(
        self,
        dataset: str,
        sources: Iterable[pb.ImportSource],
        *,
        hold_outs: Iterable[pb.HoldOut] = (),
        version_id: str = "",
    ) -> Operation[resources_pb2.DatasetVersion]:
        """Starts importing files that the server can read. `dataset` is `datasets/{d}`; see `millrace_client.specs`."""
        request = pb.ImportVersionRequest(
            parent=dataset,
            version_id=version_id,
            sources=sources,
            hold_outs=hold_outs,
            request_id=new_request_id(),
        )
        operation = self._caller.unary(self._stub.ImportVersion, request, operations_pb2.Operation)
        return Operation(self._caller, operation, resources_pb2.DatasetVersion, pb.ImportVersionMetadata)

    def get_version(self, name: str) -> resources_pb2.DatasetVersion:
        return self._caller.unary(self._stub.GetVersion, pb.GetVersionRequest(name=name), resources_pb2.DatasetVersion)

    def list_versions(self, dataset: str) -> Iterator[resources_pb2.DatasetVersion]:
        """All versions of `datasets/{d}`, in any state, in the order of their names."""
        request = pb.ListVersionsRequest(parent=dataset)
        return every_page(self._caller, self._stub.ListVersions, request, "versions")

    def preview_version(self, name: str, *, rows_per_split: int = 0) -> pb.PreviewVersionResponse:
        """The first rows of each split as an Arrow stream, and a contact sheet of an image column."""
        request = pb.PreviewVersionRequest(name=name, rows_per_split=rows_per_split)
        return self._caller.unary(self._stub.PreviewVersion, request, pb.PreviewVersionResponse)

    def read_batches(
        self,
        name: str,
        *,
        split: str = "",
        columns: Sequence[str] = (),
        offset: int = 0,
        limit: int = 0,
    ) -> Iterator[pa.RecordBatch]:
        """Rows in the order of their row ids, as they arrive. Empty `split` or `columns`: all; `limit` 0: no limit."""
        with self._reader(name, split, columns, offset, limit) as reader:
            yield from reader

    def read_table(
        self,
        name: str,
        *,
        split: str = "",
        columns: Sequence[str] = (),
        offset: int = 0,
        limit: int = 0,
    ) -> pa.Table:
        """The same rows as one table in memory."""
        with self._reader(name, split, columns, offset, limit) as reader:
            return reader.read_all()

    def _reader(self, name: str, split: str, columns: Sequence[str], offset: int, limit: int) -> Any:
        import pyarrow as pa

        request = pb.ReadVersionRequest(name=name, split=split, columns=columns, offset=offset, limit=limit)
        return pa.ipc.open_stream(ArrowBytes(self._caller.stream(self._read_version, request)))
