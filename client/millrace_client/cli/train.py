"""`millrace train create|watch|list|cancel|suspend|resume|delete`, and the group of the other job commands.

`create` lets the service suggest, prepare and explain what the options leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from google.protobuf import json_format

from millrace.data.v1 import resources_pb2 as data_pb2
from millrace.train.v1 import resources_pb2, suggestion_pb2, sweep_pb2
from millrace_client.cli.code import set_own_code
from millrace_client.cli.command import (
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    full_name,
    json_option,
    new_table,
    print_json,
    state_text,
    verbatim,
)
from millrace_client.cli.progress import has_accuracy, watch_job
from millrace_client.cli.step_options import OrderedCommand
from millrace_client.cli.train_records import coverage, download, export, import_, logs, metrics, report
from millrace_client.cli.train_run import run
from millrace_client.cli.train_specs import given_spec_of, read_message, refuse_beside_file, spec_options
from millrace_client.cli.train_sweeps import sweep, sweeps
from millrace_client.cli.versions import AS_LONG_AS_IT_TAKES_S, waiting
from millrace_client.connection import Millrace
from millrace_client.train import Making, Suggestion, prepared_suggestion

# --- Cancel, suspend, resume, delete ---

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
    _print_state(now, as_json)


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--etag", default="", help="Only what still has this etag.")
@address_options
@json_option
def suspend(job: str, etag: str, as_json: bool, **values: Any) -> None:
    """Ask JOB to take a checkpoint and to free its workers."""
    with connected(values) as millrace:
        now = millrace.train.suspend_training_job(full_name("trainingJobs", job), etag=etag)
    _print_state(now, as_json)


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--etag", default="", help="Only what still has this etag.")
@address_options
@json_option
def resume(job: str, etag: str, as_json: bool, **values: Any) -> None:
    """Go on with JOB, which was suspended or cancelled or has failed, from its newest good checkpoint."""
    with connected(values) as millrace:
        now = millrace.train.resume_training_job(full_name("trainingJobs", job), etag=etag)
    _print_state(now, as_json)


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
    _print_state(now, as_json)


def _print_state(now: Job | Sweep, as_json: bool) -> None:
    if as_json:
        print_json(now)
    else:
        console().print(f"[bold]{now.name}[/] {state_text(type(now).State.Name(now.state))}")


# --- Create, watch, list ---

Job = resources_pb2.TrainingJob


@click.group()
def train() -> None:
    """Create, watch, list, pause and end training jobs, and read what they left behind."""


RECORDS = (coverage, metrics, logs, report, export, download, import_)
for command in (run, cancel, suspend, resume, delete, *RECORDS, sweep, sweeps):
    train.add_command(command)


@train.command(cls=OrderedCommand)
@click.argument("job")
@click.option(
    "--spec",
    "spec_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TrainingSpec as JSON, instead of the options below.",
)
@spec_options
@click.option("--dry-run", is_flag=True, help="Show what would be trained, and why; make nothing.")
@click.option("--watch", "then_watch", is_flag=True, help="Stay and show its progress.")
@address_options
@json_option
def create(job: str, spec_file: Path | None, dry_run: bool, then_watch: bool, as_json: bool, **values: Any) -> None:
    """Start the training job JOB (an id).

    --dataset-version alone is enough: label, task, transform, model and the rest follow from its schema and statistics,
    and the command says what it chose and why. What an option says is taken as it is; defaults named below are those of
    sweeps. Where steps have to learn, or a validation split is missing, a prepared version is made first.

    Steps are options, too, in their order; --transform has more in a file, at its place among them.

    \b
    millrace train create penguins --dataset-version datasets/penguins/versions/v1 --watch
    millrace train create photos --dataset-version datasets/photos/versions/v2 --in-channels 3 --num-classes 2 \\
      --random-flip 0.5 --to-float --normalize 0.485,0.456,0.406:0.229,0.224,0.225 --optimizer-arg weight_decay=0.01
    millrace train create fares --dataset-version datasets/taxis/versions/v2 --task regression --label-column fare \\
      --concat features=distance,tolls --model mlp --model-arg hidden=[64,32] --in-channels 2 --num-classes 1 \\
      --target-scaling standard --metrics mae,r2 --best-metric validation_mae --patience 3
    millrace train create cells --dataset-version datasets/cells/versions/v1 \\
      --model ./project:net:build --model-arg width=32 --epochs 5
    """
    if spec_file:
        refuse_beside_file()
    spec = read_message(spec_file, resources_pb2.TrainingSpec()) if spec_file else given_spec_of(values)
    with connected(values) as millrace:
        if not spec_file:
            set_own_code(millrace, spec, values["model"], dry_run=dry_run)
            suggestion = suggested(millrace, spec, dry_run, as_json)
            spec = suggestion.spec
            if dry_run:
                show_dry_run(suggestion, as_json)
                return
        elif dry_run:
            made = millrace.train.create_training_job(job.removeprefix("trainingJobs/"), spec, validate_only=True)
            print_json(made.spec)
            return
        made = millrace.train.create_training_job(job.removeprefix("trainingJobs/"), spec)
        if not then_watch:
            if as_json:
                print_json(made)
            else:
                console().print(
                    f"[bold]{made.name}[/] is durable and starts. millrace train watch {job} shows how it goes."
                )
            return
        watch_job(millrace, made, 0, as_json)


@train.command(cls=PlainCommand)
@click.argument("job")
@click.option("--after", "after_sequence", default=0, metavar="N", help="Only events after this sequence number.")
@address_options
@json_option
def watch(job: str, after_sequence: int, as_json: bool, **values: Any) -> None:
    """Show the progress of JOB until it ends; with --json, each update as a line. Exit code 1 if it fails."""
    with connected(values) as millrace:
        name = full_name("trainingJobs", job)
        watch_job(millrace, millrace.train.get_training_job(name), after_sequence, as_json)


def _step_text(now: resources_pb2.Progress) -> str:
    """Format a job's steps. A program's steps are its reports, whose total is not known beforehand."""
    if now.total_steps:
        return f"{now.step}/{now.total_steps}"
    return str(now.step) if now.step else ""


@train.command("list", cls=PlainCommand)
@address_options
@json_option
def list_(as_json: bool, **values: Any) -> None:
    """List training jobs, and what those that cannot begin wait for."""
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
                _step_text(now),
                f"{now.accuracy:.1%}" if now.total_steps and has_accuracy(job.spec, now) else "",
                job.spec.dataset_version,
                job.best_checkpoint.rpartition("/")[2],
            )
        console().print(table)
        for job in jobs:
            if job.waiting_for:
                console().print(f"{job.name} [yellow]waits for[/] ", verbatim(job.waiting_for), sep="", soft_wrap=True)


# --- Suggestions ---


def suggested(millrace: Millrace, training_spec: resources_pb2.TrainingSpec, dry_run: bool, quiet: bool) -> Suggestion:
    """Return the complete specification, and prepare the version that it needs.

    A dry run goes as far as it can without preparing. Raises what the services answer, and `CommandFailed` if the
    prepared version needs another preparation.
    """
    suggestion = millrace.train.suggest_training_spec(training_spec.dataset_version, spec=training_spec)
    if not quiet:
        _show_choices(suggestion.choices)
    if dry_run or suggestion.preparation is None:
        return suggestion

    def wait(operation: Making) -> data_pb2.DatasetVersion:
        with waiting(operation):
            if quiet:
                return operation.wait(AS_LONG_AS_IT_TAKES_S)
            with console().status(f"preparing {operation.metadata.version} …"):
                return operation.wait(AS_LONG_AS_IT_TAKES_S)

    def ask(version: str, spec: resources_pb2.TrainingSpec | None) -> suggestion_pb2.SuggestTrainingSpecResponse:
        return millrace.train.ask_for_suggestion(version, spec)

    prepared = prepared_suggestion(ask, millrace.data, suggestion, wait)
    if not quiet:
        console().print(f"[bold]{prepared.version}[/] is prepared from {training_spec.dataset_version}.")
        _show_choices(prepared.choices[len(suggestion.choices) :])
    if prepared.preparation is not None:
        raise CommandFailed(
            f"{prepared.version} needs preparing, too",
            remedy="look at it with --dry-run, and prepare it with millrace data transform",
        )
    return prepared


def show_dry_run(suggestion: Suggestion, as_json: bool) -> None:
    """Print the specification and any preparation; as JSON also the choices."""
    preparation = suggestion.preparation
    if as_json:
        document = {"spec": suggestion.spec, "choices": list(suggestion.choices)}
        print_json({**document, "preparation": preparation} if preparation else document)
        return
    click.echo(json_format.MessageToJson(suggestion.spec, preserving_proto_field_name=True))
    if preparation is not None:
        click.echo("A version is made first, and what is not here yet follows from it:")
        click.echo(json_format.MessageToJson(preparation, preserving_proto_field_name=True))
    click.echo("Nothing was made.")


def _show_choices(choices: Sequence[suggestion_pb2.Choice]) -> None:
    if not choices:
        return
    table = new_table("field", "chosen", "why")
    for choice in choices:
        table.add_row(*(verbatim(text) for text in (choice.field, choice.value, choice.reason)))
    console().print(table)
