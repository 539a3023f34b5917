"""`python -m train_service.reconciler`: starts attempts at training jobs and sweeps on Ray."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from typing import Any

from shared.jobs import JobRecord, JobState
from shared.jobs.reconciler import JobKind, run_reconciler
from shared.logging_and_tracing import configure_logging
from shared.resource_log import StaleAttempt
from shared.settings import TRUSTED, VARIABLE, OwnCode, own_code, service_settings, standby_attempt
from shared.storage import ObjectStore, open_store
from train_service.attempt.outcomes import report_lost
from train_service.domain.capacity import BEFORE, bundle_of, described_workers
from train_service.domain.spec import (
    CPU,
    GPU,
    MAX_WORKERS,
    RAY_DATA,
    RUN_DEVICE,
    TrainingSpec,
    attempt_device,
    spec_of_job,
    with_devices,
)
from train_service.jobs.training_jobs import ClusterMemory
from train_service.placement import (
    IngestReservation,
    Queue,
    QueueRecord,
    cluster_use,
    devices_of,
    is_settling,
    lacking,
    totals,
    usable_nodes,
)
from train_service.records.event_log import TRAIN_KIND, EventKind, EventLog
from train_service.sweeps.sweeps import SWEEP_KIND, end_trials

ENTRY = "train_service.attempt.trainer:run"
PREPARE = "train_service.attempt.trainer:prepare"
SWEEP_ENTRY = "train_service.sweeps.attempt:run"
# An ended attempt frees its resources within moments; an attempt that begins earlier gets too few workers.
SETTLED_TIMEOUT_S = 5.0
CLUSTER_POLL_INTERVAL_S = 5.0
# A node that restarts, or is silent for a moment, is no reason to change to CPUs, which costs two restarts.
FALLBACK_AFTER_S = 15.0


class OwnCodeGate:
    """Gate that keeps programs waiting while callers' code is not trusted.

    A program that has begun continues. A waiting job can be cancelled or suspended like others.
    """

    def __init__(self, store: ObjectStore, own_code: OwnCode) -> None:
        self._store = store
        self._own_code = own_code
        # By job uid, the attempt whose refusal the job's events already report.
        self._noted: dict[str, int] = {}

    def refusal(self, job: JobRecord, spec: TrainingSpec) -> str:
        """Return why no attempt at the job may begin, empty if one may. Records it once per attempt in the job's
        events."""
        if spec.program is None or self._own_code.is_trusted:
            return ""
        text = f"own code is switched off: the service must be started with {VARIABLE}={TRUSTED}"
        if self._noted.get(job.uid) != job.attempt:
            self._note(job, f"no attempt begins: {text}")
            self._noted[job.uid] = job.attempt
        return text

    def _note(self, job: JobRecord, text: str) -> None:
        log = EventLog(self._store, job.name)
        # An earlier process of this service may have noted it.
        newest = log.find(job.attempt, EventKind.WARNING)
        if newest is None or newest.payload["text"] != text:
            with suppress(StaleAttempt):  # another reconciler has begun a later attempt
                log.append(job.attempt, EventKind.WARNING, {"text": text}, f"own-code-{job.attempt}")


def missing_capacity(reservation: IngestReservation, gate: OwnCodeGate, queue: Queue, job: JobRecord) -> str:
    """Return what the cluster lacks for the job's minimum of workers, besides what jobs before it take."""
    spec = spec_of_job(job.spec["training"], job.choices)
    if refusal := gate.refusal(job, spec):
        return refusal
    if spec.local:
        return ""
    nodes = usable_nodes()
    run, device = devices_of(spec, job.choices.get(RUN_DEVICE, ""), nodes)
    leaves_gpus = device == CPU and attempt_device(job.choices) == GPU
    if leaves_gpus and time.time() - job.update_time < FALLBACK_AFTER_S:
        missing = lacking(spec, run, nodes=nodes)
        return f"{missing}; it goes on on CPUs once they were gone for {FALLBACK_AFTER_S:g} s"
    ingests = partial(reservation.concurrent_ingests, job.name)
    # The jobs that wait and were checked before this one are before it.
    before = queue.first_before(job.uid, bundle_of(spec, device))
    if missing := lacking(spec, device, ingests, nodes):
        queue.waits(job.uid, spec, device, nodes, job.name)
        return missing + _why_gpus(spec, job, device) + (f"; {before} {BEFORE}" if before else "")
    left = queue.nodes(job.uid, nodes)
    if lacking(spec, device, ingests, left):
        queue.waits(job.uid, spec, device, nodes, job.name)
        workers = described_workers(spec.effective_min_workers, bundle_of(spec, device), spec.placement.strategy)
        return f"{workers}: {before} {BEFORE} and takes what is free"
    ended_now = job.state is JobState.RECOVERING and time.time() - job.update_time < SETTLED_TIMEOUT_S
    if ended_now and is_settling(spec, device):
        queue.waits(job.uid, spec, device, nodes, job.name)
        return "the workers of the last attempt to end"
    if spec.ingest == RAY_DATA:
        reservation.begins(job.name)  # counts for the jobs that are checked after it
    queue.may_begin(job.uid, spec, device, left)
    return ""


def choose(job: JobRecord, queue: Queue | None = None) -> dict[str, Any]:
    """Return what the log keeps: the device of the run, for all its attempts, and that of the next attempt.

    If other jobs claim resources in the `queue`, the log also keeps how many workers they leave to the attempt. Ray
    still reports as free what those jobs will take.
    """
    spec = spec_of_job(job.spec["training"], job.choices)
    nodes = [] if spec.local else usable_nodes()
    run, device = devices_of(spec, job.choices.get(RUN_DEVICE, ""), nodes)
    choices = with_devices(job.choices, run, device)
    choices.pop(MAX_WORKERS, None)
    most = queue.max_workers(job.uid) if queue else None
    return choices if most is None else {**choices, MAX_WORKERS: most}


def _why_gpus(spec: TrainingSpec, job: JobRecord, device: str) -> str:
    """Return why the job needs GPUs, if the specification does not say so."""
    began_on_gpus = device == GPU and job.choices.get(RUN_DEVICE) == GPU
    if not began_on_gpus or spec.placement.gpus_per_worker is not None:
        return ""
    return "; the run began on GPUs, and goes on on CPUs only with placement.allow_cpu_fallback"


class ClusterWatch:
    """Recorder of the cluster's nodes and their use, for the process that answers clients."""

    def __init__(self) -> None:
        self._memory: ClusterMemory | None = None
        self._next = 0.0

    def __call__(self, store: ObjectStore) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + CLUSTER_POLL_INTERVAL_S
            self._memory = self._memory or ClusterMemory(store)
            self._memory.note(totals())
            self._memory.note_use(cluster_use())


def training(store: ObjectStore, prepare: str = "", own_code: OwnCode | None = None) -> JobKind:
    """Return the job kind of training jobs in that store, which are checked one after another.

    Attempts at programs begin only if `own_code` trusts callers' code; None does not.
    """
    gate = OwnCodeGate(store, own_code or OwnCode())
    reservation, watch, queue, record = IngestReservation(store), ClusterWatch(), Queue(), QueueRecord(store)

    def polls(store: ObjectStore) -> None:
        reservation.poll()
        waited = queue.poll()
        if waited is not None:
            record.write(waited)
        watch(store)

    return JobKind(
        name=TRAIN_KIND,
        entry=ENTRY,
        prepare=prepare,
        missing_capacity=partial(missing_capacity, reservation, gate, queue),
        priority=lambda job: int(job.spec.get("training", {}).get("priority", 0)),
        choose=partial(choose, queue=queue),
        begun=queue.begun,
        lost=report_lost,
        standby_during_work=True,
        polls=polls,
    )


def main() -> None:
    settings = service_settings(os.environ, "127.0.0.1:0")
    configure_logging("train-reconciler", settings.log_level)
    # The service that started this process has already refused `trusted` if strangers can reach it.
    callers_code = own_code(os.environ, settings.listen, has_token=True)
    kind = training(open_store(settings.store), PREPARE if standby_attempt(os.environ) else "", callers_code)
    run_reconciler(settings, kind, JobKind(name=SWEEP_KIND, entry=SWEEP_ENTRY, ended=end_trials))


if __name__ == "__main__":
    main()
