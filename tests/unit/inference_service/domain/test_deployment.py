from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inference_service.domain.deployment import (
    Deployment,
    ModelVersion,
    State,
    check_spec,
    with_deletion,
    with_failure,
    with_loaded,
    with_removal,
)
from inference_service.domain.signature import Signature, TensorSpec
from inference_service.serve.models import choose_version, find_version
from shared.errors import Conflict, DataLoss, FailedPrecondition, InvalidArgument, NotFound, Unavailable

SIGNATURE = Signature((TensorSpec("x", "UINT8", (-1,)),), TensorSpec("x", "FP32", (-1,)), ())
UNSET: dict[str, Any] = {
    "num_replicas": 0,
    "threads_per_replica": 0,
    "max_batch_size": 0,
    "max_batch_delay_s": None,
    "max_queued_rows": 0,
}


def version(number: str = "1", **changes: Any) -> ModelVersion:
    job = "trainingJobs/j"
    known = ModelVersion(
        number=number, checkpoint=f"{job}/checkpoints/c", folder="f", checkpoint_sha256="00", training_job=job
    )
    return replace(known, **changes)


def deployment(state: State = State.LOADING, *versions: ModelVersion) -> Deployment:
    return Deployment(
        name="deployments/digits",
        uid="a" * 32,
        spec=check_spec(checkpoint="trainingJobs/j", **UNSET),
        state=state,
        generation=1,
        operation="operations/o",
        request_id="",
        versions=versions or (version(signature=SIGNATURE if state is State.READY else None),),
        create_time=1.0,
        update_time=1.0,
    )


def test_zeros_mean_defaults() -> None:
    spec = check_spec(checkpoint="trainingJobs/j", **UNSET)
    assert (spec.num_replicas, spec.threads_per_replica, spec.max_batch_size) == (1, 1, 32)
    assert (spec.max_batch_delay_s, spec.max_queued_rows) == (0.002, 4096)


def test_a_delay_of_zero_is_not_the_default() -> None:
    assert check_spec(checkpoint="trainingJobs/j", **{**UNSET, "max_batch_delay_s": 0.0}).max_batch_delay_s == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_replicas", 65),
        ("num_replicas", -1),
        ("threads_per_replica", 257),
        ("max_batch_size", 1025),
        ("max_batch_delay_s", 1.5),
        ("max_batch_delay_s", -0.1),
        ("max_queued_rows", -5),
    ],
)
def test_numbers_out_of_range_are_refused_by_field(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_spec(checkpoint="trainingJobs/j", **{**UNSET, field: value})
    assert refused.value.fields[0][0] == f"spec.{field.removesuffix('_s')}"


def test_several_bad_numbers_are_named_together() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_spec(checkpoint="trainingJobs/j", **{**UNSET, "num_replicas": 99, "max_batch_size": -1})
    assert len(refused.value.fields) == 2


def test_a_loaded_version_makes_it_ready() -> None:
    after = with_loaded(deployment(), version(signature=SIGNATURE), 2.0)
    assert after is not None
    assert (after.state, after.update_time, after.generation) == (State.READY, 2.0, 1)


@pytest.mark.parametrize("state", [State.READY, State.FAILED, State.DELETING, State.GONE])
def test_only_a_loading_deployment_becomes_ready_or_fails(state: State) -> None:
    assert with_loaded(deployment(state), version(signature=SIGNATURE), 2.0) is None
    assert with_failure(deployment(state), DataLoss("x"), 2.0) is None


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.FAILED])
def test_anything_that_is_there_can_be_deleted_once(state: State) -> None:
    before = deployment(state)
    after = with_deletion(before, before.name, before.etag, 2.0)
    assert after is not None
    assert (after.state, after.etag != before.etag) == (State.DELETING, True)
    assert with_deletion(after, before.name, "", 3.0) is None


def test_deleting_with_an_old_etag_is_refused() -> None:
    with pytest.raises(Conflict, match="etag"):
        with_deletion(deployment(), "deployments/digits", "old", 2.0)


@pytest.mark.parametrize("gone", [None, deployment(State.GONE)])
def test_deleting_what_is_not_there_is_refused(gone: Deployment | None) -> None:
    with pytest.raises(NotFound):
        with_deletion(gone, "deployments/digits", "", 2.0)


def test_only_a_deployment_that_is_being_deleted_goes() -> None:
    assert with_removal(deployment(State.READY), 2.0) is None
    after = with_removal(deployment(State.DELETING), 2.0)
    assert after is not None
    assert after.state is State.GONE


def test_a_deployment_survives_the_log() -> None:
    for before in (deployment(), deployment(State.READY), deployment(State.FAILED)):
        assert Deployment.from_record(before.as_record()) == before


def test_no_version_named_means_the_one_with_most_traffic() -> None:
    found = find_version(deployment(State.READY, version("1", weight=9), version("2", weight=1)), "")
    assert found is not None
    assert found.number == "1"


@pytest.mark.parametrize(("draw", "number"), [(0.0, "1"), (0.74, "1"), (0.76, "2"), (0.999, "2")])
def test_requests_are_shared_out_by_weight(draw: float, number: str) -> None:
    ready = deployment(
        State.READY, version("1", weight=3, signature=SIGNATURE), version("2", weight=1, signature=SIGNATURE)
    )
    assert choose_version(ready, "", draw).number == number


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_requests_go_to_versions_that_can_answer_and_never_to_one_without_weight(draw: float) -> None:
    ready = deployment(State.READY, version("1", weight=3), version("2", weight=1), version("3", weight=0))
    assert choose_version(ready, "", draw, lambda one: one.number == "2").number == "2"
    # None can: whoever asks is told to try again.
    assert choose_version(ready, "", draw, lambda one: one.number == "3").number in ("1", "2")


def test_a_record_of_an_earlier_release_is_read() -> None:
    record = deployment(State.READY).as_record()
    for new in ("roll_out", "numbers_used"):
        del record[new]
    del record["spec"]["version_policy"]
    del record["versions"][0]["retired_at"]
    assert Deployment.from_record(record) == deployment(State.READY)


def test_a_named_version_is_taken_whatever_its_weight() -> None:
    assert (
        choose_version(deployment(State.READY, version("1", weight=1), version("2", weight=0)), "2", 0.0).number == "2"
    )


def test_an_unknown_version_is_not_found_in_any_state() -> None:
    with pytest.raises(NotFound, match="version '7'"):
        choose_version(deployment(), "7", 0.0)


@pytest.mark.parametrize("state", [State.LOADING, State.DELETING])
def test_a_model_that_is_not_ready_is_unavailable(state: State) -> None:
    with pytest.raises(Unavailable, match=state):
        choose_version(deployment(state), "", 0.0)


def test_a_model_that_failed_is_not_worth_another_try() -> None:
    with pytest.raises(FailedPrecondition, match="FAILED"):
        choose_version(deployment(State.FAILED), "", 0.0)
