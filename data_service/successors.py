"""The order of versions: of several writers that append to or replace one version, one wins.

`datasets/{d}/versions/{v}/successors/{uid}/log` names the version that follows v. A claim is taken before the job is
created and holds while that job is live or has succeeded. A job that failed, was cancelled or deleted releases the
claim, and so does a refused call.

A claim without a job may be taken over after a while, though its claimant may still create the job. So each attempt
confirms the claim before it works. That appends to the same log, in which one of both comes first: a later takeover
finds the job, and a later confirmation finds the other's claim and fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared.dataset_version.version import IMPORT_KIND
from shared.errors import STORE_OUTAGES, Conflict, MillraceError
from shared.idempotency import OUTCOME_UNKNOWN
from shared.jobs import JobRecord, Jobs, JobState
from shared.log import Record, ResourceLog, State
from shared.storage import ObjectStore

# A claimant creates its job at once. A claim without a job after this time was left by a process that died in between.
JOB_APPEARS_TIMEOUT_S = 60.0
# A deleted job has left a tombstone, so it is not still to come.
GIVE_FREE = (JobState.FAILED, JobState.CANCELLED, JobState.DELETING, JobState.DELETED)
FREE: State = {"version": "", "uid": ""}


@contextmanager
def following(store: ObjectStore, base: JobRecord, successor: JobRecord) -> Iterator[None]:
    """Makes `successor` the version that follows `base`, while the body creates its job.

    The claim is released if the body is refused, but not if an outage leaves it unknown whether the job was created.
    Raises `Conflict` if another version follows already, or is about to.
    """
    log = _log(store, base)
    _append_claim(store, log, base, successor)
    try:
        yield
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(*STORE_OUTAGES):  # otherwise the claim expires after a minute without a job
                log.update(lambda newest: FREE if newest and newest.state["uid"] == successor.uid else None)
        raise


def confirm_follows(store: ObjectStore, base: JobRecord, successor: JobRecord) -> None:
    """Confirms the claim of `successor`, before its attempt works.

    Raises `Conflict` if another version has taken its place.
    """
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
