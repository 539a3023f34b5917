"""The composition root: settings → store → domain → servicers → server, and the bond with Ray beside it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence

from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc import aio

from inference import grpc_service_pb2, grpc_service_pb2_grpc
from inference_service.deployment_servicer import DeploymentServicer
from inference_service.domain.deployment import Deployment
from inference_service.front import Front
from inference_service.large_buffers import give_back_large_buffers
from inference_service.manager import DeploymentManager
from inference_service.metrics import metrics_served
from inference_service.models import Models
from inference_service.open_inference_servicer import OpenInferenceServicer
from inference_service.operations import DeploymentOperations
from inference_service.ray_serve import ServeApplications
from inference_service.reconciler import Reconciler
from inference_service.registry import Deployments
from inference_service.roll_out_manager import RollOutManager
from inference_service.roll_outs import RollOuts
from inference_service.settings import InferenceSettings, settings_from
from millrace.inference.v1 import deployment_service_pb2, deployment_service_pb2_grpc
from shared.errors import MillraceError
from shared.grpc_server import Health, serve
from shared.operations import OperationsServicer
from shared.settings import SettingsError
from shared.storage import ObjectStore, open_store, probe
from shared.storage.opening import ensure_bucket
from shared.storage.probe import StoreRefused
from shared.telemetry import configure_logging
from shared.tracing import configure_tracing, tracing

logger = logging.getLogger("inference_service")


async def run(settings: InferenceSettings, store: ObjectStore) -> int:
    """Serves until told to stop. Returns the process's exit status."""
    deployments = Deployments(store)
    operations = DeploymentOperations(store, deployments)
    applications = ServeApplications(settings.service.store.url, replica_sockets=settings.replica_sockets)
    models, health, stop = Models(), Health(), asyncio.Event()
    reconciler = Reconciler(deployments, applications, models, settings)
    front = Front(settings, applications, reconciler, models, health, stop)

    def changed(deployment: Deployment) -> None:
        models.put(deployment)
        reconciler.nudge()

    roll_outs = RollOuts(store, deployments, models, settings, changed)

    def register(server: aio.Server) -> Sequence[str]:
        manager = DeploymentManager(store, deployments, operations)
        deployment_service_pb2_grpc.add_DeploymentServiceServicer_to_server(
            DeploymentServicer(manager, RollOutManager(store, deployments, operations), changed), server
        )
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(OpenInferenceServicer(models), server)
        operations_pb2_grpc.add_OperationsServicer_to_server(OperationsServicer(operations), server)
        return [
            deployment_service_pb2.DESCRIPTOR.services_by_name["DeploymentService"].full_name,
            grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
            operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name,
        ]

    await health.set(False)  # until Ray is joined
    with metrics_served(settings.metrics_listen, models):
        serving = serve(settings.service.listen, register, health=health, ready=False, stop=stop)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(front.run()), tasks.create_task(roll_outs.run())]
            await serving
            for task in background:
                task.cancel()
    return front.exit_status


def main() -> None:
    try:
        settings = settings_from(os.environ)
        configure_logging("inference", settings.service.log_level)
        configure_tracing("inference", os.environ)
        give_back_large_buffers()
        ensure_bucket(settings.service.store)
        store = open_store(settings.service.store)
        probe(store)
        # What is loaded by now stays: the collector need not look through it while requests are answered.
        gc.collect()
        gc.freeze()
        # Neither asyncio.run nor sys.exit: both would wait for threads that wait for a Ray that is gone.
        status = asyncio.new_event_loop().run_until_complete(run(settings, store))
    except (SettingsError, StoreRefused, MillraceError) as error:
        print(f"inference_service: {error}", file=sys.stderr)
        sys.exit(2)
    tracing().close()
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
