"""A preview is one message that clients take, whatever a version's rows weigh."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import json_format
from PIL import Image

from data_service import convert
from data_service import reading as previews
from data_service.convert import ANSWER_BYTES, bound_answer
from data_service.domain.statistics import SplitStatistics
from data_service.reading import preview
from millrace.data.v1 import data_service_pb2, quality_pb2, resources_pb2
from shared.dataset_version import RowGroup, VersionReader, load_version
from shared.dataset_version.manifest import tensor_array
from shared.errors import InvalidArgument
from shared.storage import ObjectStore
from tests.support.transforming import SOURCE, commit_tables

MIB = 1024 * 1024


def reader_of(store: ObjectStore, **splits: pa.Table) -> VersionReader:
    commit_tables(store, splits)
    return VersionReader(store, load_version(store, SOURCE))


def rows_in(arrow_ipc: bytes) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = pa.ipc.open_stream(arrow_ipc).read_all().to_pydict()
    return rows


def noisy_png(side: int) -> bytes:
    """Of about 3 bytes a pixel."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (side, side), os.urandom(3 * side * side)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def test_ten_rows_of_a_version_of_many_groups_meet_only_their_own(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"text": [f"row {row}" for row in range(20_000)]})
    reader = reader_of(store, train=table, test=table.slice(0, 2_000))
    made: list[int] = []

    def counted(file_index: int, group_index: int, first_row_id: int, row_count: int) -> RowGroup:
        made.append(first_row_id)
        return RowGroup(file_index, group_index, first_row_id, row_count)

    monkeypatch.setattr("shared.dataset_version.pages.RowGroup", counted)

    assert rows_in(preview(reader, 10).arrow_ipc)["text"] == 2 * [f"row {row}" for row in range(10)]
    assert made == [0, 20_000]


def blobs(*sizes: int) -> pa.Table:
    return pa.table({"blob": pa.array([bytes(size) for size in sizes], pa.binary()), "n": range(len(sizes))})


def test_the_first_rows_of_each_split_come_with_its_name(store: ObjectStore) -> None:
    reader = reader_of(store, train=pa.table({"n": range(600)}), test=pa.table({"n": [7, 8, 9]}))
    assert rows_in(preview(reader, 2).arrow_ipc) == {"split": ["train"] * 2 + ["test"] * 2, "n": [0, 1, 7, 8]}
    assert len(rows_in(preview(reader, 0).arrow_ipc)["n"]) == 13
    for wrong in (-1, 101):
        with pytest.raises(InvalidArgument, match="rows_per_split"):
            preview(reader, wrong)


def test_rows_of_several_groups_are_put_together(store: ObjectStore) -> None:
    reader = reader_of(store, train=blobs(*[100_000] * 5, 3 * MIB, 3 * MIB, 3))
    assert len(reader.row_groups("train")) > 1
    assert rows_in(preview(reader, 100).arrow_ipc)["n"] == [0, 1, 2, 3, 4]


def test_rows_are_whole_and_end_before_the_message_is_full(store: ObjectStore) -> None:
    reader = reader_of(store, train=blobs(3, 9 * MIB, 3), test=blobs(9 * MIB, 3), val=blobs(3, 400_000, 400_000))
    shown = preview(reader, 10)
    rows = rows_in(shown.arrow_ipc)
    assert (rows["split"], [len(blob) for blob in rows["blob"]]) == (["train", "val", "val"], [3, 3, 400_000])
    assert len(shown.arrow_ipc) <= previews.ARROW_BYTES


def test_images_too_large_for_rows_are_on_the_sheet(store: ObjectStore) -> None:
    png = noisy_png(800)
    assert len(png) > previews.ARROW_BYTES
    shown = preview(reader_of(store, train=pa.table({"image": pa.array([png] * 2, pa.binary())})), 10)
    assert rows_in(shown.arrow_ipc) == {"split": [], "image": []}
    assert Image.open(io.BytesIO(shown.contact_sheet_png)).size[1] > 84


def test_a_sheet_of_many_noisy_images_shows_fewer(store: ObjectStore) -> None:
    images = np.random.default_rng(0).integers(0, 256, (100, 84, 84, 3), np.uint8)
    table = pa.table({"image": tensor_array(images)})
    shown = preview(reader_of(store, train=table, test=table, val=table), 100)
    assert previews.SHEET_BYTES // 2 < len(shown.contact_sheet_png) <= previews.SHEET_BYTES


def test_a_preview_of_large_rows_holds_few_of_them(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "PREVIEW_BYTES", 6 * MIB)
    reader = reader_of(store, train=blobs(*[2 * MIB] * 20))
    held: list[int] = []

    def counting(tables: dict[str, pa.Table], names: object) -> bytes:  # noqa: ARG001
        held.append(sum(table.num_rows for table in tables.values()))
        return b""

    monkeypatch.setattr(previews, "contact_sheet", counting)
    preview(reader, 20)
    assert held == [2]


@pytest.mark.parametrize(("columns", "name_bytes", "shown"), [(10_000, 6, 10_000), (2_000, 1_000, 500)])
def test_a_preview_of_very_many_columns_and_splits_has_no_more_than_its_bytes(
    store: ObjectStore, columns: int, name_bytes: int, shown: int
) -> None:
    names = [f"{place}".rjust(name_bytes, "c") for place in range(columns)]
    table = pa.table({name: pa.array([1], pa.int8()) for name in names})
    arrow_ipc = preview(reader_of(store, train=table, test=table), 10).arrow_ipc
    assert len(arrow_ipc) <= previews.ARROW_BYTES
    found = pa.ipc.open_stream(arrow_ipc).schema.names
    assert found == ["split", *names][: len(found)]
    assert len(found) > shown


def answer_of(report: dict[str, Any], arrow_bytes: int = 0) -> data_service_pb2.PreviewVersionResponse:
    return data_service_pb2.PreviewVersionResponse(
        arrow_ipc=bytes(arrow_bytes), report=json_format.ParseDict(report, quality_pb2.QualityReport())
    )


def wide_report(columns: int, text_bytes: int) -> dict[str, Any]:
    """Of columns with a hundred texts each, and some numbers and bars."""
    values = [{"value": {"text": f"{n:03d}".ljust(text_bytes, "x")}, "rowCount": "5"} for n in range(100)]
    numbers = {"min": 0, "max": 1, "histogram": ["100000"] * 20}
    entries = [{"split": "train", "column": f"c{n}", "rowCount": "500", "numbers": numbers} for n in range(columns)]
    return {"columns": [{**one, "values": values[: 100 - n % 2]} for n, one in enumerate(entries)]}


def test_a_report_that_fits_stays_as_it_is() -> None:
    answer = answer_of(wide_report(100, 30), 2 * MIB)
    before = answer.SerializeToString()
    bound_answer(answer)
    assert answer.SerializeToString() == before


def described(files: int = 0, value_names: int = 0, learnt: int = 0) -> data_service_pb2.PreviewVersionResponse:
    """Of a version with so many files of 200 bytes, names of values and learnt categories of 20 bytes, and a report."""
    answer = answer_of(wide_report(100, 30), 2 * MIB)
    answer.version.name, answer.version.row_count = "datasets/d/versions/v", 7
    texts = [f"{n:020d}" for n in range(max(value_names, learnt))]
    answer.version.columns.add(name="a", arrow_type="int64", value_names=texts[:value_names])
    answer.version.columns.add(name="b", arrow_type="int64", value_names=["no", "yes"])
    answer.version.files.extend(resources_pb2.File(path="p" * 128, sha256="0" * 64) for _ in range(files))
    answer.version.transform.steps.add(column="a").ordinal_encode.categories.extend(texts[:learnt])
    return answer


@pytest.mark.parametrize(
    ("made_of", "lost"),
    [({"files": 10_000}, "files"), ({"value_names": 100_000}, "value_names"), ({"learnt": 100_000}, "transform")],
)
def test_of_the_version_what_is_long_goes_and_the_rest_stays(made_of: dict[str, int], lost: str) -> None:
    answer, whole = described(**made_of), described(**made_of)
    assert answer.ByteSize() > ANSWER_BYTES
    bound_answer(answer)
    assert answer.ByteSize() <= ANSWER_BYTES
    (whole.version.columns[0] if lost == "value_names" else whole.version).ClearField(lost)
    assert answer == whole


def test_of_a_version_of_very_many_columns_with_long_names_the_first_are_reported() -> None:
    answer = answer_of({}, 2 * MIB)
    for place in range(10_000):
        answer.version.columns.add(name=f"{place:01000d}", arrow_type="int64")
    bound_answer(answer)
    assert ANSWER_BYTES - 50_000 < answer.ByteSize() <= ANSWER_BYTES
    left = [column.name for column in answer.version.columns]
    assert left == [f"{place:01000d}" for place in range(len(left))]


def test_columns_lose_their_largest_lists_of_values_first() -> None:
    answer, again = (answer_of(wide_report(300, 100), 2 * MIB) for _ in range(2))
    bound_answer(answer)
    bound_answer(again)
    assert ANSWER_BYTES - 15_000 < answer.ByteSize() <= ANSWER_BYTES
    assert answer == again
    assert len(answer.report.columns) == 300
    listed = [len(column.values) for column in answer.report.columns]
    assert listed.count(99) > 0
    assert (listed.count(100), listed.count(99) + listed.count(0)) == (0, 300)
    assert all(column.numbers.histogram for column in answer.report.columns)


@pytest.mark.parametrize(("columns", "left"), [(2_000, 2_000), (8_000, None)])
def test_very_wide_reports_lose_histograms_and_at_last_columns(
    columns: int, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "ANSWER_BYTES", 150_000)
    plain = [
        {"split": "s", "column": f"c{n}", "numbers": {"max": 1, "histogram": ["1000"] * 20}} for n in range(columns)
    ]
    answer = answer_of({"columns": plain}, 50_000)
    bound_answer(answer)
    assert 50_000 < answer.ByteSize() <= 150_000
    if left:
        bars = [bool(column.numbers.histogram) for column in answer.report.columns]
        assert len(bars) == left
        assert bars == sorted(bars, reverse=True)
        assert 0 < sum(bars) < left
    else:
        names = [column.column for column in answer.report.columns]
        assert names == [f"c{n}" for n in range(len(names))]
        assert 0 < len(names) < columns


def test_a_column_with_a_long_frequent_value_lists_none() -> None:
    table = pa.table({"short": ["é" * 100, "a"], "long": ["é" * 101, "a"], "n": [1, 2]})
    statistics = SplitStatistics(table.schema)
    statistics.update(table, 0)
    short, long, _ = statistics.result("train")
    assert sorted(value for value, _ in short.values) == ["a", "é" * 100]
    assert (list(long.values), long.distinct_count) == ([], 2)
    assert statistics.value_counts("long") == {"é" * 101: 1, "a": 1}
