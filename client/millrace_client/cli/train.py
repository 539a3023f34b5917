"""`millrace train create|watch|list|cancel|suspend|resume|delete|sweep|sweeps`, and the group of the other job
commands.

`create` lets the service suggest, prepare and explain what the options leave open. `sweep` searches for the best
parameters of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import click
from google.protobuf import json_format

from millrace.data.v1 import resources_pb2 as data_pb2
from millrace.train.v1 import resources_pb2, suggestion_pb2, sweep_pb2
from millrace_client import specs
from millrace_client.cli.code import run, set_own_code
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
    was_given,
)
from millrace_client.cli.progress import has_accuracy, watch_job
from millrace_client.cli.spec_options import (
    OrderedCommand,
    given_spec_of,
    read_message,
    refuse_beside_file,
    spec_of,
    spec_options,
)
from millrace_client.cli.train_records import coverage, download, export, import_, logs, metrics, report
from millrace_client.cli.versions import AS_LONG_AS_IT_TAKES_S, waiting
from millrace_client.connection import Millrace
from millrace_client.train import Making, Suggestion, prepared_suggestion

# --- Sweeps ---

Sweep = sweep_pb2.Sweep
RANGES: dict[str, Callable[[str, str], sweep_pb2.Domain]] = {
    "uniform": lambda low, high: specs.uniform(float(low), float(high)),
    "log_uniform": lambda low, high: specs.log_uniform(float(low), float(high)),
    "integers": lambda low, high: specs.integers(int(low), int(high)),
}


@click.command(cls=OrderedCommand)
@click.argument("sweep")
@click.option(
    "--spec",
    "spec_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A SweepSpec as JSON, instead of all options below.",
)
@click.option("--grid", multiple=True, metavar="FIELD=A,B,…", help="Each value with each one of the other grids.")
@click.option("--choice", multiple=True, metavar="FIELD=A,B,…", help="One of them drawn for each trial.")
@click.option("--uniform", multiple=True, metavar="FIELD=LOW:HIGH")
@click.option("--log-uniform", multiple=True, metavar="FIELD=LOW:HIGH")
@click.option("--integers", multiple=True, metavar="FIELD=LOW:HIGH", help="Both ends included.")
@click.option("--samples", default=1, show_default=True, help="Times that the grid is gone through.")
@click.option("--sweep-seed", default=0, show_default=True, help="Fixes what is drawn.")
@click.option("--metric", default="", help="Default: validation_accuracy.")
@click.option("--max-concurrent", default=0, help="Trials at a time. Default: 4.")
@click.option("--asha", is_flag=True, help="Stop the worse trials early.")
@click.option("--grace-period", default=0, metavar="EPOCHS", help="With --asha: what every trial has. Default: 1.")
@click.option("--reduction-factor", default=0.0, help="With --asha: one in so many goes on. Default: 4.")
@spec_options
@click.option("--watch", "then_watch", is_flag=True, help="Stay until it is over, and show its trials.")
@address_options
@json_option
def sweep(sweep: str, spec_file: Path | None, then_watch: bool, as_json: bool, **values: Any) -> None:
    """Start the sweep SWEEP (an id): training jobs that differ in some fields of their specification.

    FIELD is a path such as optimizer.learning_rate, global_batch_size or model.kwargs.dropout.
    """
    if spec_file:
        refuse_beside_file()
    spec = read_message(spec_file, sweep_pb2.SweepSpec()) if spec_file else _spec(values)
    with connected(values) as millrace:
        if not spec_file:
            set_own_code(millrace, spec.base, values["model"])
        made = millrace.train.create_sweep(sweep.removeprefix("sweeps/"), spec)
        if then_watch:
            _watch(millrace, made.name, as_json)
        elif as_json:
            print_json(made)
        else:
            console().print(
                f"[bold]{made.name}[/] is durable and starts, {len(made.trials)} trials. "
                f"millrace train sweeps {sweep} shows them.",
                soft_wrap=True,
            )


@click.command(cls=PlainCommand)
@click.argument("sweep", required=False)
@address_options
@json_option
def sweeps(sweep: str | None, as_json: bool, **values: Any) -> None:
    """List sweeps, or show the trials of SWEEP."""
    with connected(values) as millrace:
        if sweep is not None:
            found = millrace.train.get_sweep(full_name("sweeps", sweep))
            if as_json:
                print_json(found)
            else:
                _show(found)
                if found.error.message:
                    console().print(verbatim(found.error.message), soft_wrap=True)
            return
        listed = list(millrace.train.list_sweeps())
    if as_json:
        print_json({"sweeps": listed})
        return
    table = new_table("sweep", "state", "trials", "parameters", "best", numbers=("trials",))
    for one in listed:
        state = state_text(Sweep.State.Name(one.state))
        table.add_row(one.name, state, str(one.counts.total), ", ".join(one.spec.parameters), one.best_checkpoint)
    console().print(table if listed else "None yet.")


def _watch(millrace: Millrace, name: str, as_json: bool) -> None:
    last_line = None
    for now in millrace.train.watch_sweep(name):
        counts = now.counts
        line = (
            f"{counts.succeeded} done, {counts.stopped_early} stopped early, {counts.failed} failed, "
            f"{counts.running} at work, {counts.pending} to come"
        )
        if line != last_line and not as_json:
            console().print(f"   {line}", soft_wrap=True)
        last_line = line
    if as_json:
        print_json(now)
    else:
        _show(now)
    if now.state != Sweep.STATE_SUCCEEDED:
        state = Sweep.State.Name(now.state).removeprefix("STATE_").lower()
        raise CommandFailed(f"{name} {state}" + (f": {now.error.message}" if now.error.message else ""))


def _show(found: Sweep) -> None:
    """Print a row for each trial, and mark the best one."""
    metric, paths = found.spec.metric, sorted(found.spec.parameters)
    table = new_table(
        "", "trial", "state", *paths, "epochs", metric, "best", numbers=(*paths, "epochs", metric, "best")
    )
    for trial in found.trials:
        best = trial.training_job == found.best_training_job
        table.add_row(
            "[green]★[/]" if best else "",
            trial.training_job.removeprefix("trainingJobs/"),
            _state_of(trial),
            *(_text(json_format.MessageToDict(trial.parameters[path])) for path in paths),
            f"{trial.epochs_done}/{trial.epochs}",
            f"{trial.last_value:.4f}" if trial.HasField("last_value") else "",
            f"{trial.best_value:.4f}" if trial.HasField("best_value") else "",
        )
    console().print(table)
    console().print(
        f"[bold]{found.name}[/] {state_text(Sweep.State.Name(found.state))}, best {found.best_checkpoint or '–'}",
        soft_wrap=True,
    )


def _state_of(trial: sweep_pb2.Trial) -> str:
    if trial.stopped_early:
        return "stopped early"
    if trial.deleted:
        return "deleted"
    to_come = trial.state == resources_pb2.TrainingJob.STATE_UNSPECIFIED
    return "–" if to_come else state_text(resources_pb2.TrainingJob.State.Name(trial.state))


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _spec(values: dict[str, Any]) -> sweep_pb2.SweepSpec:
    parameters: dict[str, sweep_pb2.Domain] = {}
    for kind in ("grid", "choice"):
        for text in values[kind]:
            path, given = _cut(text, "=", f"--{kind}")
            _check_new(path, parameters, f"--{kind}")
            parameters[path] = getattr(specs, kind)(*(_value(one) for one in given.split(",")))
    for kind, make in RANGES.items():
        option = f"--{kind.replace('_', '-')}"
        for text in values[kind]:
            path, given = _cut(text, "=", option)
            _check_new(path, parameters, option)
            low, high = _cut(given, ":", option)
            try:
                parameters[path] = make(low, high)
            except ValueError:
                raise click.BadParameter(f"{text}: use numbers, FIELD=LOW:HIGH", param_hint=option) from None
    if not parameters:
        raise click.UsageError("name what trials differ in, e.g. --log-uniform optimizer.learning_rate=1e-4:1e-1")
    scheduler = {}
    if values["asha"]:
        made = specs.asha(grace_period=values["grace_period"], reduction_factor=values["reduction_factor"])
        scheduler = {"asha": made}
    elif extra := [name for name in ("grace_period", "reduction_factor") if was_given(name)]:
        raise click.UsageError(f"--{extra[0].replace('_', '-')} is a parameter of --asha, which is not there")
    return specs.sweep_spec(
        spec_of(values),
        parameters,
        num_samples=values["samples"],
        seed=values["sweep_seed"],
        metric=values["metric"],
        max_concurrent_trials=values["max_concurrent"],
        **scheduler,
    )


def _check_new(path: str, parameters: Collection[str], option: str) -> None:
    if path in parameters:
        raise click.BadParameter(f"{path} has a domain already; name each field once", param_hint=option)


def _cut(text: str, at: str, option: str) -> tuple[str, str]:
    left, found, right = text.partition(at)
    if not (left and found and right):
        raise click.BadParameter(f"{text}: there must be {at!r} in it", param_hint=option)
    return left, right


def _value(text: str) -> Any:
    """Parse a number, true or false as JSON; otherwise return the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# --- Cancel, suspend, resume, delete ---

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
