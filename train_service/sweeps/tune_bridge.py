"""The bridge between Ray Tune and the store: a callback in the sweep's process, and the function of each trial.

The callback makes started trials into training jobs, and cancels the jobs of stopped trials.

The function, `follow`, reads the events of the trial's training job and reports values to Tune. It writes nothing. Each
running trial has a process of its own for it, so this module does not import torch.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.tune import Callback

from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs, JobState
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from train_service.records.event_log import TRAIN_KIND, Event, EventKind, EventLog
from train_service.store_retry import retry_on_outage

if TYPE_CHECKING:
    from shared.jobs import AttemptContext
    from train_service.sweeps.sweeps import Trials


# --- The function of a trial ---

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


# --- The callback of Tune ---

logger = logging.getLogger(__name__)

# Tune writes this before each failure in a trial's error file.
FAILURE = "Failure # "


class TuneBridge(Callback):
    """A callback that records Tune's events.

    It acts on them between two of Tune's steps. Errors raised there reach the caller of Tune.
    """

    def __init__(self, context: AttemptContext, trials: Trials) -> None:
        self._context = context
        self._trials = trials
        self._started: list[int] = []
        # By number: the epochs that the trial had reported.
        self._ended: dict[int, int] = {}
        # By number: the reason.
        self._lost: dict[int, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune saves its callbacks for a restoration that is not used here.
        return Callback, ()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._started.append(trial.config[TRIAL])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._ended[trial.config[TRIAL]] = (trial.last_result or {}).get(EPOCHS, 0)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._log_failure(trial, "was lost; it is begun again")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._lost[trial.config[TRIAL]] = self._log_failure(trial, "was lost too often")

    def on_step_begin(self, iteration: int, trials: list[Any], **_: Any) -> None:
        self._context.raise_if_stopped()

    def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
        """Create started trials' jobs, and stop ended trials.

        Raises `Unavailable` if a follower was lost more often than Tune restarts it; the next attempt follows all
        trials again.
        """
        while self._started:
            number = self._started.pop(0)
            retry_on_outage(partial(self._trials.make, number), "a trial")
            # A cancellation is recorded first, and then cancels existing trials. Creating a trial first and then
            # checking for a cancellation leaves no gap.
            retry_on_outage(lambda: self._context.raise_if_stopped(fresh=True), "the sweep's state")
        while self._ended:
            number, epochs = self._ended.popitem()
            # A trial that has finished its epochs is about to succeed.
            if epochs < self._epochs(number):
                retry_on_outage(lambda: self._context.raise_if_stopped(fresh=True), "the sweep's state")
                retry_on_outage(partial(self._trials.stop_early, number), "a trial that is to stop")
        if self._lost:
            reported = "; ".join(f"{self._trials.name(number)}: {why}" for number, why in self._lost.items())
            raise Unavailable(f"processes that follow trials were lost: {reported}", reason="FOLLOWER_LOST")

    def _log_failure(self, trial: Any, what: str) -> str:
        """Log the trial's newest failure. Return its last line, which is the error itself."""
        # Read the file that Tune's driver writes. `Trial.get_error` reads a copy in Tune's storage, which is updated
        # only at times.
        failure = Path(trial.error_file).read_text().rpartition(FAILURE)[2].strip()
        logger.warning("the process that follows %s %s: %s", self._trials.name(trial.config[TRIAL]), what, failure)
        return failure.splitlines()[-1].strip()

    def _epochs(self, number: int) -> int:
        """Return after how many epochs a trial ends.

        It then ends by itself. A program's loop decides that, and the scheduler stops no trial after `max_t`.
        """
        spec = self._trials.spec
        if spec.base.program is not None:
            return spec.asha.max_t if spec.asha is not None else 0
        return spec.training_of(spec.parameters_of(number)).epochs
