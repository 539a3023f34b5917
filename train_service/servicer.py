"""`millrace.train.v1.TrainService`: convert, delegate, convert.

One part serves downloads and imports of checkpoints, another bundles of code, a third sweeps, whose messages are
converted here, too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf import json_format
from grpc import aio

from millrace.train.v1 import (
    checkpoint_import_pb2,
    code_bundle_pb2,
    resources_pb2,
    suggestion_pb2,
    sweep_pb2,
    train_service_pb2,
    train_service_pb2_grpc,
)
from shared.errors import InvalidArgument, invalid_field
from shared.grpc_errors import status_proto_from_record
from shared.jobs import JobRecord, JobState
from shared.resource_log import body_digest
from shared.streaming import DOWNLOADS, IMPORTS, Slot, Slots, Watches, in_threads
from train_service.convert import (
    bundle_to_proto,
    checkpoint_to_proto,
    coverage_to_proto,
    etag,
    event_to_proto,
    given_from_proto,
    import_parts_from_proto,
    imported_to_proto,
    job_to_proto,
    log_to_proto,
    part_to_protos,
    parts_from_proto,
    point_to_proto,
    set_values,
    sources_to_proto,
    suggestion_to_proto,
    timestamp,
    use_to_proto,
)
from train_service.convert_specs import maximizes, spec_from_proto, spec_to_proto, whole
from train_service.domain.spec import TrainingSpec
from train_service.domain.sweep import (
    CHOICE,
    GRID,
    INTEGERS,
    LISTED,
    LOG_UNIFORM,
    UNIFORM,
    Asha,
    Domain,
    SweepSpec,
    renamed,
)
from train_service.jobs.checkpoint_import import CheckpointImports
from train_service.jobs.own_code import BundleIntake
from train_service.jobs.run_records import CheckpointReader, JobReading, RunRecords
from train_service.jobs.training_jobs import JobView, TrainingJobs
from train_service.records.event_log import Event
from train_service.sweeps.sweeps import Sweeps, SweepView, Trial

# --- Servicer ---

Context = aio.ServicerContext[Any, Any]


class SweepServicerPart(train_service_pb2_grpc.TrainServiceServicer):
    def __init__(self, sweeps: Sweeps, custom_allowed: Collection[str]) -> None:
        self._sweeps = sweeps
        self._allowed_in_sweeps = custom_allowed

    async def CreateSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        timeout_s = context.time_remaining()
        return await asyncio.to_thread(self._create, request, math.inf if timeout_s is None else timeout_s)

    def _create(self, request: Any, timeout_s: float) -> sweep_pb2.Sweep:
        """Create the sweep, in a thread. A sweep may list many values, and other calls must be answered meanwhile."""
        spec = sweep_spec_from_proto(request.spec, self._allowed_in_sweeps)
        digest = body_digest(request)
        view = self._sweeps.create(request.sweep_id, spec, request.request_id, digest, request.validate_only, timeout_s)
        return sweep_to_proto(view)

    async def GetSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.get, request.name))

    async def ListSweeps(self, request: Any, context: Context) -> train_service_pb2.ListSweepsResponse:
        views, token = await asyncio.to_thread(self._sweeps.page, request.page_size, request.page_token)
        return train_service_pb2.ListSweepsResponse(
            sweeps=[sweep_to_proto(view) for view in views], next_page_token=token
        )

    async def CancelSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.cancel, request.name, request.etag))

    async def DeleteSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.delete, request.name, request.etag))


# --- Messages ---

_Order = resources_pb2.CheckpointPolicy
# Prefixes of enum names in the contract that the service's own names lack.
_PREFIXES = {"optimizer.schedule": "SCHEDULE_", "precision": "PRECISION_"}


def sweep_spec_from_proto(spec: sweep_pb2.SweepSpec, custom_allowed: Collection[str]) -> SweepSpec:
    """Return the specification with defaults filled in. Raises `InvalidArgument` for what plain values cannot hold."""
    if not spec.HasField("base"):
        raise invalid_field("spec.base", None, "say what all trials have in common")
    try:
        base = spec_from_proto(spec.base, custom_allowed)
    except InvalidArgument as error:
        raise renamed(error, {}) from None
    asha = spec.asha
    return SweepSpec(
        base=_ranked(base, spec),
        parameters={path: _domain(path, spec.parameters[path]) for path in spec.parameters},
        num_samples=spec.num_samples if spec.HasField("num_samples") else 1,
        seed=spec.seed,
        max_concurrent_trials=spec.max_concurrent_trials or 4,
        asha=Asha(grace_period=asha.grace_period or 1, reduction_factor=asha.reduction_factor or 4.0, max_t=asha.max_t)
        if spec.HasField("asha")
        else None,
    )


def sweep_to_proto(view: SweepView) -> sweep_pb2.Sweep:
    record = view.record
    message = sweep_pb2.Sweep(
        name=record.name,
        uid=record.uid,
        spec=_spec_to_proto(view.spec),
        state=f"STATE_{record.state.value}",
        attempt=record.attempt,
        create_time=timestamp(record.create_time),
        update_time=timestamp(record.update_time),
        etag=etag(record),
        counts=_counts(view),
        best_training_job=view.best_training_job,
        best_checkpoint=view.best_checkpoint,
    )
    if record.state is JobState.FAILED and record.error:
        message.error.CopyFrom(status_proto_from_record(record.error))
    message.trials.extend(_trial(trial, view.spec) for trial in view.trials or ())
    return message


def _ranked(base: TrainingSpec, spec: sweep_pb2.SweepSpec) -> TrainingSpec:
    """Return `base` ranked by the sweep's metric."""
    policy = base.checkpoints
    metric = spec.metric or policy.best_metric
    if spec.order != _Order.ORDER_UNSPECIFIED:
        maximize = spec.order == _Order.ORDER_MAXIMIZE
    else:
        maximize = policy.maximize if metric == policy.best_metric else maximizes(metric)
    return replace(base, checkpoints=replace(policy, best_metric=metric, maximize=maximize))


def _domain(path: str, domain: sweep_pb2.Domain) -> Domain:
    kind = domain.WhichOneof("domain") or ""
    if kind in LISTED:
        where = f"spec.parameters[{path}].{kind}"
        values = [_plain(value, path, where) for value in getattr(domain, kind).values]
        return Domain(kind=kind, values=tuple(values))
    if kind in (UNIFORM, LOG_UNIFORM, INTEGERS):
        bounds = getattr(domain, kind)
        return Domain(kind=kind, low=bounds.low, high=bounds.high)
    return Domain(kind="")


def _plain(value: Any, path: str, where: str) -> Any:
    """Return a JSON value as a plain one.

    JSON has only doubles. Whole ones become ints, as in the other arguments of a specification.
    """
    try:
        plain = whole(json_format.MessageToDict(value))
    except (ValueError, json_format.Error):
        raise invalid_field(where, None, "use finite numbers; JSON has no others") from None
    prefix = _PREFIXES.get(path, "")
    return plain.removeprefix(prefix) if isinstance(plain, str) else plain


def _with_prefixes(parameters: dict[str, Any]) -> dict[str, Any]:
    return {path: f"{_PREFIXES[path]}{value}" if path in _PREFIXES else value for path, value in parameters.items()}


def _spec_to_proto(spec: SweepSpec) -> sweep_pb2.SweepSpec:
    message = sweep_pb2.SweepSpec(
        base=spec_to_proto(spec.base),
        num_samples=spec.num_samples,
        seed=spec.seed,
        metric=spec.ranking.metric,
        order=_Order.ORDER_MAXIMIZE if spec.ranking.maximize else _Order.ORDER_MINIMIZE,
        max_concurrent_trials=spec.max_concurrent_trials,
    )
    for path, domain in spec.parameters.items():
        into = getattr(message.parameters[path], domain.kind)
        if domain.kind in (GRID, CHOICE):
            for value in domain.values:
                json_format.ParseDict(_with_prefixes({path: value})[path], into.values.add())
        elif domain.kind == INTEGERS:
            into.low, into.high = int(domain.low), int(domain.high)
        else:
            into.low, into.high = domain.low, domain.high
    if spec.asha is not None:
        message.asha.grace_period = spec.asha.grace_period
        message.asha.reduction_factor = spec.asha.reduction_factor
        message.asha.max_t = spec.asha.max_t
    return message


def _trial(trial: Trial, spec: SweepSpec) -> sweep_pb2.Trial:
    metric = spec.ranking.metric
    message = sweep_pb2.Trial(
        number=trial.number,
        training_job=trial.name,
        state=f"STATE_{trial.job.state.value}" if trial.job else "STATE_UNSPECIFIED",
        stopped_early=trial.stopped_early,
        deleted=trial.deleted,
        last_value=trial.last.metrics[metric] if trial.last else None,
        best_value=trial.best.metrics[metric] if trial.best else None,
        best_checkpoint=trial.best.name if trial.best else "",
        epochs_done=trial.epochs_done,
        epochs=trial.epochs,
    )
    set_values(message.parameters, _with_prefixes(trial.parameters))
    if trial.job and trial.job.state is JobState.FAILED and trial.job.error:
        message.error.CopyFrom(status_proto_from_record(trial.job.error))
    return message


def _counts(view: SweepView) -> sweep_pb2.TrialCounts:
    counts = sweep_pb2.TrialCounts(total=view.spec.trial_count)
    for trial in view.trials or ():
        if name := _counted_as(trial, view.record):
            setattr(counts, name, getattr(counts, name) + 1)
    return counts


def _counted_as(trial: Trial, sweep: JobRecord) -> str:
    """Return the count that includes the trial. The name is empty if only the total includes it."""
    if trial.deleted:
        return ""
    if trial.job is None:
        if not sweep.state.final:
            return "pending"
        return "cancelled" if JobState.CANCELLED in (sweep.state, sweep.deleted_from) else ""
    if trial.stopped_early:
        return "stopped_early"
    return {
        JobState.PENDING: "pending",
        JobState.SUCCEEDED: "succeeded",
        JobState.FAILED: "failed",
        JobState.CANCELLED: "cancelled",
        JobState.DELETING: "cancelled",
    }.get(trial.job.state, "running")


# --- Downloads and imports of checkpoints ---


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

# A follower of logs makes two requests each time.
FOLLOW_INTERVAL_S = 1.0


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
        self._watches = Watches(jobs.follow)

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
        name, sequence = request.name, request.after_sequence
        async with self._watches.watching(name) as watch:
            reading = await watch.fresh()
            view = await asyncio.to_thread(self._jobs.get, name)
            while not reading.has(view.record):
                reading = await watch.fresh()
            if not 0 <= sequence <= reading.last_sequence:
                await asyncio.to_thread(self._jobs.check_sequence, name, sequence)
            yield train_service_pb2.WatchTrainingJobResponse(job=job_to_proto(view))
            # A suspended job does not end the stream. Sent again after its events, it marks that there are no more for
            # now.
            sent = None if view.record.state is JobState.SUSPENDED else (view.record, view.waiting_for)
            views = [view]
            while True:
                # The records were read before the events. So what was written before a transition is sent before it,
                # and once the job is final and no events are left, none will come.
                while events := await self._events(reading, name, sequence):
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
                reading = await watch.next()
                if reading.view.record.uid != view.record.uid:
                    sequence = 0
                behind = reading.states_after(view.record)[:-1]
                views = [replace(reading.view, record=record, waiting_for="") for record in behind]
                views.append(reading.view)

    async def _events(self, reading: JobReading[JobView], name: str, sequence: int) -> Sequence[Event]:
        """Return the next events that a reading includes. Those that it does not have are read, some at a time."""
        events = reading.events_after(sequence)
        return await asyncio.to_thread(self._jobs.events, name, sequence) if events is None else events

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
