"""SuggestTrainingSpec of a service that runs: what it answers is taken as it is, and what it refuses has its status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import suggestion_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.specs import csv_source
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import Jobs
from tests.support.training import TrainStack
from tests.support.transforming import create_job
from tests.support.versions_here import import_here, prepare_here

VERSION, PREPARED = "datasets/flowers/versions/v1", "datasets/flowers/versions/v2"


def flowers(rows: int = 120) -> pa.Table:
    random = np.random.default_rng(1)
    kinds = np.array(["aster", "daisy", "rose"])[random.integers(0, 3, rows)]
    length = [None if number % 17 == 0 else float(number % 40) for number in range(rows)]
    return pa.table(
        {"kind": kinds, "length": length, "colour": np.array(["red", "white"])[random.integers(0, 2, rows)]}
    )


@pytest.fixture(scope="module")
def imported(file_stack: TrainStack, tmp_path_factory: pytest.TempPathFactory) -> TrainStack:
    folder: Path = tmp_path_factory.mktemp("flowers")
    pa_csv.write_csv(flowers(), folder / "flowers.csv")
    import_here(file_stack.store, VERSION, folder, [csv_source("train", folder / "flowers.csv")])
    return file_stack


def asked(stack: TrainStack, version: str, **spec: Any) -> suggestion_pb2.SuggestTrainingSpecResponse:
    request = suggestion_pb2.SuggestTrainingSpecRequest(dataset_version=version, spec=res.TrainingSpec(**spec))
    answer: suggestion_pb2.SuggestTrainingSpecResponse = stack.client.rpc.SuggestTrainingSpec(request, timeout=60)
    return answer


def test_a_table_is_prepared_and_what_is_suggested_then_is_taken_as_it_is(imported: TrainStack) -> None:
    first = asked(imported, VERSION, label_column="kind")
    assert first.preparation.source == VERSION
    assert [step.WhichOneof("op") for step in first.preparation.transform.steps] == [
        *("ordinal_encode", "fill_nulls", "standardize", "one_hot_encode", "concat")
    ]
    prepare_here(imported.store, PREPARED, first.preparation)

    request = suggestion_pb2.SuggestTrainingSpecRequest(dataset_version=PREPARED, spec=first.spec)
    again = imported.client.rpc.SuggestTrainingSpec(request, timeout=60)
    assert not again.HasField("preparation")
    assert (again.spec.model.in_channels, again.spec.model.num_classes) == (3, 3)
    assert again.spec.dataset_version == PREPARED
    wanted = pb.CreateTrainingJobRequest(training_job_id="flowers", spec=again.spec, validate_only=True)
    checked = imported.client.rpc.CreateTrainingJob(wanted, timeout=60)
    assert checked.spec.label_column == "kind"


def test_an_impossible_suggestion_is_refused_with_its_status(imported: TrainStack) -> None:
    create_job(Jobs(imported.store, IMPORT_KIND), "datasets/flowers/versions/unmade", {})
    for version, spec, code, expected in (
        (VERSION, {}, grpc.StatusCode.INVALID_ARGUMENT, "kind, colour may be it"),
        (VERSION, {"label_column": "smell"}, grpc.StatusCode.INVALID_ARGUMENT, "kind, length, colour"),
        (VERSION, {"validation_split": "v"}, grpc.StatusCode.INVALID_ARGUMENT, "has train"),
        ("datasets/flowers/versions/none", {}, grpc.StatusCode.NOT_FOUND, "none"),
        ("datasets/flowers/versions/unmade", {}, grpc.StatusCode.FAILED_PRECONDITION, "is not ACTIVE"),
        ("flowers", {}, grpc.StatusCode.INVALID_ARGUMENT, "datasets/{d}/versions/{v}"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            asked(imported, version, **spec)
        assert refused.value.code() is code, version
        assert expected in str(refused.value.details())
