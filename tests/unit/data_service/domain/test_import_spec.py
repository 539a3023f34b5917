from __future__ import annotations

import json
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from data_service.convert import import_spec_from
from data_service.domain.import_spec import (
    BadRows,
    Base,
    ColumnType,
    CsvOptions,
    HoldOut,
    ImportSpec,
    Source,
    check,
)
from millrace.data.v1 import data_service_pb2
from millrace.data.v1.data_service_pb2 import ImportSource, ImportVersionRequest, ParquetSource
from shared.errors import InvalidArgument
from tests.support.cpu_time import cpu_at_most

ROOTS = [PurePosixPath("/in")]
TRAIN = Source(
    split="train", format="idx", uris={"idx.images_uri": "file:///in/images", "idx.labels_uri": "file:///in/labels"}
)
TEST = Source(split="test", format="parquet", uris={"parquet.uri": "s3://bucket/test.parquet"})
CUT = HoldOut(from_split="train", to_split="validation", fraction=0.1, seed=1)
SPEC = ImportSpec(sources=[TRAIN, TEST, replace(TRAIN)], hold_outs=[CUT])


def refused_fields(spec: ImportSpec) -> list[str]:
    with pytest.raises(InvalidArgument) as refused:
        check(spec, ROOTS, s3=True)
    return [field for field, _ in refused.value.fields]


def test_a_whole_spec_is_accepted() -> None:
    check(SPEC, ROOTS, s3=True)


def test_imported_splits_come_first_in_the_order_of_their_sources() -> None:
    assert SPEC.splits == ["train", "test", "validation"]


def test_a_spec_survives_the_log() -> None:
    assert ImportSpec.from_record(json.loads(json.dumps(SPEC.as_record()))) == SPEC


def test_a_request_says_whether_nan_is_null() -> None:
    for asked in (False, True):
        spec = import_spec_from(data_service_pb2.ImportVersionRequest(nan_as_null=asked))
        assert spec.nan_as_null is asked
        assert ImportSpec.from_record(json.loads(json.dumps(spec.as_record()))).nan_as_null is asked


def test_a_spec_of_an_older_log_keeps_nan() -> None:
    record = SPEC.as_record()
    del record["nan_as_null"]
    assert ImportSpec.from_record(record).nan_as_null is False


def test_every_wrong_field_is_named_at_once() -> None:
    spec = ImportSpec(
        sources=[
            replace(TRAIN, split="Train"),
            replace(TEST, uris={"parquet.uri": "file:///etc/passwd"}),
            Source(split="x", format="", uris={}),
        ],
        hold_outs=[
            HoldOut(from_split="nowhere", to_split="v", fraction=0.1, seed=0),
            HoldOut(from_split="x", to_split="test", fraction=1.0, seed=0),
            HoldOut(from_split="x", to_split="v", fraction=float("nan"), seed=0),
        ],
    )
    assert refused_fields(spec) == [
        "sources[0].split",
        "sources[1].parquet.uri",
        "sources[2]",
        "hold_outs[0].from_split",
        "hold_outs[1].to_split",
        "hold_outs[1].fraction",
        "hold_outs[2].to_split",
        "hold_outs[2].fraction",
    ]


def test_options_of_all_formats_survive_the_log() -> None:
    csv = CsvOptions(delimiter=";", column_names=["a"], null_values=["-"], encoding="latin-1")
    spec = ImportSpec(
        sources=[Source(split="train", format="csv", uris={"csv.uri": "datasets/d/uploads/u"}, csv=csv)],
        hold_outs=[],
        column_types=[ColumnType(column="a", arrow_type="int8")],
        bad_rows=BadRows(action="quarantine", max_rows=5),
        checks=[{"column": "a", "notNull": {}}],
        base=Base(version="datasets/d/versions/v1", mode="append"),
        partitioning="none",
    )
    check(spec, [], s3=False)
    assert ImportSpec.from_record(json.loads(json.dumps(spec.as_record()))) == spec


def test_wrong_options_are_all_named_at_once() -> None:
    csv = CsvOptions(delimiter='"', column_names=["a", "", "a"], encoding="ebcdic")
    spec = ImportSpec(
        sources=[
            replace(TRAIN, uris={"idx.images_uri": "file:///in/*", "idx.labels_uri": "file:///in/"}),
            Source(split="train", format="csv", uris={"csv.uri": "file:///in/*.csv"}, csv=csv),
            Source(split="train", format="image_folder", uris={"image_folder.uri": "file:///in/a"}),
            Source(split="train", format="orc", uris={}),
        ],
        hold_outs=[],
        column_types=[
            ColumnType(column="a", arrow_type="int8"),
            ColumnType(column="a", arrow_type="list<int8>"),
            ColumnType(column="", arrow_type="decimal128(99, 1)"),
            ColumnType(column="t", arrow_type="fixed_shape_tensor[value_type=string, shape=[2]]"),
            ColumnType(column="u", arrow_type="fixed_shape_tensor[value_type=int8, shape=[0]]"),
        ],
        bad_rows=BadRows(action="ignore", max_rows=-1),
        base=Base(version="datasets/d", mode=""),
        partitioning="7",
    )
    assert refused_fields(spec) == [
        "sources[0].idx.images_uri",
        "sources[0].idx.labels_uri",
        "sources[1].csv.delimiter",
        "sources[1].csv.column_names[1]",
        "sources[1].csv.column_names[2]",
        "sources[1].csv.encoding",
        "sources[2].image_folder.uri",
        "sources[3]",
        "column_types[1].column",
        "column_types[1].arrow_type",
        "column_types[2].column",
        "column_types[2].arrow_type",
        "column_types[3].arrow_type",
        "column_types[4].arrow_type",
        "bad_rows.action",
        "bad_rows.max_rows",
        "base.version",
        "base.mode",
        "partitioning",
    ]


def test_an_import_that_was_asked_for_before_there_was_partitioning_goes_on_without() -> None:
    record = SPEC.as_record()
    assert record.pop("partitioning") == "hive"
    assert ImportSpec.from_record(record).partitioning == "none"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("PARTITIONING_UNSPECIFIED", "hive"), ("PARTITIONING_HIVE", "hive"), ("PARTITIONING_NONE", "none")],
)
def test_a_request_says_whether_folders_are_columns(given: str, wanted: str) -> None:
    assert import_spec_from(ImportVersionRequest(partitioning=given)).partitioning == wanted


def test_a_partitioning_of_a_later_server_is_refused() -> None:
    source = ImportSource(split="a", parquet=ParquetSource(uri="file:///in/a"))
    request = ImportVersionRequest(sources=[source], partitioning=7)  # type: ignore[arg-type]
    assert refused_fields(import_spec_from(request)) == ["partitioning"]


@pytest.mark.parametrize("sources", [[], [TRAIN] * 65], ids=["none", "too many"])
def test_a_version_has_1_to_64_sources(sources: list[Source]) -> None:
    assert refused_fields(ImportSpec(sources=sources, hold_outs=[])) == ["sources"]


def test_an_import_has_at_most_64_hold_outs() -> None:
    assert refused_fields(ImportSpec(sources=[TRAIN], hold_outs=[CUT] * 65)) == ["hold_outs"]


def csv_named(names: list[str]) -> ImportSpec:
    csv = Source(split="train", format="csv", uris={"csv.uri": "file:///in/a"}, csv=CsvOptions(column_names=names))
    return ImportSpec(sources=[csv], hold_outs=[])


@pytest.mark.timed
def test_very_many_names_of_columns_are_refused_by_their_number_and_soon() -> None:
    many = csv_named([""] * 200_000)
    with cpu_at_most(0.5), pytest.raises(InvalidArgument, match="at most 10000") as refused:
        check(many, ROOTS, s3=True)
    assert refused.value.fields == [("sources[0].csv.column_names", "200000: name at most 10000")]


@pytest.mark.timed
def test_as_many_names_as_a_version_has_columns_are_held_against_each_other_soon() -> None:
    names = [f"c{number}" for number in range(10_000)]
    with cpu_at_most(0.5):
        check(csv_named(names), ROOTS, s3=True)
        assert refused_fields(csv_named([*names[:-1], "c0"])) == ["sources[0].csv.column_names[9999]"]


@pytest.mark.parametrize(("name", "why"), [("a\0", "zero byte"), ("é" * 513, "1026 bytes"), ("_row_id", "_row_id")])
def test_names_that_no_version_can_have_are_refused_by_their_place(name: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as refused:
        check(csv_named(["a", name]), ROOTS, s3=True)
    assert [field for field, _ in refused.value.fields] == ["sources[0].csv.column_names[1]"]
