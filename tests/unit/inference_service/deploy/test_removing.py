"""How versions go that requests may still be sent to."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inference_service.deploy.deployments import DeploymentManager, Deployments
from inference_service.domain.deployment import application_name
from inference_service.domain.signature import Rows
from inference_service.serve.batcher import Batcher
from inference_service.serve.repository import ModelRepository
from tests.support.inference_server import until
from tests.unit.inference_service.reconciled import reconciling
from tests.unit.inference_service.wishes import creation


async def test_a_drain_that_fails_leaves_nothing_that_others_wait_for(
    deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager.create(creation())

    async def fails(*_: Any) -> None:
        raise OSError("broken")

    reconciler, _, running = reconciling(deployments, made)
    await reconciler.reconcile()
    assert reconciler.holds() == [application_name(made, made.versions[0])]
    monkeypatch.setattr(Batcher, "drain", fails)
    manager.delete(made.name, "")
    await reconciler.reconcile()
    await until(lambda: reconciler.holds() == [], "it holds nothing")
    await until(lambda: not reconciler._unloader.under_way, "it has given up for now")
    assert running.deleted == []
    await reconciler.reconcile()
    await until(lambda: not deployments.exists(made.name), "its log ends")


async def test_a_deployment_that_is_unloaded_is_drained_and_taken_out_and_started_anew_when_it_is_loaded_again(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made, repository = manager.create(creation()), ModelRepository(deployments)
    (name,) = (application_name(made, version) for version in made.versions)

    reconciler, models, running = reconciling(deployments, made)
    await reconciler.reconcile()
    assert models.is_ready("digits", "")

    models.put(await asyncio.to_thread(repository.unload, "digits"))
    await reconciler.reconcile()
    # Wished for before the replicas are gone: none of those that go is taken for one that is wanted.
    models.put(await asyncio.to_thread(repository.load, "digits"))
    await reconciler.reconcile()
    assert models.find_batcher(name) is None
    await until(lambda: running.deleted == [name], "the application to be gone")
    assert not models.is_ready("digits", "")

    await until(lambda: name not in reconciler._unloader.under_way, "the end of its removal")
    await reconciler.reconcile()
    assert list(running.deployed) == [name]


async def test_a_deployment_that_is_deleted_while_it_is_unloaded_still_answers_what_it_has(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made, repository = manager.create(creation()), ModelRepository(deployments)
    (name,) = (application_name(made, version) for version in made.versions)

    reconciler, models, running = reconciling(deployments, made)
    await reconciler.reconcile()
    batcher = models.find_batcher(name)
    assert batcher is not None
    model: Any = batcher._model
    model.may_work.clear()
    asked = asyncio.create_task(batcher.submit(Rows("raw", {"image": np.ones((1, 4), np.uint8)}), None))
    await until(lambda: model.at_work == 1, "a batch to be at work")
    models.put(await asyncio.to_thread(repository.unload, "digits"))
    await reconciler.reconcile()
    manager.delete(made.name, "")
    await reconciler.reconcile()
    await asyncio.sleep(0.05)
    assert (running.deleted, reconciler.holds()) == ([], [name])
    model.may_work.set()
    assert (await asked).arrays[0].tolist() == [[1.0] * 4]
    await until(lambda: not deployments.exists(made.name), "its log to end")
    assert reconciler.holds() == []
