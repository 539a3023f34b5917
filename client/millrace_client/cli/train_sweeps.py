"""`millrace train sweep|sweeps`: searches for the best parameters of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click
from google.protobuf import json_format

from millrace.train.v1 import resources_pb2, sweep_pb2
from millrace_client import specs
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
    was_given,
)
from millrace_client.cli.step_options import OrderedCommand
from millrace_client.cli.train_specs import read_message, refuse_beside_file, spec_of, spec_options
from millrace_client.connection import Millrace

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
