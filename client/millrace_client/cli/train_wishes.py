"""`millrace train cancel|suspend|resume|delete`: what a client may wish of a job."""

from __future__ import annotations

from typing import Any

import click

from millrace.train.v1 import resources_pb2, sweep_pb2
from millrace_client.cli.command import (
    PlainCommand,
    address_options,
    connected,
    console,
    full_name,
    json_option,
    print_json,
    state_text,
)

Job = resources_pb2.TrainingJob
Sweep = sweep_pb2.Sweep
SWEEPS = "sweeps/"


@click.command(cls=PlainCommand)
@click.argument("job")
@address_options
@json_option
def cancel(job: str, as_json: bool, **values: Any) -> None:
    """Ask JOB to stop at its next step; sweeps/s is a sweep with all its trials."""
    with connected(values) as millrace:
        if job.startswith(SWEEPS):
            now: Job | Sweep = millrace.train.cancel_sweep(job)
        else:
            now = millrace.train.cancel_training_job(full_name("trainingJobs", job))
    _tell(now, as_json)


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--etag", default="", help="Only what still has this etag.")
@address_options
@json_option
def suspend(job: str, etag: str, as_json: bool, **values: Any) -> None:
    """Ask JOB to take a checkpoint and to free its workers."""
    with connected(values) as millrace:
        now = millrace.train.suspend_training_job(full_name("trainingJobs", job), etag=etag)
    _tell(now, as_json)


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--etag", default="", help="Only what still has this etag.")
@address_options
@json_option
def resume(job: str, etag: str, as_json: bool, **values: Any) -> None:
    """Go on with JOB, which was suspended or cancelled or has failed, from its newest good checkpoint."""
    with connected(values) as millrace:
        now = millrace.train.resume_training_job(full_name("trainingJobs", job), etag=etag)
    _tell(now, as_json)


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--etag", default="", help="Delete only what still has this etag.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_options
@json_option
def delete(job: str, etag: str, yes: bool, as_json: bool, **values: Any) -> None:
    """Delete JOB, which is over or suspended, with its checkpoints, metrics and logs.

    sweeps/s is a sweep with all its trials.
    """
    is_sweep = job.startswith(SWEEPS)
    name = job if is_sweep else full_name("trainingJobs", job)
    if not (yes or as_json):
        what = "its trials with their checkpoints" if is_sweep else "its checkpoints"
        click.confirm(f"Delete {name} and {what}? It cannot be brought back", abort=True)
    with connected(values) as millrace:
        if is_sweep:
            now: Job | Sweep = millrace.train.delete_sweep(name, etag=etag)
        else:
            now = millrace.train.delete_training_job(name, etag=etag)
    _tell(now, as_json)


def _tell(now: Job | Sweep, as_json: bool) -> None:
    if as_json:
        print_json(now)
    else:
        console().print(f"[bold]{now.name}[/] {state_text(type(now).State.Name(now.state))}")
