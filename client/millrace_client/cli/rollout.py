"""`millrace rollout` and `millrace rollback`."""

from __future__ import annotations

import math
from typing import Any

import click

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import roll_out_pb2
from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.lineage import print_lineage
from millrace_client.cli.options import (
    MAX_DURATION_S,
    DurationType,
    address_options,
    connected,
    full_name,
    json_option,
)
from millrace_client.cli.output import console, duration_text, print_json, state_text
from millrace_client.cli.version_keeping import keep_option
from millrace_client.connection import Millrace
from millrace_client.errors import MillraceError
from millrace_client.operations import Operation


class RowsType(click.ParamType[tuple[str, str]]):
    """`datasets/d/versions/v:test`: a dataset version, and one of its splits."""

    name = "VERSION:SPLIT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        version, _, split = str(value).partition(":")
        if not version or not split:
            self.fail(f"{value!r}: use VERSION:SPLIT, e.g. datasets/d/versions/v:test", param, ctx)
        return version, split


class StepType(click.ParamType[tuple[int, float]]):
    """`25:60`: a percentage, and for how many seconds."""

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
        operation = millrace.deployments.roll_out(
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
        console().print(f"[bold]{made.name}[/] rolls out version {made.roll_out.version}.")
    else:
        console().print(f"[bold]{made.name}[/] answers as version {made.roll_out.version}.")
        print_lineage(made.lineage)


@click.command(cls=PlainCommand)
@click.argument("deployment")
@click.option("--etag", default="", help="Only what still has this etag.")
@address_options
@json_option
def rollback(deployment: str, etag: str, as_json: bool, **values: Any) -> None:
    """Give the traffic of DEPLOYMENT back to what had it before its newest roll-out, at once."""
    with connected(values) as millrace:
        now = millrace.deployments.roll_back(full_name("deployments", deployment), etag=etag)
    if as_json:
        print_json(now)
    else:
        state = roll_out_pb2.RollOut.State.Name(now.roll_out.state)
        console().print(
            f"[bold]{now.name}[/] answers as version {now.lineage.model_version}; "
            f"the roll-out of version {now.roll_out.version} is {state_text(state)}."
        )


def _keep(millrace: Millrace, name: str, version_policy: pb.VersionPolicy) -> None:
    """Behind the wish for the roll-out: one that is refused unloads nothing, and until it ends none of the versions
    goes that were there before it. Should it have ended already, those that it has retired are kept all the same."""
    try:
        millrace.deployments.update_traffic(name, version_policy=version_policy)
    except MillraceError as error:
        remedy = f"millrace deployments traffic {name} --keep … sets it; do so before the roll-out ends"
        raise CommandFailed(f"{name} rolls out, but --keep is not set: {error.message}", remedy=remedy) from None


class _Progress:
    """A line for each step that is new."""

    def __init__(self) -> None:
        self._told = ""

    def show(self, operation: Operation[pb.Deployment]) -> None:
        now = operation.metadata.roll_out
        if now.state == roll_out_pb2.RollOut.STATE_LOADING:
            line = f"loading version {now.version} beside the one that answers …"
        elif now.state == roll_out_pb2.RollOut.STATE_COMPARING:
            line = f"comparing version {now.version} with the one that answers …"
        elif now.state == roll_out_pb2.RollOut.STATE_SHIFTING:
            step = now.spec.steps[now.step]
            lasts = duration_text(step.interval.ToMicroseconds() / 1e6)
            line = f"version {now.version} has {step.percent} % of the traffic, for {lasts}"
        else:
            return
        if line != self._told:
            self._told = line
            console().print(f"   {line}")
