"""From which step of its chain on a checkpoint is run over a version, and on which versions it cannot be."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from data_service.transforms.checking import preparation
from data_service.version_attempt import columns_of
from shared.checkpoint import CheckpointContent, load_checkpoint
from shared.dataset_version.manifest import Manifest
from shared.errors import FailedPrecondition, InvalidArgument
from shared.storage import ObjectStore
from tests.support.predicting import PREPARING, TABLE_SCHEMA, write

NAME = "datasets/d/versions/v1"
PREPARED = pa.schema([("id", pa.int64()), ("x", pa.float32()), ("mark", pa.fixed_shape_tensor(pa.float32(), [2]))])


@pytest.fixture
def content(store: ObjectStore) -> CheckpointContent:
    entry = write(store)
    return load_checkpoint(store, entry.folder, entry.manifest_sha256).content


def manifest(schema: pa.Schema = TABLE_SCHEMA, *transforms: list[dict[str, Any]]) -> Manifest:
    return Manifest(
        columns=columns_of(schema, {}),
        splits=[],
        files=[],
        ingested=columns_of(TABLE_SCHEMA, {}),
        transforms=[{"steps": steps} for steps in transforms],
    )


def ops(content: CheckpointContent, source: Manifest) -> list[str]:
    """Of the steps that are still to do, those that change values."""
    return [step.op for step in preparation(content, source, NAME).steps.steps if step.op not in ("select", "drop")]


def test_raw_rows_go_through_the_whole_chain_and_give_only_what_it_reads(content: CheckpointContent) -> None:
    assert ops(content, manifest()) == ["standardize", "one_hot_encode", "concat"]
    assert preparation(content, manifest(), NAME).reads == ["x", "mark"]


def test_rows_of_the_version_that_was_trained_on_go_on_where_they_are(content: CheckpointContent) -> None:
    assert ops(content, manifest(PREPARED, PREPARING)) == ["concat"]
    half = pa.schema([("x", pa.float32()), ("mark", pa.string())])
    assert ops(content, manifest(half, PREPARING[:1])) == ["one_hot_encode", "concat"]


def test_steps_that_leave_every_value_do_not_count(content: CheckpointContent) -> None:
    filtered: list[dict[str, Any]] = [{"filter": {"expression": "id > 3"}}, {"drop": {"columns": ["id"]}}]
    without_id = pa.schema([TABLE_SCHEMA.field("x"), TABLE_SCHEMA.field("mark")])
    assert ops(content, manifest(without_id, filtered)) == ["standardize", "one_hot_encode", "concat"]
    assert ops(content, manifest(PREPARED, filtered[:1], PREPARING)) == ["concat"]


@pytest.mark.parametrize(
    "gone",
    [
        [{"column": "x", "standardize": {"mean": 3.5, "deviation": 2.0}}],
        [PREPARING[1]],
        [*PREPARING, {"column": "x", "cast": {"arrowType": "double"}}],
    ],
    ids=["other values learnt", "another step first", "a step more"],
)
def test_rows_that_went_through_other_steps_are_refused(content: CheckpointContent, gone: list[dict[str, Any]]) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        preparation(content, manifest(PREPARED, gone), NAME)
    assert refused.value.specific_reason == "PREPROCESSING_MISMATCH"
    assert NAME in refused.value.message


def test_every_column_that_does_not_fit_is_named_with_both_types(content: CheckpointContent) -> None:
    with pytest.raises(InvalidArgument) as refused:
        preparation(content, manifest(pa.schema([("x", pa.int64())])), NAME)
    assert [field for field, _ in refused.value.fields] == ["source", "source"]
    assert "column 'x' is int64: the checkpoint takes double" in refused.value.message
    assert "column 'mark' is missing: the checkpoint takes string" in refused.value.message


def test_a_tensor_of_another_shape_is_refused(store: ObjectStore) -> None:
    def schema(side: int) -> pa.Schema:
        return pa.schema([("image", pa.fixed_shape_tensor(pa.uint8(), [side, side]))])

    entry = write(
        store, ingested=schema(28), transforms=[{"steps": [{"column": "image", "toFloat": {}}]}], input_column="image"
    )
    of_images = load_checkpoint(store, entry.folder, entry.manifest_sha256).content
    with pytest.raises(InvalidArgument) as refused:
        preparation(of_images, manifest(schema(32)), NAME)
    expected = "column 'image' is uint8 of shape (32, 32): the checkpoint takes uint8 of shape (28, 28)"
    assert expected in refused.value.message
