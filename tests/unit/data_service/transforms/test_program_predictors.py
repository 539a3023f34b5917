"""Predictions by a program's checkpoint, in this process: the columns that its bundle's predictor gives, row by row."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service.datasets import Datasets, Versions
from data_service.domain.import_spec import BadRows
from data_service.domain.transform_spec import CheckpointRef, PredictSpec, Workers, check_prediction
from data_service.transforms.predict_job import check_inputs, output_columns
from data_service.version_jobs import VersionJobs
from inference_service.domain.signature import RAW, Rows
from inference_service.serve.served_model import ServedPredictor
from shared.bundle_predictor import DeclaredTensor
from shared.checkpoint.format import load_program_checkpoint, node_copy
from shared.code_bundle_registry import load_code
from shared.dataset_version import load_version
from shared.dataset_version.manifest import Prediction, tensor_array
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import FailedPrecondition, InvalidArgument
from shared.jobs import JobRecord, Jobs, JobState
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.code_folders import LOOP, store_bundle
from tests.support.own_models import code_of_this_process
from tests.support.predicting import CHECKPOINT, predict_here, write, write_program
from tests.support.transforming import SOURCE, commit_tables, rows_of

PREDICTOR = """
import json
import os

import numpy as np


class Predictor:
    inputs = {"x": ("FP32", [2]), "n": ("FP32", [1]), "text": ("BYTES", [])}
    outputs = {"sum": ("FP32", [2]), "length": ("INT64", []), "shout": ("BYTES", []), "even": ("BOOL", [])}

    def __init__(self, checkpoint_dir):
        with open(os.path.join(checkpoint_dir, "state.json")) as file:
            self.factor = json.load(file)["factor"]

    def predict(self, inputs):
        assert inputs["n"].shape[1:] == (1,) and inputs["n"].dtype == np.float32
        if (inputs["n"] < 0).any():
            raise ValueError("negative")
        lengths = np.array([len(text) for text in inputs["text"]])
        shouts = np.array([text.upper() for text in inputs["text"]], object)
        return {"sum": inputs["x"] * self.factor + inputs["n"], "length": lengths, "shout": shouts,
                "even": lengths % 2 == 0}


class Other(Predictor):
    outputs = {"shout": ("BYTES", [])}


class Latin(Other):
    def predict(self, inputs):
        return {"shout": np.array([b"\\xff"] * len(inputs["text"]), object)}
"""
FILES = {"state.json": json.dumps({"factor": 3.0}).encode()}
TRAIN, TEST = 700, 90
Ask = Callable[..., JobRecord]


def table(rows: int, first: int, null_at: int = -1) -> pa.Table:
    ids = np.arange(first, first + rows)
    x = tensor_array(np.stack([ids, ids + 0.5], 1))
    texts = [None if at == null_at else "é" * (at % 4) for at in range(rows)]
    return pa.table({"id": ids, "x": x, "n": pa.array(ids % 7), "text": pa.array(texts, pa.string())})


@pytest.fixture
def bundle(store: ObjectStore) -> Iterator[str]:
    """That of the predictor; code that a test loads is forgotten afterwards."""
    name = store_bundle(store, {"train.py": LOOP, "serve.py": PREDICTOR}).name
    with code_of_this_process():
        yield name


def predicted(store: ObjectStore, **spec: Any) -> JobRecord:
    return predict_here(store, **{"predictor": "serve:Predictor", **spec})


def test_every_row_is_predicted_once_in_its_place_as_its_replica_answers(store: ObjectStore, bundle: str) -> None:
    commit_tables(store, {"train": table(TRAIN, 0), "test": table(TEST, 1000)})
    entry = write_program(store, bundle, FILES)
    done = predicted(store, workers=Workers(most=2))
    assert done.state is JobState.SUCCEEDED, done.error
    load_code(store, bundle)
    content = load_program_checkpoint(store, entry.folder, entry.manifest_sha256)
    served = ServedPredictor(content, "serve:Predictor", node_copy(store, entry.folder, entry.manifest_sha256))
    rows, source = rows_of(store, done.name), rows_of(store, SOURCE)
    assert {split: len(one["id"]) for split, one in rows.items()} == {"train": TRAIN, "test": TEST}
    for split, there in source.items():
        assert [rows[split][name] for name in there] == list(there.values()), "the rows, in their order"
        given = {
            "x": np.array(there["x"], np.float32),
            "n": np.array(there["n"], np.float32).reshape(-1, 1),
            "text": np.array([one.encode() for one in there["text"]], object),
        }
        total, length, shout, even = served.forward(Rows(RAW, given)).arrays
        assert np.array_equal(np.array(rows[split]["sum"], np.float32), total)
        assert rows[split]["length"] == length.tolist()
        assert rows[split]["shout"] == [one.decode() for one in shout.tolist()]
        assert rows[split]["even"] == even.tolist()
    manifest = load_version(store, done.name).manifest
    names = ["sum", "length", "shout", "even"]
    assert manifest.prediction == Prediction(
        checkpoint=CHECKPOINT,
        checkpoint_sha256=entry.manifest_sha256,
        trained_on="datasets/d/versions/trained-on",
        columns=names,
    )
    types = {column.name: column.arrow_type for column in manifest.columns}
    assert [types[name] for name in names[1:]] == ["int64", "string", "bool"]


def test_outputs_are_chosen_and_named_and_the_digest_is_the_same_each_time(store: ObjectStore, bundle: str) -> None:
    commit_tables(store, {"test": table(TEST, 0)})
    write_program(store, bundle, FILES)
    chosen: dict[str, Any] = {"outputs": ["length"], "column_prefix": "m_", "columns": ["id"]}
    first = predicted(store, workers=Workers(most=1), **chosen)
    again = predicted(store, workers=Workers(most=3), **chosen)
    (rows,) = rows_of(store, first.name).values()
    assert sorted(rows) == ["_row_id", "id", "m_length"]
    assert load_version(store, first.name).manifest_sha256 == load_version(store, again.name).manifest_sha256


def test_rows_with_nulls_end_the_job_or_are_kept_aside(store: ObjectStore, bundle: str) -> None:
    commit_tables(store, {"test": table(TEST, 0, null_at=5)})
    write_program(store, bundle, FILES)
    failed = predicted(store)
    assert failed.error is not None
    assert failed.error["kind"] == "InvalidArgument"
    assert "row 5: column 'text': null" in failed.error["message"]
    done = predicted(store, bad_rows=BadRows(action="quarantine"))
    assert done.state is JobState.SUCCEEDED, done.error
    (rows,) = rows_of(store, done.name).values()
    assert rows["id"] == [one for one in range(TEST) if one != 5]
    assert load_version(store, done.name).manifest.quarantined_row_count == 1


@pytest.mark.parametrize(
    ("predictor", "kind", "expected"),
    [
        ("serve:Missing", "FailedPrecondition", "serve:Missing of codeBundles/"),
        ("serve:Latin", "FailedPrecondition", "gave text that no column can hold, for one of the rows 0 to 63"),
        ("", "FailedPrecondition", "train:Predictor of codeBundles/"),
    ],
)
def test_a_predictors_error_fails_the_job_with_its_kind_and_message(
    store: ObjectStore, bundle: str, predictor: str, kind: str, expected: str
) -> None:
    commit_tables(store, {"test": table(TEST, 0)})
    write_program(store, bundle, FILES)
    failed = predicted(store, predictor=predictor)
    assert failed.error is not None
    assert failed.error["kind"] == kind
    assert expected in failed.error["message"], failed.error


def test_an_error_of_a_predictor_names_its_line_and_the_rows(store: ObjectStore, bundle: str) -> None:
    negative = table(TEST, 0).set_column(2, "n", pa.array(-np.arange(TEST) + 70))
    commit_tables(store, {"test": negative})
    write_program(store, bundle, FILES)
    failed = predicted(store)
    assert failed.error is not None
    assert "serve.py:" in failed.error["message"]
    assert "ValueError: negative (in the batch of the rows 64 to 89 of split 'test')" in failed.error["message"]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (
            {"y": ("FP32", (2,))},
            "column 'y' is missing: the predictor takes FP32 of shape [2]; make it of several columns",
        ),
        ({"x": ("FP32", (3,))}, "column 'x' is float64 of shape (2)"),
        ({"x": ("INT64", (2,))}, "column 'x' is float64 of shape (2): the predictor takes INT64"),
        ({"n": ("INT32", ())}, "column 'n' is int64: the predictor takes INT32"),
        ({"text": ("FP32", ())}, "column 'text' is string"),
        ({"n": ("BYTES", ())}, "column 'n' is int64"),
    ],
)
def test_columns_that_do_not_fit_are_named(store: ObjectStore, inputs: dict[str, Any], expected: str) -> None:
    commit_tables(store, {"test": table(3, 0)})
    declared = [DeclaredTensor(name, *one) for name, one in inputs.items()]
    with pytest.raises(InvalidArgument) as refused:
        check_inputs(declared, load_version(store, SOURCE).manifest, SOURCE)
    assert expected in refused.value.message


@pytest.mark.parametrize(
    ("declared", "spec", "expected"),
    [
        (("label", "BYTES", (2,)), {}, "a column of text has one value a row"),
        (("free", "FP32", (-1,)), {}, "the values of a column have one shape"),
        (("a", "FP32", ()), {"outputs": ["b"]}, "outputs[0]: 'b': use some of a"),
        (("_row_id", "FP32", ()), {}, "must not be named '_row_id'"),
    ],
)
def test_outputs_that_no_column_can_hold_are_refused(declared: Any, spec: dict[str, Any], expected: str) -> None:
    asked = PredictSpec(source=SOURCE, checkpoint=CheckpointRef(name=CHECKPOINT), **spec)
    with pytest.raises(InvalidArgument) as refused:
        output_columns(asked, [DeclaredTensor(*declared)])
    assert expected in refused.value.message


@pytest.fixture
def ask(store: ObjectStore) -> Ask:
    datasets, jobs = Datasets(store), Jobs(store, IMPORT_KIND)
    datasets.create("d", display_name="", description="", request_id="", body_sha256="", validate_only=False)
    commit_tables(store, {"test": table(3, 0)})

    def start(*, is_trusted: bool = True, **spec: Any) -> JobRecord:
        version_jobs = VersionJobs(
            store,
            jobs,
            datasets,
            Versions(store, jobs, datasets),
            import_roots=[],
            custom_allowed=frozenset(),
            own_code=OwnCode(is_trusted=is_trusted),
        )
        asked = replace(PredictSpec(source=SOURCE, checkpoint=CheckpointRef(name=CHECKPOINT)), **spec)
        return version_jobs.start_predict(
            "datasets/d", "", asked, request_id=str(uuid.uuid4()), body_sha256="body", validate_only=False
        )

    return start


def test_code_of_a_bundle_needs_the_operators_leave(store: ObjectStore, ask: Ask, bundle: str) -> None:
    write_program(store, bundle, FILES)
    with pytest.raises(FailedPrecondition) as refused:
        ask(is_trusted=False)
    assert refused.value.specific_reason == "OWN_CODE_OFF"
    assert ask(predictor="serve:Predictor").spec["predict"]["predictor"] == "serve:Predictor"
    with pytest.raises(InvalidArgument, match=r"columns\[0\]: 'y'"):
        ask(columns=["y"])


def test_a_script_names_its_predictor(store: ObjectStore, ask: Ask, bundle: str) -> None:
    write_program(store, bundle, FILES, entry="cells.py")
    with pytest.raises(FailedPrecondition, match=r"cells\.py .* is a script"):
        ask()
    assert ask(predictor="serve:Predictor").name


def test_a_predictor_is_for_a_programs_checkpoint_alone(store: ObjectStore, ask: Ask) -> None:
    write(store)
    with pytest.raises(InvalidArgument, match=r"predictor: 'serve:Predictor': leave it out"):
        ask(predictor="serve:Predictor")


@pytest.mark.parametrize("predictor", ["serve", ":Predictor", "serve:a b", "a" * 300 + ":B"])
def test_a_malformed_predictor_is_refused(predictor: str) -> None:
    with pytest.raises(InvalidArgument, match=r"predictor: "):
        check_prediction(PredictSpec(source=SOURCE, checkpoint=CheckpointRef(name=CHECKPOINT), predictor=predictor))
