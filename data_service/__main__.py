"""The composition root: settings → store → domain → servicers → server, with the reconciler as a child process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc import aio

from data_service.datasets import Datasets, Versions
from data_service.deletion import Deletions, GarbageCollector
from data_service.servicer import DataServicer, VersionOperations
from data_service.settings import DataSettings, data_settings
from data_service.uploads.uploads import Uploads
from data_service.version_jobs import VersionJobs, open_version_index
from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import MillraceError
from shared.grpc_server import BearerToken, bearer_token, serve
from shared.jobs import Jobs
from shared.jobs.index import KEEP_INTERVAL_S
from shared.logging_and_tracing import configure_logging, configure_tracing, tracing
from shared.process_supervisor import WakeSignal, run_periodically, supervise
from shared.settings import OwnCode, SettingsError, own_code
from shared.storage import ObjectStore, open_store, probe
from shared.storage.object_store import StoreRefused, ensure_bucket
from shared.storage.presigning import presigner
from shared.streaming import OperationsServicer

logger = logging.getLogger("data_service")

RECONCILER = "data_service.reconciler"


async def run(settings: DataSettings, store: ObjectStore, token: BearerToken | None, callers_code: OwnCode) -> None:
    jobs = Jobs(store, IMPORT_KIND)
    index = open_version_index(store)
    datasets = Datasets(store, index)
    uploads = Uploads(store, datasets, presigner(settings.service.store))
    versions = Versions(store, jobs, datasets, index)
    wake = WakeSignal()
    version_jobs = VersionJobs(
        store,
        jobs,
        datasets,
        versions,
        import_roots=settings.import_roots,
        custom_allowed=settings.custom_transforms,
        wake=wake,
        own_code=callers_code,
    )
    operations = VersionOperations(store, jobs, versions)
    deletions = Deletions(store, jobs)
    garbage_collector = GarbageCollector(
        store, datasets, deletions, collect_uploads=uploads.collect, delete_uploads=uploads.abort_all, index=index
    )

    def register(server: aio.Server) -> Sequence[str]:
        servicer = DataServicer(datasets, uploads, versions, version_jobs, operations, deletions)
        data_service_pb2_grpc.add_DataServiceServicer_to_server(servicer, server)
        operations_pb2_grpc.add_OperationsServicer_to_server(OperationsServicer(operations), server)
        return (
            data_service_pb2.DESCRIPTOR.services_by_name["DataService"].full_name,
            operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name,
        )

    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_periodically(garbage_collector.collect, settings.sweep_interval_s, stop))
        tasks.create_task(run_periodically(index.keep, KEEP_INTERVAL_S, stop))
        if settings.service.ray_address:
            tasks.create_task(supervise(RECONCILER, stop, wake))
        else:
            logger.warning("RAY_ADDRESS is not set: versions wait to be made until the service is started with one")
        try:
            await serve(settings.service.listen, register, stop=stop, token=token)
        finally:
            stop.set()


def main() -> int:
    try:
        settings = data_settings(os.environ)
        token = bearer_token(os.environ)
        # Refuses settings that would let remote callers run code.
        callers_code = own_code(os.environ, settings.service.listen, has_token=token is not None)
        configure_logging("data", settings.service.log_level)
        configure_tracing("data", os.environ)
        ensure_bucket(settings.service.store)
        store = open_store(settings.service.store)
        probe(store)
    except (SettingsError, StoreRefused, MillraceError) as error:
        print(f"data_service: {error}", file=sys.stderr)
        return 2
    asyncio.run(run(settings, store, token, callers_code))
    tracing().close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
