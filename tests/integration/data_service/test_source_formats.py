"""Sources of every format, by globs and folders, from disk and from S3: imported by a running service, read back."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.common.v1.transform_pb2 import Transform
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace_client import checks, steps
from tests.integration.data_service.client import DataClient, imported, parquet
from tests.integration.data_service.conftest import DataStack
from tests.support.images import encoded, tar_of
from tests.support.stores import S3_IN_CHAOS

ROWS = 500
TABLE = pa.table(
    {
        "n": np.arange(ROWS),
        "half": [None if n % 7 == 0 else n / 2 for n in range(ROWS)],
        "city": [("Zürich", "東京", 'a "quoted", one')[n % 3] for n in range(ROWS)],
    }
)
FIRST, SECOND = TABLE.slice(0, 300), TABLE.slice(300)
IMAGES = {
    f"{name}/{index}.{kind.lower()}": encoded(kind, (9, 7), 20 * index)
    for name in ("bees", "ants", "çigales")
    for index, kind in enumerate(("PNG", "JPEG", "WEBP"))
}
CLASSES = ["ants", "bees", "çigales"]


def as_csv(table: pa.Table) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(table.column_names)
    writer.writerows(row.values() for row in table.to_pylist())
    return text.getvalue().encode()


def as_json_lines(table: pa.Table) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()).encode()


def as_parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=64)
    return bytes(sink.getvalue())


def as_arrow(table: pa.Table, new: Callable[..., Any]) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table, max_chunksize=64)
    return bytes(sink.getvalue())


# Files in one folder; names that are hidden, or that no pattern meets, must change nothing.
FILES = {
    "csv/a.csv": as_csv(FIRST),
    "csv/deep/er/b.csv": gzip.compress(as_csv(SECOND)),
    "csv/notes.txt": b"no table",
    "csv/.hidden.csv": b"no table",
    "json/part-1.jsonl": as_json_lines(FIRST),
    "json/part-2.jsonl": gzip.compress(as_json_lines(SECOND)),
    "json/part-10.txt": b"no table",
    "parquet/1/a.parquet": as_parquet(FIRST),
    "parquet/2/a.parquet": as_parquet(SECOND),
    "parquet/_temporary/a.parquet": b"half a file",
    "arrow/1.arrow": as_arrow(FIRST, pa.ipc.new_file),
    "arrow/2.arrows": as_arrow(SECOND, pa.ipc.new_stream),
    **{f"images/{name}": data for name, data in IMAGES.items()},
    "images/bees/Thumbs.db": b"no image",
    "tars/train.tar.gz": gzip.compress(tar_of({f"./some/where/{name}": data for name, data in IMAGES.items()})),
}


def asked(base: str) -> dict[str, pb.ImportSource]:
    """By format; a folder is named by its ending in `/`."""
    source = pb.ImportSource
    return {
        "csv by a glob": source(split="train", csv=pb.CsvSource(uri=f"{base}/csv/**/*.csv")),
        "JSON Lines by a glob": source(split="train", json_lines=pb.JsonLinesSource(uri=f"{base}/json/part-?.jsonl")),
        "Parquet in a folder": source(split="train", parquet=pb.ParquetSource(uri=f"{base}/parquet/")),
        "Arrow in a folder": source(split="train", arrow=pb.ArrowSource(uri=f"{base}/arrow/")),
        "folder of images": source(split="train", image_folder=pb.ImageFolderSource(uri=f"{base}/images/")),
        "gzipped tar of images": source(split="train", image_tar=pb.ImageTarSource(uri=f"{base}/tars/*.tar.gz")),
    }


TABLES = ["csv by a glob", "JSON Lines by a glob", "Parquet in a folder", "Arrow in a folder"]


@dataclass(frozen=True)
class Imported:
    version: DatasetVersion
    table: pa.Table


@pytest.fixture(scope="module")
def versions(stack: DataStack) -> dict[str, Imported]:
    """One of each source, imported side by side: one after the other each would take seconds."""
    parent, client = stack.new_dataset(), stack.client
    for name, data in FILES.items():
        base = stack.put_source(f"formats/{name}", data).removesuffix(f"/{name}")
    started = {
        name: client.data.ImportVersion(pb.ImportVersionRequest(parent=parent, sources=[source]), timeout=60)
        for name, source in asked(base).items()
    }
    made = {name: imported(client.wait(operation)) for name, operation in started.items()}
    return {name: Imported(version, client.read(version.name)) for name, version in made.items()}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_in_several_files_comes_back_value_by_value(versions: dict[str, Imported], name: str) -> None:
    found = versions[name]
    assert [(column.name, column.arrow_type) for column in found.version.columns] == [
        ("n", "int64"),
        ("half", "double"),
        ("city", "string"),
    ]
    assert found.version.quarantined_row_count == 0
    assert found.table.to_pydict() == TABLE.to_pydict()


@pytest.mark.parametrize("name", ["folder of images", "gzipped tar of images"])
def test_images_come_back_byte_for_byte_with_their_classes(versions: dict[str, Imported], name: str) -> None:
    found = versions[name]
    assert {column.name: list(column.value_names) for column in found.version.columns}["label"] == CLASSES
    rows = {row["path"]: (row["image"], row["label"]) for row in found.table.to_pylist()}
    assert found.table.num_rows == len(IMAGES)
    assert rows == {path: (data, CLASSES.index(path.split("/")[0])) for path, data in IMAGES.items()}


def test_the_stored_rows_are_the_imported_rows(client: DataClient, versions: dict[str, Imported]) -> None:
    for found in versions.values():
        answers = client.data.VerifyVersion(pb.VerifyVersionRequest(name=found.version.name), timeout=60)
        assert [damage for answer in answers for damage in answer.damages] == []


@pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)
def test_columns_of_folders_are_imported_checked_and_transformed_as_others(stack: DataStack) -> None:
    parent, client = stack.new_dataset(), stack.client
    parts = {("train", "a%2Fb"): (0, 200), ("train", "é"): (200, 350), ("test", "é"): (350, ROWS)}
    for (part, kind), (begin, end) in parts.items():
        name = f"hive/part={part}/kind={kind}/0.parquet"
        base = stack.put_source(name, as_parquet(TABLE.slice(begin, end - begin))).partition("/hive/")[0]
    request = pb.ImportVersionRequest(
        parent=parent,
        sources=[parquet("all", f"{base}/hive/")],
        checks=[checks.not_null("kind"), checks.unique("n")],
    )
    whole = imported(client.wait(client.data.ImportVersion(request, timeout=60)))
    assert [column.name for column in whole.columns] == [*TABLE.column_names, "part", "kind"]
    selected = client.read(whole.name, columns=["kind", "n"])
    assert set(zip(selected["n"].to_pylist(), selected["kind"].to_pylist(), strict=True)) == {
        (n, "a/b" if n < 200 else "é") for n in range(ROWS)
    }
    cut = pb.TransformVersionRequest(
        parent=parent,
        source=whole.name,
        transform=Transform(steps=[steps.one_hot_encode("kind")]),
        splits=pb.SplitRule(column=pb.ColumnSplit(column="part")),
    )
    ready = imported(client.wait(client.data.TransformVersion(cut, timeout=60)))
    assert {split.name: split.row_count for split in ready.splits} == {"train": 350, "test": 150}
    appended = pb.ImportVersionRequest(
        parent=parent,
        sources=[parquet("all", f"{base}/hive/*/kind=*/0.parquet")],
        base=pb.Base(version=whole.name, mode=pb.Base.MODE_APPEND),
    )
    assert imported(client.wait(client.data.ImportVersion(appended, timeout=60))).row_count == 2 * ROWS
    plain = pb.ImportVersionRequest(
        parent=parent, sources=request.sources, partitioning=pb.ImportVersionRequest.PARTITIONING_NONE
    )
    version = imported(client.wait(client.data.ImportVersion(plain, timeout=60)))
    assert [column.name for column in version.columns] == TABLE.column_names
