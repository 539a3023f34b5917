"""Shows a training job's progress until it ends: a live bar on a terminal, or lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from millrace.train.v1 import resources_pb2, train_service_pb2
from millrace_client.cli.command import CommandFailed, console, duration_text, print_json, state_text
from millrace_client.connection import Millrace
from millrace_client.report import cause_text
from millrace_client.train import Update

# --- Progress ---

# The interval between two lines if there is no terminal.
LINE_EVERY_S = 5.0
# Narrower terminals have no space for a bar beside the figures.
WIDTH_FOR_BAR = 110
# Smaller shares of waiting are not shown.
MIN_SHARE = 0.005


@dataclass
class Curves:
    """The points of the learning curves: (step, loss, accuracy) each."""

    training: list[tuple[int, float, float]] = field(default_factory=list)
    validation: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, event: train_service_pb2.TrainingEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "progress":
            self.training.append((event.progress.step, event.progress.loss, event.progress.accuracy))
        elif kind == "validated":
            self.validation.append((event.validated.step, event.validated.loss, event.validated.accuracy))


def has_accuracy(spec: resources_pb2.TrainingSpec, now: resources_pb2.Progress | train_service_pb2.Validated) -> bool:
    """Return whether the accuracy was measured. A regression has none, nor has own code that reports none."""
    if spec.task == resources_pb2.TrainingSpec.TASK_REGRESSION:
        return False
    return now.accuracy > 0 or not (spec.model.entry or spec.HasField("program"))


class TrainingView:
    """Shows updates of a job. Use it in a `with` statement."""

    def __init__(self, spec: resources_pb2.TrainingSpec) -> None:
        self._epochs = spec.epochs
        self._spec = spec
        self._progress = Progress(
            TextColumn("  "),
            SpinnerColumn(),
            TextColumn("{task.description}"),
            # Without a total the bar stands still, because the spinner already moves.
            *([BarColumn(bar_width=24, pulse_style="bar.back")] if console().width >= WIDTH_FOR_BAR else []),
            TextColumn("{task.fields[numbers]}"),
            console=console(),
            refresh_per_second=5,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("starting the workers", total=None, numbers="")
        self._started = time.monotonic()
        self._last_line = 0.0
        self._waiting_for = ""
        self._checkpoints = 0

    def __enter__(self) -> TrainingView:
        if console().is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if console().is_terminal:
            self._progress.stop()

    def show(self, updates: Iterable[Update], curves: Curves) -> resources_pb2.TrainingJob | None:
        """Show all updates; return the job as it was last seen."""
        job = None
        for update in updates:
            if isinstance(update, resources_pb2.TrainingJob):
                job = update
                self._on_state(job)
            else:
                curves.add(update)
                self._on_event(update)
        return job

    def _on_state(self, job: resources_pb2.TrainingJob) -> None:
        state = resources_pb2.TrainingJob.State.Name(job.state).removeprefix("STATE_").lower()
        if state in ("recovering", "cancelling", "suspending"):
            self._progress.update(self._task, description=state)
        if job.waiting_for and job.waiting_for != self._waiting_for:
            self._line(f"[yellow]waiting for[/] {escape(job.waiting_for)}")
        self._waiting_for = job.waiting_for

    def _on_event(self, event: train_service_pb2.TrainingEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "progress":
            self._on_progress(event.progress)
        elif kind == "validated":
            one = event.validated
            measured = self._measured(one, f"{one.accuracy:.2%}").items()
            shown = ", ".join([*(f"{name} [bold]{value}[/]" for name, value in measured), f"loss {one.loss:.3f}"])
            self._line(f"epoch {one.epoch + 1}/{self._epochs}: validation {shown} ({one.row_count:,} rows)")
        elif kind == "attempt_started":
            self._on_attempt(event.attempt, event.attempt_started)
        elif kind == "attempt_ended":
            ended: Any = event.attempt_ended
            ranks = f" (rank {', '.join(map(str, ended.ranks))})" if ended.ranks else ""
            self._line(
                f"[yellow]attempt {event.attempt} {cause_text(ended.cause)}[/]{ranks}"
                + (f": {escape(ended.text)}" if ended.text else "")
            )
        elif kind == "checkpoint_committed":
            self._checkpoints += 1
        elif kind == "warning":
            self._line(f"[yellow]warning:[/] {escape(event.warning)}")
        elif kind == "device_changed":
            device = resources_pb2.Device.Name(event.device_changed.device).removeprefix("DEVICE_")
            self._line(f"[yellow]attempt {event.attempt} is on {device}s:[/] {escape(event.device_changed.text)}")

    def _on_attempt(self, number: int, started: train_service_pb2.AttemptStarted) -> None:
        """Show an attempt's start. The first attempt shows only its number of workers."""
        workers = f"{started.num_workers} worker{'' if started.num_workers == 1 else 's'}"
        if number > 1 or started.step:
            self._line(f"attempt {number} goes on from step {started.step} on {workers}")
        elif started.num_workers:
            self._line(f"attempt {number} begins on {workers}")

    def _measured(self, now: resources_pb2.Progress | train_service_pb2.Validated, accuracy: str) -> dict[str, str]:
        """Return the metrics besides the loss as texts, by name. Where there is an accuracy it stands for all."""
        if has_accuracy(self._spec, now):
            return {"accuracy": accuracy}
        return {escape(name): f"{value:.4g}" for name, value in sorted(now.metrics.items())}

    def _on_progress(self, now: resources_pb2.Progress) -> None:
        measured = self._measured(now, f"{now.accuracy:.1%}").items()
        # A program reports neither its number of steps nor their speed. Its steps are its reports.
        step = f"step {now.step}/{now.total_steps}" if now.total_steps else f"report {now.step}"
        numbers = f"{step}  loss {now.loss:.3f}  " + "".join(f"{name} {value}  " for name, value in measured)
        if now.total_steps:
            numbers += f"{now.rows_per_second:,.0f} rows/s  {duration_text(now.seconds_left)} left"
        waits = [(now.data_wait_share, "for rows"), (now.checkpoint_stall_share, "for checkpoints")]
        shown = ", ".join(f"{share:.0%} {what}" for share, what in waits if share >= MIN_SHARE)
        if shown:
            numbers += f"  waits {shown}"
        if now.skipped_steps:
            numbers += f"  {now.skipped_steps} steps skipped by the loss scaler"
        if self._checkpoints:
            numbers += f"  {self._checkpoints} checkpoints"
        epoch = f"epoch {min(now.epoch + 1, self._epochs)}/{self._epochs}" if self._epochs else "running"
        self._progress.update(
            self._task, description=epoch, completed=now.step, total=now.total_steps or None, numbers=numbers
        )
        if not console().is_terminal and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._line(f"{epoch}  {numbers}")

    def _line(self, text: str) -> None:
        console().print(f"   {text}", soft_wrap=True)


# --- Watching a job ---

Job = resources_pb2.TrainingJob


def watch_job(millrace: Millrace, job: Job, after_sequence: int, as_json: bool) -> None:
    """Watch a job until it ends. With `as_json` each update is a line.

    Raises `CommandFailed` for a job that neither succeeds nor is suspended.
    """
    updates = millrace.train.watch_training_job(job.name, after_sequence=after_sequence)
    if as_json:
        for update in updates:
            print_json({"job": update} if isinstance(update, Job) else {"event": update})
        last = millrace.train.get_training_job(job.name)
    else:
        with TrainingView(job.spec) as view:
            last = view.show(updates, Curves()) or job
        console().print(
            f"[bold]{last.name}[/] {state_text(Job.State.Name(last.state))}, best {last.best_checkpoint or '–'}"
        )
    # A suspended job ended as the user requested.
    if last.state not in (Job.STATE_SUCCEEDED, Job.STATE_SUSPENDED):
        state = Job.State.Name(last.state).removeprefix("STATE_").lower()
        raise CommandFailed(f"{last.name} {state}" + (f": {last.error.message}" if last.error.message else ""))
