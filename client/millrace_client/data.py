"""The data service: datasets, uploads, what makes new versions, and reading those, which never change.

`read_table` and its like make an Arrow IPC stream of ReadVersion's messages, with one copy of its bytes on the way;
`image_rows` and its like make numpy arrays of image columns.
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
from millrace_client.calls import Caller, every_page, new_request_id
from millrace_client.errors import AlreadyExists
from millrace_client.operations import Operation

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


# --- Uploads ---


class UploadCalls(DataCalls):
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


# --- Arrow stream of ReadVersion ---

METHOD = "/millrace.data.v1.DataService/ReadVersion"
# The first byte of a response that has `arrow_ipc`: field 1, length-delimited.
_TAG = 0x0A


def read_method(channel: grpc.Channel) -> Any:
    """`ReadVersion`, whose responses are the bytes of `arrow_ipc` as they lie in the message received."""
    return channel.unary_stream(
        METHOD, request_serializer=pb.ReadVersionRequest.SerializeToString, response_deserializer=_payload
    )


class ArrowBytes:
    """The messages' bytes one after the other, as a file that Arrow reads."""

    def __init__(self, messages: Iterator[memoryview]) -> None:
        self.closed = False
        self._messages = messages
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> Any:
        """Fewer bytes at the end alone. The memory is Arrow's own: aligned, and used again once it is free."""
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
        """Whether there are bytes left; takes the next message where the present one has none."""
        while not self._left:
            message = next(self._messages, None)
            if message is None:
                return False
            self._left = message
        return True


def _payload(message: bytes) -> memoryview:
    """The parser would copy the bytes twice; where the field stands alone, as a server sends it, it is cut out."""
    if message and message[0] == _TAG:
        length, begin = _varint(message, 1)
        if begin + length == len(message):
            return memoryview(message)[begin:]
    return memoryview(pb.ReadVersionResponse.FromString(message).arrow_ipc)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position` and where it ends."""
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
    """Images of shape (N, H, W) or (N, H, W, C), and labels of shape (N,) where the table has them.

    Raises `KeyError` where there is no such image column, and `TypeError` where it holds no tensors of one shape.
    """
    if image_column not in table.column_names:
        raise KeyError(f"no column {image_column!r}; there are {', '.join(table.column_names)}")
    images = _tensors(table.column(image_column).combine_chunks())
    if label_column not in table.column_names:
        return images, None
    return images, table.column(label_column).to_numpy()


def _tensors(column: Any) -> npt.NDArray[np.uint8]:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):  # what `combine_chunks` gives for no rows
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
        """Starts importing files that the server can read, or uploads, into a new version of `datasets/{d}`.

        `column_types` maps columns to types in Arrow's own spelling. `partitioning`: whether folders `name=value` below
        the folder that a source names are columns of its rows ("hive"), or nothing but folders ("none"). With
        `nan_as_null`, NaN in columns of floats is a missing value and becomes null; tensors keep theirs. See
        `millrace_client.specs` for the messages.
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
        """Sends rows from memory, and imports them into a new version of `datasets/{d}` while they arrive.

        Returns once they are all sent; the import may still be at work. `options` are those of `import_version`. Where
        sending fails the import is cancelled and nothing is left.
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
        """Starts making a new version of `dataset` (unset: the source's own) out of `datasets/{d}/versions/{v}`.

        `request_id` is a UUID4: the same one with the same arguments returns what makes, or made, the first version.

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
            request_id=request_id or new_request_id(),
        )
        operation = self._caller.unary(self._stub.TransformVersion, request, operations_pb2.Operation)
        return Operation(self._caller, operation, resources_pb2.DatasetVersion, pb.TransformVersionMetadata)

    def cancel_version(self, version: resources_pb2.DatasetVersion) -> None:
        """Asks the server to end what makes it; where that was faster the version is there all the same."""
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


# --- DataClient ---

DELETE_TIMEOUT_S = 300.0


class DataClient(DatasetCalls, UploadCalls, VersionCalls):
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
