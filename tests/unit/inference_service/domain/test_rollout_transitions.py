"""How a deployment goes through a rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.domain.deployment import (
    Deployment,
    Kept,
    ModelVersion,
    State,
    TrafficChange,
    VersionPolicy,
    with_deletion,
)
from inference_service.domain.rollout import Rollout, RolloutLimits, RolloutState, RolloutStep, check_plan
from inference_service.domain.rollout_transitions import (
    begun,
    next_number,
    shares,
    with_change,
    with_next_step,
    with_policy_applied,
    with_retired_gone,
    with_rollback,
    with_traffic_back,
    with_version_failed,
    with_version_loaded,
)
from inference_service.domain.signature import Signature, TensorSpec
from inference_service.serve.repository import with_unloaded
from shared.errors import Conflict, DataLoss, FailedPrecondition, NotFound
from tests.unit.inference_service.domain.test_deployment import SIGNATURE, deployment, version

NAME = "deployments/digits"
PLAN = check_plan(
    checkpoint="trainingJobs/j",
    steps=[RolloutStep(10, 1.0), RolloutStep(50, 1.0), RolloutStep(100, 1.0)],
    limits=RolloutLimits(),
)
WEIGHED = State.READY, version("1", weight=3, signature=SIGNATURE), version("2", weight=1, signature=SIGNATURE)


def rolling(before: Deployment | None = None, uid: str = "r", **plan: Any) -> Deployment:
    """A rollout has just been wished for."""
    there = before or deployment(State.READY)
    number = next_number(there)
    made = Rollout(
        uid=uid,
        request_id="",
        operation=f"operations/rollout-{uid}",
        plan=replace(PLAN, **plan),
        state=RolloutState.LOADING,
        version=number,
        before={},
        create_time=2.0,
    )
    return begun(there, version(number), made, 2.0)


def loaded(before: Deployment, signature: Signature = SIGNATURE) -> Deployment:
    """The version of its rollout has been loaded."""
    assert before.rollout is not None
    new = next(one for one in before.versions if one.number == before.rollout.version)
    return sure(with_version_loaded(before, replace(new, signature=signature), 3.0))


def sure(after: Deployment | None) -> Deployment:
    assert after is not None
    return after


def state(one: Deployment) -> RolloutState:
    assert one.rollout is not None
    return one.rollout.state


def weights(one: Deployment) -> dict[str, int]:
    return {version.number: version.weight for version in one.versions}


def retired(one: Deployment) -> list[str]:
    return [version.number for version in one.versions if version.retired_at is not None]


def finished(before: Deployment) -> Deployment:
    """Gone through all steps of its rollout."""
    for step in range(3):
        before = sure(with_next_step(before, "r", step, 4.0 + step))
    return before


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 1000), min_size=1).filter(lambda one: any(one.values())),
    st.integers(0, 100),
)
def test_shares_are_whole_proportional_and_add_up(given_weights: dict[str, int], total: int) -> None:
    shared = shares(given_weights, total)
    assert sum(shared.values()) == total
    whole = sum(given_weights.values())
    for number, weight in given_weights.items():
        assert abs(shared[number] - total * weight / whole) < 1
        assert weight or not shared[number]


def test_while_the_new_version_loads_the_old_one_has_all_traffic() -> None:
    after = rolling()
    assert (after.state, state(after), weights(after)) == (State.READY, RolloutState.LOADING, {"1": 100, "2": 0})
    assert after.generation == 2
    assert after.was_loaded  # the operation that made the deployment stays done


def test_traffic_moves_by_steps_and_then_the_old_version_goes() -> None:
    one = loaded(rolling())
    assert (state(one), weights(one)) == (RolloutState.SHIFTING, {"1": 90, "2": 10})
    one = sure(with_next_step(one, "r", 0, 4.0))
    assert weights(one) == {"1": 50, "2": 50}
    one = sure(with_next_step(one, "r", 1, 5.0))
    assert (weights(one), retired(one)) == ({"1": 0, "2": 100}, [])
    one = sure(with_next_step(one, "r", 2, 6.0))
    assert (state(one), weights(one), retired(one)) == (RolloutState.SUCCEEDED, {"1": 0, "2": 100}, ["1"])
    assert one.generation == 2  # progress is no wish
    gone = sure(with_retired_gone(one, ["1"], 7.0))
    assert list(weights(gone)) == ["2"]
    assert with_retired_gone(gone, ["2"], 8.0) is None


def test_several_old_versions_keep_their_proportion() -> None:
    one = loaded(rolling(replace(deployment(*WEIGHED), numbers_used=2)))
    assert weights(one) == {"1": 68, "2": 22, "3": 10}
    back = sure(with_traffic_back(one, "r", DataLoss("x"), 4.0))
    assert (weights(back), retired(back)) == ({"1": 3, "2": 1, "3": 0}, ["3"])


def test_a_step_is_taken_once_and_only_by_its_own_rollout() -> None:
    one = loaded(rolling())
    after = sure(with_next_step(one, "r", 0, 4.0))
    assert with_next_step(after, "r", 0, 5.0) is None
    assert with_next_step(one, "another", 0, 4.0) is None
    assert with_next_step(rolling(), "r", 0, 4.0) is None


def test_a_version_that_does_not_load_ends_the_rollout_and_leaves_the_old_one_all_traffic() -> None:
    one = sure(with_version_failed(rolling(), "2", DataLoss("a file is damaged"), 3.0))
    assert (one.state, state(one), weights(one), retired(one)) == (
        State.READY,
        RolloutState.ROLLED_BACK,
        {"1": 100, "2": 0},
        ["2"],
    )
    assert one.error is None
    assert one.rollout is not None
    assert one.rollout.error is not None
    assert one.rollout.error["message"] == "a file is damaged"


def test_an_old_version_that_does_not_start_again_ends_nothing() -> None:
    assert with_version_failed(rolling(), "1", DataLoss("x"), 3.0) is None


def test_a_version_whose_tensors_differ_is_rolled_back_before_it_gets_traffic_unless_that_is_requested() -> None:
    other = replace(SIGNATURE, raw=(TensorSpec("y", "UINT8", (-1,)),))
    one = loaded(rolling(), other)
    assert (state(one), weights(one)) == (RolloutState.ROLLED_BACK, {"1": 100, "2": 0})
    assert one.rollout is not None
    assert one.rollout.error is not None
    assert "y UINT8[-1]" in one.rollout.error["message"]
    assert "allow_new_signature" in one.rollout.error["message"]
    assert state(loaded(rolling(allow_new_signature=True), other)) is RolloutState.SHIFTING


def test_a_version_that_has_lost_the_names_of_its_classes_is_rolled_back_and_one_that_gained_some_is_not() -> None:
    logits, label = TensorSpec("logits", "FP32", (-1, 2)), TensorSpec("label", "INT64", (-1,))
    plain = replace(SIGNATURE, outputs=(logits, label))
    named = replace(SIGNATURE, outputs=(replace(logits, class_names=("a", "b")), label))

    def rolled(old: Signature, new: Signature) -> Deployment:
        before = rolling()
        return loaded(replace(before, versions=(replace(before.versions[0], signature=old), *before.versions[1:])), new)

    assert state(rolled(plain, named)) is RolloutState.SHIFTING
    lost = rolled(named, plain)
    assert state(lost) is RolloutState.ROLLED_BACK
    assert lost.rollout is not None
    assert lost.rollout.error is not None
    assert "label_name BYTES[-1]" in lost.rollout.error["message"]


def test_loading_a_version_again_after_a_restart_is_no_news() -> None:
    one = loaded(rolling())
    assert with_version_loaded(one, one.versions[1], 9.0) is None


@pytest.mark.parametrize("before", [rolling(), loaded(rolling())], ids=["LOADING", "SHIFTING"])
def test_rolling_back_by_request_gives_the_traffic_back_at_once(before: Deployment) -> None:
    after = sure(with_rollback(before, NAME, before.etag, 5.0))
    assert (state(after), weights(after), retired(after)) == (RolloutState.ROLLED_BACK, {"1": 100, "2": 0}, ["2"])
    assert after.etag != before.etag
    assert with_rollback(after, NAME, "", 6.0) is None


def test_a_rollout_that_succeeded_is_undone_while_the_old_version_is_loaded() -> None:
    policy = VersionPolicy(count=2)
    ready = deployment(State.READY)
    kept = finished(loaded(rolling(replace(ready, spec=replace(ready.spec, version_policy=policy)))))
    assert retired(kept) == []
    undone = sure(with_rollback(kept, NAME, "", 9.0))
    assert (state(undone), weights(undone), retired(undone)) == (RolloutState.UNDONE, {"1": 100, "2": 0}, ["2"])
    assert undone.rollout is not None
    assert undone.rollout.error is None  # its operation stays the success that it was


def test_a_rollout_that_succeeded_is_undone_while_the_log_still_names_the_old_version() -> None:
    done = finished(loaded(rolling()))
    assert retired(done) == ["1"]
    undone = sure(with_rollback(done, NAME, "", 9.0))
    assert (state(undone), weights(undone), retired(undone)) == (RolloutState.UNDONE, {"1": 100, "2": 0}, ["2"])
    # Who had begun to let it go finds that it stays.
    assert with_retired_gone(undone, ["1"], 9.5) is None


def test_a_policy_that_comes_just_after_the_end_of_a_rollout_keeps_the_old_versions_all_the_same() -> None:
    one = finished(loaded(rolling()))
    assert retired(one) == ["1"]
    both = with_change(one, NAME, TrafficChange(policy=VersionPolicy(count=2)), "", 9.0)
    assert (retired(both), weights(both)) == ([], {"1": 0, "2": 100})
    assert retired(with_change(one, NAME, TrafficChange(policy=VersionPolicy(count=1)), "", 9.0)) == ["1"]
    assert retired(with_change(one, NAME, TrafficChange(weights={"2": 1}), "", 9.0)) == ["1"]


def test_no_policy_keeps_a_version_that_was_rolled_back() -> None:
    one = sure(with_rollback(loaded(rolling()), NAME, "", 4.0))
    assert retired(one) == ["2"]
    assert retired(with_change(one, NAME, TrafficChange(policy=VersionPolicy(Kept.ALL)), "", 9.0)) == ["2"]


def test_a_version_that_the_log_no_longer_names_is_no_target_of_a_rollback() -> None:
    gone = sure(with_retired_gone(finished(loaded(rolling())), ["1"], 8.0))
    with pytest.raises(FailedPrecondition, match="version 1 is no longer loaded"):
        with_rollback(gone, NAME, "", 9.0)
    with pytest.raises(FailedPrecondition, match="had no rollout"):
        with_rollback(deployment(State.READY), NAME, "", 9.0)
    with pytest.raises(NotFound):
        with_rollback(None, NAME, "", 9.0)
    with pytest.raises(Conflict):
        with_rollback(loaded(rolling()), NAME, "old", 9.0)


def test_only_one_rollout_at_a_time_and_only_from_ready() -> None:
    with pytest.raises(FailedPrecondition, match="rolling out version 2"):
        rolling(rolling())
    with pytest.raises(FailedPrecondition, match="LOADING"):
        rolling(deployment(State.LOADING))


def test_numbers_are_never_used_twice() -> None:
    failed = sure(with_version_failed(rolling(), "2", DataLoss("x"), 3.0))
    gone = sure(with_retired_gone(failed, ["2"], 4.0))
    assert list(weights(rolling(gone))) == ["1", "3"]


def test_deleting_ends_the_rollout() -> None:
    after = sure(with_deletion(loaded(rolling()), NAME, "", 5.0))
    assert (after.state, state(after)) == (State.DELETING, RolloutState.ROLLED_BACK)
    assert with_next_step(after, "r", 0, 6.0) is None


def test_a_rollout_survives_the_log() -> None:
    for one in (rolling(), loaded(rolling()), finished(loaded(rolling()))):
        assert Deployment.from_record(one.as_record()) == one


@pytest.mark.parametrize(
    ("policy", "going"),
    [
        (VersionPolicy(), ["1", "2"]),
        (VersionPolicy(count=3), ["1"]),
        (VersionPolicy(Kept.ALL), []),
        (VersionPolicy(Kept.NAMED, named=("1", "7")), ["2", "10"]),
    ],
)
def test_the_policy_keeps_what_it_names_and_what_has_traffic(policy: VersionPolicy, going: list[str]) -> None:
    def one(number: str, weight: int) -> ModelVersion:
        return version(number, weight=weight, signature=SIGNATURE)

    ready = deployment(State.READY, one("1", 0), one("2", 0), one("3", 5), one("10", 0))
    after = with_policy_applied(replace(ready, spec=replace(ready.spec, version_policy=policy)), 9.0)
    assert retired(after) == going


def test_a_deployment_is_not_unloaded_while_its_rollout_is_under_way() -> None:
    with pytest.raises(FailedPrecondition, match="Rollback"):
        with_unloaded(rolling(), NAME, 4.0)
