"""The data service: datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import empty_pb2, field_mask_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import resources_pb2
from millrace_client.calls import every_page, new_request_id
from millrace_client.data_calls import DataCalls
from millrace_client.errors import AlreadyExists


class DatasetCalls(DataCalls):
    def create_dataset(
        self,
        dataset_id: str,
        *,
        display_name: str = "",
        description: str = "",
        retention: resources_pb2.Retention | None = None,
        exist_ok: bool = False,
    ) -> resources_pb2.Dataset:
        """A new, empty dataset. Raises `AlreadyExists`, unless `exist_ok`: then it is the one that exists."""
        request = pb.CreateDatasetRequest(
            dataset_id=dataset_id,
            display_name=display_name,
            description=description,
            retention=retention,
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

    def update_dataset(
        self,
        name: str,
        *,
        display_name: str | None = None,
        description: str | None = None,
        retention: resources_pb2.Retention | None = None,
        etag: str = "",
    ) -> resources_pb2.Dataset:
        """Changes what is given. Raises `Aborted` where `etag` is given and not the present one."""
        given = {"display_name": display_name, "description": description, "retention": retention}
        changes: dict[str, Any] = {path: value for path, value in given.items() if value is not None}
        if not changes:
            raise ValueError("name what to change: display_name, description or retention")
        request = pb.UpdateDatasetRequest(
            dataset=resources_pb2.Dataset(name=name, etag=etag, **changes),
            update_mask=field_mask_pb2.FieldMask(paths=list(changes)),
        )
        return self._caller.unary(self._stub.UpdateDataset, request, resources_pb2.Dataset)

    def delete_dataset(self, name: str, *, etag: str = "") -> None:
        """With its uploads. Raises `FailedPrecondition` while it has versions."""
        self._caller.unary(self._stub.DeleteDataset, pb.DeleteDatasetRequest(name=name, etag=etag), empty_pb2.Empty)
