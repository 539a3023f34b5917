"""A prediction over a version, in this process: what comes out is what a deployment would answer."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service.domain.import_spec import BadRows
from data_service.domain.transform_spec import Workers
from data_service.parallel import P, Results, Work
from data_service.transforms.checking import chained
from inference_service.deploy.rollout_driver import holdout_rows
from inference_service.serve.served_model import ServedModel
from shared.checkpoint import CheckpointEntry, load_checkpoint
from shared.checkpoint.format import WEIGHTS
from shared.code_bundle_registry import load_code
from shared.dataset_version import load_version
from shared.dataset_version.manifest import QUARANTINE, Prediction
from shared.dataset_version.version import read_attachment
from shared.jobs import AttemptContext, JobRecord, JobState
from shared.model_spec import REGRESSION, ModelSpec, TargetScaling
from shared.models.loaded import LoadedModel
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.transforms import schema_of_columns
from shared.transforms.steps import images as decoding
from tests.support import several_inputs
from tests.support.code_folders import store_bundle
from tests.support.own_models import code_of_this_process
from tests.support.predicting import (
    CHECKPOINT,
    CLASS_NAMES,
    PREPARING,
    TABLE_SCHEMA,
    TRAINING,
    marks,
    predict_here,
    seeded,
    write,
)
from tests.support.transforming import SOURCE, commit_tables, rows_of, transform_here
from tests.support.watched_decodes import watched_decodes
from tests.unit.shared.transforms.samples import encoded, pixels

TRAIN, TEST = 3000, 700
# Models compute the same in the last bits only in batches of one size.
CLOSE = 1e-5


@pytest.fixture
def tables(store: ObjectStore) -> dict[str, pa.Table]:
    """The source's splits."""
    splits = {"train": marks(TRAIN, seed=1), "test": marks(TEST, seed=2)}
    commit_tables(store, splits)
    return splits


def served(store: ObjectStore, entry: CheckpointEntry, split: str, rows: int) -> list[Any]:
    """What a deployment of the checkpoint answers for the source's rows."""
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    model = ServedModel(checkpoint)
    return list(model.forward(holdout_rows(store, SOURCE, split, rows, model.signature)).arrays)


def done(job: JobRecord) -> str:
    assert job.state is JobState.SUCCEEDED, job.error
    return job.name


@pytest.mark.usefixtures("tables")
def test_every_row_is_predicted_once_in_its_place_as_a_deployment_answers(store: ObjectStore) -> None:
    entry = write(store)
    rows = rows_of(store, done(predict_here(store, outputs=[])))
    given = rows_of(store, SOURCE)
    assert list(rows) == ["train", "test"]
    for split, count in (("train", TRAIN), ("test", TEST)):
        _, probabilities, labels = served(store, entry, split, count)
        found = rows[split]
        assert [found[name] for name in ("id", "x", "mark", "_row_id")] == [
            given[split][name] for name in ("id", "x", "mark", "_row_id")
        ]
        assert found["prediction"] == labels.tolist()
        assert found["prediction_label"] == [CLASS_NAMES[label] for label in labels]
        np.testing.assert_allclose(found["score"], probabilities.max(axis=1), atol=CLOSE)
        np.testing.assert_allclose(np.array(found["probabilities"]), probabilities, atol=CLOSE)
    assert len(set(rows["train"]["prediction"])) > 1


def test_images_are_decoded_a_few_at_a_time_and_predicted_the_same(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = [encoded(one) for one in pixels(16, (30, 20, 3))]
    source = pa.table({"photo": pa.array(photos, pa.binary()), "id": range(16)})
    commit_tables(store, {"train": source})
    steps = [
        {"column": "photo", "decodeImage": {}},
        {"column": "photo", "resize": {"height": 32, "width": 32}},
        {"column": "photo", "toFloat": {}},
    ]
    model = ModelSpec(builder="torchvision.squeezenet1_1", in_channels=3, num_classes=3)
    write(store, ingested=source.schema, transforms=[{"steps": steps}], input_column="photo", model=model)
    decoded = watched_decodes(monkeypatch)
    at_once = rows_of(store, done(predict_here(store)))
    monkeypatch.setattr(decoding, "PIXELS_AT_ONCE", 4 * 600)
    assert rows_of(store, done(predict_here(store))) == at_once
    assert [len(images) for images in decoded if images] == [16, 4, 4, 4, 4]


@pytest.mark.usefixtures("tables")
def test_the_new_version_says_which_checkpoint_made_it_of_what(store: ObjectStore) -> None:
    entry = write(store)
    version = load_version(store, done(predict_here(store, column_prefix="new_")))
    source = load_version(store, SOURCE)
    assert [(one.version, one.manifest_sha256) for one in version.manifest.parents] == [
        (SOURCE, source.manifest_sha256)
    ]
    assert version.manifest.prediction == Prediction(
        checkpoint=CHECKPOINT,
        checkpoint_sha256=entry.manifest_sha256,
        trained_on="datasets/d/versions/trained-on",
        columns=["new_prediction", "new_prediction_label", "new_score", "new_probabilities"],
    )
    names = {column.name: column.value_names for column in version.columns}
    assert names["new_prediction"] == list(CLASS_NAMES)
    assert list(names) == [*TABLE_SCHEMA.names, *version.manifest.prediction.columns]


@pytest.mark.usefixtures("tables")
def test_the_bytes_do_not_depend_on_the_number_of_workers_and_the_digest_neither(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_service.transforms.predict_job.MIN_PART_BYTES", 1000)
    write(store)
    made = [load_version(store, done(predict_here(store, workers=Workers(most=most)))) for most in (0, 1, 3)]
    assert len(made[0].manifest.files) > 4, "several parts, so that workers have some each"
    assert len({one.manifest_sha256 for one in made}) == 1


@pytest.mark.usefixtures("tables")
def test_a_worker_loads_the_model_once_for_all_of_its_parts(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_service.transforms.predict_job.MIN_PART_BYTES", 1000)
    loads, parts_done = [], []

    class Counted(LoadedModel):
        def __init__(self, *arguments: Any) -> None:
            loads.append(arguments)
            super().__init__(*arguments)

    def one_worker(
        _context: AttemptContext, _folder: str, work: Work[P], parts: Sequence[P], **_: object
    ) -> Results[P]:
        kept = pickle.loads(pickle.dumps(work))
        for part in parts:
            parts_done.append(part)
            yield part, kept(part)

    monkeypatch.setattr("shared.models.loaded.LoadedModel", Counted)
    monkeypatch.setattr("tests.support.predicting.run_here", one_worker)
    write(store)
    done(predict_here(store))
    assert len(parts_done) > 4
    assert len(loads) == 1


@pytest.mark.usefixtures("tables")
def test_one_split_and_some_columns_can_be_chosen_and_the_logits_too(store: ObjectStore) -> None:
    entry = write(store)
    rows = rows_of(store, done(predict_here(store, split="test", columns=["id"], outputs=["logits", "prediction"])))
    assert list(rows) == ["test"]
    assert list(rows["test"]) == ["id", "prediction", "logits", "_row_id"]
    assert rows["test"]["_row_id"] == list(range(TEST))
    logits, _, labels = served(store, entry, "test", TEST)
    assert rows["test"]["prediction"] == labels.tolist()
    np.testing.assert_allclose(np.array(rows["test"]["logits"]), logits, atol=CLOSE)


@pytest.mark.usefixtures("tables")
def test_a_prepared_version_gives_the_predictions_of_its_raw_rows(store: ObjectStore) -> None:
    write(store)
    raw = rows_of(store, done(predict_here(store)))
    prepared = done(transform_here(store, PREPARING))
    on_prepared = rows_of(store, done(predict_here(store, source=prepared)))
    for split in ("train", "test"):
        assert on_prepared[split]["prediction"] == raw[split]["prediction"]
        assert on_prepared[split]["score"] == raw[split]["score"]


@pytest.mark.usefixtures("tables")
def test_predictions_pass_through_the_chain_of_the_new_version_as_if_they_were_ingested(store: ObjectStore) -> None:
    write(store)
    steps = [*PREPARING, {"select": {"columns": ["x", "mark", "id"]}}]
    prepared = done(transform_here(store, steps))
    made = load_version(store, done(predict_here(store, source=prepared, columns=["id", "x"])))
    ingested = {column.name for column in made.manifest.ingested}
    assert ingested == {*TABLE_SCHEMA.names, "prediction", "prediction_label", "score", "probabilities"}
    whole = chained(made.manifest.transforms)
    assert list(whole.output(schema_of_columns(made.manifest.ingested))) == [one.name for one in made.columns]


@pytest.mark.usefixtures("tables")
def test_a_version_with_predictions_can_be_predicted_on_again(store: ObjectStore) -> None:
    write(store)
    first = done(predict_here(store))
    rows = rows_of(store, done(predict_here(store, source=first, column_prefix="again_")))["train"]
    assert rows["again_prediction"] == rows["prediction"]
    assert rows["again_probabilities"] == rows["probabilities"]


@pytest.mark.parametrize("numbers", [1, 2])
@pytest.mark.usefixtures("tables")
def test_a_regression_gives_its_numbers(store: ObjectStore, numbers: int) -> None:
    model = ModelSpec(builder="mlp", in_channels=3, num_classes=numbers, task=REGRESSION)
    entry = write(store, model=model)
    rows = rows_of(store, done(predict_here(store, columns=["id"])))["test"]
    assert list(rows) == ["id", "prediction", "_row_id"]
    (values,) = served(store, entry, "test", TEST)
    np.testing.assert_allclose(np.array(rows["prediction"]).reshape(values.shape), values, atol=CLOSE)


@pytest.mark.usefixtures("tables")
def test_a_target_that_was_scaled_in_training_is_predicted_in_its_own_unit_as_a_deployment_answers(
    store: ObjectStore,
) -> None:
    model = ModelSpec(builder="mlp", in_channels=3, num_classes=1, task=REGRESSION)
    (learnt,) = served(store, write(store, model=model), "test", TEST)
    entry = write(store, model=model, target_scaling=TargetScaling(mean=(500.0,), deviation=(20.0,)))
    (values,) = served(store, entry, "test", TEST)
    rows = rows_of(store, done(predict_here(store, columns=["id"])))["test"]
    np.testing.assert_allclose(values, learnt * 20 + 500, rtol=1e-5)
    np.testing.assert_allclose(np.array(rows["prediction"]).reshape(values.shape), values, rtol=1e-5)


STRICT: list[dict[str, Any]] = [
    {"column": "mark", "ordinalEncode": {"categories": ["a", "b"]}},
    {"column": "x", "standardize": {"mean": 3.0, "deviation": 2.0}},
    {"concat": {"columns": ["x", "mark", "id"], "into": "features"}},
]


def with_strangers(store: ObjectStore) -> None:
    """Rows 5 and 700 of `train`, and the first of `test`, have a mark that the checkpoint does not know."""
    train, test = marks(TRAIN, seed=1).to_pydict(), marks(TEST, seed=2).to_pydict()
    train["mark"][5] = train["mark"][700] = test["mark"][0] = "c"
    commit_tables(store, {"train": pa.table(train, TABLE_SCHEMA), "test": pa.table(test, TABLE_SCHEMA)})
    write(store, transforms=[{"steps": STRICT}])


def test_a_row_that_a_step_cannot_work_on_fails_it_by_its_id_and_leaves_nothing(store: ObjectStore) -> None:
    with_strangers(store)
    failed = predict_here(store)
    assert failed.state is JobState.FAILED
    assert failed.error is not None
    assert (failed.error["kind"], failed.error["reason"]) == ("InvalidArgument", "BAD_ROW")
    assert f"row {TRAIN}: " in failed.error["message"] or "row 5: " in failed.error["message"]
    assert "checkpoint.transform.steps[" in failed.error["message"]
    assert list(store.list(f"{failed.name}/data")) == []


def test_bad_rows_are_left_out_and_kept_aside_where_that_is_asked(store: ObjectStore) -> None:
    with_strangers(store)
    version = load_version(store, done(predict_here(store, bad_rows=BadRows(action="quarantine", max_rows=3))))
    rows = rows_of(store, version.name)
    assert rows["train"]["id"] == [one for one in range(TRAIN) if one not in (5, 700)]
    assert rows["test"]["id"] == list(range(1, TEST))
    assert rows["test"]["_row_id"][0] == TRAIN - 2
    assert version.manifest.quarantined_row_count == 3
    aside = read_attachment(store, version, QUARANTINE) or b""
    assert [f'"row {row}"' in line for line, row in zip(aside.decode().splitlines(), (5, 700, TRAIN), strict=True)]
    too_many = predict_here(store, bad_rows=BadRows(action="quarantine", max_rows=2))
    assert too_many.error is not None
    assert too_many.error["reason"] == "TOO_MANY_BAD_ROWS"


@pytest.mark.usefixtures("tables")
def test_weights_that_do_not_fit_fail_it(store: ObjectStore) -> None:
    write(store, weights=seeded(ModelSpec(builder="mlp", in_channels=4, num_classes=3)))
    failed = predict_here(store)
    assert failed.error is not None
    assert (failed.state, failed.error["reason"]) == (JobState.FAILED, "MODEL_DOES_NOT_LOAD")


@pytest.mark.usefixtures("tables")
def test_damaged_weights_fail_it_with_the_file_named(store: ObjectStore) -> None:
    entry = write(store)
    store.delete(f"{entry.folder}/{WEIGHTS}")
    store.put(f"{entry.folder}/{WEIGHTS}", b"other")
    failed = predict_here(store)
    assert failed.error is not None
    assert (failed.state, failed.error["kind"]) == (JobState.FAILED, "DataLoss")
    assert WEIGHTS in failed.error["message"]


FILLED: list[dict[str, Any]] = [{"column": "x", "fillNulls": {"value": {"number": 3.5}}}, *PREPARING]


def with_nans(store: ObjectStore, missing: float | None, **checkpoint: Any) -> CheckpointEntry:
    """Rows 5 and 700 of `train`, and the first of `test`, have no `x`."""
    train, test = marks(TRAIN, seed=1).to_pydict(), marks(TEST, seed=2).to_pydict()
    train["x"][5] = train["x"][700] = test["x"][0] = missing
    commit_tables(store, {"train": pa.table(train, TABLE_SCHEMA), "test": pa.table(test, TABLE_SCHEMA)})
    return write(store, transforms=[{"steps": FILLED}, {"steps": TRAINING}], **checkpoint)


def test_a_nan_where_training_had_none_is_predicted_as_null_is_and_as_a_deployment_answers(
    tmp_path: Path,
) -> None:
    predicted = []
    for place, missing in (("null", None), ("nan", math.nan)):
        store = open_store(StoreSettings(url=(tmp_path / place).as_uri()))
        entry = with_nans(store, missing, nan_counts={"x": 0})
        rows = rows_of(store, done(predict_here(store, columns=["id"])))
        _, probabilities, labels = served(store, entry, "train", TRAIN)
        assert rows["train"]["prediction"] == labels.tolist()
        np.testing.assert_allclose(np.array(rows["train"]["probabilities"]), probabilities, atol=CLOSE)
        predicted.append(rows)
    assert predicted[0] == predicted[1]


@pytest.mark.parametrize("nan_counts", [None, {"x": 7}], ids=["nothing is known", "training had some"])
def test_a_nan_that_may_be_a_number_is_a_bad_row(store: ObjectStore, nan_counts: dict[str, int] | None) -> None:
    with_nans(store, math.nan, nan_counts=nan_counts)
    failed = predict_here(store)
    assert failed.state is JobState.FAILED
    assert failed.error is not None
    assert (failed.error["kind"], failed.error["reason"]) == ("InvalidArgument", "BAD_ROW")
    assert (
        f"row {TRAIN}: column 'x': nan" in failed.error["message"]
        or "row 5: column 'x': nan" in (failed.error["message"])
    )
    assert list(store.list(f"{failed.name}/data")) == []

    aside = predict_here(store, bad_rows=BadRows(action="quarantine", max_rows=3))
    version = load_version(store, done(aside))
    rows = rows_of(store, version.name)
    assert rows["train"]["id"] == [one for one in range(TRAIN) if one not in (5, 700)]
    assert rows["test"]["id"] == list(range(1, TEST))
    assert version.manifest.quarantined_row_count == 3
    expected = (read_attachment(store, version, QUARANTINE) or b"").decode().splitlines()
    assert all("column 'x': nan" in line for line in expected)


def test_a_nan_in_a_column_that_a_transform_has_changed_is_a_number(store: ObjectStore) -> None:
    with_nans(store, math.nan, nan_counts={"x": 0})
    prepared = done(transform_here(store, FILLED))
    failed = predict_here(store, source=prepared)
    assert failed.error is not None
    assert "column 'x': nan is not finite, and no step fills it" in failed.error["message"]


NET = """
from torch import nn


def build(config):
    return nn.Sequential(nn.Linear(3, config["width"]), nn.ReLU(), nn.Linear(config["width"], 3))
"""


@pytest.mark.usefixtures("tables")
def test_a_model_of_a_users_own_code_predicts_as_its_deployment_answers(store: ObjectStore) -> None:
    bundle = store_bundle(store, {"net.py": NET}).name
    model = ModelSpec(
        builder="", in_channels=3, num_classes=3, code_bundle=bundle, entry="net:build", kwargs={"width": 4}
    )
    with code_of_this_process():
        load_code(store, bundle)
        entry = write(store, model=model)
        _, probabilities, labels = served(store, entry, "test", TEST)
    with code_of_this_process():
        found = rows_of(store, done(predict_here(store, outputs=[])))["test"]

    assert found["prediction"] == labels.tolist()
    np.testing.assert_allclose(np.array(found["probabilities"]), probabilities, atol=CLOSE)


def test_a_model_of_several_inputs_predicts_as_its_deployment_answers(store: ObjectStore) -> None:
    several_inputs.commit_rows(store)
    with code_of_this_process():
        entry, module = several_inputs.write_model(store)
        checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
        model = ServedModel(checkpoint)
        held_out = holdout_rows(store, several_inputs.VERSION, "validation", 33, model.signature)
        _, probabilities, labels = model.forward(held_out).checked()
    with code_of_this_process():
        job = predict_here(store, source=several_inputs.VERSION, checkpoint=entry.name, outputs=[])
        found = rows_of(store, done(job))["validation"]

    assert found["prediction"] == labels.tolist()
    np.testing.assert_allclose(np.array(found["probabilities"]), probabilities, atol=CLOSE)
    logits = several_inputs.logits_of(module, several_inputs.arrays(several_inputs.table(33, 1)))
    assert labels.tolist() == logits.argmax(1).tolist()
