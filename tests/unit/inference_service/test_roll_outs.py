"""Roll-outs in a real store: wishes, operations, and what drives them from step to step."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_service.batcher import Batcher
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import Limits
from inference_service.domain.deployment import Deployment, State
from inference_service.domain.recent import Counts
from inference_service.domain.roll_out import (
    Compared,
    Comparison,
    RollOutLimits,
    RollOutState,
    RollOutWish,
    Step,
    check_plan,
)
from inference_service.domain.rolling import with_version_loaded
from inference_service.domain.rows import Outputs, Rows
from inference_service.domain.signature import Signature, TensorSpec
from inference_service.domain.statistics import Statistics
from inference_service.domain.traffic import TrafficChange
from inference_service.domain.version_policy import VersionPolicy
from inference_service.inferring import Inference
from inference_service.manager import DeploymentManager
from inference_service.models import Models, application_name
from inference_service.operations import DeploymentOperations
from inference_service.registry import Deployments
from inference_service.roll_out_manager import RollOutManager
from inference_service.roll_outs import RollOuts
from inference_service.settings import InferenceSettings
from inference_service.siblings import Siblings, Told
from shared.checkpoint import CheckpointRegistry
from shared.checkpoint import users as checkpoint_users
from shared.checkpoint.users import users_of_job
from shared.errors import AlreadyExists, Conflict, FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from shared.settings import ServiceSettings, StoreSettings
from shared.storage import ObjectStore
from tests.support.inference_server import IMAGES, Classifier, ask
from tests.support.versions import commit_version, striped_digits
from tests.unit.inference_service.conftest import JOB
from tests.unit.inference_service.test_registry import creation
from tests.unit.inference_service.test_siblings import ended

NAME = "deployments/digits"
LONG_AFTER = 1e12


@pytest.fixture
def roll_outs(store: ObjectStore, deployments: Deployments, operations: DeploymentOperations) -> RollOutManager:
    return RollOutManager(store, deployments, operations)


@pytest.fixture
def ready(manager: DeploymentManager, deployments: Deployments) -> Deployment:
    """`deployments/digits`, of the job's best checkpoint, c1."""
    return load(deployments, manager.create(creation()))


def load(deployments: Deployments, deployment: Deployment, signature: Signature = IMAGES) -> Deployment:
    """Its newest version has been loaded."""
    version = replace(deployment.versions[-1], signature=signature)
    after = deployments.transition(
        deployment.name, deployment.uid, lambda before: with_version_loaded(before, version, time.time())
    )
    assert after is not None
    return after


def wish(checkpoint: str = f"{JOB}/checkpoints/c2", **changes: Any) -> RollOutWish:
    limits = changes.pop("limits", RollOutLimits())
    steps = changes.pop("steps", [Step(10, 0.0), Step(100, 0.0)])
    comparison = changes.pop("comparison", None)
    plan = check_plan(checkpoint=checkpoint, steps=steps, limits=limits, comparison=comparison)
    made = RollOutWish(name=NAME, plan=plan, etag="", request_id="", digest="d", validate_only=False)
    return replace(made, **changes)


def weights(deployment: Deployment) -> dict[str, int]:
    return {version.number: version.weight for version in deployment.versions}


@pytest.mark.usefixtures("ready")
def test_a_roll_out_is_durable_and_keeps_its_checkpoint(
    store: ObjectStore, deployments: Deployments, operations: DeploymentOperations, roll_outs: RollOutManager
) -> None:
    made = roll_outs.begin(wish())
    assert deployments.get(NAME) == made
    assert made.roll_out is not None
    assert made.versions[1].checkpoint == f"{JOB}/checkpoints/c2"
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c{number}": [NAME] for number in (1, 2)}
    operation = operations.get(made.roll_out.operation)
    assert (operation.name, operation.done) == (made.roll_out.operation, False)
    assert made.roll_out.operation.removeprefix("operations/") in operations.list_ids()
    assert operations.get(made.operation).done


@pytest.mark.usefixtures("ready")
def test_a_repeated_request_gets_its_own_roll_out_even_after_a_later_one(
    deployments: Deployments, operations: DeploymentOperations, roll_outs: RollOutManager
) -> None:
    request_id = str(uuid.uuid4())
    first = roll_outs.begin(wish(request_id=request_id))
    assert first.roll_out is not None
    assert roll_outs.begin(wish(request_id=request_id)) == first
    back = roll_outs.back(NAME, "")
    second = roll_outs.begin(wish(request_id=str(uuid.uuid4())))
    assert second.roll_out is not None
    again = roll_outs.begin(wish(request_id=request_id))
    assert again.roll_out == back.roll_out
    assert operations.get(first.roll_out.operation).error.message.endswith("rolled back by wish")
    assert not operations.get(second.roll_out.operation).done
    assert len(deployments.get(NAME).versions) == 3
    with pytest.raises(AlreadyExists):
        roll_outs.begin(wish(request_id=request_id, digest="another"))


@pytest.mark.usefixtures("ready")
def test_checking_only_and_what_is_refused_write_no_roll_out_and_take_no_mark_away(
    store: ObjectStore, roll_outs: RollOutManager
) -> None:
    before = {info.key for info in store.list()}
    checked = roll_outs.begin(wish(validate_only=True))
    assert weights(checked) == {"1": 100, "2": 0}
    for refused, error in (
        (wish(etag="old"), Conflict),
        (wish(name="deployments/nobody"), NotFound),
        (wish("trainingJobs/nobody"), NotFound),
    ):
        with pytest.raises(error):
            roll_outs.begin(refused)
    assert {info.key for info in store.list()} == before
    roll_outs.begin(wish(f"{JOB}/checkpoints/c1"))
    with pytest.raises(FailedPrecondition, match="rolling out"):
        roll_outs.begin(wish(f"{JOB}/checkpoints/c1"))
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c1": [NAME]}


def test_a_wish_that_loses_a_race_leaves_the_mark_of_a_version_that_has_it(
    store: ObjectStore,
    deployments: Deployments,
    roll_outs: RollOutManager,
    ready: Deployment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roll_outs.begin(wish())
    monkeypatch.setattr(deployments, "find", lambda _name: ready)  # as read before the other wish was written
    for number, users in ((1, [NAME]), (2, [NAME])):
        with pytest.raises(FailedPrecondition, match="rolling out"):
            roll_outs.begin(wish(f"{JOB}/checkpoints/c{number}"))
        assert users_of_job(store, JOB, LONG_AFTER)[f"{JOB}/checkpoints/c{number}"] == users


@pytest.mark.usefixtures("ready")
def test_a_request_that_comes_again_while_its_first_call_is_at_work_gets_the_same_roll_out(
    deployments: Deployments,
    operations: DeploymentOperations,
    roll_outs: RollOutManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request_id = str(uuid.uuid4())
    record, again = operations.record_roll_out, []

    def meanwhile(operation: str, there: Deployment) -> None:
        monkeypatch.setattr(operations, "record_roll_out", record)
        record(operation, there)
        again.append(roll_outs.begin(wish(request_id=request_id)))

    monkeypatch.setattr(operations, "record_roll_out", meanwhile)
    first = roll_outs.begin(wish(request_id=request_id))
    assert again == [first]
    assert len(deployments.get(NAME).versions) == 2
    assert roll_outs.begin(wish(request_id=request_id)) == first


@pytest.mark.usefixtures("ready")
def test_a_store_that_is_full_takes_no_mark_of_a_served_version(
    store: ObjectStore, operations: DeploymentOperations, roll_outs: RollOutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ResourceExhausted("the store is full")

    monkeypatch.setattr(operations, "record_roll_out", full)
    with pytest.raises(ResourceExhausted):
        roll_outs.begin(wish(f"{JOB}/checkpoints/c1"))
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c1": [NAME]}


@pytest.mark.usefixtures("ready")
def test_a_best_that_changes_while_it_is_marked_takes_no_mark_of_a_served_version(
    store: ObjectStore, roll_outs: RollOutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = checkpoint_users.put_marker

    def better_meanwhile(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(checkpoint_users, "put_marker", mark)
        mark(*arguments, **named)
        registry = CheckpointRegistry(store, JOB)
        best = next(one for one in registry.entries() if one.name.endswith("c2"))
        registry.commit(
            replace(
                best,
                name=f"{JOB}/checkpoints/c3",
                folder=f"{JOB}/checkpoints/data/c3",
                step=3,
                metrics={"validation_accuracy": 0.99},
            )
        )

    monkeypatch.setattr(checkpoint_users, "put_marker", better_meanwhile)
    assert roll_outs.begin(wish(JOB)).versions[1].checkpoint == f"{JOB}/checkpoints/c3"
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c{number}": [NAME] for number in (1, 3)}


@pytest.mark.usefixtures("ready")
def test_a_service_that_dies_before_the_roll_out_is_written_keeps_its_checkpoint_for_a_while_only(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Deployment:
        raise KeyboardInterrupt

    monkeypatch.setattr(deployments, "wish", dies)
    with pytest.raises(KeyboardInterrupt):
        roll_outs.begin(wish())
    c1, c2 = (f"{JOB}/checkpoints/c{number}" for number in (1, 2))
    assert users_of_job(store, JOB, time.time()) == {c1: [NAME], c2: [NAME]}
    assert users_of_job(store, JOB, time.time() + 3600) == {c1: [NAME]}


@pytest.mark.usefixtures("ready")
def test_cancelling_the_operation_rolls_back(
    deployments: Deployments, operations: DeploymentOperations, roll_outs: RollOutManager
) -> None:
    made = load(deployments, roll_outs.begin(wish()))
    assert made.roll_out is not None
    assert weights(made) == {"1": 90, "2": 10}
    operations.cancel(made.roll_out.operation)
    assert weights(deployments.get(NAME)) == {"1": 100, "2": 0}
    assert deployments.get(NAME).etag != made.etag
    assert operations.get(made.roll_out.operation).error.message.endswith("was cancelled")


class Driven:
    """A driver of roll-outs over models that answer; `look()` is one look of its."""

    def __init__(self, store: ObjectStore, siblings: Siblings | None = None) -> None:
        self.store = store
        self.siblings = siblings or Siblings()
        self.deployments = Deployments(store)
        self.models = Models()
        service = ServiceSettings(listen="", store=StoreSettings(url="file:///nowhere"))
        self.settings = InferenceSettings(service=service, retired_for_s=0.0)
        self.restart()

    def restart(self) -> None:
        """A new process: it has seen nothing, and reads the log."""
        self.models = Models()
        self.models.replace(self.deployments.all())
        self._driver = RollOuts(
            self.store, self.deployments, self.models, self.settings, self.models.put, self.siblings
        )

    @property
    def now(self) -> Deployment:
        (found,) = self.models.deployments()
        return found

    @property
    def state(self) -> RollOutState:
        assert self.now.roll_out is not None
        return self.now.roll_out.state

    def answer(self, number: str, model: Any = None) -> None:
        """Replicas of this version are there."""
        version = next(one for one in self.now.versions if one.number == number)
        limits = Limits(max_rows=8, max_delay_s=0.0, max_queued_rows=100, max_in_flight=1)
        name = application_name(self.now, version)
        self.models.attach(name, Batcher(model or Classifier(), limits, BatchTimes(), Statistics()))

    def seen(self, number: str, requests: int, *, total_s: float = 0.01, status: str = "") -> None:
        """So many requests have just been answered, or have failed."""
        version = next(one for one in self.now.versions if one.number == number)
        recent = self.models.statistics(self.now, version).recent
        for _ in range(requests):
            if status:
                recent.failed(time.time(), status, total_s)
            else:
                recent.answered(time.time(), total_s)

    async def look(self) -> None:
        await self._driver.look(self.now)


def driving(driven: Driven, scenario: Callable[[Driven], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await scenario(driven)

    asyncio.run(main())


@pytest.mark.usefixtures("ready")
def test_it_goes_through_its_steps_while_the_new_version_answers_and_lets_the_old_one_go(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager, operations: DeploymentOperations
) -> None:
    made = load(deployments, roll_outs.begin(wish()))
    assert made.roll_out is not None
    operation = made.roll_out.operation

    async def scenario(driven: Driven) -> None:
        await driven.look()
        assert weights(driven.now) == {"1": 90, "2": 10}  # its replicas are not there: nothing was watched
        driven.answer("2")
        await driven.look()
        assert weights(driven.now) == {"1": 0, "2": 100}
        await driven.look()
        assert driven.state is RollOutState.SUCCEEDED
        await driven.look()
        assert list(weights(driven.now)) == ["2"]
        assert deployments.get(NAME) == driven.now
        assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c2": [NAME]}
        assert operations.get(operation).HasField("response")

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_a_version_that_goes_takes_no_mark_from_a_new_one_of_the_same_checkpoint(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager
) -> None:
    load(deployments, roll_outs.begin(wish()))
    roll_outs.back(NAME, "")

    async def scenario(driven: Driven) -> None:
        roll_outs.begin(wish())  # the driver has not heard of it when it lets version 2 go
        await driven.look()
        assert list(weights(deployments.get(NAME))) == ["1", "3"]
        assert users_of_job(store, JOB, LONG_AFTER)[f"{JOB}/checkpoints/c2"] == [NAME]

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_an_outage_while_a_version_goes_costs_no_other_its_mark(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(deployments, roll_outs.begin(wish()))
    roll_outs.back(NAME, "")

    def out(*_: Any) -> None:
        raise Unavailable("the store does not answer")

    async def scenario(driven: Driven) -> None:
        roll_outs.begin(wish())
        with monkeypatch.context() as outage:
            outage.setattr(driven.deployments, "keep_checkpoints", out)
            with pytest.raises(Unavailable):
                await driven.look()
        await driven.look()
        assert list(weights(deployments.get(NAME))) == ["1", "3"]
        assert users_of_job(store, JOB, LONG_AFTER)[f"{JOB}/checkpoints/c2"] == [NAME]

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_two_versions_that_go_together_let_their_checkpoint_go(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager
) -> None:
    roll_outs.change(NAME, TrafficChange(policy=VersionPolicy(count=3)), "")

    async def scenario(driven: Driven) -> None:
        for number in (1, 2):  # version 2 is of c1, as version 1 is, and version 3 of c2
            driven.models.put(load(deployments, roll_outs.begin(wish(f"{JOB}/checkpoints/c{number}"))))
            driven.answer(f"{number + 1}")
            while driven.state is not RollOutState.SUCCEEDED:
                await driven.look()
        driven.models.put(roll_outs.change(NAME, TrafficChange(policy=VersionPolicy(count=1)), ""))
        await driven.look()
        assert list(weights(driven.now)) == ["3"]
        assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c2": [NAME]}

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_requests_that_meet_a_version_before_it_is_loaded_are_no_faults_of_it(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager
) -> None:
    limits = RollOutLimits(max_error_share=0.5, min_requests=4)
    roll_outs.begin(wish(steps=[Step(10, 60.0), Step(100, 60.0)], limits=limits))

    async def scenario(driven: Driven) -> None:
        async def poll() -> None:
            for _ in range(5):
                with pytest.raises(Unavailable):
                    await Inference(driven.models).answer(ask(1, model="digits", model_version="2"), None, tuple)

        await poll()
        driven.models.put(load(deployments, driven.now))
        await poll()  # another front has its replicas, this one has not met them yet
        driven.answer("2")
        await driven.look()
        assert driven.state is RollOutState.SHIFTING
        (one,) = driven.models.listed_of("digits", "2")
        assert one.statistics.requests["UNAVAILABLE"].count == 10

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_a_version_that_has_lost_its_replicas_is_given_up_and_the_old_one_answers_meanwhile(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager
) -> None:
    load(deployments, roll_outs.begin(wish(steps=[Step(100, 60.0)])))

    async def scenario(driven: Driven) -> None:
        await driven.look()
        assert (driven.state, driven.models.is_ready("digits", "")) == (RollOutState.SHIFTING, False)
        driven.answer("1")  # the CPUs are for one of them only
        assert driven.models.choose("digits", "")[1].number == "1"
        assert driven.models.is_ready("digits", "")
        driven.settings = replace(driven.settings, roll_out_loads_within_s=0.1)
        driven.restart()
        driven.answer("1")
        await driven.look()
        driven.answer("2")
        await driven.look()
        await asyncio.sleep(0.15)
        driven.models.detach(application_name(driven.now, driven.now.versions[1]))
        await driven.look()
        assert driven.state is RollOutState.SHIFTING  # its silence has only begun
        await asyncio.sleep(0.15)
        await driven.look()
        assert (driven.state, weights(driven.now)) == (RollOutState.ROLLED_BACK, {"1": 100, "2": 0})
        assert driven.now.roll_out is not None
        assert driven.now.roll_out.error is not None
        assert driven.now.roll_out.error["kind"] == "DeadlineExceeded"

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_time_in_which_no_process_ran_is_not_that_of_a_version_to_load(
    store: ObjectStore, roll_outs: RollOutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.time()
    monkeypatch.setattr(time, "time", lambda: began_s - 3600)
    roll_outs.begin(wish())
    monkeypatch.undo()

    async def scenario(driven: Driven) -> None:
        await driven.look()
        assert driven.state is RollOutState.LOADING

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_another_process_goes_on_from_the_step_that_the_log_names_and_watches_it_anew(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager
) -> None:
    load(deployments, roll_outs.begin(wish(steps=[Step(10, 0.2), Step(50, 0.2), Step(100, 0.0)])))

    async def scenario(driven: Driven) -> None:
        driven.answer("2")
        await driven.look()
        await asyncio.sleep(0.25)
        await driven.look()
        await driven.look()
        assert weights(driven.now) == {"1": 50, "2": 50}  # each step has an interval of its own
        driven.restart()
        await asyncio.sleep(0.25)
        assert weights(driven.now) == {"1": 50, "2": 50}
        driven.answer("2")
        await driven.look()
        assert weights(driven.now) == {"1": 50, "2": 50}  # what passed while nobody watched does not count
        await asyncio.sleep(0.25)
        await driven.look()
        assert weights(driven.now) == {"1": 0, "2": 100}

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_limits_are_of_the_requests_of_all_fronts_that_live(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager, tmp_path: Path
) -> None:
    limits = RollOutLimits(max_error_share=0.5, min_requests=12)
    made = load(deployments, roll_outs.begin(wish(steps=[Step(10, 60.0), Step(100, 60.0)], limits=limits)))
    new = application_name(made, made.versions[1])

    def other(number: int, pid: int) -> None:
        told = Told(pid=pid, listens=True, ready=True, holds=[], counts={new: Counts(0, 8, {5: 8})})
        Siblings(tmp_path, number).tell(told)

    async def scenario(driven: Driven) -> None:
        driven.answer("2")
        driven.seen("2", 4)  # of its own too few to say anything
        other(1, pid=ended())
        await driven.look()
        assert driven.state is RollOutState.SHIFTING
        other(2, pid=os.getpid())
        await driven.look()
        assert (driven.state, weights(driven.now)) == (RollOutState.ROLLED_BACK, {"1": 100, "2": 0})
        assert driven.now.roll_out is not None
        assert driven.now.roll_out.error is not None
        assert "66.7% of its last 12 requests failed" in driven.now.roll_out.error["message"]

    driving(Driven(store, Siblings(tmp_path, 0)), scenario)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (RollOutLimits(max_error_share=0.5, min_requests=4), "75.0% of its last 4 requests failed"),
        (RollOutLimits(max_p99_s=0.1, min_requests=1), "at most 100 ms may"),
        (RollOutLimits(max_p99_ratio=2.0, min_requests=1), "as long as the old version's"),
    ],
)
@pytest.mark.usefixtures("ready")
def test_a_limit_that_is_passed_rolls_back_by_itself(
    store: ObjectStore,
    deployments: Deployments,
    roll_outs: RollOutManager,
    operations: DeploymentOperations,
    limits: Any,
    said: str,
) -> None:
    made = load(deployments, roll_outs.begin(wish(steps=[Step(10, 60.0), Step(100, 60.0)], limits=limits)))
    assert made.roll_out is not None
    operation = made.roll_out.operation

    async def scenario(driven: Driven) -> None:
        driven.answer("2")
        await driven.look()
        driven.seen("1", 10, total_s=0.01)
        await driven.look()
        assert driven.state is RollOutState.SHIFTING
        driven.seen("2", 3, status="INTERNAL")
        driven.seen("2", 1, total_s=0.3)
        await driven.look()
        assert (driven.state, weights(driven.now)) == (RollOutState.ROLLED_BACK, {"1": 100, "2": 0})
        assert said in operations.get(operation).error.message
        await driven.look()
        assert list(weights(driven.now)) == ["1"]

    driving(Driven(store), scenario)


@pytest.mark.usefixtures("ready")
def test_a_version_whose_replicas_never_start_is_given_up(store: ObjectStore, roll_outs: RollOutManager) -> None:
    roll_outs.begin(wish())

    async def scenario(driven: Driven) -> None:
        await driven.look()
        assert driven.state is RollOutState.LOADING
        driven.settings = replace(driven.settings, roll_out_loads_within_s=0.0)
        driven.restart()
        await driven.look()
        assert (driven.state, driven.now.state) == (RollOutState.ROLLED_BACK, State.READY)
        assert driven.now.roll_out is not None
        assert driven.now.roll_out.error is not None
        assert "CPUs" in driven.now.roll_out.error["message"]

    driving(Driven(store), scenario)


DATASET = "datasets/digits/versions/v1"
DIGITS = replace(IMAGES, raw=(TensorSpec("image", "UINT8", (-1, 28, 28)),))


class Stripes:
    """Tells the stripes of `striped_digits`; `wrong` rows of each batch it tells wrongly."""

    def __init__(self, wrong: int = 0) -> None:
        self._wrong = wrong

    async def forward(self, rows: Rows) -> Outputs:
        images = rows.values["image"].astype(np.float32)
        columns = images.mean(axis=1)  # (B, 28)
        logits = np.stack([columns[:, 2 * label + 4 : 2 * label + 6].mean(axis=1) for label in range(10)], axis=1)
        logits[: self._wrong] = np.roll(logits[: self._wrong], 1, axis=1)
        return Outputs([logits, logits.argmax(axis=1)])


def is_comparing(driven: Driven) -> bool:
    return driven.state is RollOutState.COMPARING


def comparing(
    store: ObjectStore,
    manager: DeploymentManager,
    roll_outs: RollOutManager,
    comparison: Comparison,
    wrong: int = 0,
) -> Deployment:
    """The deployment after version 2 was compared; `wrong` rows of a batch of 8 it tells otherwise."""
    deployments = Deployments(store)
    load(deployments, manager.create(creation()), DIGITS)
    assert load(deployments, roll_outs.begin(wish(comparison=comparison)), DIGITS).versions[1].weight == 0
    seen: list[Deployment] = []

    async def scenario(driven: Driven) -> None:
        driven.answer("1", Stripes())
        await driven.look()
        await asyncio.sleep(0.1)
        assert is_comparing(driven)  # version 2 has no replicas yet
        driven.answer("2", Stripes(wrong))
        while is_comparing(driven):
            await driven.look()
            await asyncio.sleep(0.01)
        seen.append(driven.now)

    driving(Driven(store), scenario)
    return seen[0]


def test_a_version_that_answers_the_held_rows_alike_gets_traffic(
    store: ObjectStore, manager: DeploymentManager, roll_outs: RollOutManager
) -> None:
    commit_version(store, DATASET, {"train": striped_digits(50), "test": striped_digits(20, seed=1)})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=1.0, max_difference=0.0)
    after = comparing(store, manager, roll_outs, wanted)
    assert after.roll_out is not None
    assert (after.roll_out.state, weights(after)) == (RollOutState.SHIFTING, {"1": 90, "2": 10})
    assert after.roll_out.compared == Compared(rows=20, agreement=1.0, difference=0.0)
    assert Deployment.from_record(after.as_record()) == after


def test_a_version_that_answers_them_otherwise_is_rolled_back_before_any_traffic_moves(
    store: ObjectStore, manager: DeploymentManager, roll_outs: RollOutManager
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(16)})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=0.9, max_rows=16)
    after = comparing(store, manager, roll_outs, wanted, wrong=2)
    assert after.roll_out is not None
    assert (after.roll_out.state, weights(after)) == (RollOutState.ROLLED_BACK, {"1": 100, "2": 0})
    assert after.roll_out.compared is not None
    assert after.roll_out.compared.agreement == 0.75
    assert after.roll_out.error is not None
    assert "75.00% of 16 held rows" in after.roll_out.error["message"]


@pytest.mark.parametrize(
    ("version", "split", "kind"), [("datasets/x/versions/v1", "test", "NotFound"), (DATASET, "no", "InvalidArgument")]
)
def test_what_cannot_be_compared_is_rolled_back_with_the_reason(
    store: ObjectStore, manager: DeploymentManager, roll_outs: RollOutManager, version: str, split: str, kind: str
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(4)})
    wanted = Comparison(dataset_version=version, split=split, min_agreement=0.9)
    after = comparing(store, manager, roll_outs, wanted)
    assert after.roll_out is not None
    assert after.roll_out.error is not None
    assert (after.roll_out.state, after.roll_out.error["kind"]) == (RollOutState.ROLLED_BACK, kind)
