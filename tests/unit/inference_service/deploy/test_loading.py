"""How versions come to be answered, with a Serve that says of their replicas what tests want."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_service.deploy.deployments import Cluster, DeploymentManager, DeploymentOperations, Deployments
from inference_service.deploy.reconciler import Reconciler
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import Autoscaling, Scale, State, application_name
from inference_service.frontend_processes import Peers, PeerState
from inference_service.frontend_tasks import PeerReports
from inference_service.serve.repository import SummedStatistics
from shared.errors import Unavailable
from shared.storage import ObjectStore
from tests.support.inference_server import until
from tests.unit.inference_service.reconciled import LOST_AFTER_S, Clock, reconciling
from tests.unit.inference_service.wishes import creation, request


async def test_a_version_whose_loading_could_not_be_written_down_is_written_down_later(
    deployments: Deployments, manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager.create(creation())

    def out(*_: Any) -> None:
        raise Unavailable("the store does not answer")

    reconciler, models, _ = reconciling(deployments, made)
    with monkeypatch.context() as outage:
        outage.setattr(deployments, "transition", out)
        await reconciler.reconcile()
    assert deployments.get(made.name).state is State.LOADING
    await reconciler.reconcile()
    assert deployments.get(made.name).state is State.READY
    assert models.is_ready("digits", "")


async def test_all_replicas_are_asked_before_a_version_gets_traffic_and_any_afterwards(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation(spec=replace(creation().spec, num_replicas=3)))

    reconciler, _, running = reconciling(deployments, made)
    await reconciler.reconcile()
    assert running.wanted == [3]
    again, _, running = reconciling(deployments, made)  # the service was started again
    await again.reconcile()
    assert running.wanted == [1]


async def test_batches_are_made_for_the_replicas_that_there_are_now(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    bounds = Autoscaling(min_replicas=1, max_replicas=4, rows_per_replica=8)
    made = manager.create(creation(spec=replace(creation().spec, autoscaling=bounds)))
    version = made.versions[0]

    reconciler, models, running = reconciling(deployments, made)
    assert models.replicas(made, version) is None
    for running.replicas in (1, 4, 2):
        await reconciler.reconcile()
        assert models.replicas(made, version) == running.replicas
        assert models.batcher(made, version)._limits.max_in_flight == 2 * running.replicas


async def test_the_version_of_a_rollout_begins_with_as_many_replicas_as_the_old_one_has(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager, operations: DeploymentOperations
) -> None:
    bounds = Autoscaling(min_replicas=1, max_replicas=4, rows_per_replica=8)
    made = manager.create(creation(spec=replace(creation().spec, autoscaling=bounds)))

    reconciler, _, running = reconciling(deployments, made)
    await reconciler.reconcile()
    after = RolloutManager(store, deployments, operations, Cluster(None)).begin(request())
    await reconciler.reconcile()
    assert running.deployed == {application_name(made, after.versions[1]): Scale(initial=3, cpus=1, autoscaling=bounds)}


async def test_a_version_that_was_loaded_is_answered_by_the_replicas_that_are_left(
    deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())

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


async def test_a_version_that_has_lost_all_its_replicas_answers_again_once_serve_has_one(
    deployments: Deployments, manager: DeploymentManager, clock: Clock
) -> None:
    made = manager.create(creation())

    reconciler, models, running = reconciling(deployments, made)
    await reconciler.reconcile()
    await reconciler.reconcile()
    running.is_well, running.replicas = False, 0
    await reconciler.reconcile()
    assert models.is_ready("digits", "")  # Serve may start one again in a moment
    clock.now_s += LOST_AFTER_S
    await reconciler.reconcile()
    assert not models.is_ready("digits", "")
    # What comes meanwhile waits in its queue.
    assert reconciler.holds() == [application_name(made, made.versions[0])]
    assert models.choose("digits", "")[1].number == "1"
    running.replicas = 1
    await reconciler.reconcile()
    assert models.is_ready("digits", "")


def test_a_frontend_that_does_not_lead_starts_nothing(deployments: Deployments, manager: DeploymentManager) -> None:
    made = manager.create(creation())

    async def scenario(number: int) -> dict[str, Scale]:
        reconciler, _, running = reconciling(deployments, made, Peers(None, number))
        running.delete(application_name(made, made.versions[0]))
        await reconciler.reconcile()
        return running.deployed

    assert asyncio.run(scenario(1)) == {}
    assert list(asyncio.run(scenario(0))) == [application_name(made, made.versions[0])]


async def test_a_frontend_whose_replicas_could_not_be_asked_opens_no_port_that_another_answers_on(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path
) -> None:
    made = manager.create(creation())
    name = application_name(made, made.versions[0])

    peers = Peers(tmp_path, 1)
    there, *_ = reconciling(deployments, made, Peers(tmp_path, 0))
    await there.reconcile()
    Peers(tmp_path, 0).publish(PeerState(pid=os.getpid(), listens=True, ready=True, holds=there.holds()))
    starting, models, running = reconciling(deployments, made, peers)
    ready = asyncio.Event()
    reports = PeerReports(peers, starting, models, SummedStatistics(models, peers), ready)
    running.trouble = Unavailable("no replica is known yet", reason="MODEL_NOT_READY")
    await starting.reconcile()
    ready.set()
    turn = asyncio.create_task(reports.turn_to_listen())
    await asyncio.sleep(0.6)
    assert running.wanted
    assert not turn.done()
    Peers(tmp_path, 0).publish(PeerState(pid=os.getpid(), listens=True, ready=True, holds=there.holds()))
    running.trouble = None
    await starting.reconcile()
    assert starting.holds() == [name]
    await asyncio.wait_for(turn, 60)


async def test_a_version_gets_traffic_once_all_frontends_reach_it_and_goes_once_none_does(
    deployments: Deployments, manager: DeploymentManager, tmp_path: Path
) -> None:
    made = manager.create(creation())
    name = application_name(made, made.versions[0])

    def tell(second: Reconciler) -> None:
        Peers(tmp_path, 1).publish(PeerState(pid=os.getpid(), listens=True, ready=True, holds=second.holds()))

    first, _, its = reconciling(deployments, made, Peers(tmp_path, 0))
    second, models, others = reconciling(deployments, made, Peers(tmp_path, 1))
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
