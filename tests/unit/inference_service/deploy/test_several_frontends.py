"""What several frontend processes do with one Serve and one log, each with a reconciler of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from inference_service.deploy.deployments import DeploymentManager, Deployments
from inference_service.deploy.reconciler import Reconciler
from inference_service.domain.deployment import Deployment, Scale, application_name
from inference_service.frontend_processes import Peers, PeerState
from inference_service.frontend_tasks import PeerReports
from inference_service.serve.models import Models
from inference_service.serve.ray_serve import Application
from inference_service.serve.replica import Loaded, ReplicaSpec
from inference_service.serve.repository import ModelRepository, SummedStatistics
from shared.errors import Unavailable
from tests.support.inference_server import Classifier, until
from tests.unit.inference_service.reconciled import Running, reconciling
from tests.unit.inference_service.wishes import creation, load

MODEL = "digits"


class Serve(Running):
    """Its replicas are up as soon as they are asked for. A deletion lasts until `may_end`, and meanwhile they still
    answer, as they do while they go."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.deleting: set[str] = set()
        self.may_end = threading.Event()
        self.may_end.set()

    def statuses(self) -> dict[str, Application]:
        return {
            name: replace(seen, running=False, deleting=True) if name in self.deleting else seen
            for name, seen in super().statuses().items()
        }

    def deploy(self, name: str, spec: ReplicaSpec, scale: Scale) -> None:
        super().deploy(name, spec, scale)
        self.start(name)

    def delete(self, name: str) -> None:
        self.deleting.add(name)
        assert self.may_end.wait(60)
        self.deleting.discard(name)
        super().delete(name)

    async def open_model(self, name: str, replicas: int) -> tuple[Classifier, Loaded]:
        if name not in super().statuses():
            raise Unavailable("no replica is known", reason="MODEL_NOT_READY")
        return await super().open_model(name, replicas)


class Frontends:
    """Two processes: the first leads. They hear of each other; when each reconciles, tests say."""

    def __init__(self, folder: Path, deployments: Deployments, made: Deployment, serve: Serve) -> None:
        self.reconcilers: list[Reconciler] = []
        self.models: list[Models] = []
        self.reports: list[PeerReports] = []
        for number in (0, 1):
            peers = Peers(folder, number)
            reconciler, models, _ = reconciling(deployments, made, peers, serve)
            ready = asyncio.Event()
            ready.set()
            statistics = SummedStatistics(models, peers)
            self.reconcilers.append(reconciler)
            self.models.append(models)
            self.reports.append(PeerReports(peers, reconciler, models, statistics, ready))

    def answer(self) -> list[bool]:
        return [models.is_ready(MODEL, "") for models in self.models]

    @asynccontextmanager
    async def reconciled_by_themselves(self) -> AsyncIterator[None]:
        async def nothing() -> None: ...

        tasks = [asyncio.create_task(one.run(nothing)) for one in self.reconcilers]
        yield
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def two_frontends(
    folder: Path, deployments: Deployments, made: Deployment, serve: Serve
) -> AsyncIterator[tuple[Frontends, Reconciler, Reconciler]]:
    """Both answer, and have the port."""
    frontends = Frontends(folder, deployments, made, serve)
    telling = [asyncio.create_task(one.run()) for one in frontends.reports]
    async with frontends.reconciled_by_themselves():
        await until(lambda: frontends.answer() == [True, True], "both to answer")
        for one in frontends.reports:
            await one.turn_to_listen()
    first, second = frontends.reconcilers
    yield frontends, first, second
    for task in telling:
        task.cancel()


def tell_going(folder: Path, *names: str) -> None:
    """By the first."""
    Peers(folder, 0).publish(PeerState(pid=os.getpid(), listens=True, ready=True, holds=[], going=list(names)))


@pytest.fixture(autouse=True)
def _publish_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_service.frontend_tasks.POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("inference_service.frontend_processes.POLL_INTERVAL_S", 0.01)


async def test_a_model_that_is_loaded_soon_after_it_was_unloaded_answers_at_every_frontend(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path
) -> None:
    made, repository = manager.create(creation()), ModelRepository(deployments)
    serve = Serve(application_name(made, made.versions[0]))

    async with two_frontends(tmp_path, deployments, made, serve) as (frontends, leader, _):
        frontends.models[0].put(await asyncio.to_thread(repository.unload, MODEL))
        await leader.reconcile()
        # The other frontend has not looked yet: it never reads that the model was unloaded.
        frontends.models[0].put(await asyncio.to_thread(repository.load, MODEL))
        async with frontends.reconciled_by_themselves():
            await until(lambda: frontends.answer() == [True, True] and serve.deleted != [], "both to answer again")
        assert list(serve.deployed) == serve.deleted


async def test_an_application_being_removed_while_another_frontend_queries_it_is_not_attached(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path
) -> None:
    made = manager.create(creation())
    name = application_name(made, made.versions[0])

    class Asked(Serve):
        async def open_model(self, name: str, replicas: int) -> tuple[Classifier, Loaded]:
            tell_going(tmp_path, name)
            return await super().open_model(name, replicas)

    serve = Asked(name)
    second, *_ = reconciling(deployments, made, Peers(tmp_path, 1), serve)
    await second.reconcile()
    assert (serve.wanted, second.holds()) == ([3], [])


async def test_replicas_that_another_frontend_is_taking_out_are_not_even_asked(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path
) -> None:
    made = manager.create(creation())
    name = application_name(made, made.versions[0])

    serve = Serve(name)
    second, *_ = reconciling(deployments, made, Peers(tmp_path, 1), serve)
    tell_going(tmp_path, name)
    await second.reconcile()
    assert (serve.wanted, second.holds()) == ([], [])
    tell_going(tmp_path)
    await second.reconcile()
    assert (serve.wanted, second.holds()) == ([3], [name])


async def test_an_application_being_removed_is_taken_over_by_no_other_frontend_however_rare_its_reports(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_service.frontend_tasks.POLL_INTERVAL_S", 60.0)
    made, repository = manager.create(creation()), ModelRepository(deployments)
    serve = Serve(application_name(made, made.versions[0]))

    async with two_frontends(tmp_path, deployments, made, serve) as (frontends, leader, other):
        await asyncio.to_thread(repository.unload, MODEL)
        await other.reconcile()
        await until(lambda: other.holds() == [], "the other frontend to let go")
        await leader.reconcile()
        await until(lambda: leader.going() != [], "the first to begin to take it out")
        frontends.models[1].put(await asyncio.to_thread(repository.load, MODEL))
        await other.reconcile()
        assert other.holds() == []


async def test_replicas_that_run_and_are_being_deleted_are_not_taken_over(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made = load(deployments, manager.create(creation()))
    name = application_name(made, made.versions[0])

    serve = Serve(name)
    serve.deleting.add(name)
    started_anew, *_ = reconciling(deployments, made, None, serve)
    await started_anew.reconcile()
    assert (started_anew.holds(), serve.deployed) == ([], {})
    serve.delete(name)
    await started_anew.reconcile()
    assert list(serve.deployed) == [name]


async def test_no_frontend_takes_over_replicas_that_another_has_begun_to_delete(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path
) -> None:
    made, repository = manager.create(creation()), ModelRepository(deployments)
    serve = Serve(application_name(made, made.versions[0]))

    async with two_frontends(tmp_path, deployments, made, serve) as (frontends, leader, other):
        serve.may_end.clear()
        await asyncio.to_thread(repository.unload, MODEL)
        await other.reconcile()
        await leader.reconcile()
        await until(lambda: serve.deleting != set(), "the deletion to begin")
        frontends.models[1].put(await asyncio.to_thread(repository.load, MODEL))
        await other.reconcile()
        assert frontends.answer() == [False, False]
        serve.may_end.set()
        async with frontends.reconciled_by_themselves():
            await until(lambda: frontends.answer() == [True, True], "both to answer again")
