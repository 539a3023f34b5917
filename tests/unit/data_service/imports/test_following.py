"""Versions that follow another, what is left out of them, and what gates them."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_service import reconciler
from data_service.domain.import_spec import BadRows, Base, ColumnType, CsvOptions, HoldOut, ImportSpec, Source
from shared.dataset_version import DatasetVersion, VersionReader, load_version
from shared.dataset_version.manifest import QUARANTINE, Parent
from shared.dataset_version.version import IMPORT_KIND, read_attachment, read_report
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store

DATASET = "datasets/d/versions"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))


def run(store: ObjectStore, folder: Path, version: str, spec: ImportSpec) -> JobRecord:
    """The job, over."""
    jobs, name, now = Jobs(store, IMPORT_KIND), f"{DATASET}/{version}", time.time()
    recorded = {"import": spec.as_record(), "import_roots": [str(folder)], "request_id": ""}
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=recorded, create_time=now, update_time=now))
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    run_attempt(reconciler.run, store, IMPORT_KIND, name, 1)
    return jobs.get(name, name)


def made(store: ObjectStore, folder: Path, version: str, spec: ImportSpec) -> DatasetVersion:
    job = run(store, folder, version, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    return load_version(store, job.name)


def refused(store: ObjectStore, folder: Path, version: str, spec: ImportSpec) -> dict[str, Any]:
    job = run(store, folder, version, spec)
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert [info.key for info in store.list(f"{job.name}/data")] == []
    return job.error


def parquet(folder: Path, name: str, split: str, **columns: object) -> Source:
    pq.write_table(pa.table(columns), folder / name)
    return Source(split=split, format="parquet", uris={"parquet.uri": (folder / name).as_uri()})


def csv(folder: Path, name: str, split: str, text: str) -> Source:
    (folder / name).write_text(text)
    return Source(split=split, format="csv", uris={"csv.uri": (folder / name).as_uri()})


def images(folder: Path, name: str, classes: list[str]) -> Source:
    """One small image of each class."""
    for number, one in enumerate(classes):
        (folder / name / one).mkdir(parents=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / name / one / f"{number}.png")
    uris = {"image_folder.uri": (folder / name).as_uri() + "/"}
    return Source(split="train", format="image_folder", uris=uris)


def rows(store: ObjectStore, version: DatasetVersion, split: str) -> dict[str, list[Any]]:
    reader = VersionReader(store, version)
    columns: dict[str, list[Any]] = pa.concat_tables(reader.read(one) for one in reader.row_groups(split)).to_pydict()
    return columns


def test_appended_rows_follow_those_of_the_base_in_each_split(store: ObjectStore, tmp_path: Path) -> None:
    sources = [parquet(tmp_path, "a", "train", n=[1, 2]), parquet(tmp_path, "b", "test", n=[9])]
    first = made(store, tmp_path, "v1", ImportSpec(sources=sources, hold_outs=[]))
    more = [parquet(tmp_path, "c", "extra", n=[7]), parquet(tmp_path, "d", "train", n=[3])]

    second = made(
        store, tmp_path, "v2", ImportSpec(sources=more, hold_outs=[], base=Base(version=first.name, mode="append"))
    )

    assert [split.name for split in second.manifest.splits] == ["train", "test", "extra"]
    assert rows(store, second, "train") == {"n": [1, 2, 3]}
    assert rows(store, second, "test") == {"n": [9]}
    assert rows(store, second, "extra") == {"n": [7]}
    assert second.manifest.parents == [Parent(version=first.name, manifest_sha256=first.manifest_sha256)]
    assert rows(store, first, "train") == {"n": [1, 2]}


def test_a_replacement_keeps_no_row_of_its_base_but_its_name(store: ObjectStore, tmp_path: Path) -> None:
    first = made(store, tmp_path, "v1", ImportSpec(sources=[parquet(tmp_path, "a", "train", n=[1])], hold_outs=[]))

    replacing = Base(version=first.name, mode="replace")
    sources = [parquet(tmp_path, "b", "all", other=["x"])]
    second = made(store, tmp_path, "v2", ImportSpec(sources=sources, hold_outs=[], base=replacing))

    assert rows(store, second, "all") == {"other": ["x"]}
    assert second.manifest.parents[0].version == first.name


def test_rows_of_other_columns_cannot_be_appended(store: ObjectStore, tmp_path: Path) -> None:
    first = made(store, tmp_path, "v1", ImportSpec(sources=[parquet(tmp_path, "a", "train", n=[1])], hold_outs=[]))
    appending = Base(version=first.name, mode="append")

    other = [parquet(tmp_path, "b", "train", n=["x"])]
    error = refused(store, tmp_path, "v2", ImportSpec(sources=other, hold_outs=[], base=appending))

    assert error["reason"] == "SCHEMA_MISMATCH"
    assert error["metadata"]["field"] == "sources[0]"


def test_whole_numbers_may_be_appended_to_a_column_of_doubles(store: ObjectStore, tmp_path: Path) -> None:
    first = made(store, tmp_path, "v1", ImportSpec(sources=[csv(tmp_path, "a", "train", "x\n1.5\n")], hold_outs=[]))
    appending = Base(version=first.name, mode="append")

    more = [csv(tmp_path, "b", "train", "x\n2\n")]
    second = made(store, tmp_path, "v2", ImportSpec(sources=more, hold_outs=[], base=appending))

    assert rows(store, second, "train") == {"x": [1.5, 2.0]}


def test_doubles_are_not_appended_to_a_column_of_whole_numbers(store: ObjectStore, tmp_path: Path) -> None:
    first = made(store, tmp_path, "v1", ImportSpec(sources=[csv(tmp_path, "a", "train", "label\n1\n")], hold_outs=[]))
    appending = Base(version=first.name, mode="append")

    more = [csv(tmp_path, "b", "train", "label\n2\n"), csv(tmp_path, "c", "train", "label\n2.5\n")]
    error = refused(store, tmp_path, "v2", ImportSpec(sources=more, hold_outs=[], base=appending))

    assert error["reason"] == "SCHEMA_MISMATCH"
    assert error["metadata"]["field"] == "sources[1]"
    assert "label: double" in error["message"]
    assert "label: int64" in error["message"]
    assert "column_types" in error["message"]


def test_the_type_of_the_base_stands_though_its_sources_differ(store: ObjectStore, tmp_path: Path) -> None:
    first = made(store, tmp_path, "v1", ImportSpec(sources=[csv(tmp_path, "a", "train", "x\n1.5\n")], hold_outs=[]))
    appending = Base(version=first.name, mode="append")

    more = [csv(tmp_path, "b", "train", "x\n2\n"), csv(tmp_path, "c", "train", "x\n2.5\n")]
    second = made(store, tmp_path, "v2", ImportSpec(sources=more, hold_outs=[], base=appending))

    assert [column.arrow_type for column in second.columns] == ["double"]
    assert rows(store, second, "train") == {"x": [1.5, 2.0, 2.5]}


def test_sources_of_whole_numbers_and_of_doubles_make_doubles(store: ObjectStore, tmp_path: Path) -> None:
    sources = [csv(tmp_path, "a", "train", "x\n1\n"), csv(tmp_path, "b", "train", "x\n2.5\n")]

    version = made(store, tmp_path, "v1", ImportSpec(sources=sources, hold_outs=[]))

    assert rows(store, version, "train") == {"x": [1.0, 2.5]}


def test_labels_keep_their_numbers_when_images_of_new_classes_are_appended(store: ObjectStore, tmp_path: Path) -> None:
    first = made(store, tmp_path, "v1", ImportSpec(sources=[images(tmp_path, "a", ["bee", "wasp"])], hold_outs=[]))
    appending = Base(version=first.name, mode="append")

    more = [images(tmp_path, "b", ["ant", "bee"])]
    second = made(store, tmp_path, "v2", ImportSpec(sources=more, hold_outs=[], base=appending))

    names = {column.name: column.value_names for column in second.columns}["label"]
    assert names == ["bee", "wasp", "ant"]
    read = rows(store, second, "train")
    assert [names[label] for label in read["label"]] == ["bee", "wasp", "ant", "bee"]
    assert read["path"] == ["bee/0.png", "wasp/1.png", "ant/0.png", "bee/1.png"]


def with_labels_of(arrow_type: str, store: ObjectStore, tmp_path: Path) -> ImportSpec:
    """Append bees and ants to a version of bees and wasps, both with labels of that type."""
    types = [ColumnType(column="label", arrow_type=arrow_type)]
    sources = [images(tmp_path, "a", ["bee", "wasp"])]
    first = made(store, tmp_path, "v1", ImportSpec(sources=sources, hold_outs=[], column_types=types))
    more = [images(tmp_path, "b", ["ant", "bee"])]
    base = Base(version=first.name, mode="append")
    return ImportSpec(sources=more, hold_outs=[], column_types=types, base=base)


@pytest.mark.parametrize(
    ("arrow_type", "labels"),
    [("int32", [0, 1, 2, 0]), ("string", ["0", "1", "2", "0"]), ("double", [0.0, 1.0, 2.0, 0.0])],
)
def test_labels_of_a_given_type_keep_their_numbers_too(
    store: ObjectStore, tmp_path: Path, arrow_type: str, labels: list[Any]
) -> None:
    second = made(store, tmp_path, "v2", with_labels_of(arrow_type, store, tmp_path))

    assert {column.name: column.value_names for column in second.columns}["label"] == ["bee", "wasp", "ant"]
    assert rows(store, second, "train")["label"] == labels


def test_labels_of_a_type_that_cannot_hold_their_new_numbers_are_refused(store: ObjectStore, tmp_path: Path) -> None:
    error = refused(store, tmp_path, "v2", with_labels_of("bool", store, tmp_path))

    assert error["reason"] == "SCHEMA_MISMATCH"
    assert error["metadata"]["field"] == "sources[0]"
    assert "bool" in error["message"]


def test_nulls_in_a_column_that_its_file_declares_without_are_bad_rows(store: ObjectStore, tmp_path: Path) -> None:
    fields = [pa.field("n", pa.int64(), nullable=False), pa.field("s", pa.string(), nullable=False)]
    table = pa.Table.from_arrays([pa.array([1, None, 3]), pa.array(["a", "b", None])], schema=pa.schema(fields))
    with pa.OSFile(str(tmp_path / "a"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    sources = [Source(split="train", format="arrow", uris={"arrow.uri": (tmp_path / "a").as_uri()})]

    error = refused(store, tmp_path, "v1", ImportSpec(sources=sources, hold_outs=[]))
    assert error["reason"] == "BAD_ROW"
    assert "column 'n' is null" in error["message"]

    policy = BadRows(action="quarantine")
    version = made(store, tmp_path, "v2", ImportSpec(sources=sources, hold_outs=[], bad_rows=policy))
    assert rows(store, version, "train") == {"n": [1], "s": ["a"]}
    assert version.manifest.quarantined_row_count == 2


def test_a_bad_row_ends_the_import_with_its_place(store: ObjectStore, tmp_path: Path) -> None:
    sources = [csv(tmp_path, "a.csv", "train", "n,s\n1,a\n2,b,too many\n3,c\n")]

    error = refused(store, tmp_path, "v1", ImportSpec(sources=sources, hold_outs=[]))

    assert error["reason"] == "BAD_ROW"
    assert "a.csv" in error["message"]
    assert "3" in error["metadata"]["place"]


NAN = float("nan")


@pytest.mark.parametrize("arrow_type", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_nan_becomes_null_where_it_is_asked_for_and_stays_a_number_else(
    store: ObjectStore, tmp_path: Path, arrow_type: pa.DataType
) -> None:
    column = pa.array([1.5, NAN, None, -0.0], pa.float64()).cast(arrow_type)
    source = parquet(tmp_path, "a", "train", x=column, n=[1, 2, 3, 4])
    kept = made(store, tmp_path, "v1", ImportSpec(sources=[source], hold_outs=[]))
    assert read_report(store, kept)["columns"][0]["nanCount"] == 1

    version = made(store, tmp_path, "v2", ImportSpec(sources=[source], hold_outs=[], nan_as_null=True))
    assert rows(store, version, "train")["x"] == [1.5, None, None, 0.0]
    statistics = read_report(store, version)["columns"][0]
    assert (statistics["nullCount"], statistics["nanCount"]) == (2, 0)


def test_nan_becomes_null_in_texts_and_in_columns_that_were_declared_without_nulls(
    store: ObjectStore, tmp_path: Path
) -> None:
    csv_text = csv(tmp_path, "a", "train", "x\nNaN\n1.5\n")
    texts = dataclasses.replace(csv_text, csv=CsvOptions(null_values=["-"]))
    (tmp_path / "b").write_text('{"x": "nan"}\n{"x": 2.5}\n')
    lines = Source(split="train", format="json_lines", uris={"json_lines.uri": (tmp_path / "b").as_uri()})
    pq.write_table(
        pa.table([[NAN, 3.5]], schema=pa.schema([pa.field("x", pa.float64(), nullable=False)])), tmp_path / "c"
    )
    declared = Source(split="train", format="parquet", uris={"parquet.uri": (tmp_path / "c").as_uri()})
    types = [ColumnType(column="x", arrow_type="double")]
    spec = ImportSpec(sources=[texts, lines, declared], hold_outs=[], column_types=types, nan_as_null=True)
    version = made(store, tmp_path, "v1", spec)
    assert rows(store, version, "train")["x"] == [None, 1.5, None, 2.5, None, 3.5]


def test_checks_see_the_null_that_was_nan(store: ObjectStore, tmp_path: Path) -> None:
    source = parquet(tmp_path, "a", "train", x=[1.5, NAN])
    check = {"column": "x", "action": "ACTION_QUARANTINE", "notNull": {}}
    version = made(store, tmp_path, "v1", ImportSpec(sources=[source], hold_outs=[], checks=[check], nan_as_null=True))
    assert rows(store, version, "train")["x"] == [1.5]
    assert version.manifest.quarantined_row_count == 1


def test_tensors_and_the_rows_of_a_base_keep_their_nan(store: ObjectStore, tmp_path: Path) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.array([[NAN, 1.0]]))
    source = parquet(tmp_path, "a", "train", t=tensors, x=[NAN])
    first = made(store, tmp_path, "v1", ImportSpec(sources=[source], hold_outs=[]))
    base = Base(version=first.name, mode="append")
    version = made(store, tmp_path, "v2", ImportSpec(sources=[source], hold_outs=[], base=base, nan_as_null=True))
    columns = read_report(store, version)["columns"]
    counts = [(one["column"], one["nanCount"], one["nullCount"]) for one in columns]
    assert counts == [("t", 2, 0), ("x", 1, 1)]


def test_bad_rows_are_kept_aside_with_their_reason(store: ObjectStore, tmp_path: Path) -> None:
    sources = [csv(tmp_path, "a.csv", "train", "n,s\n1,a\n2,b,too many\nx,c\n4,d\n")]
    spec = ImportSpec(
        sources=sources,
        hold_outs=[],
        column_types=[ColumnType(column="n", arrow_type="int64")],
        bad_rows=BadRows(action="quarantine"),
    )

    version = made(store, tmp_path, "v1", spec)

    assert rows(store, version, "train") == {"n": [1, 4], "s": ["a", "d"]}
    assert version.manifest.quarantined_row_count == 2
    data = read_attachment(store, version, QUARANTINE)
    assert data is not None
    lines = [json.loads(line) for line in data.splitlines()]
    assert len(lines) == 2
    assert all(line["source"].endswith("a.csv") and line["reason"] and line["excerpt"] for line in lines)
    assert read_report(store, version)["quarantinedRowCount"] == 2


def test_more_bad_rows_than_allowed_end_the_import(store: ObjectStore, tmp_path: Path) -> None:
    sources = [csv(tmp_path, "a.csv", "train", "n,s\n1,a\n2,b,c\n3,b,c\n")]
    policy = BadRows(action="quarantine", max_rows=1)

    error = refused(store, tmp_path, "v1", ImportSpec(sources=sources, hold_outs=[], bad_rows=policy))

    assert error["reason"] == "TOO_MANY_BAD_ROWS"


def test_a_quote_that_is_not_closed_costs_one_row_with_hold_outs_too(store: ObjectStore, tmp_path: Path) -> None:
    lines = [f"{number},name{number}" for number in range(20_000)]
    lines[5] = '5,"oops'
    policy = BadRows(action="quarantine", max_rows=1)
    spec = ImportSpec(
        sources=[csv(tmp_path, "a.csv", "train", "\n".join(["n,s", *lines]))],
        hold_outs=[HoldOut(from_split="train", to_split="test", fraction=0.1, seed=1)],
        bad_rows=policy,
    )

    version = made(store, tmp_path, "v1", spec)

    kept = sorted(rows(store, version, "train")["n"] + rows(store, version, "test")["n"])
    assert kept == [number for number in range(20_000) if number != 5]
    assert version.manifest.quarantined_row_count == 1
    data = read_attachment(store, version, QUARANTINE)
    assert data is not None
    assert json.loads(data)["place"] == "line 7"


def test_the_lines_of_a_bad_record_count_against_the_bad_rows_allowed(store: ObjectStore, tmp_path: Path) -> None:
    sources = [csv(tmp_path, "a.csv", "train", 'n,s\n1,a\n2,"x\ny\nz",c\n')]
    policies = [BadRows(action="quarantine", max_rows=most) for most in (2, 3)]

    specs = [ImportSpec(sources=sources, hold_outs=[], bad_rows=policy) for policy in policies]

    assert refused(store, tmp_path, "v1", specs[0])["reason"] == "TOO_MANY_BAD_ROWS"
    assert made(store, tmp_path, "v2", specs[1]).manifest.quarantined_row_count == 3


@pytest.mark.parametrize("action", ["ACTION_FAIL", "ACTION_QUARANTINE"])
def test_a_check_leaves_rows_out_or_ends_the_import(store: ObjectStore, tmp_path: Path, action: str) -> None:
    sources = [parquet(tmp_path, "a", "train", n=[1, 2, None, 2])]
    checks = [
        {"column": "n", "action": action, "unique": {}},
        {"column": "n", "action": action, "notNull": {}},
    ]
    spec = ImportSpec(sources=sources, hold_outs=[], checks=checks)

    if action == "ACTION_FAIL":
        assert refused(store, tmp_path, "v1", spec)["reason"] == "QUALITY_CHECK_FAILED"
    else:
        version = made(store, tmp_path, "v1", spec)
        assert rows(store, version, "train") == {"n": [1, 2]}
        assert [one["quarantined"] for one in read_report(store, version)["checks"]] == [1, 1]


def test_a_version_check_is_held_against_the_base(store: ObjectStore, tmp_path: Path) -> None:
    first = made(
        store, tmp_path, "v1", ImportSpec(sources=[parquet(tmp_path, "a", "train", n=list(range(100)))], hold_outs=[])
    )
    replacing = Base(version=first.name, mode="replace")
    drift = {"column": "n", "drift": {"maxPopulationStabilityIndex": 0.1}}

    other = [parquet(tmp_path, "b", "train", n=list(range(90, 190)))]
    error = refused(store, tmp_path, "v2", ImportSpec(sources=other, hold_outs=[], base=replacing, checks=[drift]))

    assert error["reason"] == "QUALITY_CHECK_FAILED"
    same = [parquet(tmp_path, "c", "train", n=list(range(100)))]
    made(store, tmp_path, "v3", ImportSpec(sources=same, hold_outs=[], base=replacing, checks=[drift]))


def test_equal_sources_give_equal_digests(store: ObjectStore, tmp_path: Path) -> None:
    text = "n,s\n" + "".join(f"{number},row {number}\n" for number in range(5000)) + "1,2,3\n"
    spec = ImportSpec(
        sources=[csv(tmp_path, "a.csv", "train", text)], hold_outs=[], bad_rows=BadRows(action="quarantine")
    )

    assert made(store, tmp_path, "v1", spec).manifest_sha256 == made(store, tmp_path, "v2", spec).manifest_sha256


def test_a_base_that_is_another_version_by_then_fails_the_import(store: ObjectStore, tmp_path: Path) -> None:
    sources = [parquet(tmp_path, "a", "train", n=[1])]
    first = made(store, tmp_path, "v1", ImportSpec(sources=sources, hold_outs=[]))
    base = Base(version=first.name, mode="append", manifest_sha256="0" * 64)

    error = refused(store, tmp_path, "v2", ImportSpec(sources=sources, hold_outs=[], base=base))

    assert error["reason"] == "BASE_CHANGED"


def partitioned(folder: Path, name: str, split: str, table: pa.Table, *columns: str) -> Source:
    """As pyarrow and Spark write it."""
    pq.write_to_dataset(table, folder / name, partition_cols=list(columns))
    return Source(split=split, format="parquet", uris={"parquet.uri": (folder / name).as_uri() + "/"})


def test_columns_of_folders_are_columns_of_the_version(store: ObjectStore, tmp_path: Path) -> None:
    table = pa.table({"n": list(range(100)), "country": ["de", "fr", None, "fr"] * 25, "month": [1, 2] * 50})
    spec = ImportSpec(
        sources=[partitioned(tmp_path, "a", "train", table, "country", "month")],
        hold_outs=[HoldOut(from_split="train", to_split="test", fraction=0.2, seed=1)],
        column_types=[ColumnType(column="month", arrow_type="int8")],
        bad_rows=BadRows(action="quarantine"),
        checks=[{"column": "country", "action": "ACTION_QUARANTINE", "notNull": {}}],
    )

    version = made(store, tmp_path, "v1", spec)

    assert [(column.name, column.arrow_type) for column in version.columns] == [
        ("n", "int64"),
        ("country", "string"),
        ("month", "int8"),
    ]
    read = {split: rows(store, version, split) for split in ("train", "test")}
    kept = sorted(zip(*(read["train"][name] + read["test"][name] for name in ("n", "country", "month")), strict=True))
    assert kept == [
        (n, country, month) for n, country, month in zip(*table.to_pydict().values(), strict=True) if country
    ]
    assert len(read["test"]["n"]) == 15
    assert [int(one["quarantined"]) for one in read_report(store, version)["checks"]] == [25]


def test_rows_of_further_folders_can_be_appended(store: ObjectStore, tmp_path: Path) -> None:
    days = pa.table({"n": [1, 2], "day": [20240101, 20240102]})
    first = made(
        store, tmp_path, "v1", ImportSpec(sources=[partitioned(tmp_path, "a", "train", days, "day")], hold_outs=[])
    )
    appending = Base(version=first.name, mode="append")
    partitioned(tmp_path, "a", "train", pa.table({"n": [3], "day": [20240103]}), "day")
    root = (tmp_path / "a").as_uri()

    def spec(uri: str) -> ImportSpec:
        source = Source(split="train", format="parquet", uris={"parquet.uri": uri})
        return ImportSpec(sources=[source], hold_outs=[], base=appending)

    assert refused(store, tmp_path, "v2", spec(f"{root}/day=20240103/"))["reason"] == "SCHEMA_MISMATCH"
    second = made(store, tmp_path, "v3", spec(f"{root}/day=20240103*/"))
    assert rows(store, second, "train") == {"n": [1, 2, 3], "day": [20240101, 20240102, 20240103]}


def test_folders_are_no_columns_where_the_import_says_so(store: ObjectStore, tmp_path: Path) -> None:
    source = partitioned(tmp_path, "a", "train", pa.table({"n": [1, 2], "day": [1, 2]}), "day")

    version = made(store, tmp_path, "v1", ImportSpec(sources=[source], hold_outs=[], partitioning="none"))

    assert rows(store, version, "train") == {"n": [1, 2]}


def test_a_folder_that_names_a_column_of_its_file_leaves_nothing_behind(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "n=1").mkdir()
    source = parquet(tmp_path, "n=1/a.parquet", "train", n=[1])
    source.uris["parquet.uri"] = tmp_path.as_uri() + "/*/a.parquet"

    error = refused(store, tmp_path, "v1", ImportSpec(sources=[source], hold_outs=[]))

    assert (error["kind"], error["reason"]) == ("InvalidArgument", "CORRUPT_SOURCE")
    assert "n%3D1/a.parquet cannot be imported: it has a column 'n'" in error["message"]
