"""Which version follows which: of several writers that append to or replace one version, one wins.

`datasets/{d}/versions/{v}/successors/{uid}/log` names the version that follows v. A claim is taken before the job is
made and holds while that job lives or has succeeded; a job that failed, was cancelled or deleted gives its place free,
and so does a call that was refused after all.

A claim without a job may be taken over after a while, and its claimant may yet make the job. So each attempt confirms
the claim before it works: that appends to the same log, in which one of both comes first. Who takes over afterwards
finds the job; who is confirmed afterwards finds the other's claim, and fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared.dataset_version.version import IMPORT_KIND
from shared.errors import STORE_OUTAGES, Conflict, MillraceError
from shared.jobs import JobRecord, Jobs, JobState
from shared.log import Record, ResourceLog, State
from shared.requests import OUTCOME_UNKNOWN
from shared.storage import ObjectStore

# Whoever claims makes the job at once. A claim without one for so long was left by a process that died in between.
JOB_APPEARS_TIMEOUT_S = 60.0
# A job that was deleted has left its tombstone: it is not still to come.
GIVE_FREE = (JobState.FAILED, JobState.CANCELLED, JobState.DELETING, JobState.DELETED)
FREE: State = {"version": "", "uid": ""}


@contextmanager
def following(store: ObjectStore, base: JobRecord, successor: JobRecord) -> Iterator[None]:
    """Makes `successor` the version that follows `base` while the body makes its job; the place is free again if that
    is refused, but not when an outage leaves open whether it was made.

    Raises `Conflict` where another version follows already, or is being made to.
    """
    log = _log(store, base)
    _append_claim(store, log, base, successor)
    try:
        yield
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(*STORE_OUTAGES):  # then the claim is free once its job has not come for a minute
                log.update(lambda newest: FREE if newest and newest.state["uid"] == successor.uid else None)
        raise


def confirm_follows(store: ObjectStore, base: JobRecord, successor: JobRecord) -> None:
    """For the attempt of `successor`, before it works. Raises `Conflict` where another version has taken its place."""
    _append_claim(store, _log(store, base), base, successor, confirmed=True)


def _log(store: ObjectStore, base: JobRecord) -> ResourceLog:
    return ResourceLog(store, f"{base.name}/successors/{base.uid}/log")


def _append_claim(
    store: ObjectStore, log: ResourceLog, base: JobRecord, successor: JobRecord, *, confirmed: bool = False
) -> None:
    jobs = Jobs(store, IMPORT_KIND)

    def decide(newest: Record | None) -> State | None:
        if newest is not None and newest.state["uid"] != successor.uid and _holds(jobs, newest):
            raise Conflict(
                f"base.version: {newest.state['version']} already follows {base.name}; read it, and decide again",
                reason="BASE_HAS_SUCCESSOR",
                metadata={"resource": base.name, "successor": newest.state["version"]},
            )
        is_own = newest is not None and newest.state["uid"] == successor.uid
        if newest is not None and is_own and (newest.state.get("confirmed", False) or not confirmed):
            return None  # a repeated call, or a later attempt
        return {"version": successor.name, "uid": successor.uid, "confirmed": confirmed}

    log.update(decide)


def _holds(jobs: Jobs, claim: Record) -> bool:
    if not claim.state["uid"]:
        return False
    job = jobs.newest_of(claim.state["version"], claim.state["uid"])
    if job is None:
        return time.time() - claim.time < JOB_APPEARS_TIMEOUT_S
    return job.state not in GIVE_FREE
