"""`millrace.train.v1.TrainService`: convert, delegate, convert.

One part serves downloads and imports of checkpoints, another bundles of code; `sweeps.servicer` serves sweeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from grpc import aio

from millrace.train.v1 import (
    checkpoint_import_pb2,
    code_bundle_pb2,
    resources_pb2,
    suggestion_pb2,
    train_service_pb2,
    train_service_pb2_grpc,
)
from shared.idempotency import body_digest
from shared.jobs import JobState
from shared.streaming import DOWNLOADS, IMPORTS, Slot, Slots, in_threads
from train_service.converters.checkpoints import (
    import_parts_from_proto,
    imported_to_proto,
    part_to_protos,
    sources_to_proto,
)
from train_service.converters.jobs import (
    bundle_to_proto,
    checkpoint_to_proto,
    coverage_to_proto,
    event_to_proto,
    given_from_proto,
    job_to_proto,
    log_to_proto,
    parts_from_proto,
    point_to_proto,
    suggestion_to_proto,
    use_to_proto,
)
from train_service.converters.specs import spec_from_proto
from train_service.jobs.checkpoint_import import CheckpointImports
from train_service.jobs.own_code import BundleIntake
from train_service.jobs.run_records import CheckpointReader, RunRecords
from train_service.jobs.training_jobs import TrainingJobs
from train_service.sweeps.servicer import SweepServicerPart
from train_service.sweeps.sweeps import Sweeps

# --- Downloads and imports of checkpoints ---

Context = aio.ServicerContext[Any, Any]

# Each download holds two pieces of 4 MiB and a message, and a thread at times.
MAX_DOWNLOADS = 8
# Each import has its files on disk, and a child process that may need as much memory as their size.
MAX_IMPORTS = 2


class CheckpointServicerPart(train_service_pb2_grpc.TrainServiceServicer):
    def __init__(
        self, checkpoints: CheckpointReader, imports: CheckpointImports, custom_allowed: Collection[str]
    ) -> None:
        self._checkpoints = checkpoints
        self._imports = imports
        self._custom_allowed = custom_allowed
        self._downloads = Slots(MAX_DOWNLOADS, wording=DOWNLOADS)
        self._intakes = Slots(MAX_IMPORTS, wording=IMPORTS)

    async def GetCheckpoint(
        self, request: Any, context: Context
    ) -> AsyncIterator[train_service_pb2.GetCheckpointResponse]:
        with self._downloads.slot() as slot:
            parts = self._checkpoints.read(request.name, request.manifest_sha256, request.path, request.offset)
            async for part in in_threads(parts):
                for message in part_to_protos(part):
                    with slot.waiting():
                        yield message

    async def ImportCheckpoint(
        self, request: AsyncIterator[Any], context: Context
    ) -> checkpoint_import_pb2.ImportCheckpointResponse:
        with self._intakes.slot() as slot:
            parts = import_parts_from_proto(_awaited(request, slot), self._custom_allowed)
            return imported_to_proto(await self._imports.receive(parts))

    async def GetImportedWeights(self, request: Any, context: Context) -> checkpoint_import_pb2.ImportedWeights:
        return sources_to_proto(await asyncio.to_thread(self._imports.sources, request.name))


async def _awaited(requests: AsyncIterator[Any], slot: Slot) -> AsyncIterator[Any]:
    """Yield the requests, and count the time in which the sender is awaited as waiting."""
    while True:
        with slot.waiting():
            request = await anext(requests, None)
        if request is None:
            return
        yield request


# --- Bundles of code ---


class BundleServicerPart(train_service_pb2_grpc.TrainServiceServicer):
    def __init__(self, intake: BundleIntake) -> None:
        self._intake = intake

    async def CreateCodeBundle(self, request: AsyncIterator[Any], context: Context) -> code_bundle_pb2.CodeBundle:
        return bundle_to_proto(await self._intake.receive(parts_from_proto(request)))

    async def GetCodeBundle(self, request: Any, context: Context) -> code_bundle_pb2.CodeBundle:
        return bundle_to_proto(await asyncio.to_thread(self._intake.bundles.get, request.name))

    async def ListCodeBundles(self, request: Any, context: Context) -> train_service_pb2.ListCodeBundlesResponse:
        records, token = await asyncio.to_thread(self._intake.bundles.page, request.page_size, request.page_token)
        return train_service_pb2.ListCodeBundlesResponse(
            code_bundles=map(bundle_to_proto, records), next_page_token=token
        )

    async def DeleteCodeBundle(self, request: Any, context: Context) -> train_service_pb2.DeleteCodeBundleResponse:
        await asyncio.to_thread(self._intake.bundles.delete, request.name)
        return train_service_pb2.DeleteCodeBundleResponse()


# --- Training jobs ---

WATCH_INTERVAL_S = 0.25
FOLLOW_INTERVAL_S = 0.5


class TrainServicer(SweepServicerPart, BundleServicerPart, CheckpointServicerPart):
    def __init__(
        self,
        jobs: TrainingJobs,
        records: RunRecords,
        sweeps: Sweeps,
        intake: BundleIntake,
        checkpoints: CheckpointReader,
        imports: CheckpointImports,
        custom_allowed: Collection[str],
    ) -> None:
        """Build the servicer. `custom_allowed` are the functions that custom transform steps may name."""
        SweepServicerPart.__init__(self, sweeps, custom_allowed)
        BundleServicerPart.__init__(self, intake)
        CheckpointServicerPart.__init__(self, checkpoints, imports, custom_allowed)
        self._jobs = jobs
        self._records = records
        self._custom_allowed = custom_allowed

    async def CreateTrainingJob(self, request: Any, context: Context) -> resources_pb2.TrainingJob:
        spec = spec_from_proto(request.spec, self._custom_allowed)
        digest = body_digest(request)
        view = await asyncio.to_thread(
            self._jobs.create, request.training_job_id, spec, request.request_id, digest, request.validate_only
        )
        return job_to_proto(view)

    async def SuggestTrainingSpec(self, request: Any, context: Context) -> suggestion_pb2.SuggestTrainingSpecResponse:
        given = given_from_proto(request.spec)
        made = await asyncio.to_thread(self._jobs.suggest, request.dataset_version, given, self._custom_allowed)
        return suggestion_to_proto(made)

    async def GetTrainingJob(self, request: Any, context: Context) -> resources_pb2.TrainingJob:
        return job_to_proto(await asyncio.to_thread(self._jobs.get, request.name))

    async def ListTrainingJobs(self, request: Any, context: Context) -> train_service_pb2.ListTrainingJobsResponse:
        views, token = await asyncio.to_thread(self._jobs.page, request.page_size, request.page_token)
        return train_service_pb2.ListTrainingJobsResponse(
            training_jobs=[job_to_proto(view) for view in views], next_page_token=token
        )

    async def GetClusterUse(self, request: Any, context: Context) -> train_service_pb2.ClusterUse:
        return use_to_proto(*await asyncio.to_thread(self._jobs.cluster_use))

    async def CancelTrainingJob(self, request: Any, context: Context) -> resources_pb2.TrainingJob:
        return job_to_proto(await asyncio.to_thread(self._jobs.cancel, request.name, request.etag))

    async def DeleteTrainingJob(self, request: Any, context: Context) -> resources_pb2.TrainingJob:
        return job_to_proto(await asyncio.to_thread(self._jobs.delete, request.name, request.etag))

    async def SuspendTrainingJob(self, request: Any, context: Context) -> resources_pb2.TrainingJob:
        return job_to_proto(await asyncio.to_thread(self._jobs.suspend, request.name, request.etag))

    async def ResumeTrainingJob(self, request: Any, context: Context) -> resources_pb2.TrainingJob:
        return job_to_proto(await asyncio.to_thread(self._jobs.resume, request.name, request.etag))

    async def WatchTrainingJob(
        self, request: Any, context: Context
    ) -> AsyncIterator[train_service_pb2.WatchTrainingJobResponse]:
        sequence = request.after_sequence
        view = await asyncio.to_thread(self._jobs.get, request.name)
        await asyncio.to_thread(self._jobs.check_sequence, request.name, sequence)
        yield train_service_pb2.WatchTrainingJobResponse(job=job_to_proto(view))
        views = [view]
        # A suspended job does not end the stream. Sent again after its events, it marks that there are no more for now.
        sent = None if view.record.state is JobState.SUSPENDED else (view.record, view.waiting_for)
        while True:
            # The records were read before the events. So what was written before a transition is sent before it, and
            # once the job is final and no events are left, none will come.
            while events := await asyncio.to_thread(self._jobs.events, request.name, sequence):
                for event in events:
                    yield train_service_pb2.WatchTrainingJobResponse(event=event_to_proto(event))
                    sequence = event.sequence
            for view in views:
                if (view.record, view.waiting_for) != sent:
                    yield train_service_pb2.WatchTrainingJobResponse(job=job_to_proto(view))
                    sent = (view.record, view.waiting_for)
            # A suspended job may be resumed, so the stream continues.
            if view.record.state.final and view.record.state is not JobState.SUSPENDED:
                return
            await asyncio.sleep(WATCH_INTERVAL_S)
            views = await asyncio.to_thread(self._jobs.since, request.name, view.record)

    async def ListCheckpoints(self, request: Any, context: Context) -> train_service_pb2.ListCheckpointsResponse:
        entries, token = await asyncio.to_thread(
            self._jobs.checkpoints, request.parent, request.page_size, request.page_token
        )
        return train_service_pb2.ListCheckpointsResponse(
            checkpoints=[checkpoint_to_proto(entry) for entry in entries], next_page_token=token
        )

    async def GetCoverage(self, request: Any, context: Context) -> train_service_pb2.Coverage:
        coverage = await asyncio.to_thread(
            self._records.coverage, request.name, request.epoch, request.checkpoint, request.shard
        )
        return coverage_to_proto(coverage)

    async def ListMetrics(self, request: Any, context: Context) -> train_service_pb2.ListMetricsResponse:
        points, token = await asyncio.to_thread(
            self._records.metrics, request.name, request.after_step, request.page_size, request.page_token
        )
        return train_service_pb2.ListMetricsResponse(points=map(point_to_proto, points), next_page_token=token)

    async def StreamLogs(self, request: Any, context: Context) -> AsyncIterator[train_service_pb2.StreamLogsResponse]:
        rank = request.rank if request.HasField("rank") else None
        reader = await asyncio.to_thread(self._records.logs, request.name, request.attempt, rank, request.follow)
        while True:
            # Ask before reading: if the job is over and nothing is left, nothing will come.
            over = not request.follow or await asyncio.to_thread(reader.over)
            texts = await asyncio.to_thread(reader.read)
            for text in texts:
                yield log_to_proto(text)
            if over and not texts:
                return
            if not texts:
                await asyncio.sleep(FOLLOW_INTERVAL_S)
