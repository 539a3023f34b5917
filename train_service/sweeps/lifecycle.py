"""The end of a sweep: no checkpoint of its trials may be in use; then they go one by one, and it goes last.

As with a training job its log says DELETING first and users are looked for then. Somebody who begins to use a
checkpoint after that look keeps that trial: the sweep then stays DELETING until the user has let go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shared.checkpoint.users import users_of_job
from shared.errors import STORE_OUTAGES, FailedPrecondition
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.deletion import condemned, remove_objects, undone, while_deleting
from shared.jobs.transitions import confirm_delete, request_delete
from shared.storage import ObjectStore
from train_service.jobs.inputs import release_inputs
from train_service.jobs.lifecycle import Deletions, check_deletable, in_background, in_use
from train_service.sweeps.trials import SWEEP_KIND, Trials

logger = logging.getLogger(__name__)

COLLECTION = "sweeps"


class SweepDeletions:
    """`clock` gives seconds since the epoch."""

    def __init__(self, store: ObjectStore, deletions: Deletions, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = Jobs(store, SWEEP_KIND)
        self._deletions = deletions
        self._clock = clock

    def begin(self, name: str, etag: str = "") -> JobRecord:
        """The sweep, DELETING for good; `finish` takes it away with its trials.

        Raises `NotFound`, `Conflict` when `etag` is given and not the present one, and `FailedPrecondition` while it or
        a trial is at work, or somebody uses a checkpoint of one: then it is what it was before.
        """
        self._jobs.get(name, name)

        def decide(newest: JobRecord) -> JobRecord:
            check_deletable(newest, etag)
            return request_delete(newest, newest.update_time)

        return self._condemn(self._jobs.transition(name, decide))

    def finish(self, name: str) -> None:
        """Takes on a deletion that was begun. Nothing to do for a sweep that is not DELETING. Raises as `begin`."""
        sweep = self._jobs.find(name)
        if sweep is None or sweep.state is not JobState.DELETING:
            return
        sweep = self._condemn(sweep)
        trials = Trials(self._store, sweep)
        for number in trials.numbers:
            if (trial := trials.job(number)) is not None:
                self._deletions.begin(trial.name, uid=trial.uid)
                self._deletions.finish(trial.name)
        release_inputs(self._store, SWEEP_KIND, sweep.uid, sweep.spec["sweep"]["base"])
        # Listed before the log is read again: another may have finished this, and a new sweep may have the name.
        keys = [info.key for info in self._store.list(f"{name}/stopped")]
        if not remove_objects(self._store, self._jobs, sweep, [*keys, f"{name}/progress.json"]):
            return
        while_deleting(self._jobs, sweep, lambda newest: confirm_delete(newest, self._clock()))
        logger.info("%s is deleted", name)

    def finish_soon(self, name: str) -> None:
        """As `finish`, in a thread; what stops it is left to `finish_all`."""
        in_background(self.finish, name)

    def finish_all(self) -> None:
        """Every deletion that was begun. What goes wrong with one sweep is logged and leaves the others be; raises
        where the store does not answer."""
        for sweep_id in self._store.folders(COLLECTION):
            name = f"{COLLECTION}/{sweep_id}"
            try:
                self.finish(name)
            except STORE_OUTAGES:
                raise  # which holds for every sweep
            except FailedPrecondition as error:
                logger.info("%s stays: %s", name, error.message)
            except Exception:
                logger.exception("%s cannot be taken away; the others go on", name)

    def _condemn(self, sweep: JobRecord) -> JobRecord:
        if sweep.deleted_from is None:
            return sweep
        refusal = self._refusal(sweep)
        sweep = while_deleting(self._jobs, sweep, undone if refusal else condemned)
        if sweep.state not in (JobState.DELETING, JobState.DELETED):
            raise refusal or in_use(sweep, {})
        return sweep

    def _refusal(self, sweep: JobRecord) -> FailedPrecondition | None:
        """What is against it."""
        trials = Trials(self._store, sweep)
        users: dict[str, list[str]] = {}
        for number in trials.numbers:
            job = trials.job(number)
            if job is None:
                continue
            try:
                check_deletable(job, "")
            except FailedPrecondition as error:
                return error
            users |= users_of_job(self._store, job.name, self._clock())
        return in_use(sweep, users) if users else None
