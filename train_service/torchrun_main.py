"""The training loop without services and without Ray, for debugging:

    MILLRACE_STORE=file:///path/to/store torchrun --nproc-per-node 2 -m train_service.torchrun_main spec.json --job
    debug

`spec.json` is the JSON form of `millrace.train.v1.TrainingSpec`; without torchrun there is one rank. The job is an
ordinary job of that store, with its checkpoints, events, metrics, logs and coverage. Only its `runner` differs, so that
no reconciler takes it. The same command resumes it from its newest good checkpoint. Exit code 0: the run is complete,
or a client suspended or cancelled it. 1: it failed. 2: it could not begin.

A user's own training function, `program` in the specification, runs the same way: all its `ray.train` calls work, and
the ranks' reports meet in rank 0's process. The user who calls the command runs their own code, so MILLRACE_OWN_CODE is
not checked.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from google.protobuf import json_format

from millrace.train.v1 import resources_pb2
from shared.code_environment import environments_of_node
from shared.errors import FailedPrecondition, MillraceError, Unavailable
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState
from shared.jobs.attempt import run_attempt
from shared.logging_and_tracing import configure_logging, flush_logs
from shared.names import check_id
from shared.settings import OwnCode, SettingsError, StoreSettings, allowed_functions, store_settings
from shared.storage import ObjectStore, open_store
from train_service.attempt.outcomes import end_attempt, program_result, report_device, result_of, run_and_report_error
from train_service.convert_specs import spec_from_proto
from train_service.domain.spec import CPU, GPU, RUN_DEVICE, THREADS, TrainingSpec
from train_service.jobs.own_code import ProgramCheck
from train_service.jobs.training_jobs import COLLECTION, TrainingJobs
from train_service.learning.ranks import Ranks, join_process_group
from train_service.program.coordinator import ReportCoordinator
from train_service.program.signing import handling
from train_service.records.event_log import TRAIN_KIND, EventPrinter, Reporter
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import HeartbeatServer
from train_service.worker.loop import LoopConfig, train_loop

if TYPE_CHECKING:
    from train_service.program.worker import ProgramConfig

RUNNER = "train_service.torchrun_main"
AGAIN = f"its command, {RUNNER}, to be run again"


@dataclass(frozen=True)
class Launch:
    """This process's place among those that torchrun started. A single rank without torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    # The address at which other ranks reach the first rank.
    host: str = "127.0.0.1"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Launch:
        return cls(
            rank=int(environ.get("RANK", 0)),
            world_size=int(environ.get("WORLD_SIZE", 1)),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
            host=environ.get("MASTER_ADDR", "127.0.0.1"),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    launch = Launch.from_environ(os.environ)
    configure_logging("train-standalone", "INFO")
    try:
        store = store_settings(os.environ)
        spec = _read_spec(given.spec)
        device = _device(spec, launch, _device_of_run(store, given.job))
    except (SettingsError, MillraceError, OSError, UnicodeDecodeError, json_format.ParseError) as error:
        print(f"{RUNNER}: {error}", file=sys.stderr)
        return 2
    ranks = _joined(spec, launch, device)
    try:
        if spec.program is not None:
            return _run_program(ranks, launch, store, given.job, spec)
        return _run(ranks, launch, store, given.job, spec)
    finally:
        if launch.world_size > 1:
            dist.destroy_process_group()


def _run(ranks: Ranks, launch: Launch, store: StoreSettings, job_id: str, spec: TrainingSpec) -> int:
    """Run a job of the built-in loop. Rank 0 owns the job; the others learn their attempt from it."""
    job: JobRecord | None = None
    config: LoopConfig | None
    code = 0
    if ranks.rank == 0:
        try:
            opened = open_store(store)
            jobs = TrainingJobs(opened, programs=_check_of(opened))
            job = jobs.begin_external_attempt(job_id, spec, RUNNER, _kind(ranks.device))
        except MillraceError as error:
            print(f"{RUNNER}: {error.message}", file=sys.stderr)
            code = 2
    config, code = ranks.share((_config(store, job), code))
    if job is None:
        return int(code) if config is None else _follow(config, ranks, launch, store)
    if config is not None:
        loop = config
        _attempt(job, open_store(store), lambda context: _trained_loop(context, loop, ranks, launch))
    return _report_end(Jobs(open_store(store), TRAIN_KIND), job.name)


def _check_of(store: ObjectStore) -> ProgramCheck:
    """Return the check of a user's own code, which this process runs with the rights of the user who started it."""
    return ProgramCheck(store, OwnCode(is_trusted=True), environments=environments_of_node(os.environ))


def _run_program(ranks: Ranks, launch: Launch, settings: StoreSettings, job_id: str, spec: TrainingSpec) -> int:
    """Run a job with a user's training function. Rank 0 also commits the reports of all ranks."""
    job: JobRecord | None = None
    config: ProgramConfig | None = None
    code = 0
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            store = open_store(settings)
            try:
                program = spec.program
                if program is not None and program.is_script:
                    raise FailedPrecondition(
                        f"spec.program.entry is the script {program.entry}; name its training function, module:function"
                    )
                jobs = TrainingJobs(store, programs=_check_of(store))
                job = jobs.begin_external_attempt(job_id, spec, RUNNER, _kind(ranks.device))
            except MillraceError as error:
                print(f"{RUNNER}: {error.message}", file=sys.stderr)
                code = 2
        if job is not None and job.state is JobState.RUNNING:
            from train_service.program.worker import ProgramConfig  # imports ray, which the built-in loop does not need

            spec = TrainingSpec.from_config(job.spec["training"])
            reporter = Reporter(store, job.name, job.attempt)
            coordinator = ReportCoordinator(
                store,
                job.name,
                job.attempt,
                spec,
                ranks.world_size,
                report_event=lambda kind, payload: reporter.emit(kind, **payload),
                stop_reason=lambda: reporter.stop_reason,
            )
            handle = stack.enter_context(handling(store, job.name, job.attempt, spec, coordinator))
            heartbeats = stack.enter_context(HeartbeatServer(launch.host, handle))
            config = ProgramConfig(
                store_url=settings.url, job_name=job.name, attempt=job.attempt, spec=spec, heartbeat=heartbeats.address
            )
        config, code = ranks.share((config, code))
        if ranks.rank:
            return int(code) if config is None else _follow(config, ranks, launch, settings)
        if job is None:
            return int(code)
        if config is not None:
            own, at_meeting = config, (reporter, coordinator, heartbeats)
            _attempt(job, store, lambda context: _trained(context, own, ranks, launch, *at_meeting))
        return _report_end(Jobs(open_store(settings), TRAIN_KIND), job.name)


def _trained(
    context: AttemptContext,
    config: ProgramConfig,
    ranks: Ranks,
    launch: Launch,
    reporter: Reporter,
    coordinator: ReportCoordinator,
    heartbeats: HeartbeatServer,
) -> dict[str, Any]:
    """Run rank 0's part of an attempt at a program."""
    with reporter, coordinator:
        try:
            _train_rank(config, ranks, launch, partial(_end_process, store=context.store, config=config))
            while heartbeats.at_work():
                time.sleep(0.1)  # wait for other ranks; torchrun ends this process if one fails
        except KeyboardInterrupt:
            if coordinator.cause is not None:
                raise coordinator.cause from None
            raise Unavailable("it was interrupted", reason="INTERRUPTED") from None
        if coordinator.all_returned:
            coordinator.finish()
    return program_result(context, coordinator, None)


def _train_rank(
    config: LoopConfig | ProgramConfig,
    ranks: Ranks,
    launch: Launch,
    end_process: Callable[[MillraceError], None] | None = None,
) -> None:
    if isinstance(config, LoopConfig):
        train_loop(config, ranks, ranks_of_node=launch.local_world_size, end_process=end_process)
        return
    # These modules import ray, which the built-in loop does not need.
    from train_service.program.ray_hooks import LocalRank
    from train_service.program.worker import run_program

    local = LocalRank(
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        node_rank=launch.rank // launch.local_world_size,
        name=config.job_name.rpartition("/")[2],
        tees=True,
    )
    run_program(config, ranks.rank, ranks.world_size, "", local, end_process=end_process)


def _end_process(error: MillraceError, store: ObjectStore, config: LoopConfig | ProgramConfig) -> None:
    """End this process, whose memory is full. Its error ends the attempt."""
    end_attempt(store, config.job_name, config.attempt, error)
    print(f"{RUNNER}: {error.message}", file=sys.stderr, flush=True)
    flush_logs()
    os._exit(1)


def _follow(config: LoopConfig | ProgramConfig, ranks: Ranks, launch: Launch, settings: StoreSettings) -> int:
    """Run a rank other than the first.

    An error of ours ends the attempt here, because rank 0 would only see that the rank is lost.
    """
    # A program's rank sends its error to the first rank, which ends the attempt.
    end = partial(_end_process, store=open_store(settings), config=config) if isinstance(config, LoopConfig) else None
    try:
        _train_rank(config, ranks, launch, end)
        return 0
    except MillraceError as error:
        raised = error
        print(f"{RUNNER}: rank {ranks.rank}: {error.message}", file=sys.stderr, flush=True)

    raised.metadata["ranks"] = str(ranks.rank)
    store = open_store(settings)
    end_attempt(store, config.job_name, config.attempt, raised)
    return _report_end(Jobs(store, TRAIN_KIND), config.job_name)


def _trained_loop(context: AttemptContext, config: LoopConfig, ranks: Ranks, launch: Launch) -> dict[str, Any]:
    try:
        _train_rank(config, ranks, launch, partial(_end_process, store=context.store, config=config))
    except KeyboardInterrupt:
        raise Unavailable("it was interrupted", reason="INTERRUPTED") from None
    return result_of(context, config.spec)


def _attempt(job: JobRecord, store: ObjectStore, trained: Callable[[AttemptContext], dict[str, Any]]) -> None:
    def work(context: AttemptContext) -> dict[str, Any]:
        def report_trained() -> dict[str, Any]:
            retry_on_outage(lambda: report_device(store, context.job), "the change of the device")
            return trained(context)

        return run_and_report_error(context, report_trained)

    # torchrun sends SIGTERM to the ranks if one of them fails.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Jobs(store, TRAIN_KIND).wait_for(job.name, "")
    with EventPrinter(store, job.name):
        run_attempt(work, store, TRAIN_KIND, job.name, job.attempt)


def _report_end(jobs: Jobs, name: str) -> int:
    job = jobs.get(name, name)
    result = f", best {job.result['best_checkpoint']}" if job.result else ""
    error = f": {job.error['message']}" if job.error else ""
    print(f"{name} is {job.state}{result}{error}", flush=True)
    if job.state is JobState.RECOVERING:
        jobs.wait_for(name, AGAIN)
    return 0 if job.state in (JobState.SUCCEEDED, JobState.SUSPENDED, JobState.CANCELLED) else 1


def _config(store: StoreSettings, job: JobRecord | None) -> LoopConfig | None:
    """Return the config of the attempt, or None if there is nothing to run."""
    if job is None or job.state is not JobState.RUNNING:
        return None
    spec = TrainingSpec.from_config(job.spec["training"])
    return LoopConfig(store=store, job_name=job.name, attempt=job.attempt, spec=spec)


def _joined(spec: TrainingSpec, launch: Launch, kind: str) -> Ranks:
    """Return this process's rank, in the process group of torchrun. A single rank needs no group."""
    cuda = kind == GPU
    device = torch.device("cuda", launch.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if launch.world_size > 1:
        join_process_group(device, spec.placement.backend, spec.placement.timeout_s)
    return Ranks(launch.rank, launch.world_size, device)


def _device_of_run(store: StoreSettings, job_id: str) -> str:
    """Return the device that an earlier attempt at the job chose. Empty if there was none."""
    check_id("job", job_id)
    job = Jobs(open_store(store), TRAIN_KIND).find(f"{COLLECTION}/{job_id}")
    return str(job.choices.get(RUN_DEVICE, "")) if job is not None else ""


def _device(spec: TrainingSpec, launch: Launch, of_run: str) -> str:
    """Return GPU or CPU for an attempt at a run on `of_run`. Raises `FailedPrecondition`."""
    if launch.world_size > spec.max_ranks:
        raise FailedPrecondition(
            f"spec.num_workers is {spec.num_workers} and there are {launch.world_size} ranks; start fewer, or raise it"
        )
    placement = spec.placement
    wanted = placement.backend != "gloo" and placement.gpus_per_worker != 0 and not spec.local
    cuda = torch.cuda.is_available() and (of_run == GPU or (wanted and of_run != CPU))
    if of_run == GPU and not cuda and not placement.allow_cpu_fallback:
        raise FailedPrecondition(
            "the run began on GPUs, and torch finds none here; start it where there are some, or use another id"
        )
    if cuda and launch.local_rank >= torch.cuda.device_count():
        raise FailedPrecondition(
            f"rank {launch.rank} would be number {launch.local_rank + 1} on this machine, which has "
            f"{torch.cuda.device_count()} GPUs; start fewer ranks, or set placement.gpus_per_worker to 0"
        )
    if spec.ingest != THREADS:
        raise FailedPrecondition(f"spec.ingest is {spec.ingest}, which needs a Ray cluster; use INGEST_THREADS")
    return GPU if cuda else CPU


def _kind(device: torch.device) -> str:
    return GPU if device.type == "cuda" else CPU


def _read_spec(path: Path) -> TrainingSpec:
    message = json_format.Parse(path.read_text(), resources_pb2.TrainingSpec())
    return spec_from_proto(message, allowed_functions(os.environ))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=RUNNER, description="Trains without services and without Ray, to debug.")
    parser.add_argument("spec", type=Path, help="a TrainingSpec as JSON; its dataset version is in MILLRACE_STORE")
    parser.add_argument("--job", required=True, metavar="ID", help="of the training job, new or begun by this command")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    flush_logs()
    # gloo's threads may outlive the interpreter and then abort the process.
    os._exit(code)
