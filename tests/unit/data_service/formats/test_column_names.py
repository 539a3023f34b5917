"""Which names columns may have, whatever the format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.errors import InvalidArgument
from tests.support.import_sources import opened, source_of

FORMATS = ["csv", "json_lines", "parquet", "arrow"]


def names_of(folder: Path, kind: str, name: str) -> list[str]:
    """The columns of a file that has one of that name."""
    path = folder / "file"
    if kind == "csv":
        path.write_text(f"{name},b\n1,2\n")
    elif kind == "json_lines":
        path.write_text(json.dumps({name: 1, "b": 2}) + "\n")
    else:
        table = pa.table({name: [1], "b": [2]})
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    (one,) = opened(folder, source_of(path.as_uri(), kind))
    return list(one.rows.schema.names)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_name_of_a_column_may_be_long(tmp_path: Path, kind: str) -> None:
    assert names_of(tmp_path, kind, "é" * 512) == ["é" * 512, "b"]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_name_of_a_column_that_is_too_long_is_refused_and_shown_in_part(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InvalidArgument, match=r"name of 1025 bytes; at most 1024.*'ééé") as caught:
        names_of(tmp_path, kind, "é" * 512 + "n")
    assert caught.value.specific_reason == "CORRUPT_SOURCE"
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("kind", FORMATS)
def test_a_zero_byte_in_the_name_of_a_column_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InvalidArgument, match=r"column 'a\\x00b' has a zero byte in its name"):
        names_of(tmp_path, kind, "a\0b")
