from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from millrace.common.v1 import transform_pb2
from millrace_client import specs, steps


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("s3://bucket/a b", "s3://bucket/a b"),
        ("datasets/d/uploads/u", "datasets/d/uploads/u"),
        ("/data/part-*.csv", "file:///data/part-*.csv"),
        ("/data/images/", "file:///data/images/"),
        ("/data/a b%.csv", "file:///data/a%20b%25.csv"),
        (Path("/data/a?.csv"), "file:///data/a%3F.csv"),
        ("/data/../in/*.csv", "file:///in/*.csv"),
        ("/data/../in/", "file:///in/"),
        (Path("/data/../in/a.csv"), "file:///in/a.csv"),
    ],
)
def test_paths_become_uris_and_names_stay(given: str | Path, uri: str) -> None:
    assert specs.uri(given) == uri


def test_each_source_is_of_its_format() -> None:
    made = {
        "parquet": specs.parquet_source("train", "/x"),
        "arrow": specs.arrow_source("train", "/x"),
        "csv": specs.csv_source("train", "/x", delimiter=";", null_values=["-"]),
        "json_lines": specs.json_lines_source("train", "/x"),
        "image_folder": specs.image_folder_source("train", "/x"),
        "image_tar": specs.image_tar_source("train", "/x"),
    }
    for format_name, source in made.items():
        assert (source.split, source.WhichOneof("format")) == ("train", format_name)
    assert made["image_folder"].image_folder.uri == "file:///x/"
    assert (made["csv"].csv.delimiter, list(made["csv"].csv.null_values)) == (";", ["-"])


def test_each_step_is_of_its_kind() -> None:
    made = {
        "select": steps.select("a", "b"),
        "drop": steps.drop("a"),
        "rename": steps.rename({"a": "b"}),
        "cast": steps.cast("a", "int64"),
        "filter": steps.filter_rows("a > 0"),
        "fill_nulls": steps.fill_nulls("a", 0),
        "standardize": steps.standardize("a"),
        "min_max_scale": steps.min_max_scale("a", clip=True),
        "ordinal_encode": steps.ordinal_encode("a"),
        "one_hot_encode": steps.one_hot_encode("a", unknown_as_zeros=True),
        "bucketize": steps.bucketize("a", [1, 2]),
        "concat": steps.concat(["a", "b"], "x"),
        "decode_image": steps.decode_image("a"),
        "resize": steps.resize("a", 8, 9),
        "center_crop": steps.center_crop("a", 8, 8),
        "grayscale": steps.grayscale("a"),
        "to_float": steps.to_float("a"),
        "normalize": steps.normalize(0.5, [0.1, 0.2]),
        "random_crop": steps.random_crop(8, 8, padding=2),
        "random_flip": steps.random_flip(),
        "random_rotation": steps.random_rotation(10),
        "color_jitter": steps.color_jitter(brightness=0.1),
        "custom": steps.custom("m:f", ["a"]),
        "tokenize": steps.tokenize("a", 16, vocabulary_size=300),
    }
    kinds = {field.name for field in transform_pb2.TransformStep.DESCRIPTOR.oneofs_by_name["op"].fields}
    assert set(made) == kinds
    for kind, step in made.items():
        assert step.WhichOneof("op") == kind


def test_nulls_are_filled_with_a_value_or_a_statistic() -> None:
    assert steps.fill_nulls("a", False).fill_nulls.value.WhichOneof("kind") == "boolean"
    assert steps.fill_nulls("a", 1.5).fill_nulls.value.number == 1.5
    median = steps.fill_nulls("a", statistic="median").fill_nulls
    assert median.statistic == transform_pb2.FillNulls.STATISTIC_MEDIAN
    with pytest.raises(ValueError, match="one of both"):
        steps.fill_nulls("a")
    with pytest.raises(ValueError, match="STATISTIC_RANGE"):
        steps.fill_nulls("a", statistic="range")


def test_a_tokenizer_is_learnt_or_brought() -> None:
    brought = steps.tokenize("a", 16, tokenizer="{}", ids_column="ids").tokenize
    assert (brought.tokenizer, brought.max_length, brought.ids_column) == ("{}", 16, "ids")
    with pytest.raises(ValueError, match="one of both"):
        steps.tokenize("a", 16)


def test_rules_of_splits_name_their_splits_in_order() -> None:
    by_hash = specs.hash_split(["id"], {"train": 9, "test": 1}, seed=3).hash
    assert [(share.split, share.weight) for share in by_hash.shares] == [("train", 9), ("test", 1)]
    by_time = specs.time_split("t", {"train": datetime(2019, 3, 1, tzinfo=UTC)}, "test").time
    assert [(period.split, period.HasField("before")) for period in by_time.periods] == [
        ("train", True),
        ("test", False),
    ]
