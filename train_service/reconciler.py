"""`python -m train_service.reconciler`: starts attempts at training jobs and sweeps on Ray."""

from __future__ import annotations

import os
import time
from functools import partial

from shared.jobs import JobRecord, JobState
from shared.jobs.reconciler import JobKind, run_reconciler
from shared.settings import service_settings, spare_attempt
from shared.storage import ObjectStore, open_store
from shared.telemetry import configure_logging
from train_service.attempt.endings import tell_lost
from train_service.attempt.ingest_room import IngestRoom
from train_service.domain.spec import RAY_DATA, TrainingSpec
from train_service.jobs.cluster_memory import ClusterMemory
from train_service.placement import is_settling, lacking, totals
from train_service.records.reporting import TRAIN_KIND
from train_service.sweeps.trials import SWEEP_KIND, end_trials

ENTRY = "train_service.attempt.trainer:run"
PREPARE = "train_service.attempt.trainer:prepare"
SWEEP_ENTRY = "train_service.sweeps.attempt:run"
# An attempt that has ended gives its room back within moments; who begins before gets fewer workers than there are.
SETTLED_WITHIN_S = 5.0
CLUSTER_LOOK_EVERY_S = 5.0


def lacks(room: IngestRoom, job: JobRecord) -> str:
    """What the cluster lacks for the fewest workers that the job may go on with."""
    spec = TrainingSpec.from_config(job.spec["training"])
    if missing := lacking(spec, partial(room.beside, job.name)):
        return missing
    ended_now = job.state is JobState.RECOVERING and time.time() - job.update_time < SETTLED_WITHIN_S
    waits = ended_now and not spec.local and is_settling(spec)
    if waits:
        return "the workers of the last attempt to end"
    if spec.ingest == RAY_DATA and not spec.local:
        room.begins(job.name)  # for those that are looked at behind it
    return ""


class ClusterWatch:
    """Remembers which nodes there are, for the process that answers clients."""

    def __init__(self) -> None:
        self._memory: ClusterMemory | None = None
        self._next = 0.0

    def __call__(self, store: ObjectStore) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + CLUSTER_LOOK_EVERY_S
            self._memory = self._memory or ClusterMemory(store)
            self._memory.note(totals())


def training(store: ObjectStore, prepare: str = "") -> JobKind:
    """Training jobs in that store, which are looked at one after the other."""
    room, watch = IngestRoom(store), ClusterWatch()

    def looks(store: ObjectStore) -> None:
        room.look()
        watch(store)

    return JobKind(
        name=TRAIN_KIND,
        entry=ENTRY,
        prepare=prepare,
        lacks=partial(lacks, room),
        lost=tell_lost,
        spare_beside_work=True,
        looks=looks,
    )


def main() -> None:
    settings = service_settings(os.environ, "127.0.0.1:0")
    configure_logging("train-reconciler", settings.log_level)
    kind = training(open_store(settings.store), PREPARE if spare_attempt(os.environ) else "")
    run_reconciler(settings, kind, JobKind(name=SWEEP_KIND, entry=SWEEP_ENTRY, ended=end_trials))


if __name__ == "__main__":
    main()
