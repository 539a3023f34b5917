"""A client in another language uploads, imports and reads back, by what the protos say alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow.csv import write_csv

from tests.integration.data_service.conftest import DataStack
from tests.support.node_client import proto_path
from tests.support.service_process import ServiceProcess
from tests.support.stores import S3

PROGRAM = Path(__file__).parent / "node" / "client.js"
# Several chunks, the last one short.
ROWS = 12_345
CITIES = ("Zürich", "東京", "Reykjavík")


def rows() -> pa.Table:
    numbers = range(ROWS)
    return pa.table(
        {
            "number": pa.array(numbers, pa.int64()),
            "half": pa.array([None if n % 7 == 0 else n / 2 for n in numbers], pa.float64()),
            "city": pa.array([CITIES[n % 3] for n in numbers]),
            "even": pa.array([n % 2 == 0 for n in numbers]),
        }
    )


def as_csv(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    write_csv(table, sink)
    return bytes(sink.getvalue())


def as_arrow(table: pa.Table) -> bytes:
    # Without compression: JavaScript's Arrow has no LZ4 of its own.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return bytes(sink.getvalue())


def run_client(
    service: ServiceProcess, node_packages: Path, source: Path, format_name: str, folder: Path
) -> dict[str, Any]:
    ended = subprocess.run(
        ["node", str(PROGRAM), service.address, str(source), format_name],
        env={**os.environ, "NODE_PATH": str(node_packages), "PROTO_PATH": proto_path(folder)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


# Each format on one store, and on the other in `make chaos`: each is imported in the same way on both.
@pytest.mark.parametrize(
    ("stack", "format_name"),
    [
        pytest.param(store, format_name, id=f"{format_name}-{shown}", marks=[] if quick else pytest.mark.chaos)
        for store, shown, format_name, quick in (
            ("file", "file", "csv", True),
            ("file", "file", "arrow", False),
            ("s3", S3, "csv", False),
            ("s3", S3, "arrow", True),
        )
    ],
    indirect=["stack"],
)
def test_a_node_client_uploads_imports_and_reads_back(
    stack: DataStack, node_packages: Path, tmp_path: Path, format_name: str
) -> None:
    sent = rows()
    source = tmp_path / "rows"
    source.write_bytes({"csv": as_csv, "arrow": as_arrow}[format_name](sent))
    found = run_client(stack.service, node_packages, source, format_name, tmp_path / "protos")
    assert found["rows"] == ROWS
    assert found["values"] == sent.to_pydict()
    assert found["columns"] == {"number": "Int64", "half": "Float64", "city": "Utf8", "even": "Bool"}
