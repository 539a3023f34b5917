"""Which version follows which: of several writers that append to or replace one version, one wins.

`datasets/{d}/versions/{v}/successors/{uid}/log` names the version that follows v. A claim is taken before the job is
made and holds while that job lives or has succeeded; a job that failed, was cancelled or deleted gives its place free,
and so does a call that was refused after all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared.dataset_version.version import IMPORT_KIND
from shared.errors import STORE_OUTAGES, Conflict, MillraceError
from shared.jobs import JobRecord, Jobs, JobState
from shared.log import ResourceLog
from shared.log.resource_log import Record, State
from shared.requests import OUTCOME_UNKNOWN
from shared.storage import ObjectStore

# Whoever claims makes the job at once. A claim without one for so long was left by a process that died in between.
JOB_APPEARS_WITHIN_S = 60.0
# A job that was deleted has left its tombstone: it is not still to come.
GIVE_FREE = (JobState.FAILED, JobState.CANCELLED, JobState.DELETING, JobState.DELETED)
FREE: State = {"version": "", "uid": ""}


@contextmanager
def following(store: ObjectStore, base: JobRecord, successor: JobRecord) -> Iterator[None]:
    """Makes `successor` the version that follows `base` while the body makes its job; the place is free again if that
    is refused, but not when an outage leaves open whether it was made.

    Raises `Conflict` where another version follows already, or is being made to.
    """
    log = ResourceLog(store, f"{base.name}/successors/{base.uid}/log")
    _claim(store, log, base, successor)
    try:
        yield
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(*STORE_OUTAGES):  # then the claim is free once its job has not come for a minute
                log.update(lambda newest: FREE if newest and newest.state["uid"] == successor.uid else None)
        raise


def _claim(store: ObjectStore, log: ResourceLog, base: JobRecord, successor: JobRecord) -> None:
    jobs = Jobs(store, IMPORT_KIND)

    def decide(newest: Record | None) -> State | None:
        if newest is not None and newest.state["uid"] != successor.uid and _holds(jobs, newest):
            raise Conflict(
                f"base.version: {newest.state['version']} already follows {base.name}; read it, and decide again",
                reason="BASE_HAS_SUCCESSOR",
                metadata={"resource": base.name, "successor": newest.state["version"]},
            )
        if newest is not None and newest.state["uid"] == successor.uid:
            return None  # a repeated call
        return {"version": successor.name, "uid": successor.uid}

    log.update(decide)


def _holds(jobs: Jobs, claim: Record) -> bool:
    if not claim.state["uid"]:
        return False
    job = jobs.newest_of(claim.state["version"], claim.state["uid"])
    if job is None:
        return time.time() - claim.time < JOB_APPEARS_WITHIN_S
    return job.state not in GIVE_FREE
