"""Each end of an attempt is an event, written by the attempt itself or, should its process have died, for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shared.errors import MillraceError
from shared.jobs import AttemptContext, JobRecord, JobState
from shared.jobs.record import PREEMPTED, RESIZED
from shared.log import StaleAttempt
from shared.storage import ObjectStore
from train_service.events import EventKind, EventLog

logger = logging.getLogger(__name__)

FAILURE, HUNG = "CAUSE_FAILURE", "CAUSE_HUNG"
PREEMPTION, RESIZING = "CAUSE_PREEMPTED", "CAUSE_RESIZED"
SUSPENDED, CANCELLED = "CAUSE_SUSPENDED", "CAUSE_CANCELLED"
OF_REASON = {"RANK_HUNG": HUNG, PREEMPTED: PREEMPTION, RESIZED: RESIZING}


def cause_of(error: MillraceError, state: JobState) -> str:
    """The cause of an attempt's end, from what it raised and what clients wish of the job."""
    if state is JobState.CANCELLING:
        return CANCELLED
    if state is JobState.SUSPENDING:
        return SUSPENDED
    return OF_REASON.get(error.specific_reason, FAILURE)


def tell_end(context: AttemptContext, cause: str, text: str, ranks: Sequence[int] = ()) -> None:
    """Once for each attempt: whoever comes second changes nothing. A later attempt's log is left alone."""
    _tell(context.store, context.job.name, context.attempt, cause, text, ranks)


def tell_lost(store: ObjectStore, job: JobRecord) -> None:
    """For the process of `job`'s present attempt, which is gone; nothing where there has been none yet."""
    if job.attempts_made == 0:
        return
    cause = {JobState.CANCELLING: CANCELLED, JobState.SUSPENDING: SUSPENDED}.get(job.state, FAILURE)
    _tell(store, job.name, job.attempt, cause, "the process of the attempt ended", ())


def _tell(store: ObjectStore, name: str, attempt: int, cause: str, text: str, ranks: Sequence[int]) -> None:
    log = EventLog(store, name)
    try:
        if not log.has(attempt, EventKind.ATTEMPT_ENDED):
            log.append(attempt, EventKind.ATTEMPT_ENDED, {"cause": cause, "text": text, "ranks": list(ranks)})
    except StaleAttempt:
        logger.warning("a later attempt tells its own story")
