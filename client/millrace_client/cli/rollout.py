"""`millrace deploy`, `rollout` and `rollback`: serve a checkpoint, replace it, or go back."""

from __future__ import annotations

import math
from typing import Any

import click

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import rollout_pb2
from millrace_client.calls import Operation
from millrace_client.cli.command import (
    MAX_DURATION_S,
    CommandFailed,
    DurationType,
    PlainCommand,
    address_options,
    connected,
    console,
    duration_text,
    full_name,
    json_option,
    print_json,
    state_text,
)
from millrace_client.cli.deployments import keep_option, print_lineage
from millrace_client.connection import Millrace
from millrace_client.errors import MillraceError

# --- Rollout and rollback ---


class RowsType(click.ParamType[tuple[str, str]]):
    """A dataset version and one of its splits, e.g. `datasets/d/versions/v:test`."""

    name = "VERSION:SPLIT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        version, _, split = str(value).partition(":")
        if not version or not split:
            self.fail(f"{value!r}: use VERSION:SPLIT, e.g. datasets/d/versions/v:test", param, ctx)
        return version, split


class StepType(click.ParamType[tuple[int, float]]):
    """A percentage and a duration in seconds, e.g. `25:60`."""

    name = "PERCENT:SECONDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        percent, _, seconds = str(value).partition(":")
        try:
            step = int(percent), float(seconds)
        except ValueError:
            step = 0, math.nan
        if not (abs(step[0]) < 2**31 and abs(step[1]) <= MAX_DURATION_S):
            self.fail(f"{value!r}: use PERCENT:SECONDS, e.g. 25:60", param, ctx)
        return step


@click.command(cls=PlainCommand)
@click.argument("deployment")
@click.argument("checkpoint")
@click.option(
    "--step",
    "steps",
    type=StepType(),
    multiple=True,
    help="Share of the traffic, and for how long; the last is of 100. Default: 5, 25, 50 and 100, 60 s each.",
)
@click.option("--max-error-share", type=float, help="Roll back where more of the requests fail, 0 to 1.")
@click.option("--max-p99-ms", type=DurationType(), help="Roll back where 1 % of the answers take longer.")
@click.option("--max-p99-ratio", default=0.0, help="Roll back where they take so many times as long as the old one's.")
@click.option("--min-requests", default=0, help="Before a limit means anything. Default: 50.")
@click.option("--window", "window_s", type=DurationType(), help="Seconds that the limits look back. Default: 60.")
@click.option(
    "--compare",
    type=RowsType(),
    help="Rows that both versions answer before any traffic moves: datasets/d/versions/v:test.",
)
@click.option("--min-agreement", type=float, help="Share of those rows with the same label, 0 to 1.")
@click.option("--max-difference", type=float, help="By how much outputs for those rows may differ.")
@click.option("--allow-new-signature", is_flag=True, help="Also where inputs or outputs differ from the old version's.")
@keep_option("as it is")
@click.option("--no-wait", is_flag=True, help="Return once it is durable; it goes on meanwhile.")
@address_options
@json_option
def rollout(
    deployment: str,
    checkpoint: str,
    steps: tuple[tuple[int, float], ...],
    max_p99_ms: float | None,
    compare: tuple[str, str] | None,
    version_policy: pb.VersionPolicy | None,
    no_wait: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Move the traffic of DEPLOYMENT to CHECKPOINT, step by step, without a dropped request.

    CHECKPOINT is trainingJobs/j/checkpoints/c, or a job (trainingJobs/j or j) for its best one. With --keep 2 the old
    version stays loaded, and `millrace rollback` gives it the traffic back; --keep is set once the roll-out is
    accepted, and nothing is unloaded before its end.
    """
    name = full_name("deployments", deployment)
    limits = {name: values[name] for name in ("max_error_share", "max_p99_ratio", "min_requests", "window_s")}
    with connected(values) as millrace:
        operation = millrace.deployments.rollout(
            name,
            full_name("trainingJobs", checkpoint),
            steps=steps,
            max_p99_s=max_p99_ms / 1000 if max_p99_ms is not None else None,
            allow_new_signature=values["allow_new_signature"],
            compare=compare,
            min_agreement=values["min_agreement"],
            max_difference=values["max_difference"],
            **limits,
        )
        if version_policy is not None:
            _keep(millrace, name, version_policy)
        if no_wait:
            made = millrace.deployments.get_deployment(operation.metadata.deployment)
        else:
            made = operation.wait(timeout_s=float("inf"), on_progress=None if as_json else _Progress().show)
    if as_json:
        print_json(made)
    elif no_wait:
        console().print(f"[bold]{made.name}[/] rolls out version {made.rollout.version}.")
    else:
        console().print(f"[bold]{made.name}[/] answers as version {made.rollout.version}.")
        print_lineage(made.lineage)


@click.command(cls=PlainCommand)
@click.argument("deployment")
@click.option("--etag", default="", help="Only what still has this etag.")
@address_options
@json_option
def rollback(deployment: str, etag: str, as_json: bool, **values: Any) -> None:
    """Give the traffic of DEPLOYMENT back to what had it before its newest roll-out, at once."""
    with connected(values) as millrace:
        now = millrace.deployments.rollback(full_name("deployments", deployment), etag=etag)
    if as_json:
        print_json(now)
    else:
        state = rollout_pb2.Rollout.State.Name(now.rollout.state)
        console().print(
            f"[bold]{now.name}[/] answers as version {now.lineage.model_version}; "
            f"the roll-out of version {now.rollout.version} is {state_text(state)}."
        )


def _keep(millrace: Millrace, name: str, version_policy: pb.VersionPolicy) -> None:
    """Set the version policy after the roll-out was accepted.

    A refused roll-out therefore unloads nothing, and until its end no earlier version is removed. If the roll-out has
    already ended, the versions that it retired are kept all the same.
    """
    try:
        millrace.deployments.update_traffic(name, version_policy=version_policy)
    except MillraceError as error:
        remedy = f"millrace deployments traffic {name} --keep … sets it; do so before the roll-out ends"
        raise CommandFailed(f"{name} rolls out, but --keep is not set: {error.message}", remedy=remedy) from None


class _Progress:
    """Prints a line for each new step."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, operation: Operation[pb.Deployment]) -> None:
        now = operation.metadata.rollout
        if now.state == rollout_pb2.Rollout.STATE_LOADING:
            line = f"loading version {now.version} beside the one that answers …"
        elif now.state == rollout_pb2.Rollout.STATE_COMPARING:
            line = f"comparing version {now.version} with the one that answers …"
        elif now.state == rollout_pb2.Rollout.STATE_SHIFTING:
            step = now.spec.steps[now.step]
            lasts = duration_text(step.interval.ToMicroseconds() / 1e6)
            line = f"version {now.version} has {step.percent} % of the traffic, for {lasts}"
        else:
            return
        if line != self._shown:
            self._shown = line
            console().print(f"   {line}")


# --- Deploy ---


def _min_and_max(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse MIN..MAX, or a plain number as both."""
    if value is None:
        return None
    least, dots, most = value.partition("..")
    try:
        return int(least), int(most if dots else least)
    except ValueError:
        raise click.BadParameter(f"{value!r}: use a number, or MIN..MAX, e.g. 1..4") from None


@click.command(cls=PlainCommand)
@click.argument("deployment")
@click.argument("checkpoint")
@click.option(
    "--replicas",
    callback=_min_and_max,
    metavar="N|MIN..MAX",
    help="So many, or as many as the load asks for, e.g. 1..4. Default: 1.",
)
@click.option("--rows-per-replica", default=0, help="Of MIN..MAX: one replica for each so many rows. Default: a batch.")
@click.option("--scale-up-after", type=DurationType(), help="Seconds that replicas must have been too few. Default: 5.")
@click.option(
    "--scale-down-after", type=DurationType(), help="Seconds that they must have been too many. Default: 300."
)
@click.option("--threads", default=0, help="CPU threads of each replica's model. Default: 1.")
@click.option("--cpus", type=float, help="CPUs that Ray keeps free for each replica, e.g. 0.5. Default: its threads.")
@click.option("--gpus", default=0.0, help="GPUs for each replica, e.g. 0.25, or 1. Default: 0.")
@click.option("--max-batch-size", default=0, help="Rows in one call of the model. Default: 32.")
@click.option("--max-batch-delay-ms", type=DurationType(), help="How long a row may wait for others. Default: 2.")
@click.option("--max-queued-rows", default=0, help="Rows that may wait; more are refused. Default: 4096.")
@click.option(
    "--allow-non-finite",
    is_flag=True,
    help="Answer rows with a NaN or an infinity that no step fills. Default: their request is refused.",
)
@click.option("--predictor", default="", metavar="MODULE:CLASS", help="Of a program's checkpoint: what serves it.")
@keep_option("1")
@click.option("--no-wait", is_flag=True, help="Return once it is durable; it loads meanwhile.")
@address_options
@json_option
def deploy(deployment: str, checkpoint: str, no_wait: bool, as_json: bool, **values: Any) -> None:
    """Serve CHECKPOINT as the model DEPLOYMENT (an id).

    CHECKPOINT is trainingJobs/j/checkpoints/c, or a job (trainingJobs/j or j) or sweep (sweeps/s) for its best one.
    """
    fields = _fields(values)
    with connected(values) as millrace:
        if checkpoint.startswith("sweeps/"):
            sweep, checkpoint = checkpoint, millrace.train.get_sweep(checkpoint).best_checkpoint
            if not checkpoint:
                raise CommandFailed(f"{sweep} has no checkpoint yet", remedy="wait for the first validation of a trial")
        operation = millrace.deployments.create_deployment(
            deployment.removeprefix("deployments/"),
            full_name("trainingJobs", checkpoint),
            **fields,
        )
        if no_wait:
            made = millrace.deployments.get_deployment(operation.metadata.deployment)
        elif as_json:
            made = operation.wait()
        else:
            with console().status("loading the model …"):
                made = operation.wait()
    if as_json:
        print_json(made)
    elif no_wait:
        console().print(f"[bold]{made.name}[/] is durable and loads.")
    else:
        console().print(f"[bold]{made.name}[/] answers.")
        print_lineage(made.lineage)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the further fields of the specification. Options that were not given are left to the server."""
    from millrace_client.deployments import duration

    delay_ms = values["max_batch_delay_ms"]
    return {
        "threads_per_replica": values["threads"],
        "cpus_per_replica": values["cpus"],
        "gpus_per_replica": values["gpus"],
        "max_batch_size": values["max_batch_size"],
        "max_batch_delay": None if delay_ms is None else duration(delay_ms / 1000),
        "max_queued_rows": values["max_queued_rows"],
        "version_policy": values["version_policy"],
        "allow_non_finite": values["allow_non_finite"],
        "predictor": values["predictor"],
        **_replicas(values),
    }


def _replicas(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that determine the number of replicas."""
    from millrace_client.deployments import autoscaling

    least, most = values["replicas"] or (0, 0)
    scaling = {
        "rows_per_replica": values["rows_per_replica"],
        "scale_up_after_s": values["scale_up_after"],
        "scale_down_after_s": values["scale_down_after"],
    }
    if least != most:
        return {"autoscaling": autoscaling(least, most, **scaling)}
    if values["rows_per_replica"] or values["scale_up_after"] is not None or values["scale_down_after"] is not None:
        raise click.UsageError("scaling needs --replicas MIN..MAX, e.g. 1..4")
    return {"num_replicas": least}
