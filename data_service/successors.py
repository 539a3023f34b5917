"""Which version follows which: of several writers that append to or replace one version, one wins.

`datasets/{d}/versions/{v}/successors/{uid}/log` names the version that follows v. A claim is taken before the job is
made and holds while that job lives or has succeeded; a job that failed, was cancelled or deleted gives its place free.
"""

from __future__ import annotations

import time

from shared.dataset_version.version import IMPORT_KIND
from shared.errors import Conflict
from shared.jobs import JobRecord, Jobs, JobState
from shared.log import ResourceLog
from shared.log.resource_log import Record, State
from shared.storage import ObjectStore

# Whoever claims makes the job at once. A claim without one for so long was left by a process that died in between.
JOB_APPEARS_WITHIN_S = 60.0


def claim_successor(store: ObjectStore, base: JobRecord, successor: JobRecord) -> None:
    """Makes `successor` the version that follows `base`.

    Raises `Conflict` where another version does already, or is being made to.
    """
    jobs = Jobs(store, IMPORT_KIND)

    def decide(newest: Record | None) -> State | None:
        if newest is not None and newest.state["uid"] != successor.uid and _holds(jobs, newest):
            raise Conflict(
                f"base.version: {newest.state['version']} already follows {base.name}; read it, and decide again",
                reason="BASE_HAS_SUCCESSOR",
                metadata={"resource": base.name, "successor": newest.state["version"]},
            )
        if newest is not None and newest.state["uid"] == successor.uid:
            return None
        return {"version": successor.name, "uid": successor.uid}

    ResourceLog(store, f"{base.name}/successors/{base.uid}/log").update(decide)


def _holds(jobs: Jobs, claim: Record) -> bool:
    job = jobs.find(claim.state["version"])
    if job is None or job.uid != claim.state["uid"]:
        return time.time() - claim.time < JOB_APPEARS_WITHIN_S
    return job.state not in (JobState.FAILED, JobState.CANCELLED, JobState.DELETING)
