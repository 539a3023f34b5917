"""What is said of a request for predictions before anything is looked up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from data_service.domain.import_spec import BadRows
from data_service.domain.transform_spec import CheckpointRef, PredictSpec, Workers, check_prediction
from shared.errors import InvalidArgument
from tests.support.cpu_time import cpu_at_most

GOOD = PredictSpec(
    source="datasets/d/versions/v1",
    checkpoint=CheckpointRef(name="trainingJobs/j", folder="f", sha256="a" * 64),
    source_sha256="b" * 64,
    split="test",
    columns=("id",),
    outputs=("score",),
    column_prefix="new_",
    bad_rows=BadRows(action="quarantine", max_rows=3),
    workers=Workers(most=2, batch_size=8, cpus=2, gpus=0.5),
)


def test_a_spec_comes_back_from_its_record() -> None:
    again = PredictSpec.from_record(json.loads(json.dumps(GOOD.as_record())))
    check_prediction(again)
    assert again == PredictSpec(**{**GOOD.__dict__, "columns": ["id"], "outputs": ["score"]})


def test_every_broken_field_is_reported_at_once() -> None:
    broken = PredictSpec(
        source="datasets/d",
        checkpoint=CheckpointRef(name="", sha256="xyz"),
        columns=["a", "a"],
        outputs=["score", "score"],
        column_prefix="p" * 64,
        bad_rows=BadRows(max_rows=-1),
        workers=Workers(most=-1, batch_size=0, cpus=-2, gpus=1.5),
    )
    with pytest.raises(InvalidArgument) as refused:
        check_prediction(broken)
    assert [field for field, _ in refused.value.fields] == [
        "source",
        "checkpoint",
        "checkpoint_sha256",
        "columns[1]",
        "outputs[1]",
        "column_prefix",
        "bad_rows.max_rows",
        "workers.max_workers",
        "workers.batch_size",
        "workers.cpus",
        "workers.gpus",
    ]


@pytest.mark.parametrize(
    ("many", "field"),
    [(replace(GOOD, columns=[""] * 200_000), "columns"), (replace(GOOD, outputs=[""] * 200_000), "outputs")],
    ids=["columns", "outputs"],
)
@pytest.mark.timed
def test_very_many_names_are_refused_by_their_number_and_soon(many: PredictSpec, field: str) -> None:
    with cpu_at_most(0.5), pytest.raises(InvalidArgument, match="200000: name at most 10000") as refused:
        check_prediction(many)
    assert [path for path, _ in refused.value.fields] == [field]


def test_a_prefix_that_no_name_of_a_column_can_have_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"column_prefix: .* zero byte"):
        check_prediction(replace(GOOD, column_prefix="a\0"))
