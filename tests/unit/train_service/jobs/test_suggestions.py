"""Suggestions for versions in a store: their real statistics, and preparations that really run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.train.v1 import resources_pb2
from millrace_client.specs import parquet_source
from shared.dataset_version import load_version
from shared.errors import FailedPrecondition, InvalidArgument
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.transforming import commit_tables, rows_of
from tests.support.versions_here import import_here, prepare_here, suggest_here
from train_service.convert_specs import spec_from_proto
from train_service.loading.preprocessing import fitted

VERSION, PREPARED = "datasets/d/versions/v1", "datasets/d/versions/v2"
Spec = resources_pb2.TrainingSpec


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))


def imported(store: ObjectStore, folder: Path, **splits: pa.Table) -> None:
    for split, table in splits.items():
        pq.write_table(table, folder / split)
    import_here(store, VERSION, folder, [parquet_source(split, folder / split) for split in splits])


def prepared(store: ObjectStore, given: Spec | None = None) -> Spec:
    """The specification for the prepared version, which a job would take."""
    answer = suggest_here(store, VERSION, given)
    assert answer.HasField("preparation")
    prepare_here(store, PREPARED, answer.preparation)
    again = suggest_here(store, PREPARED, answer.spec)
    assert not again.HasField("preparation")
    fitted(store, spec_from_proto(again.spec, ()))
    return again.spec


def test_rows_without_a_label_are_left_out_whatever_the_column_is_called(store: ObjectStore, tmp_path: Path) -> None:
    name = 'the "class"\\'
    label = pa.array(
        [None if row % 10 == 0 else float("nan") if row % 10 == 1 else float(row % 2) for row in range(200)]
    )
    imported(store, tmp_path, train=pa.table({name: label, "a": np.arange(200.0)}))
    spec = prepared(store, Spec(label_column=name))
    rows = rows_of(store, PREPARED)
    assert sum(len(split[name]) for split in rows.values()) == 160
    assert {one for split in rows.values() for one in split[name]} == {0, 1}
    assert (spec.model.in_channels, spec.model.num_classes) == (1, 2)


def test_a_class_that_training_rows_lack_and_nulls_of_one_split_alone_are_no_error(
    store: ObjectStore, tmp_path: Path
) -> None:
    train = pa.table({"label": ["a", "b"] * 40, "x": np.arange(80), "y": [1.0, 2.0] * 40, "z": ["p", "q"] * 40})
    validation = pa.table(
        {"label": ["c", "b"], "x": pa.array([None, 3], pa.int64()), "y": [None, 1.0], "z": ["r", None]}
    )
    imported(store, tmp_path, train=train, validation=validation)
    spec = prepared(store)
    assert spec.model.num_classes == 3
    (label,) = (column for column in load_version(store, PREPARED).columns if column.name == "label")
    assert label.value_names == ["a", "b", "c"]
    assert len(rows_of(store, PREPARED)["validation"]["features"]) == 2


def test_a_regression_learns_any_number(store: ObjectStore, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    table = pa.table({"price": random.normal(900, 90, 300), "on": random.random(300) < 0.5, "size": random.random(300)})
    imported(store, tmp_path, train=table)
    spec = prepared(store)
    assert (spec.task, spec.target_scaling) == (Spec.TASK_REGRESSION, Spec.TARGET_SCALING_STANDARD)
    assert spec.model.in_channels == 2


def test_images_take_the_mean_and_deviation_of_their_own_pixels(store: ObjectStore, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (50, 16, 16, 3)).astype(np.uint8)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 16 * 16 * 3)
    image = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.uint8(), [16, 16, 3]), flat)
    table = pa.table({"image": image, "label": np.arange(50) % 2})
    commit_with_statistics(store, tmp_path, table)
    answer = suggest_here(store, VERSION, Spec(validation_split="train"))
    normalize = answer.spec.transform.steps[-1].normalize
    assert normalize.mean[0] == pytest.approx(pixels.mean() / 255, abs=1e-4)
    assert normalize.std[0] == pytest.approx(pixels.std() / 255, abs=1e-4)
    fitted(store, spec_from_proto(answer.spec, ()))


def commit_with_statistics(store: ObjectStore, folder: Path, table: pa.Table) -> None:
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    from millrace_client.specs import arrow_source

    import_here(store, VERSION, folder, [arrow_source("train", folder / "rows.arrow")])


def test_a_transform_of_ones_own_says_how_wide_the_input_is(store: ObjectStore, tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1] * 20, "a": np.arange(40.0), "b": np.arange(40)})
    imported(store, tmp_path, train=table, validation=table)
    given = Spec()
    given.transform.steps.add().concat.columns.extend(["a", "b"])
    given.transform.steps[0].concat.into = "both"
    answer = suggest_here(store, VERSION, given)
    assert not answer.HasField("preparation")
    assert (answer.spec.input_column, answer.spec.model.in_channels) == ("both", 2)
    assert answer.spec.transform == given.transform
    fitted(store, spec_from_proto(answer.spec, ()))


def test_a_version_without_statistics_is_refused(store: ObjectStore) -> None:
    commit_tables(store, {"train": pa.table({"label": [0, 1] * 20, "a": [1.0, 2.0] * 20})}, VERSION)
    with pytest.raises(FailedPrecondition, match="has no statistics of column 'label'"):
        suggest_here(store, VERSION)


def test_a_program_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    imported(store, tmp_path, train=pa.table({"label": [0, 1] * 20, "a": np.arange(40.0)}))
    given = Spec()
    given.program.entry = "train:loop"
    with pytest.raises(InvalidArgument, match=r"spec\.program"):
        suggest_here(store, VERSION, given)
