"""`millrace.train.v1.TrainService`: convert, delegate, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from grpc import aio

from millrace.train.v1 import resources_pb2, suggestion_pb2, train_service_pb2
from shared.jobs import JobState
from shared.requests import body_digest
from train_service.bundle_servicer import BundleServicerPart
from train_service.checkpoint_servicer import CheckpointServicerPart
from train_service.converters.jobs import checkpoint_to_proto, event_to_proto, job_to_proto
from train_service.converters.records import (
    coverage_to_proto,
    given_from_proto,
    log_to_proto,
    point_to_proto,
    suggestion_to_proto,
    use_to_proto,
)
from train_service.converters.specs import spec_from_proto
from train_service.jobs.bundle_intake import BundleIntake
from train_service.jobs.checkpoint_import import CheckpointImports
from train_service.jobs.checkpoint_reading import CheckpointReader
from train_service.jobs.run_records import RunRecords
from train_service.jobs.training_jobs import TrainingJobs
from train_service.sweeps.servicer import SweepServicerPart
from train_service.sweeps.sweeps import Sweeps

WATCH_INTERVAL_S = 0.25
FOLLOW_INTERVAL_S = 0.5

Context = aio.ServicerContext[Any, Any]


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
        """`custom_allowed` are the functions that custom transform steps may name."""
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
        # A suspended job ends no stream: sent again behind its events it says that those were all.
        sent = None if view.record.state is JobState.SUSPENDED else (view.record, view.waiting_for)
        while True:
            # The records were read before the events: what was written before a transition is sent before it, and once
            # the job is final and none are left, none will come.
            while events := await asyncio.to_thread(self._jobs.events, request.name, sequence):
                for event in events:
                    yield train_service_pb2.WatchTrainingJobResponse(event=event_to_proto(event))
                    sequence = event.sequence
            for view in views:
                if (view.record, view.waiting_for) != sent:
                    yield train_service_pb2.WatchTrainingJobResponse(job=job_to_proto(view))
                    sent = (view.record, view.waiting_for)
            # A suspended job is only between two of its parts.
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
            # Asked before reading: once it is over and nothing is left, nothing will come.
            over = not request.follow or await asyncio.to_thread(reader.over)
            texts = await asyncio.to_thread(reader.read)
            for text in texts:
                yield log_to_proto(text)
            if over and not texts:
                return
            if not texts:
                await asyncio.sleep(FOLLOW_INTERVAL_S)
