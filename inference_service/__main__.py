"""The composition root: settings → store → domain → servicers → server, and the connection to Ray.

With several frontends this is their parent, which starts each as `python -m inference_service NUMBER FOLDER`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc import aio

from inference import grpc_service_pb2, grpc_service_pb2_grpc
from inference_service.deploy.deployments import Cluster, DeploymentManager, DeploymentOperations, Deployments
from inference_service.deploy.reconciler import Reconciler
from inference_service.deploy.rollout_driver import RolloutManager, Rollouts
from inference_service.domain.deployment import Deployment
from inference_service.frontend_processes import REFUSED, Peers, parent_gone, run_frontends
from inference_service.frontend_tasks import (
    LoadReporter,
    PeerReports,
    RayConnection,
    StoreCheck,
    give_back_large_buffers,
    metrics_served,
)
from inference_service.serve.infer import Dispatcher, Inference
from inference_service.serve.models import Models
from inference_service.serve.ray_serve import ServeApplications
from inference_service.serve.repository import ModelRepository, SummedStatistics
from inference_service.servicer import DeploymentServicer, OpenInferenceServicer
from inference_service.settings import InferenceSettings, metrics_of, settings_from
from millrace.inference.v1 import deployment_service_pb2, deployment_service_pb2_grpc
from shared.errors import MillraceError
from shared.grpc_server import BearerToken, Health, LoadShedder, bearer_token, serve
from shared.logging_and_tracing import configure_logging, configure_tracing, flush_logs, tracing
from shared.settings import SettingsError, own_code
from shared.storage import ObjectStore, open_store
from shared.storage.object_store import StoreRefused
from shared.streaming import OperationsServicer

logger = logging.getLogger("inference_service")

# The methods that the load shedder covers, since more of their requests may arrive than can be read.
SHED_METHODS = ("/inference.GRPCInferenceService/ModelInfer",)
# Twice the default queue capacity of a model in rows, so that calls of one row each can fill it. The bytes of requests
# are limited separately, by `InFlightBytes`.
MAX_CALLS = 8192


async def run(
    settings: InferenceSettings, store: ObjectStore, check: StoreCheck, peers: Peers, token: BearerToken | None
) -> int:
    """Serve until a signal to stop; return the process's exit status."""
    deployments = Deployments(store)
    operations = DeploymentOperations(store, deployments)
    applications = ServeApplications(settings.service.store.url, replica_sockets=settings.replica_sockets)
    models, health, stop = Models(), Health(), asyncio.Event()
    dispatcher = Dispatcher(models)
    cluster = Cluster(settings.cluster_max)
    reconciler = Reconciler(deployments, applications, models, cluster, settings, peers)
    ray_connection = RayConnection(settings, applications, reconciler, models, health, stop)

    def changed(deployment: Deployment) -> None:
        models.put(deployment)
        reconciler.wake()

    rollouts = Rollouts(store, deployments, models, settings, changed, peers)
    statistics = SummedStatistics(models, peers)
    reports = PeerReports(peers, reconciler, models, statistics, ray_connection.ready)

    def register(server: aio.Server) -> Sequence[str]:
        manager = DeploymentManager(store, deployments, operations, cluster, settings.own_code)
        requests = RolloutManager(store, deployments, operations, cluster, settings.own_code)
        deployment_service_pb2_grpc.add_DeploymentServiceServicer_to_server(
            DeploymentServicer(manager, requests, changed, models.replicas), server
        )
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            OpenInferenceServicer(
                models, Inference(models, dispatcher), ModelRepository(deployments), statistics, changed
            ),
            server,
        )
        operations_pb2_grpc.add_OperationsServicer_to_server(OperationsServicer(operations), server)
        return [
            deployment_service_pb2.DESCRIPTOR.services_by_name["DeploymentService"].full_name,
            grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
            operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name,
        ]

    refused = False

    async def finish_check() -> None:
        nonlocal refused
        try:
            await check.finish()
        except StoreRefused as error:
            logger.error("%s; ending", error)
            refused = True
            stop.set()

    await health.set(False)  # until Ray is joined
    with metrics_served(settings.metrics_listen, models):
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(part.run()) for part in (ray_connection, LoadReporter(applications, models), reports)
            ]
            if peers.is_leader:
                background.append(tasks.create_task(rollouts.run()))
            if not check.passed:
                background.append(tasks.create_task(finish_check()))
            if peers.are_there:
                background.append(tasks.create_task(_stop_without_parent(stop)))
            if await _first_of(reports.turn_to_listen(), stop.wait()):
                await serve(
                    settings.service.listen,
                    register,
                    health=health,
                    ready=ray_connection.ready.is_set(),
                    stop=stop,
                    shared_port=peers.are_there,
                    load_shedder=LoadShedder(SHED_METHODS, dispatcher.turned_away),
                    max_calls=MAX_CALLS,
                    token=token,
                )
            for task in background:
                task.cancel()
    return REFUSED if refused else ray_connection.exit_status


async def _stop_without_parent(stop: asyncio.Event) -> None:
    await parent_gone()
    stop.set()


async def _first_of(wanted: Coroutine[Any, Any, None], other: Coroutine[Any, Any, object]) -> bool:
    """Return whether the wanted one ended first; cancel the other, and raise the wanted one's error."""
    first, second = asyncio.create_task(wanted), asyncio.create_task(other)
    done, left = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    if first not in done:
        return False
    await first
    return True


def main() -> None:
    try:
        settings = settings_from(os.environ)
        token = bearer_token(os.environ)
        # Refuses settings that would let remote callers run code.
        callers_code = own_code(os.environ, settings.service.listen, has_token=token is not None)
        settings = replace(settings, own_code=callers_code)
        configure_logging("inference", settings.service.log_level)
        check = StoreCheck(settings.service.store)
        check.begin()
        if settings.frontends > 1 and len(sys.argv) == 1:
            listen = settings.service.listen
            _end(asyncio.run(run_frontends("inference_service", listen, settings.frontends, settings.metrics_listen)))
        configure_tracing("inference", os.environ)
        give_back_large_buffers()
        store = open_store(settings.service.store)
        peers = Peers()
        if len(sys.argv) > 1:
            number, folder = sys.argv[1:]
            peers = Peers(Path(folder), int(number))
            settings = replace(settings, metrics_listen=metrics_of(settings.metrics_listen, int(number)))
        # Freezes the objects loaded so far, so that the garbage collector does not scan them while requests are
        # answered.
        gc.collect()
        gc.freeze()
        # Not asyncio.run, which would join threads that wait for a lost Ray.
        status = asyncio.new_event_loop().run_until_complete(run(settings, store, check, peers, token))
    except (SettingsError, StoreRefused, MillraceError) as error:
        print(f"inference_service: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    except Exception:
        logger.exception("ending: unexpected")
        status = 1
    tracing().close()
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process without joining threads.

    sys.exit would join threads that wait for a lost Ray or an unresponsive store.
    """
    flush_logs()
    os._exit(status)


if __name__ == "__main__":
    main()
