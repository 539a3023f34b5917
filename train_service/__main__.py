"""Composition root of the train service: settings, store, domain, servicer, server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence

from grpc import aio

from millrace.train.v1 import train_service_pb2, train_service_pb2_grpc
from shared.code_bundle_registry import CodeBundles
from shared.code_environment import CodeEnvironments, code_environments
from shared.errors import MillraceError
from shared.grpc_server import BearerToken, bearer_token, serve
from shared.jobs.index import KEEP_INTERVAL_S
from shared.logging_and_tracing import configure_logging, configure_tracing, tracing
from shared.process_supervisor import run_periodically, supervise
from shared.settings import (
    OwnCode,
    ServiceSettings,
    SettingsError,
    allowed_functions,
    largest_cluster,
    own_code,
    service_settings,
)
from shared.storage import ObjectStore, open_store, probe
from shared.storage.object_store import StoreRefused, ensure_bucket
from train_service.jobs.checkpoint_import import CheckpointImports
from train_service.jobs.deletion import COLLECT_INTERVAL_S, Deletions, GarbageCollector
from train_service.jobs.own_code import BundleIntake, ProgramCheck
from train_service.jobs.run_records import CheckpointReader, RunRecords
from train_service.jobs.training_jobs import TrainingJobs
from train_service.servicer import TrainServicer
from train_service.sweeps.sweeps import SweepDeletions, Sweeps

logger = logging.getLogger(__name__)

DEFAULT_LISTEN = "127.0.0.1:50052"


async def run(
    settings: ServiceSettings,
    store: ObjectStore,
    custom_allowed: Collection[str],
    cluster_max: Mapping[str, float] | None,
    token: BearerToken | None,
    callers_code: OwnCode,
    environments: CodeEnvironments,
) -> None:
    deletions = Deletions(store)
    programs = ProgramCheck(store, callers_code, environments=environments)
    jobs = TrainingJobs(store, deletions, cluster_max, programs)
    bundles = CodeBundles(store)
    sweep_deletions = SweepDeletions(store, deletions)
    sweeps = Sweeps(store, jobs, sweep_deletions)
    stop = asyncio.Event()

    def register(server: aio.Server) -> Sequence[str]:
        intake, checkpoints = BundleIntake(bundles, callers_code), CheckpointReader(store)
        imports = CheckpointImports(store, jobs, deletions)
        servicer = TrainServicer(jobs, RunRecords(store), sweeps, intake, checkpoints, imports, custom_allowed)
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)
        return [train_service_pb2.DESCRIPTOR.services_by_name["TrainService"].full_name]

    tasks = [asyncio.create_task(asyncio.to_thread(jobs.warm_up))]
    garbage_collector = GarbageCollector(store, deletions, index=jobs.index)
    tasks.append(asyncio.create_task(run_periodically(garbage_collector.collect, COLLECT_INTERVAL_S, stop)))
    tasks.append(asyncio.create_task(run_periodically(sweep_deletions.finish_all, COLLECT_INTERVAL_S, stop)))
    tasks.append(asyncio.create_task(run_periodically(bundles.collect, COLLECT_INTERVAL_S, stop)))
    tasks.append(asyncio.create_task(run_periodically(jobs.index.keep, KEEP_INTERVAL_S, stop)))
    tasks.append(asyncio.create_task(run_periodically(sweeps.index.keep, KEEP_INTERVAL_S, stop)))
    if settings.ray_address:
        tasks.append(asyncio.create_task(supervise("train_service.reconciler", stop)))
    await serve(settings.listen, register, stop=stop, token=token)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


def main() -> int:
    try:
        settings = service_settings(os.environ, DEFAULT_LISTEN)
        token = bearer_token(os.environ)
        # Refuses settings that would let strangers run code.
        callers_code = own_code(os.environ, settings.listen, has_token=token is not None)
        environments = code_environments(os.environ)
        custom_allowed = allowed_functions(os.environ)
        cluster_max = largest_cluster(os.environ)
        configure_logging("train", settings.log_level)
        configure_tracing("train", os.environ)
        ensure_bucket(settings.store)
        store = open_store(settings.store)
        probe(store)
    except (SettingsError, StoreRefused, MillraceError) as error:
        print(f"train_service: {error}", file=sys.stderr)
        return 2
    asyncio.run(run(settings, store, custom_allowed, cluster_max, token, callers_code, environments))
    tracing().close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
