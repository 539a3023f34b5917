"""What the reconciler does about a version whose replicas are there, with a Serve that says they are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from inference_service.domain.deployment import Deployment, State
from inference_service.manager import DeploymentManager
from inference_service.models import Models, application_name
from inference_service.ray_serve import Application
from inference_service.reconciler import RayLost, Reconciler
from inference_service.registry import Deployments
from inference_service.replica import Loaded
from inference_service.settings import InferenceSettings
from shared.errors import DataLoss, MillraceError, ResourceExhausted, Unavailable
from shared.settings import ServiceSettings, StoreSettings
from tests.support.inference_server import IMAGES, Classifier, until
from tests.unit.inference_service.test_registry import creation


class Running:
    """Serve as the reconciler sees it while all replicas of these applications are up."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.wanted: list[int] = []

    def statuses(self) -> dict[str, Application]:
        return dict.fromkeys(self._names, Application(running=True, failed=False, message=""))

    def describe(self, _name: str, replicas: int) -> tuple[Classifier, Loaded]:
        self.wanted.append(replicas)
        return Classifier(), Loaded(IMAGES, "", {})


def reconciling(deployments: Deployments, made: Deployment) -> tuple[Reconciler, Models, Running]:
    service = ServiceSettings(listen="", store=StoreSettings(url="file:///nowhere"))
    models, running = Models(), Running(application_name(made, made.versions[0]))
    serve: Any = running
    settings = InferenceSettings(service=service, reconcile_every_s=0.01, ray_silent_after_s=0.05)
    return Reconciler(deployments, serve, models, settings), models, running


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
