"""What the reconciler does when Ray, the store or a log of a deployment is in trouble."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inference_service.deploy import live_deployments
from inference_service.deploy.deployments import DeploymentManager, Deployments
from inference_service.deploy.reconciler import RayLost
from inference_service.domain.deployment import Deployment, application_name
from shared.errors import DataLoss, MillraceError, ResourceExhausted, Unavailable
from shared.storage import ObjectStore
from tests.support.inference_server import until
from tests.unit.inference_service.reconciled import reconciling
from tests.unit.inference_service.wishes import JOB, creation


@pytest.mark.parametrize(
    "trouble",
    [
        Unavailable("the store does not answer"),
        ResourceExhausted("the store is full", reason="STORE_FULL"),
        DataLoss("a log cannot be read"),
    ],
    ids=lambda trouble: type(trouble).__name__,
)
async def test_a_store_in_trouble_is_not_taken_for_a_ray_that_is_silent(
    deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch, trouble: MillraceError
) -> None:
    made = manager.create(creation())
    tried = 0

    def out(*_: Any) -> None:
        nonlocal tried
        tried += 1
        raise trouble

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


async def test_a_ray_that_is_silent_ends_the_process(
    deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager.create(creation())

    def unresponsive() -> None:
        raise TimeoutError

    async def on_first() -> None:
        raise AssertionError("it has reconciled")

    reconciler, _, running = reconciling(deployments, made)
    monkeypatch.setattr(running, "statuses", unresponsive)
    async with asyncio.timeout(60):
        with pytest.raises(RayLost):
            await reconciler.run(on_first)


async def test_a_fault_of_ours_is_not_taken_for_a_ray_that_is_silent(
    deployments: Deployments,
    manager: DeploymentManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = manager.create(creation())
    polls = 0

    def unreadable() -> list[Deployment]:
        nonlocal polls
        polls += 1
        raise TypeError("unexpected keyword argument 'colour'")

    async def on_first() -> None:
        raise AssertionError("it has reconciled")

    reconciler, _, _ = reconciling(deployments, made)
    monkeypatch.setattr(deployments, "all", unreadable)
    running = asyncio.create_task(reconciler.run(on_first))
    await asyncio.wait({running}, timeout=0.5)  # ten times what Ray may be silent
    await until(lambda: polls > 1 or running.done(), "it to look again")
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})

    assert polls > 1
    assert "colour" in caplog.text
    assert "does not answer" not in caplog.text


async def test_no_application_is_taken_for_a_stray_before_all_logs_were_read(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_deployments, "DEPLOYMENTS_A_FIRST_TURN", 1)
    made = manager.create(creation())
    late = manager.create(creation("letters"))
    store.delete_folder(live_deployments.FOLDER)  # an earlier release created them beside this one
    store.put(live_deployments.ALL_ARE_MARKED, b"")
    late_name, stray = application_name(late, late.versions[0]), f"{'0' * 32}-v1"
    reconciler, models, running = reconciling(deployments, made)
    running.start(application_name(made, made.versions[0]), late_name, stray)

    await reconciler.reconcile()
    assert models.is_ready("digits", "")
    assert late.name not in [one.name for one in models.deployments()]
    while not deployments.has_read_all:
        await reconciler.reconcile()

    assert late.name in [one.name for one in models.deployments()]
    await until(lambda: running.deleted == [stray], "what no log names to go, and nothing else")


async def test_a_log_that_cannot_be_read_keeps_no_other_model_from_being_served_and_loses_no_application(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = manager.create(creation()), manager.create(creation("letters"))
    names = [application_name(one, one.versions[0]) for one in (good, bad)]
    unwanted, stray = f"{good.uid}-v9", f"{'0' * 32}-v1"
    (key,) = (info.key for info in store.list(f"{bad.name}/log"))
    whole = store.get(key)
    store.put(key, whole[:-9])

    reconciler, models, running = reconciling(deployments, good)
    running.start(*names, unwanted, stray)
    first = asyncio.Event()

    async def on_first() -> None:
        first.set()

    task = asyncio.create_task(reconciler.run(on_first))
    await asyncio.wait_for(first.wait(), 60)
    await until(lambda: models.is_ready("digits", ""), "the good one is served")
    await until(lambda: unwanted in running.deleted, "what a log that can be read does not name goes")
    assert not models.is_ready("letters", "")
    (reported,) = (record.getMessage() for record in caplog.records if bad.name in record.getMessage())
    assert "cannot be read" in reported
    store.put(key, whole)  # an operator has it restored
    await until(lambda: models.is_ready("letters", ""), "the other one is served")
    await until(lambda: running.deleted == [unwanted, stray], "what no log names goes")
    task.cancel()


async def test_a_model_whose_log_cannot_be_read_any_more_is_served_as_before(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())

    reconciler, models, running = reconciling(deployments, made)
    await reconciler.reconcile()
    key = max(info.key for info in store.list(f"{made.name}/log"))
    store.put(key, b"{")
    await reconciler.reconcile()
    assert models.is_ready("digits", "")
    assert (running.deployed, running.deleted) == ({}, [])


async def test_a_job_whose_checkpoints_cannot_be_read_keeps_no_model_from_being_served(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())
    for info in [*store.list(f"{JOB}/checkpoints/log")]:
        store.put(info.key, b"{")

    reconciler, models, _ = reconciling(deployments, made)
    await reconciler.reconcile()
    assert models.is_ready("digits", "")
