"""The function that Ray Tune runs for a trial.

It reads the events of the trial's training job and reports values to Tune.

It writes nothing. Each running trial has a process of its own for it, so this module imports neither torch nor Parquet
readers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared.jobs import JobRecord, Jobs, JobState
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from train_service.records.event_log import TRAIN_KIND, Event, EventKind, EventLog
from train_service.store_retry import retry_on_outage

POLL_INTERVAL_S = 0.5
EVENTS_AT_ONCE = 256
# Replaces a value that is no number: worse than all others, and finite, because the scheduler computes with it.
WORST = 1e30
PREFIX = "validation_"
# Keys of a trial in Tune: its number, and in each report the finished epochs and the metric's value.
TRIAL, EPOCHS, VALUE = "trial", "epochs", "value"


@dataclass(frozen=True)
class Followed:
    """The job that a trial follows.

    `name` and `uid` identify it, and `metric` is reported.

    The job may not exist yet. `by_reports` means that it runs a program, whose reports with a checkpoint count instead
    of validated epochs.
    """

    settings: StoreSettings
    name: str
    uid: str
    metric: str
    maximize: bool
    by_reports: bool = False


def follow(trial: Followed, report: Callable[[int, float], None]) -> None:
    """Report a job's epochs to Tune.

    Calls `report` with (finished epochs, value) once for each validated epoch, until the job is over.

    For a program call it with (report, value) for each report that has the metric. Epochs that the job finished earlier
    are reported at once.
    """
    store = open_store(trial.settings)
    last_epoch = 0
    for epoch, value in _validated(store, trial):
        # An attempt that was lost after its last checkpoint may have reported these epochs already.
        if epoch > last_epoch:
            last_epoch = epoch
            report(epoch, value)


def _validated(store: ObjectStore, trial: Followed) -> Iterator[tuple[int, float]]:
    jobs = Jobs(store, TRAIN_KIND)
    log, sequence = EventLog(store, trial.name), 0
    before: JobRecord | None = None
    while True:
        job = retry_on_outage(lambda: jobs.newest_of(trial.name, trial.uid), "the trial's state")
        if job is not None:
            if job.state is JobState.DELETED:
                return  # its events are deleted, too; present ones belong to another job
            # The state was read before the events, so after the end of the job an empty read means that no more will
            # come.
            # Events are gathered only after the end of the job.
            read_next = partial(_next, log, also_gathered=job != before)
            before = job
            while events := retry_on_outage(partial(read_next, sequence), "the trial's events"):
                for event in events:
                    sequence = event.sequence
                    metrics = event.payload.get("metrics", {})
                    if trial.by_reports and event.kind is EventKind.CHECKPOINT_COMMITTED and trial.metric in metrics:
                        yield event.payload["step"], float(metrics[trial.metric])
                    elif event.kind is EventKind.VALIDATED:
                        yield event.payload["epoch"] + 1, _value(trial, event.payload)
            if job.state.final and job.state is not JobState.SUSPENDED:
                return
        time.sleep(POLL_INTERVAL_S)


def _next(log: EventLog, sequence: int, *, also_gathered: bool) -> list[Event]:
    return list(itertools.islice(log.after(sequence, also_gathered=also_gathered), EVENTS_AT_ONCE))


def _value(trial: Followed, payload: dict[str, Any]) -> float:
    name = trial.metric.removeprefix(PREFIX)
    value = float({**payload, **payload["metrics"]}[name])
    return value if math.isfinite(value) else -WORST if trial.maximize else WORST
