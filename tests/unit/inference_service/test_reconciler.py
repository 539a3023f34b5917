"""What the reconciler does about a version whose replicas are there, with a Serve that says they are."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_service.batcher import Batcher
from inference_service.cluster import Cluster
from inference_service.domain.deployment import Deployment, State
from inference_service.domain.scaling import Autoscaling, Scale
from inference_service.manager import DeploymentManager
from inference_service.models import Models, application_name
from inference_service.operations import DeploymentOperations
from inference_service.ray_serve import Application
from inference_service.reconciler import RayLost, Reconciler
from inference_service.registry import Deployments
from inference_service.replica import Loaded, ReplicaSpec
from inference_service.repository import ModelRepository
from inference_service.roll_out_manager import RollOutManager
from inference_service.settings import InferenceSettings
from inference_service.sibling_reports import SiblingReports
from inference_service.siblings import Siblings, Told
from shared.errors import DataLoss, MillraceError, ResourceExhausted, Unavailable
from shared.settings import ServiceSettings, StoreSettings
from shared.storage import ObjectStore
from tests.support.inference_server import IMAGES, Classifier, until
from tests.unit.inference_service.wishes import JOB, creation, wish

LOST_AFTER_S = 0.1


class Running:
    """Serve as the reconciler sees it while all replicas of these applications are up."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.wanted: list[int] = []
        self.replicas = 3
        self.deployed: dict[str, Scale] = {}
        self.deleted: list[str] = []
        self.forgotten: list[str] = []
        self.is_well = True
        self.trouble: Exception | None = None

    def start(self, *names: str) -> None:
        """These are up, and no others."""
        self._names = names

    def statuses(self) -> dict[str, Application]:
        seen = Application(running=self.is_well, failed=False, message="", replicas=self.replicas)
        return dict.fromkeys(self._names, seen)

    def deploy(self, name: str, _spec: ReplicaSpec, scale: Scale) -> None:
        self.deployed[name] = scale

    def delete(self, name: str) -> None:
        self.deleted.append(name)
        self._names = tuple(one for one in self._names if one != name)

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    def nodes(self) -> dict[str, dict[str, float]]:
        return {"a": {"CPU": 8.0}}

    async def describe(self, _name: str, replicas: int) -> tuple[Classifier, Loaded]:
        self.wanted.append(replicas)
        if self.trouble is not None:
            raise self.trouble
        return Classifier(), Loaded(IMAGES, "", {})


def reconciling(
    deployments: Deployments, made: Deployment, siblings: Siblings | None = None
) -> tuple[Reconciler, Models, Running]:
    service = ServiceSettings(listen="", store=StoreSettings(url="file:///nowhere"))
    models, running = Models(LOST_AFTER_S), Running(application_name(made, made.versions[0]))
    serve: Any = running
    settings = InferenceSettings(service=service, reconcile_every_s=0.01, ray_silent_after_s=0.05)
    reconciler = Reconciler(deployments, serve, models, Cluster(None), settings, siblings or Siblings())
    return reconciler, models, running


def test_a_version_whose_loading_could_not_be_written_down_is_written_down_later(
    deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager.create(creation())

    def out(*_: Any) -> None:
        raise Unavailable("the store does not answer")

    async def scenario() -> None:
        reconciler, models, _ = reconciling(deployments, made)
        with monkeypatch.context() as outage:
            outage.setattr(deployments, "transition", out)
            await reconciler.reconcile()
        assert deployments.get(made.name).state is State.LOADING
        await reconciler.reconcile()
        assert deployments.get(made.name).state is State.READY
        assert models.is_ready("digits", "")

    asyncio.run(scenario())


def test_all_replicas_are_asked_before_a_version_gets_traffic_and_any_afterwards(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation(spec=replace(creation().spec, num_replicas=3)))

    async def scenario() -> None:
        reconciler, _, running = reconciling(deployments, made)
        await reconciler.reconcile()
        assert running.wanted == [3]
        again, _, running = reconciling(deployments, made)  # the service was started again
        await again.reconcile()
        assert running.wanted == [1]

    asyncio.run(scenario())


def test_batches_are_made_for_the_replicas_that_there_are_now(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    bounds = Autoscaling(min_replicas=1, max_replicas=4, rows_per_replica=8)
    made = manager.create(creation(spec=replace(creation().spec, autoscaling=bounds)))
    version = made.versions[0]

    async def scenario() -> None:
        reconciler, models, running = reconciling(deployments, made)
        assert models.replicas(made, version) is None
        for running.replicas in (1, 4, 2):
            await reconciler.reconcile()
            assert models.replicas(made, version) == running.replicas
            batcher = models.detach(application_name(made, version))
            assert batcher is not None
            models.attach(application_name(made, version), batcher)
            assert batcher._limits.max_in_flight == 2 * running.replicas

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "trouble",
    [
        Unavailable("the store does not answer"),
        ResourceExhausted("the store is full", reason="STORE_FULL"),
        DataLoss("a log cannot be read"),
    ],
    ids=lambda trouble: type(trouble).__name__,
)
def test_a_store_in_trouble_is_not_taken_for_a_ray_that_is_silent(
    deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch, trouble: MillraceError
) -> None:
    made = manager.create(creation())
    tried = 0

    def out(*_: Any) -> None:
        nonlocal tried
        tried += 1
        raise trouble

    async def scenario() -> None:
        reconciler, models, _ = reconciling(deployments, made)
        first = asyncio.Event()

        async def on_first() -> None:
            first.set()

        running = asyncio.create_task(reconciler.run(on_first))
        with monkeypatch.context() as outage:
            outage.setattr(deployments, "all", out)
            # Ten times the pause, twice the silence that ends the process.
            await until(lambda: tried > 10 or running.done(), "it tries again and again")
        await until(lambda: first.is_set() or running.done(), "it goes on")
        assert models.is_ready("digits", "")
        assert not running.done()
        running.cancel()

    asyncio.run(scenario())


def test_the_version_of_a_roll_out_begins_with_as_many_replicas_as_the_old_one_has(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager, operations: DeploymentOperations
) -> None:
    bounds = Autoscaling(min_replicas=1, max_replicas=4, rows_per_replica=8)
    made = manager.create(creation(spec=replace(creation().spec, autoscaling=bounds)))

    async def scenario() -> None:
        reconciler, _, running = reconciling(deployments, made)
        await reconciler.reconcile()
        after = RollOutManager(store, deployments, operations, Cluster(None)).begin(wish())
        await reconciler.reconcile()
        assert running.deployed == {
            application_name(made, after.versions[1]): Scale(initial=3, cpus=1, autoscaling=bounds)
        }

    asyncio.run(scenario())


def test_a_version_gets_traffic_once_all_fronts_reach_it_and_goes_once_none_does(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path
) -> None:
    made = manager.create(creation())
    name = application_name(made, made.versions[0])

    def tell(second: Reconciler) -> None:
        Siblings(tmp_path, 1).tell(Told(pid=os.getpid(), listens=True, ready=True, holds=second.holds()))

    async def scenario() -> None:
        first, _, its = reconciling(deployments, made, Siblings(tmp_path, 0))
        second, models, others = reconciling(deployments, made, Siblings(tmp_path, 1))
        tell(second)
        await first.reconcile()
        assert deployments.get(made.name).state is State.LOADING  # the second has not met its replicas
        await second.reconcile()
        tell(second)
        assert deployments.get(made.name).state is State.LOADING
        await first.reconcile()
        assert deployments.get(made.name).state is State.READY
        await second.reconcile()
        assert models.is_ready("digits", "")
        manager.delete(made.name, "")
        await first.reconcile()
        await asyncio.sleep(0.4)
        assert its.deleted == []  # the second may still send a batch there
        await second.reconcile()
        await until(lambda: second.holds() == [], "the second has let it go")
        tell(second)
        await until(lambda: its.deleted == [name], "the first takes it away")
        await until(lambda: not deployments.exists(made.name), "its log ends")
        assert (others.deleted, others.deployed, others.forgotten) == ([], {}, [name])

    asyncio.run(scenario())


def test_a_version_that_was_loaded_is_answered_by_the_replicas_that_are_left(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())

    async def scenario() -> None:
        reconciler, models, running = reconciling(deployments, made)
        running.is_well = False
        await reconciler.reconcile()
        assert reconciler.holds() == []  # before it is loaded, all of its replicas must be well
        running.is_well = True
        await reconciler.reconcile()
        # The service is started again while there is no room for a replica that died.
        again, models, running = reconciling(deployments, made)
        running.is_well, running.replicas = False, 0
        await again.reconcile()
        assert again.holds() == []
        running.replicas = 1
        await again.reconcile()
        assert models.is_ready("digits", "")

    asyncio.run(scenario())


def test_a_version_that_has_lost_all_its_replicas_answers_again_once_serve_has_one(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())

    async def scenario() -> None:
        reconciler, models, running = reconciling(deployments, made)
        await reconciler.reconcile()
        await reconciler.reconcile()
        running.is_well, running.replicas = False, 0
        await reconciler.reconcile()
        assert models.is_ready("digits", "")  # Serve may start one again in a moment
        await asyncio.sleep(LOST_AFTER_S)
        await reconciler.reconcile()
        assert not models.is_ready("digits", "")
        # What comes meanwhile waits in its queue.
        assert reconciler.holds() == [application_name(made, made.versions[0])]
        assert models.choose("digits", "")[1].number == "1"
        running.replicas = 1
        await reconciler.reconcile()
        assert models.is_ready("digits", "")

    asyncio.run(scenario())


def test_a_front_whose_replicas_could_not_be_asked_opens_no_port_that_another_answers_on(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path
) -> None:
    made = manager.create(creation())
    name = application_name(made, made.versions[0])

    async def scenario() -> None:
        siblings = Siblings(tmp_path, 1)
        there, *_ = reconciling(deployments, made, Siblings(tmp_path, 0))
        await there.reconcile()
        Siblings(tmp_path, 0).tell(Told(pid=os.getpid(), listens=True, ready=True, holds=there.holds()))
        starting, models, running = reconciling(deployments, made, siblings)
        ready = asyncio.Event()
        reports = SiblingReports(siblings, starting, models, ready)
        running.trouble = Unavailable("no replica is known yet", reason="MODEL_NOT_READY")
        await starting.reconcile()
        ready.set()
        turn = asyncio.create_task(reports.turn_to_listen())
        await asyncio.sleep(0.6)
        assert running.wanted
        assert not turn.done()
        Siblings(tmp_path, 0).tell(Told(pid=os.getpid(), listens=True, ready=True, holds=there.holds()))
        running.trouble = None
        await starting.reconcile()
        assert starting.holds() == [name]
        await asyncio.wait_for(turn, 5)

    asyncio.run(scenario())


def test_a_drain_that_fails_leaves_nothing_that_others_wait_for(
    deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager.create(creation())

    async def fails(*_: Any) -> None:
        raise OSError("broken")

    async def scenario() -> None:
        reconciler, _, running = reconciling(deployments, made)
        await reconciler.reconcile()
        assert reconciler.holds() == [application_name(made, made.versions[0])]
        monkeypatch.setattr(Batcher, "drain", fails)
        manager.delete(made.name, "")
        await reconciler.reconcile()
        await until(lambda: reconciler.holds() == [], "it holds nothing")
        await until(lambda: not reconciler._removing, "it has given up for now")
        assert running.deleted == []
        await reconciler.reconcile()
        await until(lambda: not deployments.exists(made.name), "its log ends")

    asyncio.run(scenario())


def test_a_front_that_does_not_lead_starts_nothing(deployments: Deployments, manager: DeploymentManager) -> None:
    made = manager.create(creation())

    async def scenario(number: int) -> dict[str, Scale]:
        reconciler, _, running = reconciling(deployments, made, Siblings(None, number))
        running.delete(application_name(made, made.versions[0]))
        await reconciler.reconcile()
        return running.deployed

    assert asyncio.run(scenario(1)) == {}
    assert list(asyncio.run(scenario(0))) == [application_name(made, made.versions[0])]


def test_a_ray_that_is_silent_ends_the_process(
    deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager.create(creation())

    def silent() -> None:
        raise TimeoutError

    async def on_first() -> None:
        raise AssertionError("it has reconciled")

    async def scenario() -> None:
        reconciler, _, running = reconciling(deployments, made)
        monkeypatch.setattr(running, "statuses", silent)
        async with asyncio.timeout(20):
            with pytest.raises(RayLost):
                await reconciler.run(on_first)

    asyncio.run(scenario())


def test_a_fault_of_ours_is_not_taken_for_a_ray_that_is_silent(
    deployments: Deployments,
    manager: DeploymentManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = manager.create(creation())
    looks = 0

    def unreadable() -> list[Deployment]:
        nonlocal looks
        looks += 1
        raise TypeError("unexpected keyword argument 'colour'")

    async def on_first() -> None:
        raise AssertionError("it has reconciled")

    async def scenario() -> None:
        reconciler, _, _ = reconciling(deployments, made)
        monkeypatch.setattr(deployments, "all", unreadable)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):  # ten times what Ray may be silent
                await reconciler.run(on_first)

    asyncio.run(scenario())
    assert looks > 1
    assert "colour" in caplog.text
    assert "does not answer" not in caplog.text


def test_a_deployment_that_is_unloaded_is_drained_and_taken_out_and_started_anew_when_it_is_loaded_again(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made, repository = manager.create(creation()), ModelRepository(deployments)
    (name,) = (application_name(made, version) for version in made.versions)

    async def scenario() -> None:
        reconciler, models, running = reconciling(deployments, made)
        await reconciler.reconcile()
        assert models.is_ready("digits", "")

        models.put(await asyncio.to_thread(repository.unload, "digits"))
        await reconciler.reconcile()
        # Wished for before the replicas are gone: none of those that go is taken for one that is wanted.
        models.put(await asyncio.to_thread(repository.load, "digits"))
        await reconciler.reconcile()
        assert not models.has_batcher(name)
        await until(lambda: running.deleted == [name], "the application to be gone")
        assert not models.is_ready("digits", "")

        await until(lambda: name not in reconciler._removing, "the end of its removal")
        await reconciler.reconcile()
        assert list(running.deployed) == [name]

    asyncio.run(scenario())


def test_a_log_that_cannot_be_read_keeps_no_other_model_from_being_served_and_loses_no_application(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = manager.create(creation()), manager.create(creation("letters"))
    names = [application_name(one, one.versions[0]) for one in (good, bad)]
    unwanted, stray = f"{good.uid}-v9", f"{'0' * 32}-v1"
    (key,) = (info.key for info in store.list(f"{bad.name}/log"))
    whole = store.get(key)
    store.put(key, whole[:-9])

    async def scenario() -> None:
        reconciler, models, running = reconciling(deployments, good)
        running.start(*names, unwanted, stray)
        first = asyncio.Event()

        async def on_first() -> None:
            first.set()

        task = asyncio.create_task(reconciler.run(on_first))
        await asyncio.wait_for(first.wait(), 5)
        await until(lambda: models.is_ready("digits", ""), "the good one is served")
        await until(lambda: unwanted in running.deleted, "what a log that can be read does not name goes")
        assert not models.is_ready("letters", "")
        (told,) = (record.getMessage() for record in caplog.records if bad.name in record.getMessage())
        assert "cannot be read" in told
        store.put(key, whole)  # an operator has it restored
        await until(lambda: models.is_ready("letters", ""), "the other one is served")
        await until(lambda: running.deleted == [unwanted, stray], "what no log names goes")
        task.cancel()

    asyncio.run(scenario())


def test_a_model_whose_log_cannot_be_read_any_more_is_served_as_before(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())

    async def scenario() -> None:
        reconciler, models, running = reconciling(deployments, made)
        await reconciler.reconcile()
        key = max(info.key for info in store.list(f"{made.name}/log"))
        store.put(key, b"{")
        await reconciler.reconcile()
        assert models.is_ready("digits", "")
        assert (running.deployed, running.deleted) == ({}, [])

    asyncio.run(scenario())


def test_a_job_whose_checkpoints_cannot_be_read_keeps_no_model_from_being_served(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())
    for info in [*store.list(f"{JOB}/checkpoints/log")]:
        store.put(info.key, b"{")

    async def scenario() -> None:
        reconciler, models, _ = reconciling(deployments, made)
        await reconciler.reconcile()
        assert models.is_ready("digits", "")

    asyncio.run(scenario())
