"""The data service: what makes new versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import quality_pb2, resources_pb2
from millrace_client.calls import new_request_id
from millrace_client.data_calls import DataCalls
from millrace_client.operations import Operation

if TYPE_CHECKING:
    import pyarrow as pa


class MakingCalls(DataCalls):
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
