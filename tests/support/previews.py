"""Previews of versions as the data service sends them, with everything in them that is hard to show."""

from __future__ import annotations

import io
import math

import numpy as np
import pyarrow as pa
from google.protobuf.json_format import ParseDict
from PIL import Image

from millrace.data.v1 import data_service_pb2

NASTY = "<script>alert(1)</script> [bold]x[/] \x1b[31m"

VERSION = {
    "name": "datasets/d/versions/v2",
    "state": "STATE_ACTIVE",
    "commitTime": "2026-01-02T03:04:05Z",
    "rowCount": 4,
    "sizeBytes": 5_200_000,
    "manifestSha256": "ab" * 32,
    "quarantinedRowCount": 3,
    "columns": [
        {
            "name": "image",
            "arrowType": "extension<arrow.fixed_shape_tensor[value_type=uint8, shape=[2,2]]>",
            "shape": [2, 2],
        },
        {"name": "label", "arrowType": "int64", "valueNames": ["ants", "bees"]},
        {"name": "price", "arrowType": "double"},
        {"name": "note", "arrowType": "string"},
        {"name": "day", "arrowType": "date32[day]"},
    ],
    "splits": [{"name": "train", "rowCount": 3}, {"name": "test", "firstRowId": 3, "rowCount": 1}],
    "parents": [{"version": "datasets/d/versions/v1", "manifestSha256": "cd" * 32}],
    "transform": {"steps": [{"column": "image", "resize": {"height": 2, "width": 2}}]},
}


def column(name: str, **facts: object) -> dict[str, object]:
    return {"split": "train", "column": name, "rowCount": 3, "distinctIsExact": True, **facts}


REPORT = {
    "columns": [
        column("image", numbers={"min": 0, "max": 255, "mean": 100.5, "deviation": 3, "histogram": [1, 0, 8, 2]}),
        column(
            "label",
            distinctCount=2,
            numbers={"max": 1, "mean": 0.5, "deviation": 0.5, "quantiles": [0, 0, 0, 0, 1, 1, 1], "histogram": [2, 1]},
            values=[{"value": {"integer": 0}, "rowCount": 2}, {"value": {"integer": 1}, "rowCount": 1}],
        ),
        column(
            "price",
            nullCount=1,
            nanCount=1,
            numbers={"min": "-Infinity", "max": 12_345, "mean": "NaN", "deviation": "NaN"},
        ),
        column(
            "note",
            distinctCount=9_000,
            distinctIsExact=False,
            texts={"minBytes": 1, "maxBytes": 9, "meanBytes": 4.5},
            values=[{"value": {"text": NASTY}, "rowCount": 2}],
        ),
        column("day", times={"min": "2020-01-01T00:00:00Z", "max": "2021-01-01T00:00:00Z", "histogram": [1, 2]}),
    ],
    "checks": [
        {"check": {"column": "price", "range": {"min": 0}}, "observed": "none"},
        {
            "check": {"column": "note", "action": "ACTION_QUARANTINE", "pattern": {"regex": "[a-z]+"}},
            "violations": 3,
            "quarantined": 3,
            "observed": "3 rows",
        },
    ],
    "quarantine": [
        {
            "reason": "note does not match [a-z]+",
            "rowCount": 3,
            "examples": [{"source": "file:///data/a.csv", "place": "line 17", "excerpt": NASTY}],
        }
    ],
    "quarantinedRowCount": 3,
}


def preview(*, with_report: bool = True) -> data_service_pb2.PreviewVersionResponse:
    answer = data_service_pb2.PreviewVersionResponse(arrow_ipc=_rows())
    ParseDict(VERSION, answer.version)
    if with_report:
        ParseDict(REPORT, answer.report)
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4)).save(buffer, "PNG")
        answer.contact_sheet_png = buffer.getvalue()
    return answer


def _rows() -> bytes:
    images = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8, dtype=np.uint8)), 4)
    table = pa.table(
        {
            "split": ["train", "test"],
            "image": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.uint8(), [2, 2]), images),
            "label": [0, 1],
            "price": [1.25, math.nan],
            "note": [NASTY, None],
            "day": pa.array([0, 1], pa.date32()),
        }
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()
