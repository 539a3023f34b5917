"""The client of the data service: datasets, uploads, and immutable versions.

`read_table` and similar methods turn ReadVersion's messages into an Arrow IPC stream with one copy of the bytes.
`image_rows` turns image columns into numpy arrays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2, field_mask_pb2

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc, quality_pb2, resources_pb2
from millrace_client.calls import Caller, Operation, every_page, new_request_id
from millrace_client.errors import AlreadyExists

if TYPE_CHECKING:
    import grpc
    import pyarrow as pa

    from millrace_client.uploads import OnProgress, Source


# --- What the parts share ---


class DataCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = data_service_pb2_grpc.DataServiceStub(caller.channel)


# --- Datasets ---


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
        """Create an empty dataset. With `exist_ok` an existing one is returned; otherwise it raises `AlreadyExists`."""
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
        """Yield all datasets in the order of their names."""
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
        """Change the given fields. Raises `Aborted` if `etag` is set and not the present one."""
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
        """Delete a dataset and its uploads. Raises `FailedPrecondition` while it has versions."""
        self._caller.unary(self._stub.DeleteDataset, pb.DeleteDatasetRequest(name=name, etag=etag), empty_pb2.Empty)


# --- Uploads ---


class UploadCalls(DataCalls):
    def upload(
        self, dataset: str, source: Source, *, upload_id: str = "", on_progress: OnProgress | None = None
    ) -> resources_pb2.Upload:
        """Send a file or bytes into a new upload of `datasets/{d}`; see `millrace_client.uploads.upload`."""
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
        """Send a file directly to S3; see `millrace_client.uploads.upload_presigned`."""
        from millrace_client.uploads import upload_presigned

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
        """Continue an interrupted upload; see `millrace_client.uploads.resume_upload`."""
        from millrace_client.uploads import resume_upload

        return resume_upload(self._caller, self._stub, name, source, on_progress=on_progress)

    def get_upload(self, name: str) -> resources_pb2.Upload:
        return self._caller.unary(self._stub.GetUpload, pb.GetUploadRequest(name=name), resources_pb2.Upload)

    def abort_upload(self, name: str) -> None:
        """Remove an upload and its bytes. Raises `FailedPrecondition` while an import reads it."""
        self._caller.unary(self._stub.AbortUpload, pb.AbortUploadRequest(name=name), empty_pb2.Empty)


# --- Arrow stream of ReadVersion ---

METHOD = "/millrace.data.v1.DataService/ReadVersion"
# The first byte of a response with `arrow_ipc`: field 1, length-delimited.
_TAG = 0x0A


def read_method(channel: grpc.Channel) -> Any:
    """Return `ReadVersion` with responses that are views of the `arrow_ipc` bytes in the received message."""
    return channel.unary_stream(
        METHOD, request_serializer=pb.ReadVersionRequest.SerializeToString, response_deserializer=_payload
    )


class ArrowBytes:
    """The concatenated bytes of the messages, as a file that Arrow reads."""

    def __init__(self, messages: Iterator[memoryview]) -> None:
        self.closed = False
        self._messages = messages
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> Any:
        """Read `size` bytes, or fewer at the end. Arrow allocates the memory: it is aligned, and reused once freed."""
        import pyarrow as pa

        buffer = pa.allocate_buffer(size, resizable=True)
        target = memoryview(buffer).cast("B")
        filled = 0
        while filled < size and self._more():
            piece = self._left[: size - filled]
            target[filled : filled + len(piece)] = piece
            self._left = self._left[len(piece) :]
            filled += len(piece)
        return buffer if filled == size else buffer.slice(0, filled)

    def close(self) -> None:
        self.closed = True

    def _more(self) -> bool:
        """Return whether bytes are left, and take the next message if the present one is empty."""
        while not self._left:
            message = next(self._messages, None)
            if message is None:
                return False
            self._left = message
        return True


def _payload(message: bytes) -> memoryview:
    """Return the field's bytes without the parser, which would copy them twice.

    This works if the field stands alone in the message, as the server sends it.
    """
    if message and message[0] == _TAG:
        length, begin = _varint(message, 1)
        if begin + length == len(message):
            return memoryview(message)[begin:]
    return memoryview(pb.ReadVersionResponse.FromString(message).arrow_ipc)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at `position` and the position after it."""
    value = shift = 0
    for index in range(position, min(position + 10, len(data))):
        value |= (data[index] & 0x7F) << shift
        if data[index] < 0x80:
            return value, index + 1
        shift += 7
    return value, len(data)


# --- Image columns ---


def image_rows(
    table: pa.Table, image_column: str = "image", label_column: str = "label"
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]:
    """Return images (N, H, W) or (N, H, W, C), and labels (N,) if the table has them.

    Raises `KeyError` if there is no such image column, and `TypeError` if it holds no tensors of one shape.
    """
    if image_column not in table.column_names:
        raise KeyError(f"no column {image_column!r}; there are {', '.join(table.column_names)}")
    images = _tensors(table.column(image_column).combine_chunks())
    if label_column not in table.column_names:
        return images, None
    return images, table.column(label_column).to_numpy()


def _tensors(column: Any) -> npt.NDArray[np.uint8]:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):  # the result of `combine_chunks` for no rows
        column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    if not isinstance(column.type, pa.FixedShapeTensorType):
        raise TypeError(f"the column's type is {column.type}, not a tensor of fixed shape")
    array: npt.NDArray[np.uint8] = column.to_numpy_ndarray()
    return array


# --- Making versions ---


class VersionCalls(DataCalls):
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
        partitioning: Literal["hive", "none"] = "hive",
        nan_as_null: bool = False,
    ) -> Operation[resources_pb2.DatasetVersion]:
        """Start importing files that the server can read, or uploads, into a new version of `datasets/{d}`.

        `column_types` maps columns to types in Arrow's own spelling. `partitioning` "hive" turns folders `name=value`
        below the folder that a source names into columns; "none" ignores them. With `nan_as_null`, NaN in float columns
        counts as missing and becomes null; tensors keep NaN. `millrace_client.specs` makes the messages.
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
            partitioning=f"PARTITIONING_{partitioning.upper()}",
            nan_as_null=nan_as_null,
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
        """Send rows from memory, and import them into a new version of `datasets/{d}` while they arrive.

        Return once all rows are sent; the import may still run. `options` are those of `import_version`. If sending
        fails, the import is cancelled and nothing is left.
        """
        from millrace_client.specs import arrow_source
        from millrace_client.uploads import import_while_sent

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
        request_id: str = "",
    ) -> Operation[resources_pb2.DatasetVersion]:
        """Start making a new version of `dataset` (unset: the source's own) from `datasets/{d}/versions/{v}`.

        `request_id` is a UUID4: the same one with the same arguments returns the first operation.
        `millrace_client.steps` makes the steps, and `millrace_client.specs` the split rules.
        """
        request = pb.TransformVersionRequest(
            parent=dataset or source.partition("/versions/")[0],
            version_id=version_id,
            source=source,
            transform=transform_pb2.Transform(steps=steps),
            splits=splits,
            fit_split=fit_split,
            checks=checks,
            request_id=request_id or new_request_id(),
        )
        operation = self._caller.unary(self._stub.TransformVersion, request, operations_pb2.Operation)
        return Operation(self._caller, operation, resources_pb2.DatasetVersion, pb.TransformVersionMetadata)

    def cancel_version(self, version: resources_pb2.DatasetVersion) -> None:
        """Ask the server to stop making a version. If the version was committed first, it stays."""
        stub: Any = operations_pb2_grpc.OperationsStub(self._caller.channel)
        request = operations_pb2.CancelOperationRequest(name=version.operation)
        self._caller.unary(stub.CancelOperation, request, empty_pb2.Empty)

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
        predictor: str = "",
    ) -> Operation[resources_pb2.DatasetVersion]:
        """Start predicting on `datasets/{d}/versions/{v}` with a model, into a new version of `dataset` (unset: the
        source's own).

        The model is that of `trainingJobs/{j}/checkpoints/{c}`, or the best one of `trainingJobs/{j}`. Empty `split`
        and `columns` mean all; empty `outputs` means all but the logits. `batch_size` is the number of rows in one call
        of the model; `cpus` and `gpus` are those of each worker. 0 means the server's default. Of a checkpoint that a
        program reported, `predictor="serve:Predictor"` names the class of its bundle that predicts.
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
            predictor=predictor,
            request_id=new_request_id(),
        )
        operation = self._caller.unary(self._stub.PredictVersion, request, operations_pb2.Operation)
        return Operation(self._caller, operation, resources_pb2.DatasetVersion, pb.PredictVersionMetadata)


# --- DataClient ---

DELETE_TIMEOUT_S = 300.0


class DataClient(DatasetCalls, UploadCalls, VersionCalls):
    """The client of the data service. Names are `datasets/{d}` and `datasets/{d}/versions/{v}`."""

    def __init__(self, caller: Caller) -> None:
        super().__init__(caller)
        self._read_version = read_method(caller.channel)

    def delete_version(self, name: str, *, etag: str = "") -> None:
        """Delete a version and its files. Raises `FailedPrecondition` while it is being made or used."""
        request = pb.DeleteVersionRequest(name=name, etag=etag)
        # Deleting a version of many files takes a while.
        self._caller.unary(self._stub.DeleteVersion, request, empty_pb2.Empty, timeout_s=DELETE_TIMEOUT_S)

    def verify_version(self, name: str) -> Iterator[pb.VerifyVersionResponse]:
        """Verify every stored byte, and yield the progress. Each message has the damage found since the one before."""
        yield from self._caller.stream(self._stub.VerifyVersion, pb.VerifyVersionRequest(name=name))

    def read_quarantine(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows that were left out of a version: `source`, `place`, `reason` and `excerpt` of each."""
        left = b""
        for message in self._caller.stream(self._stub.ReadQuarantine, pb.ReadQuarantineRequest(name=name)):
            *lines, left = (left + message.json_lines).split(b"\n")
            yield from map(json.loads, lines)

    def get_version(self, name: str) -> resources_pb2.DatasetVersion:
        return self._caller.unary(self._stub.GetVersion, pb.GetVersionRequest(name=name), resources_pb2.DatasetVersion)

    def list_versions(self, dataset: str) -> Iterator[resources_pb2.DatasetVersion]:
        """Yield all versions of `datasets/{d}`, in any state, in the order of their names."""
        request = pb.ListVersionsRequest(parent=dataset)
        return every_page(self._caller, self._stub.ListVersions, request, "versions")

    def preview_version(self, name: str, *, rows_per_split: int = 0) -> pb.PreviewVersionResponse:
        """Return the first rows of each split as an Arrow stream, the quality report, and a contact sheet.

        The version is complete, even if the server's answer had to shorten it.
        """
        request = pb.PreviewVersionRequest(name=name, rows_per_split=rows_per_split)
        preview = self._caller.unary(self._stub.PreviewVersion, request, pb.PreviewVersionResponse)
        preview.version.CopyFrom(self.get_version(name))
        return preview

    def read_batches(
        self, name: str, *, split: str = "", columns: Sequence[str] = (), offset: int = 0, limit: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows in the order of their row ids, as they arrive.

        Empty `split` or `columns`: all; `limit` 0: no limit.
        """
        with self._reader(name, split, columns, offset, limit) as reader:
            yield from reader

    def read_table(
        self, name: str, *, split: str = "", columns: Sequence[str] = (), offset: int = 0, limit: int = 0
    ) -> pa.Table:
        """Return the same rows as one table in memory."""
        with self._reader(name, split, columns, offset, limit) as reader:
            return reader.read_all()

    def _reader(self, name: str, split: str, columns: Sequence[str], offset: int, limit: int) -> Any:
        import pyarrow as pa

        request = pb.ReadVersionRequest(name=name, split=split, columns=columns, offset=offset, limit=limit)
        return pa.ipc.open_stream(ArrowBytes(self._caller.stream(self._read_version, request)))
