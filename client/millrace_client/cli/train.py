"""`millrace train create|watch|list`, and the group that the other commands on jobs belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from google.protobuf import json_format

from millrace.train.v1 import resources_pb2
from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, new_table, print_json, state_text
from millrace_client.cli.train_records import coverage, export, logs, metrics, report
from millrace_client.cli.train_wishes import cancel, delete, resume, suspend
from millrace_client.connection import Millrace
from millrace_client.specs import optimizer, training_spec
from millrace_client.steps import normalize, to_float

Job = resources_pb2.TrainingJob


@click.group()
def train() -> None:
    """Create, watch, list, pause and end training jobs, and read what they left behind."""


for command in (cancel, suspend, resume, delete, coverage, metrics, logs, report, export):
    train.add_command(command)


@train.command(cls=PlainCommand)
@click.argument("job")
@click.option(
    "--spec",
    "spec_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TrainingSpec as JSON, instead of the options below.",
)
@click.option("--dataset-version", metavar="NAME", help="datasets/d/versions/v")
@click.option("--model", default="torchvision.resnet18", show_default=True, help="A builder of torchvision.models.")
@click.option("--in-channels", default=1, show_default=True)
@click.option("--num-classes", default=10, show_default=True)
@click.option("--mean", default=0.1307, show_default=True, help="Of the pixels 0..1, to normalise by.")
@click.option("--std", default=0.3081, show_default=True)
@click.option("--optimizer", "optimizer_name", default="AdamW", show_default=True)
@click.option("--learning-rate", default=0.002, show_default=True)
@click.option("--cosine/--constant", default=True, show_default=True, help="How the learning rate moves.")
@click.option("--epochs", default=3, show_default=True)
@click.option("--batch-size", default=128, show_default=True, help="Rows of a step over all workers.")
@click.option("--workers", default=2, show_default=True, help="0: local mode, alone and without Ray Train, to debug.")
@click.option("--threads", default=1, show_default=True, help="CPU threads of each worker.")
@click.option("--seed", default=0, show_default=True)
@click.option("--watch", "then_watch", is_flag=True, help="Stay and show its progress.")
@address_options
@json_option
def create(job: str, spec_file: Path | None, then_watch: bool, as_json: bool, **values: Any) -> None:
    """Start the training job JOB (an id)."""
    spec = _read_spec(spec_file) if spec_file else _spec(values)
    with connected(values) as millrace:
        made = millrace.train.create_training_job(job.removeprefix("trainingJobs/"), spec)
        if not then_watch:
            if as_json:
                print_json(made)
            else:
                console().print(
                    f"[bold]{made.name}[/] is durable and starts. millrace train watch {job} shows how it goes."
                )
            return
        _watch(millrace, made, 0, as_json)


@train.command(cls=PlainCommand)
@click.argument("job")
@click.option("--after", "after_sequence", default=0, metavar="N", help="Only events after this sequence number.")
@address_options
@json_option
def watch(job: str, after_sequence: int, as_json: bool, **values: Any) -> None:
    """Show the progress of JOB until it ends; with --json, each update as a line. Exit code 1 if it fails."""
    with connected(values) as millrace:
        name = full_name("trainingJobs", job)
        _watch(millrace, millrace.train.get_training_job(name), after_sequence, as_json)


@train.command("list", cls=PlainCommand)
@address_options
@json_option
def list_(as_json: bool, **values: Any) -> None:
    """List training jobs."""
    with connected(values) as millrace:
        jobs = list(millrace.train.list_training_jobs())
    if as_json:
        print_json({"training_jobs": jobs})
    elif not jobs:
        console().print("None yet.")
    else:
        table = new_table(
            "job", "state", "step", "accuracy", "dataset version", "best checkpoint", numbers=("step", "accuracy")
        )
        for job in jobs:
            now = job.progress
            table.add_row(
                job.name,
                state_text(Job.State.Name(job.state)),
                f"{now.step}/{now.total_steps}" if now.total_steps else "",
                f"{now.accuracy:.1%}" if now.total_steps else "",
                job.spec.dataset_version,
                job.best_checkpoint.rpartition("/")[2],
            )
        console().print(table)


def _watch(millrace: Millrace, job: Job, after_sequence: int, as_json: bool) -> None:
    updates = millrace.train.watch_training_job(job.name, after_sequence=after_sequence)
    if as_json:
        for update in updates:
            print_json({"job": update} if isinstance(update, Job) else {"event": update})
        last = millrace.train.get_training_job(job.name)
    else:
        from millrace_client.cli.progress import Curves, TrainingView

        with TrainingView(job.spec.epochs) as view:
            last = view.show(updates, Curves()) or job
        console().print(
            f"[bold]{last.name}[/] {state_text(Job.State.Name(last.state))}, best {last.best_checkpoint or '–'}"
        )
    # Who suspended it got what was wished for.
    if last.state not in (Job.STATE_SUCCEEDED, Job.STATE_SUSPENDED):
        state = Job.State.Name(last.state).removeprefix("STATE_").lower()
        raise CommandFailed(f"{last.name} {state}" + (f": {last.error.message}" if last.error.message else ""))


def _read_spec(path: Path) -> resources_pb2.TrainingSpec:
    try:
        return json_format.Parse(path.read_text(), resources_pb2.TrainingSpec())
    except json_format.ParseError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--spec") from None


def _spec(values: dict[str, Any]) -> resources_pb2.TrainingSpec:
    if not values["dataset_version"]:
        raise click.UsageError("name --dataset-version datasets/d/versions/v (or give --spec)")
    return training_spec(
        values["dataset_version"],
        model=values["model"],
        in_channels=values["in_channels"],
        num_classes=values["num_classes"],
        transform=[to_float(), normalize(values["mean"], values["std"])],
        optimizer=optimizer(values["optimizer_name"], values["learning_rate"], cosine=values["cosine"]),
        epochs=values["epochs"],
        global_batch_size=values["batch_size"],
        num_workers=values["workers"],
        threads_per_worker=values["threads"],
        seed=values["seed"],
    )
