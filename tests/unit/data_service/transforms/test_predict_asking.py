"""What is refused when predictions are asked for, and what stays while they are made."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from data_service.datasets import Datasets, Versions
from data_service.deletion import Deletions
from data_service.domain.transform_spec import CheckpointRef, PredictSpec
from data_service.version_jobs import VersionJobs
from shared.checkpoint import CheckpointRegistry
from shared.checkpoint.references import live_references
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import DataLoss, FailedPrecondition, InvalidArgument, MillraceError, NotFound
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, succeed
from shared.model_spec import ModelSpec
from shared.resource_log import ResourceLog
from shared.storage import ObjectStore
from tests.support.predicting import CHECKPOINT, JOB, TABLE_SCHEMA, marks, write
from tests.support.transforming import SOURCE, commit_tables

ASKED = PredictSpec(source=SOURCE, checkpoint=CheckpointRef(name=CHECKPOINT))


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """With a source and a checkpoint that fits it."""
    Datasets(store).create("d", display_name="", description="", request_id="", body_sha256="", validate_only=False)
    commit_tables(store, {"train": marks(50), "test": marks(20)})
    write(store)
    return Jobs(store, IMPORT_KIND)


@pytest.fixture
def ask(store: ObjectStore, jobs: Jobs) -> Callable[..., JobRecord]:
    datasets = Datasets(store)
    version_jobs = VersionJobs(
        store, jobs, datasets, Versions(store, jobs, datasets), import_roots=[], custom_allowed=frozenset()
    )

    def start(*, request_id: str = "", validate_only: bool = False, **spec: Any) -> JobRecord:
        return version_jobs.start_predict(
            "datasets/d",
            "",
            replace(ASKED, **spec),
            request_id=request_id,
            body_sha256="body",
            validate_only=validate_only,
        )

    return start


def keys(store: ObjectStore) -> list[str]:
    return sorted(info.key for info in store.list())


def of_checkpoint(name: str, sha256: str = "") -> CheckpointRef:
    return CheckpointRef(name=name, sha256=sha256)


@pytest.mark.parametrize(
    ("spec", "kind", "expected"),
    [
        ({"checkpoint": of_checkpoint(f"{JOB}/checkpoints/none")}, NotFound, "checkpoints/none does not exist"),
        ({"checkpoint": of_checkpoint("trainingJobs/none")}, NotFound, "trainingJobs/none does not exist"),
        ({"checkpoint": of_checkpoint("models/x")}, InvalidArgument, "checkpoint: "),
        ({"checkpoint": of_checkpoint(CHECKPOINT, "0" * 64)}, FailedPrecondition, "checkpoint_sha256: "),
        ({"source": "datasets/d/versions/none"}, NotFound, "versions/none does not exist"),
        ({"split": "none"}, InvalidArgument, "use one of train, test"),
        ({"columns": ["none"]}, InvalidArgument, "columns[0]: 'none': use some of id, x, mark"),
        ({"outputs": ["score", "label"]}, InvalidArgument, "outputs[1]: 'label': use some of prediction, "),
    ],
)
def test_an_invalid_predict_request_is_refused_and_writes_nothing(
    store: ObjectStore, ask: Callable[..., JobRecord], spec: dict[str, Any], kind: type[MillraceError], expected: str
) -> None:
    before = keys(store)
    with pytest.raises(kind) as refused:
        ask(request_id=str(uuid.uuid4()), **spec)
    assert expected in refused.value.message
    assert keys(store) == before


def test_a_column_with_the_name_of_a_prediction_is_left_out_or_the_prediction_is_named_otherwise(
    store: ObjectStore, ask: Callable[..., JobRecord]
) -> None:
    scored = marks(20).append_column("score", pa.array([1.0] * 20))
    commit_tables(store, {"train": scored}, "datasets/d/versions/scored")
    with pytest.raises(InvalidArgument) as refused:
        ask(source="datasets/d/versions/scored")
    assert refused.value.fields[0][0] == "columns"
    assert "'score'" in refused.value.message
    # Its name stands for the ingested column further up, even where that does not go along.
    with pytest.raises(InvalidArgument, match="column_prefix"):
        ask(source="datasets/d/versions/scored", columns=["id"])
    assert ask(source="datasets/d/versions/scored", column_prefix="m_").name
    assert ask(source="datasets/d/versions/scored", columns=["id"], outputs=["prediction"]).name


def test_a_label_is_refused_where_the_classes_have_no_names(store: ObjectStore, ask: Callable[..., JobRecord]) -> None:
    write(store, class_names=())
    with pytest.raises(InvalidArgument, match="has no names for its classes"):
        ask(outputs=["prediction_label"])


def test_a_checkpoint_whose_job_is_being_deleted_is_refused(store: ObjectStore, ask: Callable[..., JobRecord]) -> None:
    ResourceLog(store, f"{JOB}/log").append(None, {"state": "DELETING"})
    with pytest.raises(FailedPrecondition) as refused:
        ask()
    assert refused.value.specific_reason == "JOB_DELETING"


def test_a_damaged_checkpoint_is_refused(store: ObjectStore, ask: Callable[..., JobRecord]) -> None:
    entry = write(store)
    store.delete(f"{entry.folder}/manifest.json")
    with pytest.raises(DataLoss, match=r"manifest\.json is missing"):
        ask()


def test_a_function_that_the_operator_does_not_allow_is_refused(
    store: ObjectStore, ask: Callable[..., JobRecord]
) -> None:
    step = {"custom": {"function": "os:system", "columns": ["x"]}}
    write(store, transforms=[{"steps": [step]}], input_column="x")
    with pytest.raises(FailedPrecondition) as refused:
        ask()
    assert refused.value.specific_reason == "CUSTOM_FUNCTION_NOT_ALLOWED"
    assert "data service" in refused.value.message


def test_validating_makes_nothing(store: ObjectStore, ask: Callable[..., JobRecord]) -> None:
    before = keys(store)
    assert ask(validate_only=True).name == "datasets/d/versions/v1"
    assert keys(store) == before


def test_the_best_checkpoint_of_a_job_is_fixed_when_it_is_asked_for_and_a_repeated_call_changes_nothing(
    store: ObjectStore, ask: Callable[..., JobRecord]
) -> None:
    request_id = str(uuid.uuid4())
    job = ask(request_id=request_id, checkpoint=of_checkpoint(JOB))
    assert job.spec["predict"]["checkpoint"]["name"] == CHECKPOINT
    write(store, name=f"{JOB}/checkpoints/c2")
    assert ask(request_id=request_id, checkpoint=of_checkpoint(JOB)) == job


def test_source_and_checkpoint_stay_while_they_are_read_and_no_longer(
    store: ObjectStore, jobs: Jobs, ask: Callable[..., JobRecord]
) -> None:
    job = ask()
    registry, now = CheckpointRegistry(store, JOB), time.time()
    assert live_references(store, CHECKPOINT, now) == [job.name]
    assert registry.retire(registry.entries()) == []
    with pytest.raises(FailedPrecondition, match=job.name):
        Deletions(store, jobs).delete(SOURCE)
    jobs.transition(job.name, lambda newest: begin_attempt(newest, now), attempt=1)
    jobs.transition(job.name, lambda newest: succeed(newest, {}, now), attempt=1)
    assert live_references(store, CHECKPOINT, now) == []
    assert [entry.name for entry in registry.retire(registry.entries())] == [CHECKPOINT]
    Deletions(store, jobs).delete(SOURCE)


def test_a_source_of_another_kind_is_refused_with_both_types(store: ObjectStore, ask: Callable[..., JobRecord]) -> None:
    whole = marks(20)
    commit_tables(
        store,
        {"train": whole.set_column(1, "x", whole["id"]).select(TABLE_SCHEMA.names[:2])},
        "datasets/d/versions/other",
    )
    with pytest.raises(InvalidArgument) as refused:
        ask(source="datasets/d/versions/other")
    assert "column 'x' is int64: the checkpoint takes double" in refused.value.message
    assert "column 'mark' is missing" in refused.value.message


def test_a_model_of_a_users_own_code_predicts_nothing_where_such_code_does_not_run(
    store: ObjectStore, ask: Callable[..., JobRecord]
) -> None:
    model = ModelSpec(
        builder="", in_channels=3, num_classes=3, code_bundle=f"codeBundles/{'0' * 64}", entry="net:build"
    )
    write(store, name=f"{JOB}/checkpoints/own", model=model, weights=b"")
    before = keys(store)

    with pytest.raises(FailedPrecondition, match="MILLRACE_OWN_CODE=trusted") as refused:
        ask(checkpoint=of_checkpoint(f"{JOB}/checkpoints/own"), validate_only=True)

    assert refused.value.specific_reason == "OWN_CODE_OFF"
    assert keys(store) == before
