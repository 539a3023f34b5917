"""An attempt at a training job, and its supervision while the workers train.

The attempt hands the loop to Ray Train on as many workers as fit, supervises them, and waits. In local mode it runs the
loop itself.

It bypasses Ray's own checkpoint manager and turns Ray's retries off: Millrace's registry decides which checkpoints
count, and a lost worker ends the attempt. The next attempt is a fresh Ray run that resumes from the newest good
checkpoint.

The supervision watches for hung ranks, draining nodes, and capacity for more workers. It reaches a worker's process on
any node, to read the stacks that the process left there and to kill it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.train import TrainingFailedError

from shared.errors import STORE_OUTAGES, Cancelled, MillraceError, Unavailable
from shared.jobs import AttemptContext, JobRecord, warm_workers
from shared.jobs.actor import NODE_ID_LABEL, draining_nodes
from shared.jobs.transitions import INSUFFICIENT_RESOURCES, PREEMPTED, RESIZED
from shared.logging_and_tracing import flush_logs
from shared.resource_log import StaleAttempt
from train_service.attempt.outcomes import (
    HUNG,
    RankErrors,
    as_last_error,
    end_attempt,
    program_error,
    program_result,
    report_device,
    report_error,
    report_outcome,
    result_of,
    run_and_report_error,
)
from train_service.attempt.ray_run import WARM_WORKERS, Failure, RayRun
from train_service.domain.capacity import Resources
from train_service.domain.order import max_rows_of_a_rank
from train_service.domain.spec import CPU, GPU, RUN_DEVICE, Program, TrainingSpec, attempt_device, max_workers
from train_service.domain.watchdog import Phase, culprits, hung, limit_s, line_in_bundle, unresponsive_ranks
from train_service.learning.ranks import Ranks
from train_service.placement import (
    QueueRecord,
    Size,
    count_concurrent_ingests,
    devices_of,
    lacking,
    size_now,
    usable_nodes,
)
from train_service.program.coordinator import ReportCoordinator
from train_service.program.signing import handling
from train_service.program.worker import ProgramConfig
from train_service.records.event_log import GO_ON, PREEMPT, RESIZE, Reporter
from train_service.records.logs import OWN_PROCESS, STACKS_CHUNK, LogShipper
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import HeartbeatServer, RankHeartbeat
from train_service.worker.loop import LoopConfig, train_loop

# --- Attempt ---

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

    This is the entry function of a durable job of kind `train`. Return the last and the best checkpoint.
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


# --- Supervision ---


POLL_INTERVAL_S = 1.0
GROWTH_POLL_INTERVAL_S = 3.0
# Capacity must have been free for this long, so that nodes that join one after another cost one restart, not several.
CAPACITY_STABLE_S = 10.0
# A restart takes about this long; with less training left, more workers do not pay.
WORTH_A_RESTART_S = 30.0
# Warm workers are started this long after training began, when the start of this attempt is over. They are started only
# if at least WORTH_WARM_WORKERS_S of training is left, which makes a loss likely enough.
WARM_AFTER_S = 10.0
WORTH_WARM_WORKERS_S = 60.0
STACKS_TIMEOUT_S = 5.0
# Workers that have not reached their loop by then never will.
START_TIMEOUT_S = 900.0
# Ranks that have ended may still write their logs before Ray ends its run. If Ray hangs there, so would the job.
GONE_TIMEOUT_S = 90.0
# `fit` returns after its workers were killed. If it does not, this process ends.
FIT_ENDS_TIMEOUT_S = 30.0
STORE_OUTAGE_TIMEOUT_S = 30.0


class Supervision:
    """A thread that supervises the attempt while `fit` runs.

    Use as a context. Afterwards `cause` holds the reason for which the supervision ended the attempt, if it did.
    """

    def __init__(
        self,
        context: AttemptContext,
        spec: TrainingSpec,
        heartbeats: HeartbeatServer,
        size: Size | None = None,
        coordinator: ReportCoordinator | None = None,
        request: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Create the supervision of one attempt.

        `size` is the attempt's size; None in local mode. `coordinator` is that of a program. `request` is called with
        each reason to stop, in addition to the message to the ranks.
        """
        self._coordinator = coordinator
        self._request = request
        self._stacks_kept = False
        self._context = context
        self._spec = spec
        self._heartbeats = heartbeats
        self._size = size
        self._workers = size.workers if size else 1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervision", daemon=True)
        self._began = time.monotonic()
        self._gone_since: float | None = None
        self._capacity_polled_at = 0.0
        self._capacity_since: float | None = None
        # Trials are many and short, and a local attempt has no workers.
        self._may_warm = not spec.local and "trial" not in context.job.spec and warm_workers.wanted()
        self._training_since: float | None = None
        # The reason for which the ranks were asked to stop; see `reporting`.
        self._asked = GO_ON
        # Whether a node of the attempt is draining, and whether the job's record notes it. The process that finds this
        # attempt dead reads that note.
        self._leaving = self._noted = False
        self.cause: MillraceError | None = None

    def __enter__(self) -> Supervision:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(POLL_INTERVAL_S):
            try:
                self._poll()
            except (RayError, ConnectionError, OSError) as error:
                logger.warning("not looked after for a moment: %s", error)
            except Exception:
                logger.exception("not looked after for a moment")

    def _poll(self) -> None:
        ranks = self._heartbeats.at_work()
        if len(self._heartbeats.heard()) < self._workers and time.monotonic() - self._began > START_TIMEOUT_S:
            self._give_up(
                Unavailable(f"the workers did not start within {START_TIMEOUT_S:.0f} s", reason="DID_NOT_START")
            )
        self._check_end(ranks)
        if self._coordinator is not None:
            self._check_reports(self._coordinator, ranks)
        self._check_hung_ranks(ranks)
        # Repeat the request at each poll: a starting rank may have missed it, and a rank that received it ignores the
        # repetition.
        if self._asked:
            self._request(self._asked)
            self._heartbeats.ask_to_stop(self._asked)
        # Check also while the attempt stops for a resize: a node may go away before the attempt has stopped.
        if self.cause is None or self.cause.specific_reason == RESIZED:
            self._check_drains(ranks)
        if self._leaving and not self._noted:
            self._note_leaving()
        if self.cause is None and self._size is not None and self._may_change(self._size):
            self._check_capacity(self._size, ranks)
        if self.cause is None:
            self._keep_warm(ranks)

    def _check_end(self, ranks: list[RankHeartbeat]) -> None:
        """Give up if `fit` hangs after all ranks ended.

        All ranks that ever connected have ended, but `fit` does not return.
        """
        if ranks or not self._heartbeats.heard():
            self._gone_since = None
            return
        self._gone_since = self._gone_since or time.monotonic()
        if time.monotonic() - self._gone_since > GONE_TIMEOUT_S:
            text = f"its ranks had gone for {GONE_TIMEOUT_S:.0f} s, and their run did not end"
            self._give_up(self.cause or Unavailable(text, reason="RUN_DID_NOT_EXIT"))

    def _check_reports(self, coordinator: ReportCoordinator, ranks: list[RankHeartbeat]) -> None:
        """Handle ranks that miss a report or do not stop.

        If ranks miss a report, keep the stacks of all ranks. Kill ranks that ignored a request to stop. What those
        ranks reported is durable.
        """
        if coordinator.missing and not self._stacks_kept:
            self._keep(self._heartbeats.stacks(STACKS_TIMEOUT_S))
        self._stacks_kept = bool(coordinator.missing)
        overdue = set(coordinator.overdue())
        late = [rank for rank in ranks if rank.rank in overdue]
        if late:
            logger.warning("ranks %s did not stop at their report and are killed", sorted(overdue))
            end_hard(late)

    def _check_hung_ranks(self, ranks: list[RankHeartbeat]) -> None:
        now = time.monotonic()
        limit = limit_s(self._heartbeats.seconds_per_step, self._heartbeats.first_step_s)
        states = [one.state(now) for one in ranks]
        if self._coordinator is not None:
            program = self._spec.program
            limit = (program.hang_after_s if program else 0.0) or limit
            if program and program.hang_after_s and self._coordinator.reported:
                # A rank that steps no optimizer says that it starts until its end.
                states = [replace(one, phase=Phase.TRAINING) for one in states]
            if self._coordinator.is_committing:
                # The ranks wait for this process, which may in turn wait for the store.
                states = [replace(one, still_s=0.0) for one in states]
        suspects = hung(states, limit)
        if not suspects:
            return
        logger.warning("ranks %s stand still for more than %.0f s: %s", suspects, limit, states)
        unresponsive = unresponsive_ranks(states, limit)
        stacks = self._heartbeats.stacks(STACKS_TIMEOUT_S)
        if self._spec.program is not None and not self._spec.local:
            # The error text names the file and line of each rank. A rank whose interpreter is blocked wrote its stacks
            # to its file.
            stacks = {**end_hard(ranks), **stacks}
        standing = culprits(suspects, stacks, unresponsive)
        at = {state.rank: state.step for state in states}
        described = ", ".join(f"rank {rank} at step {at[rank]}{self._line(stacks.get(rank, ''))}" for rank in standing)
        self.cause = Unavailable(
            f"{described} stood still for more than {limit:.0f} s; the stacks of all ranks are in its logs",
            reason="RANK_HUNG",
            metadata={"ranks": ",".join(str(rank) for rank in standing)},
        )
        if not self._spec.local and self._spec.program is None:  # in local mode this process is the only rank
            # Read the file in which a rank with a blocked interpreter wrote its stacks, before its process is killed.
            stacks = {**end_hard(ranks), **stacks}
        self._keep(stacks)
        retry_on_outage(
            lambda: report_outcome(self._context, HUNG, str(self.cause), standing),
            "the end of an attempt",
            STORE_OUTAGE_TIMEOUT_S,
        )
        self._give_up(self.cause)

    def _line(self, stacks: str) -> str:
        """Return a rank's line in the program's own code. Its stacks show the line."""
        program = self._spec.program
        line = line_in_bundle(stacks, program.code_bundle.rpartition("/")[2]) if program else ""
        return f" ({line})" if line else ""

    def _keep(self, stacks: dict[int, str]) -> None:
        for rank, text in stacks.items():
            key = f"{self._context.folder}/logs/a{self._context.attempt:05d}/r{rank:04d}/{STACKS_CHUNK}"
            retry_on_outage(partial(self._context.store.put, key, text.encode()), "a stack", STORE_OUTAGE_TIMEOUT_S)

    def _give_up(self, cause: MillraceError) -> None:
        """End an attempt without workers.

        The workers are lost or will never come, and `fit` should notice that. If it does not return, this process
        exits.
        """
        self.cause = cause
        if self._spec.local or not self._ended.wait(FIT_ENDS_TIMEOUT_S):
            logger.warning("the loop does not end by itself; ending the attempt: %s", cause.message)
            try:
                retry_on_outage(
                    lambda: report_error(self._context, cause), "the end of an attempt", STORE_OUTAGE_TIMEOUT_S
                )
            finally:
                flush_logs()
                os._exit(1)

    def _check_drains(self, ranks: list[RankHeartbeat]) -> None:
        here = {one.node_id: one.rank for one in ranks}
        here.setdefault(ray.get_runtime_context().get_node_id(), -1)
        leaving = draining_nodes() & set(here)
        if leaving:
            gone = sorted(one.rank for one in ranks if one.node_id in leaving)
            self.cause = Unavailable(
                f"{'a node' if len(leaving) == 1 else f'{len(leaving)} nodes'} of the attempt will be taken away",
                reason=PREEMPTED,
                metadata={"ranks": ",".join(str(rank) for rank in gone), "nodes": ",".join(sorted(leaving))},
            )
            logger.warning("%s: %s", self.cause.message, ", ".join(leaving))
            self._asked = PREEMPT
            self._heartbeats.ask_to_stop(PREEMPT)
            self._leaving = True

    def _note_leaving(self) -> None:
        """Note in the job's record that a node drains.

        The note is written once. If the store is unavailable, the next poll tries again, because the supervision has
        other things to check meanwhile.
        """
        try:
            self._context.note_leaving()
            self._noted = True
        except STORE_OUTAGES as error:
            logger.warning("%s; the state of the node is recorded later", error.message)

    def _may_change(self, own: Size) -> bool:
        return self._workers < self._spec.num_workers or self._waits_for_gpus(own)

    def _waits_for_gpus(self, own: Size) -> bool:
        """Return whether the run waits for its GPUs. It then runs on CPUs until the GPUs are back."""
        return own.device == CPU and self._context.job.choices.get(RUN_DEVICE) == GPU

    def _check_capacity(self, own: Size, ranks: list[RankHeartbeat]) -> None:
        now = time.monotonic()
        if now - self._capacity_polled_at < GROWTH_POLL_INTERVAL_S or len(ranks) < self._workers:
            return
        self._capacity_polled_at = now
        concurrent_ingests = partial(count_concurrent_ingests, self._context.store, self._context.job.name)
        held = own.held(Counter(rank.node_id for rank in ranks))
        size = self._better_size(own, held, concurrent_ingests)
        if size is None or not self._pays():
            self._capacity_since = None
            return
        self._capacity_since = self._capacity_since or now
        if now - self._capacity_since >= CAPACITY_STABLE_S:
            moves = size.device != own.device
            self.cause = Unavailable(
                f"there is room for {size.workers} workers {f'on {GPU}s' if moves else f'instead of {self._workers}'}",
                reason=RESIZED,
            )
            logger.info("%s", self.cause.message)
            self._asked = RESIZE
            self._heartbeats.ask_to_stop(RESIZE)

    def _better_size(
        self, own: Size, held: Mapping[str, Resources], concurrent_ingests: Callable[[], int]
    ) -> Size | None:
        """Return a better size that fits now, if any.

        A run that waits for its GPUs gets a size with GPUs. Otherwise it is a size with more workers that are faster.
        """
        # What a job in the queue waits for is no room for this one.
        claims = QueueRecord(self._context.store).read
        if self._waits_for_gpus(own):
            size = size_now(self._spec, GPU, concurrent_ingests, held, claims=claims)
            if size.workers:
                return size
        if self._workers >= self._spec.num_workers:
            return None
        size = size_now(self._spec, own.device, concurrent_ingests, held, own.workers, None, claims)
        return size if size.workers > own.workers and self._is_faster(size.workers) else None

    def _keep_warm(self, ranks: list[RankHeartbeat]) -> None:
        """Start warm processes for the next attempt. They start on the nodes of this attempt's workers."""
        now = time.monotonic()
        if not self._may_warm or len(ranks) < self._workers or not self._heartbeats.seconds_per_step:
            return
        self._training_since = self._training_since or now
        if now - self._training_since < WARM_AFTER_S or self._left_s() < WORTH_WARM_WORKERS_S:
            return
        # Start them once per attempt: Ray keeps idle processes and does not report how many there are.
        self._may_warm = False
        WARM_WORKERS.start(Counter(rank.node_id for rank in ranks))

    def _is_faster(self, workers: int) -> bool:
        """Return whether `workers` ranks are faster.

        The slowest of them must have less to compute than the slowest rank now. A worker computes whole lanes, so more
        workers are not always faster.
        """
        now, then = (
            max_rows_of_a_rank(self._spec.global_batch_size, self._spec.lanes, number)
            for number in (self._workers, workers)
        )
        return then < now

    def _pays(self) -> bool:
        return self._left_s() > WORTH_A_RESTART_S

    def _left_s(self) -> float:
        """Return the remaining seconds of the run. 0 means unknown."""
        first = next((one for one in self._heartbeats.at_work() if one.rank == 0), None)
        seconds = self._heartbeats.seconds_per_step
        if first is None or not seconds or not first.total_steps:
            return 0.0
        return (first.total_steps - first.step) * median(seconds)


# --- Processes on other nodes ---

TIMEOUT_S = 20.0


def end_hard(ranks: list[RankHeartbeat]) -> dict[int, str]:
    """Kill the ranks' processes with SIGKILL.

    The signal also ends stopped processes. Return the content of each rank's stacks file, by rank, if there is one.
    """
    own_node = ray.get_runtime_context().get_node_id()
    found = {one.rank: _end(one.pid, one.stacks_file) for one in ranks if one.node_id == own_node}
    elsewhere = {one.rank: one for one in ranks if one.node_id != own_node}
    remote = ray.remote(num_cpus=0, max_retries=0)(_end)
    calls = {
        rank: remote.options(label_selector={NODE_ID_LABEL: one.node_id}).remote(one.pid, one.stacks_file)
        for rank, one in elsewhere.items()
    }
    for rank, call in calls.items():
        try:
            found[rank] = ray.get(call, timeout=TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            logger.warning("rank %d on node %s cannot be reached: %s", rank, elsewhere[rank].node_id, error)
    return {rank: text for rank, text in found.items() if text}


def _end(pid: int, stacks_file: str) -> str:
    text = ""
    with suppress(OSError):
        text = Path(stacks_file).read_text(errors="replace")
        Path(stacks_file).unlink()
    with suppress(OSError):
        # Kill only a worker of Ray's, not another process that has since got the same number.
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
    return text
