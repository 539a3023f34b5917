"""Showing how a training job goes, until it ends."""

from __future__ import annotations

from millrace.train.v1 import resources_pb2
from millrace_client.cli.command import CommandFailed, console, print_json, state_text
from millrace_client.connection import Millrace

Job = resources_pb2.TrainingJob


def watch_job(millrace: Millrace, job: Job, after_sequence: int, as_json: bool) -> None:
    """With `as_json` each update is a line. Raises `CommandFailed` for a job that neither succeeds nor is suspended."""
    updates = millrace.train.watch_training_job(job.name, after_sequence=after_sequence)
    if as_json:
        for update in updates:
            print_json({"job": update} if isinstance(update, Job) else {"event": update})
        last = millrace.train.get_training_job(job.name)
    else:
        from millrace_client.cli.progress import Curves, TrainingView

        with TrainingView(job.spec) as view:
            last = view.show(updates, Curves()) or job
        console().print(
            f"[bold]{last.name}[/] {state_text(Job.State.Name(last.state))}, best {last.best_checkpoint or '–'}"
        )
    # Who suspended it got what was wished for.
    if last.state not in (Job.STATE_SUCCEEDED, Job.STATE_SUSPENDED):
        state = Job.State.Name(last.state).removeprefix("STATE_").lower()
        raise CommandFailed(f"{last.name} {state}" + (f": {last.error.message}" if last.error.message else ""))
