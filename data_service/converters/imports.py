"""An ImportVersionRequest as a domain value."""

from __future__ import annotations

from google.protobuf import json_format

from data_service.domain import import_spec
from data_service.domain.import_spec import ImportSpec, Source
from millrace.data.v1 import data_service_pb2

_APPEND, _REPLACE = data_service_pb2.Base.MODE_APPEND, data_service_pb2.Base.MODE_REPLACE
MODES = {_APPEND: "append", _REPLACE: "replace"}
_Request = data_service_pb2.ImportVersionRequest
PARTITIONINGS = {
    _Request.PARTITIONING_UNSPECIFIED: "hive",
    _Request.PARTITIONING_HIVE: "hive",
    _Request.PARTITIONING_NONE: "none",
}


def import_spec_from(request: data_service_pb2.ImportVersionRequest) -> ImportSpec:
    return ImportSpec(
        sources=[_source(source) for source in request.sources],
        hold_outs=[
            import_spec.HoldOut(from_split=one.from_split, to_split=one.to_split, fraction=one.fraction, seed=one.seed)
            for one in request.hold_outs
        ],
        column_types=[
            import_spec.ColumnType(column=one.column, arrow_type=one.arrow_type) for one in request.column_types
        ],
        bad_rows=bad_rows_from(request.bad_rows),
        checks=[json_format.MessageToDict(check) for check in request.checks],
        base=_base(request.base) if request.HasField("base") else None,
        partitioning=PARTITIONINGS.get(request.partitioning, str(request.partitioning)),
        nan_as_null=request.nan_as_null,
    )


def _source(source: data_service_pb2.ImportSource) -> Source:
    chosen = source.WhichOneof("format")
    if chosen is None:
        return Source(split=source.split, format="", uris={})
    if chosen == "idx":
        uris = {"idx.images_uri": source.idx.images_uri, "idx.labels_uri": source.idx.labels_uri}
        return Source(split=source.split, format=chosen, uris=uris)
    uris = {f"{chosen}.uri": getattr(source, chosen).uri}
    options = _csv_options(source.csv) if chosen == "csv" else None
    return Source(split=source.split, format=chosen, uris=uris, csv=options)


def _csv_options(csv: data_service_pb2.CsvSource) -> import_spec.CsvOptions:
    return import_spec.CsvOptions(
        delimiter=csv.delimiter,
        column_names=list(csv.column_names),
        null_values=list(csv.null_values),
        encoding=csv.encoding,
    )


def bad_rows_from(bad_rows: data_service_pb2.BadRows) -> import_spec.BadRows:
    quarantine = bad_rows.action == data_service_pb2.BadRows.ACTION_QUARANTINE
    return import_spec.BadRows(action="quarantine" if quarantine else "fail", max_rows=bad_rows.max_rows)


def _base(base: data_service_pb2.Base) -> import_spec.Base:
    return import_spec.Base(version=base.version, mode=MODES.get(base.mode, ""))
