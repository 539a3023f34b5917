"""An attempt at a training job.

The attempt hands the loop to Ray Train on as many workers as fit, supervises them, and waits. In local mode it runs the
loop itself.

It bypasses Ray's own checkpoint manager and turns Ray's retries off: Millrace's registry decides which checkpoints
count, and a lost worker ends the attempt. The next attempt is a fresh Ray run that resumes from the newest good
checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch
from ray.train import TrainingFailedError

from shared.errors import Cancelled, MillraceError, Unavailable
from shared.jobs import AttemptContext, JobRecord
from shared.jobs.transitions import INSUFFICIENT_RESOURCES
from shared.log import StaleAttempt
from shared.telemetry import flush_logs
from train_service.attempt.outcomes import (
    RankErrors,
    as_last_error,
    end_attempt,
    program_error,
    program_result,
    report_device,
    result_of,
    run_and_report_error,
)
from train_service.attempt.ray_run import Failure, RayRun
from train_service.attempt.supervision import Supervision, end_hard
from train_service.domain.spec import Program, TrainingSpec, attempt_device, max_workers
from train_service.learning.ranks import Ranks
from train_service.placement import Size, count_concurrent_ingests, devices_of, lacking, size_now, usable_nodes
from train_service.program.coordinator import ReportCoordinator
from train_service.program.signing import handling
from train_service.program.worker import ProgramConfig
from train_service.records.event_log import GO_ON, Reporter
from train_service.records.logs import OWN_PROCESS, LogShipper
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import HeartbeatServer
from train_service.worker.loop import LoopConfig, train_loop

logger = logging.getLogger(__name__)

# Workers that have begun stop after their next step. Workers that wait for resources would never stop by themselves.
STOP_TIMEOUT_S = 20.0
# A checkpoint may have to be written first.
PAUSE_TIMEOUT_S = 300.0
# The capacity that the reconciler saw last may become free again within moments.
CAPACITY_TIMEOUT_S = 5.0


def prepare() -> None:
    """Do nothing: importing this module is the slow part.

    It is called in a standby process that waits for an attempt.
    """


def run(context: AttemptContext) -> dict[str, Any]:
    """Run an attempt at a training job.

    This is the entry function of a durable job of kind `train`. Returns the last and the best checkpoint.
    """
    spec = TrainingSpec.from_config(context.job.spec["training"])
    if spec.local and spec.program is None:
        return run_and_report_error(context, lambda: _run(context, spec))  # this process is rank 0 and logs as rank 0
    with LogShipper(context.store, context.job.name, context.attempt, OWN_PROCESS) as shipper:
        return run_and_report_error(context, lambda: _run(context, spec, shipper.add_lines))


def _run(
    context: AttemptContext, spec: TrainingSpec, add_lines: Callable[[bytes], None] = lambda _: None
) -> dict[str, Any]:
    """Run the attempt. `add_lines` receives the output of a process that the attempt starts."""
    retry_on_outage(lambda: report_device(context.store, context.job), "the change of the device")
    if spec.program is not None and (spec.program.is_script or spec.local):
        from train_service.attempt.script_run import ScriptRun  # imports this module

        # In local mode a function, too, runs in a process of its own, because this process has the store's credentials.
        return ScriptRun(context, spec, spec.program, add_lines).run()
    if spec.program is not None:
        return _run_program(context, spec, spec.program)
    size = None if spec.local else size_of_attempt(context, spec)
    errors = RankErrors()
    with HeartbeatServer(ray.util.get_node_ip_address(), errors) as heartbeats:  # type: ignore[no-untyped-call]
        config = LoopConfig(
            store=context.store.settings,
            job_name=context.job.name,
            attempt=context.attempt,
            spec=spec,
            heartbeat=heartbeats.address,
        )
        with (
            _ends_when_stopped(context, PAUSE_TIMEOUT_S, STOP_TIMEOUT_S),
            Supervision(context, spec, heartbeats, size) as supervision,
        ):
            if size is None:
                node_id, rank = ray.get_runtime_context().get_node_id(), Ranks(0, 1, torch.device("cpu"))
                train_loop(config, rank, node_id, end_process=partial(_end_process, context))
            else:
                _fit(config, size, context, supervision, errors)
    return result_of(context, spec, supervision.cause)


def _run_program(context: AttemptContext, spec: TrainingSpec, program: Program) -> dict[str, Any]:
    """Run a user's own training function. It replaces Millrace's loop."""
    size = size_of_attempt(context, spec)
    with program_at_work(context, spec, program, size, began_before=began_before(context.job)) as run:
        try:
            _fit(run.config, size, context, run.supervision)
        except MillraceError as lost:
            error = program_error(run.coordinator, run.heartbeats, lost)
            before = context.job.error if run.coordinator.reported == 0 else None
            raise as_last_error(error, before) from lost
        if run.coordinator.all_returned:
            run.coordinator.finish()
    return run.result(context)


def began_before(job: JobRecord) -> bool:
    """Return whether an earlier attempt began to train. Attempts that found no capacity did not."""
    return job.attempts_made - job.waits > 1


@dataclass(frozen=True)
class ProgramAtWork:
    """The attempt's objects while a program trains. The ranks meet in the attempt's process at each report."""

    config: ProgramConfig
    coordinator: ReportCoordinator
    heartbeats: HeartbeatServer
    supervision: Supervision

    def result(self, context: AttemptContext) -> dict[str, Any]:
        """Return the result of a finished run. See `program_result`."""
        return program_result(context, self.coordinator, self.supervision.cause)


@contextmanager
def program_at_work(
    context: AttemptContext,
    spec: TrainingSpec,
    program: Program,
    size: Size | None,
    fit: int = 0,
    reports_before: int = 0,
    *,
    began_before: bool = False,
) -> Iterator[ProgramAtWork]:
    """Provide the attempt's side of a run.

    The body has Ray Train run it. If `size` is None, the run has one rank that is no worker. The other arguments are
    those of `ReportCoordinator`.
    """
    name, timeout_s = context.job.name, program.stop_within_s
    asked = [GO_ON]
    with contextlib.ExitStack() as stack:
        reporter = stack.enter_context(Reporter(context.store, name, context.attempt, lambda: asked[0]))
        coordinator = ReportCoordinator(
            context.store,
            name,
            context.attempt,
            spec,
            size.workers if size else 1,
            report_event=lambda kind, payload: reporter.emit(kind, **payload),
            stop_reason=lambda: reporter.stop_reason,
            fit=fit,
            reports_before=reports_before,
            began_before=began_before,
        )
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        handle = stack.enter_context(handling(context.store, name, context.attempt, spec, coordinator))
        heartbeats = stack.enter_context(HeartbeatServer(host, handle))
        stack.enter_context(coordinator)
        config = ProgramConfig(
            store_url=context.store.settings.url,
            job_name=name,
            attempt=context.attempt,
            spec=spec,
            heartbeat=heartbeats.address,
        )
        stack.enter_context(_ends_when_stopped(context, timeout_s, timeout_s, heartbeats))

        def request(reason: int) -> None:
            asked[0] = reason

        supervision = Supervision(context, spec, heartbeats, size, coordinator, request)
        stack.enter_context(supervision)
        yield ProgramAtWork(config, coordinator, heartbeats, supervision)


def size_of_attempt(context: AttemptContext, spec: TrainingSpec) -> Size:
    # For a job that an earlier release began, choose the device as for a first attempt.
    device = attempt_device(context.job.choices) or devices_of(spec, "", usable_nodes())[1]

    def concurrent_ingests() -> int:
        return retry_on_outage(lambda: count_concurrent_ingests(context.store, context.job.name), "the other jobs")

    give_up_at = time.monotonic() + CAPACITY_TIMEOUT_S
    most = max_workers(spec, context.job.choices)
    while not (size := size_now(spec, device, concurrent_ingests, most=most)).workers:
        if time.monotonic() > give_up_at:
            # Not a failure: the reconciler waits for capacity before it begins the next attempt.
            raise Unavailable(
                f"room was taken: {lacking(spec, device, concurrent_ingests)}", reason=INSUFFICIENT_RESOURCES
            )
        time.sleep(0.2)
    return size


def _end_process(context: AttemptContext, error: MillraceError) -> None:
    """Record the end of an attempt in local mode, whose process is ended next."""
    end_attempt(context.store, context.job.name, context.attempt, error)
    flush_logs()


def _fit(
    config: LoopConfig | ProgramConfig,
    size: Size,
    context: AttemptContext,
    supervision: Supervision,
    errors: RankErrors | None = None,
) -> None:
    try:
        RayRun(config, size).fit()
    except TrainingFailedError as error:
        retry_on_outage(lambda: context.raise_if_stopped(fresh=True), "the job's state")
        sent = errors.first if errors is not None else None
        raise Failure.from_error(error).cause(sent or supervision.cause) from error


@contextmanager
def _ends_when_stopped(
    context: AttemptContext, pause_timeout_s: float, stop_within_s: float, heartbeats: HeartbeatServer | None = None
) -> Iterator[None]:
    """End this process if its workers ignore a stop.

    A client or a later attempt asks for the stop, and the limit is `pause_timeout_s` or `stop_within_s`. `fit` cannot
    be interrupted while its workers start. The ranks that `heartbeats` knows are killed first.
    """
    done = threading.Event()

    def watch() -> None:
        asked_at: float | None = None
        while not done.wait(1.0):
            try:
                context.raise_if_stopped()
            except (Cancelled, StaleAttempt) as stop:
                asked_at = asked_at or time.monotonic()
                pausing = isinstance(stop, Cancelled) and context.is_suspending
                if time.monotonic() - asked_at > (pause_timeout_s if pausing else stop_within_s):
                    logger.warning("the workers did not stop in time; ending the attempt")
                    if heartbeats is not None:
                        end_hard(heartbeats.at_work())
                    flush_logs()
                    os._exit(1)

    thread = threading.Thread(target=watch, name="stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
