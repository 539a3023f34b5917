"""Events for the end of each attempt and for each change of its device.

The attempt itself writes the event. If its process has died, another process writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, load_checkpoint
from shared.errors import DataLoss, FailedPrecondition, Internal, MillraceError, Unavailable, error_from_record
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import INSUFFICIENT_RESOURCES, PREEMPTED, RESIZED
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from train_service.domain.spec import ATTEMPT_DEVICE, DEVICE_BEFORE, GPU, TrainingSpec
from train_service.program.coordinator import ReportCoordinator
from train_service.records.event_log import TRAIN_KIND, EventKind, EventLog
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import FAILING, HeartbeatServer, Reply

logger = logging.getLogger(__name__)

FAILURE, HUNG = "CAUSE_FAILURE", "CAUSE_HUNG"
PREEMPTION, RESIZING = "CAUSE_PREEMPTED", "CAUSE_RESIZED"
SUSPENDED, CANCELLED = "CAUSE_SUSPENDED", "CAUSE_CANCELLED"
# Names of Python errors that come from the code and its data.
ERRORS_IN_CODE = frozenset(
    kind.__name__
    for kind in (
        ArithmeticError,
        AssertionError,
        AttributeError,
        FloatingPointError,
        ImportError,
        IndentationError,
        IndexError,
        KeyError,
        ModuleNotFoundError,
        NameError,
        NotImplementedError,
        OverflowError,
        RecursionError,
        SyntaxError,
        TypeError,
        UnboundLocalError,
        UnicodeDecodeError,
        UnicodeEncodeError,
        ValueError,
        ZeroDivisionError,
    )
)
OF_REASON = {"RANK_HUNG": HUNG, PREEMPTED: PREEMPTION, RESIZED: RESIZING, INSUFFICIENT_RESOURCES: RESIZING}


def cause_of(error: MillraceError, state: JobState) -> str:
    """Return the cause of an attempt's end. It follows from the error and from the state that clients requested."""
    if state is JobState.CANCELLING:
        return CANCELLED
    if state is JobState.SUSPENDING:
        return SUSPENDED
    return OF_REASON.get(error.specific_reason, FAILURE)


def run_and_report_error(context: AttemptContext, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `work`, the attempt. An error is reported as an event before it is raised again."""
    try:
        return work()
    except MillraceError as error:
        ended_by = error
        retry_on_outage(lambda: report_error(context, ended_by), "the end of an attempt")
        raise
    except StaleAttempt:
        raise
    except Exception:
        retry_on_outage(lambda: report_error(context, Internal("an unexpected error")), "the end of an attempt")
        raise


def end_attempt(store: ObjectStore, job_name: str, attempt: int, error: MillraceError) -> None:
    """Record `error` as the end of an attempt that another thread or process runs, which is about to be ended."""

    def failed() -> dict[str, Any]:
        raise error

    run_attempt(lambda context: run_and_report_error(context, failed), store, TRAIN_KIND, job_name, attempt)


class RankErrors:
    """The errors that ranks of the built-in loop sent before their processes ended. A handler of `HeartbeatServer`."""

    def __init__(self) -> None:
        self.first: MillraceError | None = None

    def __call__(self, rank: int, body: dict[str, Any], reply: Reply) -> None:
        if body["kind"] != FAILING:
            raise Internal(f"rank {rank} asks {body['kind']!r}, which is no known request", reason="UNKNOWN_REQUEST")
        self.first = self.first or error_from_record(body["error"])
        reply({})


def result_of(context: AttemptContext, spec: TrainingSpec, cause: MillraceError | None = None) -> dict[str, Any]:
    """Return the last and the best checkpoint.

    The attempt's ranks must have ended. If the run is not done, raises the stop that a client requested, else `cause`.
    """
    last, chosen = _last_and_best(context, spec)
    if last is not None and chosen is not None and last.final and _good(context, last):
        return {"checkpoint": last.name, "best_checkpoint": chosen.name}
    retry_on_outage(lambda: context.raise_if_stopped(fresh=True), "the job's state")
    if cause is not None and cause.specific_reason == RESIZED:
        _require_progress(context, cause)
    raise cause or Internal("the workers ended before the last epoch was saved", reason="RUN_INCOMPLETE")


def program_result(
    context: AttemptContext, coordinator: ReportCoordinator, ended_for: MillraceError | None
) -> dict[str, Any]:
    """Return the result of an attempt at a program.

    It works as `result_of` does, but the run is done once the program's function has returned on every rank.
    `ended_for` is the reason for which the supervision ended the attempt.
    """
    if coordinator.all_returned:
        return coordinator.result()
    retry_on_outage(lambda: context.raise_if_stopped(fresh=True), "the job's state")
    cause = ended_for or coordinator.cause
    if cause is not None and cause.specific_reason == RESIZED:
        _require_progress(context, cause)
    raise cause or Internal("the workers ended before the training function returned on all", reason="RUN_INCOMPLETE")


def script_result(context: AttemptContext, spec: TrainingSpec) -> dict[str, Any]:
    """Return the last and the best checkpoint of a script.

    All runs of the script count, after its end. There may be none.
    """
    last, chosen = _last_and_best(context, spec)
    return {"checkpoint": last.name if last else "", "best_checkpoint": chosen.name if chosen else ""}


def program_error(coordinator: ReportCoordinator, heartbeats: HeartbeatServer, lost: MillraceError) -> MillraceError:
    """Return why an attempt at a program ended.

    Ray reports `lost`. An earlier error of a rank or of the coordinator counts first, then the process that was lost
    first.
    """
    if coordinator.cause is not None:
        return coordinator.cause
    gone = sorted((one for one in heartbeats.heard() if one.lost), key=lambda one: one.lost_at)
    if lost.specific_reason != "WORKERS_LOST" or not gone:
        return lost
    first = gone[0]
    return Unavailable(
        f"the process of rank {first.rank} (pid {first.pid}) ended without a word: by a signal, e.g. SIGKILL where "
        "memory ran out, or by an exit in C code",
        reason="WORKERS_LOST",
        metadata={"ranks": str(first.rank)},
    )


def as_last_error(error: MillraceError, before: Mapping[str, Any] | None) -> MillraceError:
    """Return `error`, made final if it is a repetition.

    `error` ended an attempt at a program, and may repeat the previous attempt's error. After a final error no other
    attempt begins. Errors repeat if they come from the code, have the same type and the same line, and no report came
    in between. Attempts get the same seeds and the same rows, so another one would fail the same way. `before` is the
    record of the previous error.

    An error that a disk, a network or a device may cause is never final, because its cause may pass.
    """
    if before is None or error.metadata.get("exception") not in ERRORS_IN_CODE or not error.metadata.get("line"):
        return error
    place = ("exception", "line", "report")
    if any(error.metadata.get(key) != before["metadata"].get(key) for key in place):
        return error
    return FailedPrecondition(
        f"{error.message}; the attempt before ended with the same error at the same line, and no report came in "
        "between, so no other attempt is made: correct the program and push it again, or resume the job where only "
        "something outside of the program was wrong",
        reason="ERROR_REPEATED",
        metadata=error.metadata,
    )


def _last_and_best(
    context: AttemptContext, spec: TrainingSpec
) -> tuple[CheckpointEntry | None, CheckpointEntry | None]:
    registry = CheckpointRegistry(context.store, context.job.name)
    return retry_on_outage(
        lambda: registry.poll(lambda view: (view.newest(), view.best(spec.checkpoints.ranking))), "the checkpoints"
    )


def _require_progress(context: AttemptContext, resized: MillraceError) -> None:
    """Raise `Internal` if a resized attempt took no checkpoint.

    A resize costs a run nothing while each attempt makes progress. Without progress the run could resize for ever.
    """
    registry = CheckpointRegistry(context.store, context.job.name)
    if not retry_on_outage(lambda: registry.poll(lambda view: view.has_attempt(context.attempt)), "the checkpoints"):
        raise Internal(
            f"{resized.message}, but no checkpoint was taken for it", reason="RESIZE_WITHOUT_CHECKPOINT"
        ) from resized


def _good(context: AttemptContext, last: CheckpointEntry) -> bool:
    """Return whether the last checkpoint is intact.

    A checkpoint of an earlier attempt may be damaged; this attempt then trained on from an earlier one.
    """
    if last.attempt == context.attempt:
        return True
    try:
        retry_on_outage(
            lambda: load_checkpoint(context.store, last.folder, last.manifest_sha256).verify(), "a checkpoint"
        )
    except DataLoss as error:
        logger.warning("%s is damaged, and the run is not done: %s", last.name, error.message)
        return False
    return True


def report_outcome(context: AttemptContext, cause: str, text: str, ranks: Sequence[int] = ()) -> None:
    """Report the end of an attempt, once. A second report changes nothing. The log of a later attempt is left alone."""
    _append_end(context.store, context.job.name, context.attempt, cause, text, ranks)


def report_error(context: AttemptContext, error: MillraceError) -> None:
    """Report an error as the end of an attempt.

    See `report_outcome`. A stop that clients have requested by now takes precedence as the cause. Raises `StaleAttempt`
    if the job was deleted.
    """
    ranks = [int(rank) for rank in error.metadata.get("ranks", "").split(",") if rank.strip()]
    report_outcome(context, cause_of(error, context.newest().state), error.message, ranks)


def report_lost(store: ObjectStore, job: JobRecord) -> None:
    """Report the loss of the present attempt's process.

    If the job has had no attempt, the function does nothing. Also reports the attempt's change of device if that is
    still missing.

    An attempt that reported its own failure, such as a hang, was not lost with its node, even if the node was draining.
    """
    if job.attempts_made == 0:
        return
    report_device(store, job)
    jobs = Jobs(store, TRAIN_KIND)
    leaving = jobs.was_leaving(job.name, job.attempt)
    if leaving:
        own_word = EventLog(store, job.name).find(job.attempt, EventKind.ATTEMPT_ENDED)
        if own_word is not None and own_word.payload["cause"] in (FAILURE, HUNG):
            jobs.forget_leaving(job.name)
            return
    of_itself = PREEMPTION if leaving else FAILURE
    cause = {JobState.CANCELLING: CANCELLED, JobState.SUSPENDING: SUSPENDED}.get(job.state, of_itself)
    _append_end(store, job.name, job.attempt, cause, "the process of the attempt ended", ())


def report_device(store: ObjectStore, job: JobRecord) -> None:
    """Report a change of the attempt's kind of device.

    The present attempt is compared with the previous one. Call this before the attempt reports anything else, so that
    the event is written once. An attempt that ends without workers reports it, too, because the next attempt is
    compared only with this one.
    """
    choices = job.choices
    before = choices.get(DEVICE_BEFORE)
    log = EventLog(store, job.name)
    if not before or log.last_attempt() >= job.attempt:
        return
    now = choices[ATTEMPT_DEVICE]
    text = (
        "the GPUs of the run are back"
        if now == GPU
        else "there are no GPUs for the run, and placement.allow_cpu_fallback lets it go on without"
    )
    payload = {"before": f"DEVICE_{before}", "device": f"DEVICE_{now}", "text": text}
    with suppress(StaleAttempt):  # a later attempt reports for itself
        log.append(job.attempt, EventKind.DEVICE_CHANGED, payload, f"device-{job.attempt}")


def _append_end(store: ObjectStore, name: str, attempt: int, cause: str, text: str, ranks: Sequence[int]) -> None:
    payload = {"cause": cause, "text": text, "ranks": list(ranks)}
    try:
        EventLog(store, name).append_first(attempt, EventKind.ATTEMPT_ENDED, payload)
    except StaleAttempt:
        logger.warning("a later attempt reports for itself")
