"""Parts of an import are known again by another process and by the next attempt, unless their file changed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.domain.import_spec import Source
from data_service.formats import open_sources
from data_service.imports.plan import ImportPart, plan_parts
from data_service.storage.source_files import SourceFiles

KINDS = ["parquet", "arrow", "csv", "json_lines"]
TABLE = pa.table({"n": [1, 2, 3], "word": ["a", None, "c"]})


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    match kind:
        case "parquet":
            pq.write_table(TABLE, path)
        case "arrow":
            with pa.ipc.new_file(path, TABLE.schema) as writer:
                writer.write_table(TABLE)
        case "csv":
            path.write_text("n,word\n1,a\n2,\n3,c\n")
        case _:
            path.write_text('{"n": 1, "word": "a"}\n{"n": 2}\n')
    return path


def part_of(path: Path, uri: str, kind: str) -> ImportPart:
    """The part, as an attempt plans it that opens the source anew."""
    source = Source(split="train", format=kind, uris={f"{kind}.uri": uri})
    opened = open_sources([source], SourceFiles([PurePosixPath(path.parent)], None), {}, "")
    (part,) = plan_parts(["train"], None, opened).parts
    return part


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, f"rows.{kind}") for kind in KINDS] + [("parquet", "*.parquet"), ("csv", "*.csv")],
)
def test_a_part_is_the_same_for_another_attempt_and_in_another_process(tmp_path: Path, kind: str, name: str) -> None:
    path, uri = write(tmp_path, kind), f"{tmp_path.as_uri()}/{name}"
    part = part_of(path, uri, kind)
    sent = pickle.loads(pickle.dumps(part))
    assert repr(part) == repr(part_of(path, uri, kind)) == repr(sent) == repr(pickle.loads(pickle.dumps(sent)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_whose_file_was_written_again_is_another_one(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    before, size = repr(part_of(path, path.as_uri(), kind)), path.stat().st_size
    write(tmp_path, kind)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # within one tick of the disk's clock
    assert path.stat().st_size == size
    assert repr(part_of(path, path.as_uri(), kind)) != before
