"""What drives a rollout from step to step, and back."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_service.deploy.deployments import DeploymentOperations, Deployments
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import State, TrafficChange, VersionPolicy, application_name
from inference_service.domain.rollout import (
    RolloutLimits,
    RolloutState,
    RolloutStep,
)
from inference_service.domain.statistics import Counts
from inference_service.frontend_processes import Peers, PeerState
from inference_service.serve.infer import Dispatcher, Inference
from shared.checkpoint.references import references_of_job
from shared.dataset_version.version import live_references
from shared.errors import Unavailable
from shared.storage import ObjectStore
from tests.support.inference_server import ask
from tests.support.versions import commit_version, striped_digits
from tests.unit.inference_service.driven import Driven
from tests.unit.inference_service.reconciled import Clock
from tests.unit.inference_service.test_frontend_processes import ended
from tests.unit.inference_service.wishes import DATASET, JOB, NAME, load, request, weights

LONG_AFTER = 1e12


@pytest.mark.usefixtures("ready")
async def test_a_rollout_takes_its_steps_while_the_new_version_answers_and_unloads_the_old_version(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager, operations: DeploymentOperations
) -> None:
    made = load(deployments, rollouts.begin(request()))
    assert made.rollout is not None
    operation = made.rollout.operation

    driven = Driven(store)
    await driven.poll()
    assert weights(driven.now) == {"1": 90, "2": 10}  # its replicas are not there: nothing was watched
    driven.answer("2")
    await driven.poll()
    assert weights(driven.now) == {"1": 0, "2": 100}
    await driven.poll()
    assert driven.state is RolloutState.SUCCEEDED
    await driven.poll()
    assert list(weights(driven.now)) == ["2"]
    assert deployments.get(NAME) == driven.now
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c2": [NAME]}
    assert operations.get(operation).HasField("response")


@pytest.mark.usefixtures("ready")
async def test_a_version_that_goes_takes_no_mark_from_a_new_one_of_the_same_checkpoint(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager
) -> None:
    load(deployments, rollouts.begin(request()))
    rollouts.back(NAME, "")

    driven = Driven(store)
    rollouts.begin(request())  # the driver has not heard of it when it lets version 2 go
    await driven.poll()
    assert list(weights(deployments.get(NAME))) == ["1", "3"]
    assert references_of_job(store, JOB, LONG_AFTER)[f"{JOB}/checkpoints/c2"] == [NAME]


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("after", ["before the driver looks", "between its look and its record"])
async def test_a_version_that_is_rolled_back_to_while_it_goes_stays_and_keeps_its_mark(
    store: ObjectStore,
    deployments: Deployments,
    rollouts: RolloutManager,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
) -> None:
    load(deployments, rollouts.begin(request()))

    driven = Driven(store)
    driven.answer("2")
    while driven.state is not RolloutState.SUCCEEDED:
        await driven.poll()
    transition = driven.deployments.transition

    def late(*arguments: Any) -> Any:
        rollouts.back(NAME, "")
        return transition(*arguments)

    # Either way it has not heard of the wish when it lets version 1 go.
    if after == "before the driver looks":
        rollouts.back(NAME, "")
    else:
        monkeypatch.setattr(driven.deployments, "transition", late)
    await driven.poll()
    assert weights(deployments.get(NAME)) == {"1": 100, "2": 0}
    assert references_of_job(store, JOB, LONG_AFTER)[f"{JOB}/checkpoints/c1"] == [NAME]


@pytest.mark.usefixtures("ready")
async def test_a_version_that_goes_takes_no_mark_from_a_new_one_of_the_same_dataset_version(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager
) -> None:
    commit_version(store, DATASET, {"train": striped_digits(5)})
    loaded = load(deployments, rollouts.begin(request()), dataset_version=DATASET)
    deployments.mark_datasets(loaded, loaded.versions)
    rollouts.back(NAME, "")

    driven = Driven(store)
    # Another frontend has loaded it, and the driver has not heard of it when it lets version 2 go.
    again = load(deployments, rollouts.begin(request()), dataset_version=DATASET)
    deployments.mark_datasets(again, again.versions)
    await driven.poll()
    assert list(weights(deployments.get(NAME))) == ["1", "3"]
    assert live_references(store, DATASET, LONG_AFTER) == [NAME]


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("marks", ["keep_checkpoints", "mark_datasets"])
async def test_an_outage_while_a_version_goes_costs_no_other_its_mark(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager, monkeypatch: pytest.MonkeyPatch, marks: str
) -> None:
    load(deployments, rollouts.begin(request()))
    rollouts.back(NAME, "")

    def out(*_: Any) -> None:
        raise Unavailable("the store does not answer")

    driven = Driven(store)
    rollouts.begin(request())
    with monkeypatch.context() as outage:
        outage.setattr(driven.deployments, marks, out)
        with pytest.raises(Unavailable):
            await driven.poll()
    await driven.poll()
    assert list(weights(deployments.get(NAME))) == ["1", "3"]
    assert references_of_job(store, JOB, LONG_AFTER)[f"{JOB}/checkpoints/c2"] == [NAME]


@pytest.mark.usefixtures("ready")
async def test_two_versions_that_go_together_let_their_checkpoint_go(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager
) -> None:
    rollouts.change(NAME, TrafficChange(policy=VersionPolicy(count=3)), "")

    driven = Driven(store)
    for number in (1, 2):  # version 2 is of c1, as version 1 is, and version 3 of c2
        driven.models.put(load(deployments, rollouts.begin(request(f"{JOB}/checkpoints/c{number}"))))
        driven.answer(f"{number + 1}")
        while driven.state is not RolloutState.SUCCEEDED:
            await driven.poll()
    driven.models.put(rollouts.change(NAME, TrafficChange(policy=VersionPolicy(count=1)), ""))
    await driven.poll()
    assert list(weights(driven.now)) == ["3"]
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c2": [NAME]}


@pytest.mark.usefixtures("ready")
async def test_requests_that_meet_a_version_before_it_is_loaded_are_no_faults_of_it(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager
) -> None:
    limits = RolloutLimits(max_error_share=0.5, min_requests=4)
    rollouts.begin(request(steps=[RolloutStep(10, 60.0), RolloutStep(100, 60.0)], limits=limits))

    driven = Driven(store)
    inference = Inference(driven.models, Dispatcher(driven.models))

    async def poll() -> None:
        for _ in range(5):
            with pytest.raises(Unavailable):
                await inference.answer(ask(1, model="digits", model_version="2"), None, tuple)

    await poll()
    driven.models.put(load(deployments, driven.now))
    await poll()  # another frontend has its replicas, this one has not met them yet
    driven.answer("2")
    await driven.poll()
    assert driven.state is RolloutState.SHIFTING
    (one,) = driven.models.listed_of("digits", "2")
    assert one.statistics.requests["UNAVAILABLE"].count == 10


async def given_up_for_its_silence(driven: Driven, clock: Clock) -> None:
    """Version 2, which may be silent for 0.1 s; from the first look on that finds it so."""
    await driven.poll()
    assert driven.state is RolloutState.SHIFTING  # its silence has only begun
    clock.now_s += 0.15
    await driven.poll()
    assert (driven.state, weights(driven.now)) == (RolloutState.ROLLED_BACK, {"1": 100, "2": 0})
    assert driven.now.rollout is not None
    assert driven.now.rollout.error is not None
    assert driven.now.rollout.error["kind"] == "DeadlineExceeded"


@pytest.mark.usefixtures("ready")
async def test_a_version_that_has_lost_its_replicas_is_given_up_and_the_old_one_answers_meanwhile(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager, clock: Clock
) -> None:
    load(deployments, rollouts.begin(request(steps=[RolloutStep(100, 60.0)])))

    driven = Driven(store)
    await driven.poll()
    assert (driven.state, driven.models.is_ready("digits", "")) == (RolloutState.SHIFTING, False)
    driven.answer("1")  # the CPUs are for one of them only
    assert driven.models.choose("digits", "")[1].number == "1"
    assert driven.models.is_ready("digits", "")
    driven.settings = replace(driven.settings, rollout_load_timeout_s=0.1)
    driven.restart()
    driven.answer("1")
    await driven.poll()
    driven.answer("2")
    await driven.poll()
    clock.now_s += 0.15
    driven.models.detach(application_name(driven.now, driven.now.versions[1]))
    await given_up_for_its_silence(driven, clock)


@pytest.mark.usefixtures("ready")
async def test_a_version_whose_replicas_all_die_takes_no_step_and_is_given_up_while_the_old_one_answers(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager, clock: Clock
) -> None:
    load(deployments, rollouts.begin(request(steps=[RolloutStep(100, 0.0)])))

    driven = Driven(store)
    driven.settings = replace(driven.settings, rollout_load_timeout_s=0.1)
    driven.lost_after_s = 0.2
    driven.restart()
    driven.answer("1")
    driven.answer("2")
    driven.run_now(v1=1, v2=0)
    await driven.poll()
    await driven.poll()
    # For a moment it may be that Serve starts them again: it does not succeed, and is not given up.
    assert (driven.state, weights(driven.now)) == (RolloutState.SHIFTING, {"1": 0, "2": 100})
    assert driven.models.choose("digits", "")[1].number == "2"
    clock.now_s += 0.25
    driven.run_now(v1=1, v2=0)
    assert driven.models.choose("digits", "")[1].number == "1"
    assert (driven.models.is_ready("digits", "2"), driven.models.is_ready("digits", "")) == (False, True)
    await given_up_for_its_silence(driven, clock)


@pytest.mark.usefixtures("ready")
async def test_a_rollout_goes_on_when_the_replicas_of_its_version_are_back(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager
) -> None:
    load(deployments, rollouts.begin(request(steps=[RolloutStep(50, 0.0), RolloutStep(100, 0.0)])))

    driven = Driven(store)
    driven.answer("1")
    driven.answer("2")
    driven.run_now(v1=1, v2=0)
    await driven.poll()
    assert weights(driven.now) == {"1": 50, "2": 50}
    driven.run_now(v1=1, v2=1)
    await driven.poll()
    assert weights(driven.now) == {"1": 0, "2": 100}
    await driven.poll()
    assert driven.state is RolloutState.SUCCEEDED


@pytest.mark.usefixtures("ready")
async def test_time_in_which_no_process_ran_is_not_that_of_a_version_to_load(
    store: ObjectStore, rollouts: RolloutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.time()
    monkeypatch.setattr(time, "time", lambda: began_s - 3600)
    rollouts.begin(request())
    monkeypatch.undo()

    driven = Driven(store)
    await driven.poll()
    assert driven.state is RolloutState.LOADING


@pytest.mark.usefixtures("ready")
async def test_another_process_goes_on_from_the_step_that_the_log_names_and_watches_it_anew(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager, clock: Clock
) -> None:
    load(
        deployments, rollouts.begin(request(steps=[RolloutStep(10, 0.2), RolloutStep(50, 0.2), RolloutStep(100, 0.0)]))
    )

    driven = Driven(store)
    driven.answer("2")
    await driven.poll()
    clock.now_s += 0.25
    await driven.poll()
    await driven.poll()
    assert weights(driven.now) == {"1": 50, "2": 50}  # each step has an interval of its own
    driven.restart()
    clock.now_s += 0.25
    assert weights(driven.now) == {"1": 50, "2": 50}
    driven.answer("2")
    await driven.poll()
    assert weights(driven.now) == {"1": 50, "2": 50}  # what passed while nobody watched does not count
    clock.now_s += 0.25
    await driven.poll()
    assert weights(driven.now) == {"1": 0, "2": 100}


@pytest.mark.usefixtures("ready")
async def test_limits_are_of_the_requests_of_all_frontends_that_live(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager, tmp_path: Path
) -> None:
    limits = RolloutLimits(max_error_share=0.5, min_requests=12)
    made = load(
        deployments, rollouts.begin(request(steps=[RolloutStep(10, 60.0), RolloutStep(100, 60.0)], limits=limits))
    )
    new = application_name(made, made.versions[1])

    def other(number: int, pid: int) -> None:
        reported = PeerState(pid=pid, listens=True, ready=True, holds=[], counts={new: Counts(0, 8, {5: 8})})
        Peers(tmp_path, number).publish(reported)

    driven = Driven(store, Peers(tmp_path, 0))
    driven.answer("2")
    driven.seen("2", 4)  # of its own too few to say anything
    other(1, pid=ended())
    await driven.poll()
    assert driven.state is RolloutState.SHIFTING
    other(2, pid=os.getpid())
    await driven.poll()
    assert (driven.state, weights(driven.now)) == (RolloutState.ROLLED_BACK, {"1": 100, "2": 0})
    assert driven.now.rollout is not None
    assert driven.now.rollout.error is not None
    assert "66.7% of its last 12 requests failed" in driven.now.rollout.error["message"]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (RolloutLimits(max_error_share=0.5, min_requests=4), "75.0% of its last 4 requests failed"),
        (RolloutLimits(max_p99_s=0.1, min_requests=1), "at most 100 ms may"),
        (RolloutLimits(max_p99_ratio=2.0, min_requests=1), "as long as the old version's"),
    ],
)
@pytest.mark.usefixtures("ready")
async def test_a_limit_that_is_passed_rolls_back_by_itself(
    store: ObjectStore,
    deployments: Deployments,
    rollouts: RolloutManager,
    operations: DeploymentOperations,
    limits: Any,
    said: str,
) -> None:
    made = load(
        deployments, rollouts.begin(request(steps=[RolloutStep(10, 60.0), RolloutStep(100, 60.0)], limits=limits))
    )
    assert made.rollout is not None
    operation = made.rollout.operation

    driven = Driven(store)
    driven.answer("2")
    await driven.poll()
    driven.seen("1", 10, total_s=0.01)
    await driven.poll()
    assert driven.state is RolloutState.SHIFTING
    driven.seen("2", 3, status="INTERNAL")
    driven.seen("2", 1, total_s=0.3)
    await driven.poll()
    assert (driven.state, weights(driven.now)) == (RolloutState.ROLLED_BACK, {"1": 100, "2": 0})
    assert said in operations.get(operation).error.message
    await driven.poll()
    assert list(weights(driven.now)) == ["1"]


@pytest.mark.usefixtures("ready")
async def test_a_version_whose_replicas_never_start_is_given_up(store: ObjectStore, rollouts: RolloutManager) -> None:
    rollouts.begin(request())

    driven = Driven(store)
    await driven.poll()
    assert driven.state is RolloutState.LOADING
    driven.settings = replace(driven.settings, rollout_load_timeout_s=0.0)
    driven.restart()
    await driven.poll()
    assert (driven.state, driven.now.state) == (RolloutState.ROLLED_BACK, State.READY)
    assert driven.now.rollout is not None
    assert driven.now.rollout.error is not None
    assert "CPUs" in driven.now.rollout.error["message"]
