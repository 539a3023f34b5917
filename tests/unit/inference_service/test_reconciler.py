"""What the reconciler does about a version whose replicas are there, with a Serve that says they are."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from inference_service.roll_out_manager import RollOutManager
from inference_service.settings import InferenceSettings
from inference_service.siblings import Siblings, Told
from shared.errors import DataLoss, MillraceError, ResourceExhausted, Unavailable
from shared.settings import ServiceSettings, StoreSettings
from shared.storage import ObjectStore
from tests.support.inference_server import IMAGES, Classifier, until
from tests.unit.inference_service.test_registry import creation
from tests.unit.inference_service.test_roll_outs import wish


class Running:
    """Serve as the reconciler sees it while all replicas of these applications are up."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.wanted: list[int] = []
        self.replicas = 3
        self.deployed: dict[str, Scale] = {}
        self.deleted: list[str] = []

    def statuses(self) -> dict[str, Application]:
        return dict.fromkeys(self._names, Application(running=True, failed=False, message="", replicas=self.replicas))

    def deploy(self, name: str, _spec: ReplicaSpec, scale: Scale) -> None:
        self.deployed[name] = scale

    def delete(self, name: str) -> None:
        self.deleted.append(name)
        self._names = tuple(one for one in self._names if one != name)

    def nodes(self) -> dict[str, dict[str, float]]:
        return {"a": {"CPU": 8.0}}

    def describe(self, _name: str, replicas: int) -> tuple[Classifier, Loaded]:
        self.wanted.append(replicas)
        return Classifier(), Loaded(IMAGES, "", {})


def reconciling(
    deployments: Deployments, made: Deployment, siblings: Siblings | None = None
) -> tuple[Reconciler, Models, Running]:
    service = ServiceSettings(listen="", store=StoreSettings(url="file:///nowhere"))
    models, running = Models(), Running(application_name(made, made.versions[0]))
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
        after = RollOutManager(store, deployments, operations).begin(wish())
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
        assert (others.deleted, others.deployed) == ([], {})

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
