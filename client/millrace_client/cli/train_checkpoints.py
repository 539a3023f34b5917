"""`millrace train download`: checkpoints that leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from millrace.train.v1 import resources_pb2
from millrace_client.cli.exits import NOT_FOUND, CommandFailed, PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json, size_text
from millrace_client.connection import Millrace

COLLECTION = "trainingJobs"


@click.command(cls=PlainCommand)
@click.argument("source", metavar="CHECKPOINT|JOB")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--best", is_flag=True, help="The best of the job; the default where a job is named.")
@click.option("--step", type=int, metavar="N", help="The one of the job at step N; of a program, of its report N.")
@address_options
@json_option
def download(source: str, directory: Path, best: bool, step: int | None, as_json: bool, **values: Any) -> None:
    """Write the files of a checkpoint into DIRECTORY, each compared with its digest.

    DIRECTORY is there once all files are. The same command again goes on with a download that was cut off. It leaves a
    folder with other content alone.
    """
    name = full_name(COLLECTION, source)
    is_job = name.count("/") == 1
    if best and step is not None:
        raise click.UsageError("--best and --step name two checkpoints; give one of them")
    if not is_job and (best or step is not None):
        raise click.UsageError("--best and --step choose among a job's checkpoints; name a job with them")
    with connected(values) as millrace:
        if step is not None:
            name = _at_step(millrace, name, step)
        found = _downloaded(millrace, name, directory, as_json)
    if as_json:
        print_json({"checkpoint": found, "directory": str(directory)})
    else:
        console().print(f"[bold]{found.name}[/] is in {directory} ({size_text(found.size_bytes)})", soft_wrap=True)


def _at_step(millrace: Millrace, job: str, step: int) -> str:
    checkpoints = list(millrace.train.list_checkpoints(job))
    for one in checkpoints:
        if one.step == step:
            return one.name
    there = ", ".join(str(one.step) for one in checkpoints)
    remedy = f"it has some at steps {there}" if there else "it has none yet"
    raise CommandFailed(f"{job} has no checkpoint at step {step}", remedy=remedy, code=NOT_FOUND)


def _downloaded(millrace: Millrace, name: str, directory: Path, as_json: bool) -> resources_pb2.Checkpoint:
    """With a bar on a terminal."""
    if as_json or not console().is_terminal:
        return millrace.train.download_checkpoint(name, directory)
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console(), transient=True) as progress:
        task = progress.add_task(name, total=None)

        def show(done: int, size_bytes: int) -> None:
            progress.update(task, completed=done, total=size_bytes)

        return millrace.train.download_checkpoint(name, directory, on_progress=show)
