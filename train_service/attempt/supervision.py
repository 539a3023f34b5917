"""Supervision of an attempt while its workers train.

It watches for hung ranks, draining nodes, and capacity for more workers.

It reaches a worker's process on any node, to read the stacks that the process left there and to kill it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import ray
from ray.exceptions import GetTimeoutError, RayError

from shared.errors import STORE_OUTAGES, MillraceError, Unavailable
from shared.jobs import AttemptContext, warm_workers
from shared.jobs.actor import draining_nodes
from shared.jobs.transitions import PREEMPTED, RESIZED
from shared.telemetry import flush_logs
from train_service.attempt.outcomes import HUNG, report_error, report_outcome
from train_service.attempt.ray_run import WARM_WORKERS
from train_service.domain.capacity import Resources
from train_service.domain.order import max_rows_of_a_rank
from train_service.domain.spec import CPU, GPU, RUN_DEVICE, TrainingSpec
from train_service.domain.watchdog import Phase, culprits, hung, limit_s, line_in_bundle, unresponsive_ranks
from train_service.placement import Size, count_concurrent_ingests, size_now
from train_service.program.coordinator import ReportCoordinator
from train_service.queue_record import QueueRecord
from train_service.records.event_log import GO_ON, PREEMPT, RESIZE
from train_service.records.logs import STACKS_CHUNK
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import HeartbeatServer, RankHeartbeat

# --- Supervision ---

logger = logging.getLogger(__name__)

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
        if self._waits_for_gpus(own):
            size = size_now(self._spec, GPU, concurrent_ingests, held)
            if size.workers:
                return size
        if self._workers >= self._spec.num_workers:
            return None
        # What a job in the queue waits for is not room to grow.
        claims = QueueRecord(self._context.store).read
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
NODE_ID_LABEL = "ray.io/node-id"


def end_hard(ranks: list[RankHeartbeat]) -> dict[int, str]:
    """Kill the ranks' processes with SIGKILL.

    The signal also ends stopped processes. Returns the content of each rank's stacks file, by rank, if there is one.
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
