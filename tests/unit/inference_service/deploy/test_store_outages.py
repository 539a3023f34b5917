"""A frontend that starts while the store is full or silent serves what runs; a silent store is no silent Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from inference_service.deploy.deployments import Deployments
from inference_service.deploy.reconciler import Reconciler
from inference_service.domain.deployment import application_name
from inference_service.serve import ray_serve
from inference_service.serve.ray_serve import Application
from shared.errors import ResourceExhausted, Unavailable
from shared.storage import ObjectStore
from tests.support.flaky_store import FlakyStore
from tests.support.inference_server import deployment, until
from tests.unit.inference_service.reconciled import Running, reconciling

FULL = ResourceExhausted("the object store is full", reason="STORE_FULL")


Scenario = Callable[[asyncio.Event, asyncio.Task[None]], Awaitable[None]]


async def started(reconciler: Reconciler, scenario: Scenario) -> None:
    """The scenario gets what is set once the frontend is ready."""
    ready = asyncio.Event()

    async def on_first() -> None:
        ready.set()

    running = asyncio.create_task(reconciler.run(on_first))
    try:
        await scenario(ready, running)
    finally:
        running.cancel()


async def test_a_frontend_that_starts_while_the_store_is_full_serves_what_runs_and_marks_it_later(
    store: ObjectStore,
) -> None:
    flaky = FlakyStore(store)
    deployments = Deployments(flaky)
    one = deployments.create(deployment())
    flaky.error = FULL

    reconciler, models, _ = reconciling(deployments, one)

    async def scenario(ready: asyncio.Event, _: asyncio.Task[None]) -> None:
        await asyncio.wait_for(ready.wait(), 60)
        assert models.is_ready("m", "")
        await until(lambda: flaky.refused > 2, "it tries to mark what it serves")
        flaky.come_back()
        before = flaky.puts
        await until(lambda: flaky.puts > before, "it marks what it serves")

    await started(reconciler, scenario)


class UnresponsiveStore:
    """Stands for what `deployments` reads while `is_unresponsive`."""

    def __init__(self, deployments: Deployments, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_unresponsive = False
        self.asked = 0
        read = deployments.all

        def read_or_raise() -> object:
            self.asked += 1
            if self.is_unresponsive:
                raise Unavailable("the object store does not answer")
            return read()

        monkeypatch.setattr(deployments, "all", read_or_raise)


def _first_frontend(deployments: Deployments, running: Running) -> None:
    """One that read the logs while the store answered."""
    one = deployments.get("deployments/m")
    asyncio.run(reconciling(deployments, one, running=running)[0].reconcile())


def test_a_frontend_that_starts_while_the_store_is_silent_serves_what_runs_as_ray_kept_it(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployments = Deployments(store)
    one, other = deployments.create(deployment()), deployments.create(deployment("other"))
    stray = f"{'0' * 32}-v1"
    running = Running(*(application_name(each, each.versions[0]) for each in (one, other)))
    _first_frontend(deployments, running)
    deployments.delete("deployments/other", "", 2.0)
    unresponsive = UnresponsiveStore(deployments, monkeypatch)
    unresponsive.is_unresponsive = True
    running.start(application_name(one, one.versions[0]), stray)

    async def main() -> None:
        reconciler, models, _ = reconciling(deployments, one, running=running)

        async def scenario(ready: asyncio.Event, _: asyncio.Task[None]) -> None:
            await asyncio.wait_for(ready.wait(), 60)
            assert models.is_ready("m", "")
            asked = unresponsive.asked
            await until(lambda: unresponsive.asked > asked + 2, "it asks the store again and again")
            assert not models.is_ready("other", "")
            assert (running.deployed, running.deleted) == ({}, [])
            unresponsive.is_unresponsive = False
            await until(lambda: stray in running.deleted, "what no log names goes")
            assert models.is_ready("m", "")

        await started(reconciler, scenario)

    asyncio.run(main())


@pytest.mark.parametrize("kept", [None, b"[{", b'[{"colour": "red"}]'])
async def test_a_frontend_that_has_heard_of_nothing_goes_on_asking_the_store_and_is_not_ready(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, kept: bytes | None
) -> None:
    deployments = Deployments(store)
    one = deployments.create(deployment())
    unresponsive = UnresponsiveStore(deployments, monkeypatch)
    unresponsive.is_unresponsive = True

    reconciler, models, running = reconciling(deployments, one)
    running.data = kept

    async def scenario(ready: asyncio.Event, task: asyncio.Task[None]) -> None:
        await until(lambda: unresponsive.asked > 3 or task.done(), "it asks again and again")
        assert not ready.is_set()
        unresponsive.is_unresponsive = False
        await asyncio.wait_for(ready.wait(), 60)
        assert models.is_ready("m", "")

    await started(reconciler, scenario)


async def test_values_that_ray_keeps_are_written_again_only_where_they_are_new(store: ObjectStore) -> None:
    deployments = Deployments(store)
    one = deployments.create(deployment())

    reconciler, _, running = reconciling(deployments, one)
    await reconciler.reconcile()
    writes = [running.kept()]
    running.data = None
    await reconciler.reconcile()
    writes.append(running.kept())
    deployments.create(deployment("other"))
    await reconciler.reconcile()
    writes.append(running.kept())
    assert [one is not None and one.count(b'"name": "deployments/') for one in writes] == [1, False, 2]


async def test_threads_that_all_wait_for_the_store_are_not_taken_for_a_silent_ray(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_serve, "SERVE_TIMEOUT_S", 240.0)
    deployments = Deployments(store)
    one = deployments.create(deployment())
    may_be_held, waits, all_held, answers = (threading.Event() for _ in range(4))
    both = threading.Barrier(2, all_held.set)

    def wait_for_the_store() -> None:
        both.wait(240)
        assert answers.wait(240)

    class Asked(Running):
        """Its first question from `may_be_held` on is answered once all other threads wait for the store."""

        answered_while_held = 0

        def statuses(self) -> dict[str, Application]:
            if may_be_held.is_set() and not answers.is_set():
                waits.set()
                assert all_held.wait(240)
            return super().statuses()

        def nodes(self) -> dict[str, dict[str, float]]:
            self.answered_while_held += all_held.is_set() and not answers.is_set()
            return super().nodes()

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    running = Asked(application_name(one, one.versions[0]))
    reconciler, models, _ = reconciling(deployments, one, running=running)

    async def scenario(ready: asyncio.Event, task: asyncio.Task[None]) -> None:
        await asyncio.wait_for(ready.wait(), 60)
        may_be_held.set()
        await until(waits.is_set, "Serve to be asked")
        held = [asyncio.create_task(asyncio.to_thread(wait_for_the_store)) for _ in range(2)]
        await until(lambda: running.answered_while_held > 0 or task.done(), "Serve's answers")
        answers.set()
        assert not task.done()
        await asyncio.gather(*held)
        assert models.is_ready("m", "")

    await started(reconciler, scenario)
