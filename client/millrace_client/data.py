"""The data service: datasets, their immutable versions, and reading them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, field_mask_pb2

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc, quality_pb2, resources_pb2
from millrace_client.arrow_stream import ArrowBytes, read_method
from millrace_client.calls import Caller, new_request_id
from millrace_client.errors import AlreadyExists
from millrace_client.operations import Operation
from millrace_client.paging import every_page

if TYPE_CHECKING:
    import pyarrow as pa

    from millrace_client.byte_sources import Source
    from millrace_client.uploads import OnProgress

DELETE_TIMEOUT_S = 300.0


class DataClient:
    """Names: `datasets/{d}` and `datasets/{d}/versions/{v}`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = data_service_pb2_grpc.DataServiceStub(caller.channel)
        self._read_version = read_method(caller.channel)

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

    def upload(
        self, dataset: str, source: Source, *, upload_id: str = "", on_progress: OnProgress | None = None
    ) -> resources_pb2.Upload:
        """Sends a file or bytes into a new upload of `datasets/{d}`: see `millrace_client.uploads.upload`."""
        from millrace_client.uploads import upload

        return upload(self._caller, self._stub, dataset, source, upload_id=upload_id, on_progress=on_progress)

    def upload_presigned(
        self,
        dataset: str,
        path: str | os.PathLike[str],
        *,
        upload_id: str = "",
        part_size_bytes: int = 0,
        on_progress: OnProgress | None = None,
    ) -> resources_pb2.Upload:
        """Sends a file past the service, straight to S3: see `millrace_client.presigned_upload.upload_presigned`."""
        from millrace_client.presigned_upload import upload_presigned

        return upload_presigned(
            self._caller,
            self._stub,
            dataset,
            path,
            upload_id=upload_id,
            part_size_bytes=part_size_bytes,
            on_progress=on_progress,
        )

    def resume_upload(
        self, name: str, source: Source, *, on_progress: OnProgress | None = None
    ) -> resources_pb2.Upload:
        """Goes on with an upload that broke off: see `millrace_client.uploads.resume_upload`."""
        from millrace_client.uploads import resume_upload

        return resume_upload(self._caller, self._stub, name, source, on_progress=on_progress)

    def get_upload(self, name: str) -> resources_pb2.Upload:
        return self._caller.unary(self._stub.GetUpload, pb.GetUploadRequest(name=name), resources_pb2.Upload)

    def abort_upload(self, name: str) -> None:
        """Takes an upload away, with its bytes. Raises `FailedPrecondition` while an import reads it."""
        self._caller.unary(self._stub.AbortUpload, pb.AbortUploadRequest(name=name), empty_pb2.Empty)

    def import_version(
        self,
        dataset: str,
        sources: Iterable[pb.ImportSource],
        *,
        hold_outs: Iterable[pb.HoldOut] = (),
        version_id: str = "",
        column_types: Mapping[str, str] | None = None,
        bad_rows: pb.BadRows | None = None,
        checks: Iterable[quality_pb2.QualityCheck] = (),
        base: pb.Base | None = None,
    ) -> Operation[resources_pb2.DatasetVersion]:
        """Starts importing files that the server can read, or uploads, into a new version of `datasets/{d}`.

        `column_types` maps columns to types in Arrow's own spelling. See `millrace_client.specs` for the messages.
        """
        request = pb.ImportVersionRequest(
            parent=dataset,
            version_id=version_id,
            sources=sources,
            hold_outs=hold_outs,
            request_id=new_request_id(),
            column_types=[
                pb.ColumnType(column=column, arrow_type=arrow_type)
                for column, arrow_type in (column_types or {}).items()
            ],
            bad_rows=bad_rows,
            checks=checks,
            base=base,
        )
        operation = self._caller.unary(self._stub.ImportVersion, request, operations_pb2.Operation)
        return Operation(self._caller, operation, resources_pb2.DatasetVersion, pb.ImportVersionMetadata)

    def import_table(
        self,
        dataset: str,
        rows: pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch],
        *,
        split: str = "train",
        **options: Any,
    ) -> Operation[resources_pb2.DatasetVersion]:
        """Sends rows from memory, and imports them into a new version of `datasets/{d}` while they arrive.

        Returns once they are all sent; the import may still be at work. `options` are those of `import_version`. Where
        sending fails the import is cancelled and nothing is left.
        """
        from millrace_client.arrow_upload import import_while_sent
        from millrace_client.specs import arrow_source

        def import_upload(upload: str) -> Operation[resources_pb2.DatasetVersion]:
            return self.import_version(dataset, [arrow_source(split, upload)], **options)

        return import_while_sent(self._caller, self._stub, dataset, rows, import_upload)

    def transform_version(
        self,
        source: str,
        steps: Iterable[transform_pb2.TransformStep] = (),
        *,
        dataset: str = "",
        version_id: str = "",
        splits: pb.SplitRule | None = None,
        fit_split: str = "",
        checks: Iterable[quality_pb2.QualityCheck] = (),
    ) -> Operation[resources_pb2.DatasetVersion]:
        """Starts making a new version of `dataset` (unset: the source's own) out of `datasets/{d}/versions/{v}`.

        See `millrace_client.steps` for the steps, and `millrace_client.specs` for the rules of splits.
        """
        request = pb.TransformVersionRequest(
            parent=dataset or source.partition("/versions/")[0],
            version_id=version_id,
            source=source,
            transform=transform_pb2.Transform(steps=steps),
            splits=splits,
            fit_split=fit_split,
            checks=checks,
            request_id=new_request_id(),
        )
        operation = self._caller.unary(self._stub.TransformVersion, request, operations_pb2.Operation)
        return Operation(self._caller, operation, resources_pb2.DatasetVersion, pb.TransformVersionMetadata)

    def predict_version(
        self,
        source: str,
        checkpoint: str,
        *,
        checkpoint_sha256: str = "",
        dataset: str = "",
        version_id: str = "",
        split: str = "",
        columns: Iterable[str] = (),
        outputs: Iterable[str] = (),
        column_prefix: str = "",
        bad_rows: pb.BadRows | None = None,
        max_workers: int = 0,
        batch_size: int = 0,
        cpus: int = 0,
        gpus: float = 0.0,
    ) -> Operation[resources_pb2.DatasetVersion]:
        """Starts running a model over `datasets/{d}/versions/{v}`, into a new version of `dataset` (unset: the source's
        own) with columns of predictions. The model is that of `trainingJobs/{j}/checkpoints/{c}`, or of the best one of
        `trainingJobs/{j}`.

        `split` and `columns` empty: all; `outputs` empty: all but the logits. `batch_size` are rows in one call of the
        model; `cpus` and `gpus` are those of each worker. What is 0 has the server's default.
        """
        request = pb.PredictVersionRequest(
            parent=dataset or source.partition("/versions/")[0],
            version_id=version_id,
            source=source,
            split=split,
            checkpoint=checkpoint,
            checkpoint_sha256=checkpoint_sha256,
            columns=columns,
            outputs=outputs,
            column_prefix=column_prefix,
            bad_rows=bad_rows,
            workers=pb.PredictionWorkers(max_workers=max_workers, batch_size=batch_size, cpus=cpus, gpus=gpus),
            request_id=new_request_id(),
        )
        operation = self._caller.unary(self._stub.PredictVersion, request, operations_pb2.Operation)
        return Operation(self._caller, operation, resources_pb2.DatasetVersion, pb.PredictVersionMetadata)

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
