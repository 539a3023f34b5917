"""The attempt at a script: the script runs in a process of its own, which asks the attempt for everything durable.

    the script's process (`script_process`)     a driver of Ray; no credentials of the store
        fit()       the script's settings   ->  which run it is; its result at once, or how Ray Train is to run it
        fitted      Ray has ended           ->  the result, once it is committed
        checkpoint  a name                  ->  a folder with its verified files

The attempt receives the ranks' reports, owns the registry, and supervises the workers, as for a training function. A
loss ends the attempt, and the next attempt runs the script again: `Fits` records which of its runs are done. The script
never sees a failed run.

A script's `Tuner` becomes a sweep of the job. The sweep is created once, and each attempt follows it to its end. Its
name and uid are pure functions of the job and of how many sweeps the script had before it, so the attempt after a lost
one finds the existing sweep. Each trial is a training job that runs the same script with the trial's values, up to its
`Tuner.fit()`.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import ray

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.code_bundle_registry import unpack_on_node
from shared.code_environment import environments_of_node
from shared.code_packing import requirements_of_folder
from shared.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MillraceError,
    error_from_record,
)
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState
from shared.jobs.retry_limits import SWEEP_MAX_FAILURES
from train_service.attempt.outcomes import as_last_error, program_error, script_result
from train_service.attempt.ray_run import Failure
from train_service.attempt.trainer import ProgramAtWork, began_before, program_at_work, size_of_attempt
from train_service.domain import sweep
from train_service.domain.spec import (
    ATTEMPT_DEVICE,
    BUDGETS,
    RAY_DATA,
    RUN_DEVICE,
    SCRIPT,
    Program,
    TrainingSpec,
    spec_of_job,
)
from train_service.domain.sweep import MAX_SWEEP_ID, PROGRAM_CONFIG, Asha, Domain, SweepSpec
from train_service.placement import Size, devices_of, usable_nodes
from train_service.program.coordinator import described
from train_service.program.fit_calls import (
    Channel,
    ChannelClosed,
    Fit,
    FitCall,
    FitDone,
    Fits,
    TrainerSettings,
    matching,
    overridden,
    settled,
)
from train_service.program.signing import hide_memory
from train_service.program.worker_setup import HIDDEN_VARIABLES, AttemptFolder, NodeCopies
from train_service.records.event_log import TRAIN_KIND, EventKind, Reporter
from train_service.store_retry import retry_on_outage
from train_service.worker.user_process import forward_lines

# --- Script ---

logger = logging.getLogger(__name__)

CHILD = "train_service.attempt.script_process"
# The rank that names the script's own folder in the attempt's folder, next to the folders of the ranks.
DRIVER = -1
POLL_INTERVAL_S = 0.5
# A script that has announced its end must leave the cluster within this time, or it is killed.
ENDS_TIMEOUT_S = 20.0
OUTPUT_ENDS_TIMEOUT_S = 5.0
# Warnings about the script's calls, in one attempt.
MAX_WARNINGS = 100
# More than the bound of a rank's log allows.
LOG_CHUNKS = 100_000
# Variables of this process that the script does not get, in addition to those hidden from ranks: no credentials, no
# token.
PRIVATE = "MILLRACE_"
# Copies of checkpoints that the script reads. All are kept until the attempt ends, because the script may hold their
# paths.
COPIES = "read-by-script"
# A log shows neither figures nor progress bars.
NOBODY_LOOKS = {"MPLBACKEND": "Agg", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}


class ScriptRun:
    """The run of a script in one attempt.

    `run` returns the attempt's result, and raises as an attempt at a function does.
    """

    def __init__(
        self, context: AttemptContext, spec: TrainingSpec, program: Program, add_lines: Callable[[bytes], None]
    ) -> None:
        """Create the run. `add_lines` receives the script's output."""
        self._context = context
        self._spec = spec
        self._program = program
        self._add_lines = add_lines
        self._store = context.store
        self._fits = Fits(self._store, context.job.name, context.job.uid)
        # The fits of all attempts by number, and the numbers that this attempt has met.
        self._known: dict[int, Fit] = {}
        self._met: set[int] = set()
        # Jobs whose checkpoints the script may read: this job, and the trials of its sweeps.
        self._readable = {context.job.name}
        # The numbers of the fits that an earlier attempt began.
        self._begun_before: set[int] = set()
        # How many fits Ray has run in this attempt.
        self._begun = 0
        self._warned: set[str] = set()
        # How many sweeps the script has requested in this attempt.
        self._sweeps = 0
        # The present fit: the script's call, and the objects that exist while Ray runs it.
        self._call: FitCall | None = None
        self._number = 0
        self._at_work: ProgramAtWork | None = None
        self._leave = ExitStack()
        # The specification of the present or last fit, with the settings of the script's configurations.
        self._fit_spec = spec_of_job(context.job.spec["training"], context.job.choices)
        # The result of a training function in local mode, which is no script.
        self._function_result: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        job, url = self._context.job.name, self._store.settings.url
        if urlsplit(url).scheme == "s3":
            hide_memory()  # the script's process starts below, and may share its node with other attempts
        with ExitStack() as stack:
            self._reporter = stack.enter_context(Reporter(self._store, job, self._context.attempt))
            folder = stack.enter_context(AttemptFolder(url, job, self._context.attempt, DRIVER).entered())
            self._copies = NodeCopies(self._store, folder.path / COPIES, keeps_all=True)
            self._known = {one.number: one for one in retry_on_outage(self._fits.read, "the runs of the script")}
            self._begun_before = {one.number for one in self._known.values() if one.done is None}
            digest = self._program.code_bundle.rpartition("/")[2]
            code = retry_on_outage(lambda: unpack_on_node(self._store, digest, folder.code), "the code of the script")
            # This process installs them, because the script's process has only what it is given.
            environments = environments_of_node(os.environ)
            packages = stack.enter_context(
                environments.opened(requirements_of_folder(code), self._context.raise_if_stopped)
            )
            process, channel = self._start(str(folder.run), stack)
            channel.send(
                {
                    "code": str(code),
                    "packages": str(packages or ""),
                    "entry": self._program.entry,
                    "config": json.loads(self._program.config_json or "{}"),
                    "job": job,
                    # A function alone needs none.
                    "cluster": ray.get_runtime_context().gcs_address if self._program.is_script else "",
                    "is_trial": "trial" in self._context.job.spec,
                    "gpus_per_worker": self._spec.placement.gpus_per_worker,
                }
            )
            stack.callback(self._leave.close)
            self._serve(process, channel)
            self._wait_for_end(process)
            if self._program.is_script and not self._met:
                self._warn(f"{self._program.entry} has ended without a call of fit(): nothing was trained")
        return self._function_result or script_result(self._context, self._fit_spec)

    def _start(self, folder: str, stack: ExitStack) -> tuple[subprocess.Popen[bytes], Channel]:
        own, other = socket.socketpair()
        stack.callback(own.close)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(PRIVATE) and name not in HIDDEN_VARIABLES
        }
        for name, value in NOBODY_LOOKS.items():
            environment.setdefault(name, value)
        with other:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD, str(other.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[other.fileno()],
                env={**environment, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"},
                cwd=folder,
                start_new_session=True,
            )
        assert process.stdout is not None
        reader = threading.Thread(
            target=forward_lines, args=(process.stdout.fileno(), self._add_lines), name="script-output", daemon=True
        )
        reader.start()
        stack.callback(reader.join, OUTPUT_ENDS_TIMEOUT_S)
        stack.callback(_end, process)
        return process, Channel(own)

    def _serve(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        """Answer the script's questions until it ends.

        Raises the script's error, and the reason for which a run of it ended.
        """
        while True:
            try:
                question = channel.receive(POLL_INTERVAL_S)
            except ChannelClosed:
                raise self._gone(process) from None
            if question is None:
                if self._at_work is None:
                    # A run checks that itself: its ranks stop at a report.
                    self._context.raise_if_stopped()
                continue
            if question["kind"] == "end":
                return
            try:
                answer = self._answer(question)
            except _Refused as refused:
                answer = {"error": refused.error.as_record()}
            with suppress(ChannelClosed):  # the next receive reports it
                channel.send(answer)

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        kind = question["kind"]
        if kind == "fit":
            return self._fit(
                FitCall(**question["call"]), TrainerSettings.from_message(question["asked"]), question["datasets"]
            )
        if kind == "sweep":
            return self._sweep(question)
        if kind == "train":
            return self._begin(None, 0, 0)
        if kind == "fitted":
            return self._fitted()
        if kind == "failed":
            raise self._ended(Failure.from_message(question["failure"]))
        if kind == "withdrawn":
            # Ray never began, so the script gets the error that its own trainer raised.
            self._close()
            return {}
        if kind == "checkpoint":
            return {"folder": self._folder_of(question["name"])}
        if kind == "warning":
            # A script may repeat the call that causes a warning.
            if (text := str(question["text"])) not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(text)
                self._warn(text)
            return {}
        if kind == "raised":
            # Another attempt reaches the same line in the same state, unless Ray has run a fit in this one.
            before = self._context.job.error if self._begun == 0 else None
            raise as_last_error(error_from_record(question["error"]), before)
        raise Internal(f"the script's process asks {kind!r}, which is no known request", reason="UNKNOWN_REQUEST")

    def _fit(self, call: FitCall, trainer_settings: TrainerSettings, datasets: list[str]) -> dict[str, Any]:
        if self._at_work is not None:
            text = f"{call.line}: fit() is called while another one is at work; call one after the other"
            raise _Refused(FailedPrecondition(text, reason="CONCURRENT_FITS"))
        fit = matching(list(self._known.values()), call, self._met)
        fit = fit or Fit(number=len(self._known) + 1, call=call)
        self._met.add(fit.number)
        if fit.done is not None and fit.is_done(call):
            logger.info("%s: fit() of %r has ended before: its result is given again", call.line, call.name)
            return {"result": self._result(fit)}
        fit, spec = self._settle(fit, trainer_settings, call.line)
        # If the script has Ray Datasets, keep the CPU that prepares their rows free.
        size = (
            None if spec.local else size_of_attempt(self._context, replace(spec, ingest=RAY_DATA) if datasets else spec)
        )
        use_gpu = size is not None and size.use_gpu
        fit = self._report_overrides(fit, overridden(trainer_settings, spec, use_gpu=use_gpu), call.line)
        retry_on_outage(lambda: self._fits.begin(fit), "a run of the script")
        self._known[fit.number] = fit
        before = max((one.done.report for one in self._known.values() if one.done and one is not fit), default=0)
        self._call, self._number = call, fit.number
        return self._begin(size, fit.number, before)

    def _settle(self, fit: Fit, trainer_settings: TrainerSettings, line: str) -> tuple[Fit, TrainingSpec]:
        """Return the specification of a run.

        It is the job's specification, completed with the settings of the script's configurations. The job records the
        settings before there is capacity, because the next attempt begins once there is capacity for these workers.
        """
        context = self._context
        spec = self._spec
        if "trial" in context.job.spec:
            # The sweep's metric compares the checkpoints of all trials.
            kept = tuple(one for one in spec.left_open if not one.startswith("checkpoints."))
            spec = replace(spec, left_open=kept)
        if not spec.left_open:
            self._fit_spec = spec
            return fit, spec
        choices, chooses = context.job.choices, "placement.gpus_per_worker" in spec.left_open
        device = fit.device if chooses else choices.get(RUN_DEVICE, "")

        def device_of(settled: TrainingSpec) -> str:
            nonlocal device
            device = device or devices_of(settled, "", [] if settled.local else usable_nodes())[0]
            return device

        try:
            taken, spec = settled(trainer_settings, spec, choices.get(SCRIPT, {}).get("lanes", 0), device_of, line)
        except InvalidArgument as error:
            raise _Refused(error) from error
        chosen: dict[str, Any] = {SCRIPT: taken}
        if chooses:
            fit = replace(fit, device=device)
            chosen |= {RUN_DEVICE: device, ATTEMPT_DEVICE: device}
        budgets = {name: getattr(spec, name) for name in BUDGETS if name in self._spec.left_open}
        retry_on_outage(lambda: context.choose(chosen, budgets), "what the script asks for")
        retry_on_outage(lambda: self._fits.begin(fit), "a run of the script")
        self._known[fit.number] = fit
        self._fit_spec = spec
        return fit, spec

    def _sweep(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the trials of a script's finished sweep. The sweep stands for the script's `Tuner`."""
        self._sweeps += 1
        self._met.add(0)
        sweep = ScriptSweep(self._context, self._spec, self._program, self._sweeps)
        try:
            spec = sweep.spec_of(question["constants"], question["domains"], question["settings"])
        except InvalidArgument as error:
            error.message = f"{question['line']}: {error.message}"
            raise _Refused(error) from error
        self._warn(f"{question['line']}: Tuner.fit() is the sweep {sweep.name} of {spec.trial_count} training jobs")
        ended = sweep.ended(spec)
        self._readable.update(trial["name"] for trial in ended["trials"])
        return ended

    def _begin(self, size: Size | None, number: int, reports_before: int) -> dict[str, Any]:
        """Return the configuration for the run. If `size` is None, the script's process itself trains."""
        before = number in self._begun_before if self._program.is_script else began_before(self._context.job)
        at_work = program_at_work(
            self._context, self._fit_spec, self._program, size, number, reports_before, began_before=before
        )
        self._at_work = self._leave.enter_context(at_work)
        config = replace(self._at_work.config, first_log_chunk=LOG_CHUNKS * self._begun)
        self._begun += 1
        given = pickle.dumps((config, size))
        return {"run": base64.b64encode(given).decode()}

    def _report_overrides(self, fit: Fit, sentences: list[str], line: str) -> Fit:
        new = [one for one in sentences if one not in fit.reported_overrides]
        for sentence in new:
            self._warn(f"{line}: {sentence}")
        return replace(fit, reported_overrides=(*fit.reported_overrides, *new))

    def _fitted(self) -> dict[str, Any]:
        """Commit a run that Ray has ended.

        Every rank has ended, too: its function returned, or it stopped at a report as requested.
        """
        run, call = self._at_work, self._call
        assert run is not None
        if not run.coordinator.all_returned:
            self._close()
            run.result(self._context)
            raise Internal("the run ended before its function returned on all ranks", reason="RUN_INCOMPLETE")
        run.coordinator.finish()
        self._close()
        if call is None:
            self._function_result = run.coordinator.result()
            return {}
        report, metrics = run.coordinator.last_report
        newest = run.coordinator.newest
        done = FitDone(
            function=call.function,
            config_sha256=call.config_sha256,
            report=report,
            checkpoint=newest.name if newest else "",
            metrics=metrics or (newest.metrics if newest else {}),
        )
        fit = replace(self._known[self._number], done=done)
        retry_on_outage(lambda: self._fits.finish(fit.number, done), "the end of a run of the script")
        self._known[fit.number] = fit
        return {"result": self._result(fit)}

    def _ended(self, failure: Failure) -> MillraceError:
        """Return why Ray's run has failed."""
        run = self._at_work
        assert run is not None
        self._close()
        retry_on_outage(lambda: self._context.raise_if_stopped(fresh=True), "the job's state")
        error = program_error(run.coordinator, run.heartbeats, failure.cause(run.supervision.cause))
        return as_last_error(error, self._context.job.error if run.coordinator.reported == 0 else None)

    def _gone(self, process: subprocess.Popen[bytes]) -> MillraceError:
        """Return why the script's process ended without announcing it."""
        run = self._at_work
        self._close()
        if run is not None and (known := run.coordinator.cause or run.supervision.cause) is not None:
            return known
        retry_on_outage(lambda: self._context.raise_if_stopped(fresh=True), "the job's state")
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_TIMEOUT_S)
        code = process.returncode
        how = "" if code is None else f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        return Internal(
            f"the process of {self._program.entry} ended{how} before the script's last line", reason="PROGRAM_EXITED"
        )

    def _close(self) -> None:
        """Leave the contexts of the present fit."""
        self._at_work = None
        self._leave.close()

    def _result(self, fit: Fit) -> dict[str, Any]:
        """Return the values that `ray.train.Result` is built from."""
        assert fit.done is not None
        entries = [one for one in retry_on_outage(self._entries, "the checkpoints") if one.fit == fit.number]
        return {
            "name": fit.call.name,
            "path": self._context.job.name,
            "metrics": fit.done.metrics,
            "checkpoints": [{"name": entry.name, "metrics": entry.metrics} for entry in entries],
        }

    def _entries(self) -> list[CheckpointEntry]:
        return CheckpointRegistry(self._store, self._context.job.name).entries()

    def _folder_of(self, name: str) -> str:
        """Return the folder of a checkpoint on this node. Its files are verified."""
        job = name.partition("/checkpoints/")[0]
        if job not in self._readable:
            what = f"{job} is neither this job nor a trial of its sweeps"
            raise _Refused(FailedPrecondition(f"{name} cannot be read: {what}", reason="KEY_REFUSED"))
        entry = retry_on_outage(lambda: CheckpointRegistry(self._store, job).find(name), "the checkpoints")
        if entry is None:
            raise _Refused(FailedPrecondition(f"{name} was taken away since, by checkpoints.keep_newest"))
        found = described(entry)
        assert found is not None
        try:
            return str(self._copies.folder_of(found))
        except MillraceError as damaged:
            raise _Refused(damaged) from damaged

    def _wait_for_end(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + ENDS_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            self._context.raise_if_stopped()
            time.sleep(0.05)
        if process.poll() is None:
            logger.warning("the script's process has not ended within %g s and is killed", ENDS_TIMEOUT_S)

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._reporter.emit(EventKind.WARNING, text=text)


class _Refused(Exception):
    """A refused question. The script gets `error` and may continue."""

    def __init__(self, error: MillraceError) -> None:
        super().__init__(error.message)
        self.error = error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the script's process and its session.

    This includes all processes that the script started in its own session.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- Sweeps of a script ---

SWEEP_KIND = "sweep"
COLLECTION, TRAINING_JOBS = "sweeps", "trainingJobs"
SWEEP_POLL_INTERVAL_S = 1.0
DEFAULT_CONCURRENT = 4


class ScriptSweep:
    """The sweep that a script's `Tuner` becomes. `number` counts the script's sweeps from 1."""

    def __init__(self, context: AttemptContext, spec: TrainingSpec, program: Program, number: int) -> None:
        self._context = context
        self._spec = spec
        self._program = program
        job_id = context.job.name.rpartition("/")[2]
        suffix = "-sweep" if number == 1 else f"-sweep-{number}"
        self._id = f"{job_id[: MAX_SWEEP_ID - len(suffix)]}{suffix}"
        self._uid = uuid.uuid5(uuid.UUID(context.job.uid), f"sweep-{number}").hex
        self._jobs = Jobs(context.store, SWEEP_KIND)
        self.name = f"{COLLECTION}/{self._id}"

    def spec_of(
        self, constants: Mapping[str, Any], domains: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> SweepSpec:
        """Return the specification of the sweep. Raises `InvalidArgument` if it is not valid."""
        asha = settings["asha"]
        policy = replace(self._spec.checkpoints, best_metric=settings["metric"], maximize=bool(settings["maximize"]))
        program = replace(self._program, config_json=json.dumps(dict(constants)))
        spec = SweepSpec(
            base=replace(self._spec, program=program, checkpoints=policy),
            parameters={
                f"{PROGRAM_CONFIG}{path}": Domain.from_config({"values": (), **domain})
                for path, domain in domains.items()
            },
            num_samples=settings["num_samples"],
            seed=self._spec.seed,
            max_concurrent_trials=settings["max_concurrent"] or DEFAULT_CONCURRENT,
            asha=Asha(**asha) if asha else None,
        )
        sweep.check(spec)
        return spec

    def ended(self, spec: SweepSpec) -> dict[str, Any]:
        """Create the sweep if necessary and await its end.

        Return `trials`: for each trial its `name`, `config`, `error` and `checkpoints`, oldest first. Raises the error
        for which the sweep failed. Cancels the sweep if the job is cancelled.
        """
        record = retry_on_outage(lambda: self._new_record(spec), "the sweep of the script")
        try:
            while not record.state.final:
                time.sleep(SWEEP_POLL_INTERVAL_S)
                self._context.raise_if_stopped()
                record = retry_on_outage(lambda: self._jobs.get(self.name, self.name), "the sweep of the script")
        except Cancelled:
            if not self._context.is_suspending:
                retry_on_outage(lambda: self._jobs.cancel(self.name, self.name), "the end of the sweep")
            raise
        if record.state is not JobState.SUCCEEDED:
            raise self._failed(record)
        return {"trials": [self._trial(spec, number) for number in range(spec.trial_count)]}

    def _new_record(self, spec: SweepSpec) -> JobRecord:
        now = time.time()
        record = JobRecord(
            uid=self._uid,
            name=self.name,
            spec={"sweep": spec.as_config(), "request_id": ""},
            create_time=now,
            update_time=now,
            max_failures=SWEEP_MAX_FAILURES,
        )
        try:
            return self._jobs.create(self.name, record)
        except AlreadyExists:
            there = self._jobs.get(self.name, self.name)
            if there.uid != self._uid:
                raise
            return there

    def _failed(self, record: JobRecord) -> MillraceError:
        if record.error:
            return error_from_record(record.error)
        return InvalidArgument(f"{self.name}, the sweep of the script, is {record.state}")

    def _trial(self, spec: SweepSpec, number: int) -> dict[str, Any]:
        store, name = self._context.store, f"{TRAINING_JOBS}/{sweep.trial_id(self._id, number)}"
        job = retry_on_outage(lambda: Jobs(store, TRAIN_KIND).find(name), "a trial")
        entries = retry_on_outage(CheckpointRegistry(store, name).entries, "a trial's checkpoints")
        training = spec.training_of(spec.parameters_of(number))
        assert training.program is not None
        return {
            "name": name,
            "config": json.loads(training.program.config_json),
            "error": str(job.error["message"]) if job is not None and job.error else "",
            "checkpoints": [{"name": entry.name, "metrics": entry.metrics} for entry in entries],
        }
