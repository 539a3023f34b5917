"""`millrace deploy|rollout|rollback` and `millrace deployments list|show|traffic|delete`.

A served model's lineage is printed with a line for each step. `--keep` selects the versions that stay loaded without
traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from millrace.common.v1.lineage_pb2 import Lineage
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
    new_table,
    print_json,
    state_text,
    verbatim,
)
from millrace_client.connection import Millrace
from millrace_client.errors import MillraceError
from millrace_client.inference import keep_all, keep_latest, keep_named

# --- Lineage ---


def print_lineage(lineage: Lineage) -> None:
    """Print dataset version → run → checkpoint digest → model version."""
    steps = [
        ("dataset version", lineage.dataset_version),
        *([("own code", lineage.code_bundle)] if lineage.code_bundle else []),
        ("training run", lineage.training_job),
        ("checkpoint", f"{lineage.checkpoint.rpartition('/')[2]}  sha256:{lineage.checkpoint_sha256}"),
        ("model version", f"{lineage.deployment}  version {lineage.model_version}"),
    ]
    for index, (kind, name) in enumerate(steps):
        console().print(f"  {'→' if index else ' '} {kind:<16} [cyan]{name}[/]", soft_wrap=True)


# --- Versions that stay loaded ---

Function = TypeVar("Function", bound=Callable[..., Any])


class KeepType(click.ParamType[pb.VersionPolicy]):
    """A number of newest versions, or `all`."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> pb.VersionPolicy:
        text = str(value)
        if text == "all":
            return keep_all()
        if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
            self.fail(f"{value!r}: use a number from 1 on, or all", param, ctx)
        return keep_latest(int(text))


def keep_option(default: str) -> Callable[[Function], Function]:
    """Add `--keep`, passed on as `version_policy`; None if it is not given.

    `default` describes the effect of leaving it out.
    """
    help_text = f"Keep so many of the newest versions loaded, or all, without traffic too. Default: {default}."
    return click.option("--keep", "version_policy", type=KeepType(), metavar=KeepType.name, help=help_text)


def policy_text(policy: pb.VersionPolicy) -> str:
    """Describe in a sentence which versions stay loaded."""
    chosen = policy.WhichOneof("choice")
    if chosen == "all":
        return "all versions stay loaded without traffic"
    if chosen == "named":
        named = ", ".join(policy.named.versions) or "none"
        return f"of the versions without traffic these stay loaded: {named}"
    count = policy.latest.count or 1
    latest = "the latest version stays" if count == 1 else f"the latest {count} versions stay"
    return f"{latest} loaded without traffic"


# --- A deployment as people read it ---


def print_deployment(deployment: pb.Deployment) -> None:
    """Print the versions as a table, then what steers requests, then the lineage."""
    console().print(f"[bold]{deployment.name}[/] {state_text(pb.Deployment.State.Name(deployment.state))}")
    if deployment.HasField("error"):
        console().print(verbatim(deployment.error.message, "red"), soft_wrap=True)
    table = new_table("version", "state", "traffic", "replicas", "checkpoint", numbers=("traffic", "replicas"))
    for version in deployment.versions:
        state = state_text(pb.ModelVersion.State.Name(version.state))
        table.add_row(
            version.number, state, share_text(deployment, version), replicas_text(version), _checkpoint(version)
        )
    console().print(table)
    for line in _steering(deployment):
        console().print(verbatim(line), soft_wrap=True)
    console().print(verbatim(_spec_text(deployment.spec), "dim"), soft_wrap=True)
    console().print(f"[dim]etag {deployment.etag}[/]", soft_wrap=True)
    print_lineage(deployment.lineage)


def traffic_text(deployment: pb.Deployment) -> str:
    """Format the traffic shares, e.g. `1: 95 %, 2: 5 %`."""
    return ", ".join(
        f"{version.number}: {share_text(deployment, version)}" for version in deployment.versions if version.weight
    )


def share_text(deployment: pb.Deployment, version: pb.ModelVersion) -> str:
    """Format the share of requests that name no version, e.g. `33.3 %`."""
    total = sum(other.weight for other in deployment.versions) or 1
    return f"{version.weight / total * 100:.3g} %"


def replicas_text(*versions: pb.ModelVersion) -> str:
    """Format the number of running replicas; empty if the service does not know it."""
    known = [version.replicas for version in versions if version.HasField("replicas")]
    return str(sum(known)) if known else ""


def _checkpoint(version: pb.ModelVersion) -> str:
    return version.lineage.checkpoint


def _steering(deployment: pb.Deployment) -> Iterator[str]:
    for route in deployment.traffic.routes:
        yield f"requests with {route.header}: {route.value} go to version {route.version}"
    if deployment.traffic.HasField("shadow"):
        shadow = deployment.traffic.shadow
        yield f"version {shadow.version} gets copies of {shadow.percent} % of the requests"
    yield policy_text(deployment.spec.version_policy)
    if deployment.HasField("rollout"):
        rollout = deployment.rollout
        state = rollout_pb2.Rollout.State.Name(rollout.state).removeprefix("STATE_").lower().replace("_", " ")
        why = f": {rollout.error.message}" if rollout.HasField("error") else ""
        yield f"the rollout of version {rollout.version} is {state}{why}"


def _spec_text(spec: pb.DeploymentSpec) -> str:
    """Describe the replicas, the batches and the queue."""
    scaling, number = spec.autoscaling, str(spec.num_replicas)
    if spec.HasField("autoscaling"):
        number = f"{scaling.min_replicas} to {scaling.max_replicas}"
    delay_ms = spec.max_batch_delay.ToMicroseconds() / 1000
    return (
        f"replicas: {number}, threads each: {spec.threads_per_replica}; batches of up to {spec.max_batch_size} rows, "
        f"which wait up to {delay_ms:g} ms for others; at most {spec.max_queued_rows:,} rows wait"
    )


# --- Traffic ---

# A shadow of 0 % names no version.
NO_SHADOW = "", 0


class SharesType(click.ParamType[tuple[str, int]]):
    """A version and its share, e.g. `2=5`."""

    def __init__(self, name: str, example: str) -> None:
        self.name = name
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        version, _, share = str(value).partition("=")
        if not (version and share.isascii() and share.isdecimal() and int(share) < 2**31):
            self.fail(f"{value!r}: use {self.name}, e.g. {self._example}", param, ctx)
        return version, int(share)


class RouteType(click.ParamType[tuple[str, str, str]]):
    """A header, its whole value, and the version for such requests, e.g. `x-canary=yes:2`."""

    name = "HEADER=VALUE:VERSION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str, str]:
        header, _, rest = str(value).partition("=")
        wanted, _, version = rest.rpartition(":")
        if not (header and wanted and version):
            self.fail(f"{value!r}: use {self.name}, e.g. x-canary=yes:2", param, ctx)
        return header, wanted, version


@click.command(cls=PlainCommand)
@click.argument("deployment")
@click.option(
    "--weight",
    "weights",
    type=SharesType("VERSION=WEIGHT", "2=5"),
    multiple=True,
    help="Share of the requests that name no version, 0 to 1000; versions that are not named get none.",
)
@click.option(
    "--route",
    "routes",
    type=RouteType(),
    multiple=True,
    help="Requests with this header go to that version. Takes the place of all routes before.",
)
@click.option("--no-routes", is_flag=True, help="No routes by header.")
@click.option(
    "--shadow",
    type=SharesType("VERSION=PERCENT", "2=10"),
    help="A version without traffic that gets copies of this share of requests; their answers are discarded.",
)
@click.option("--no-shadow", is_flag=True, help="No copies.")
@keep_option("as it is")
@click.option("--keep-version", "kept", metavar="VERSION", multiple=True, help="Keep this one loaded without traffic.")
@click.option("--etag", default="", help="Only what still has this etag.")
@address_options
@json_option
def traffic(
    deployment: str,
    weights: tuple[tuple[str, int], ...],
    routes: tuple[tuple[str, str, str], ...],
    no_routes: bool,
    shadow: tuple[str, int] | None,
    no_shadow: bool,
    version_policy: pb.VersionPolicy | None,
    kept: tuple[str, ...],
    etag: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Share the requests of DEPLOYMENT out among its versions; what no option names stays as it is.

    A request goes to the version that it names, else by the first route that fits, else by weight. While a rollout is
    under way the weights are its own.
    """
    _either("--route", routes, "--no-routes", no_routes)
    _either("--shadow", shadow, "--no-shadow", no_shadow)
    _either("--keep", version_policy, "--keep-version", kept)
    if kept:
        version_policy = keep_named(*kept)
    if not (weights or routes or no_routes or shadow or no_shadow or version_policy):
        raise click.UsageError("name what to change: --weight, --route, --shadow, --keep, …")
    with connected(values) as millrace:
        now = millrace.deployments.update_traffic(
            full_name("deployments", deployment),
            weights=_by_version(weights) if weights else None,
            routes=routes if routes or no_routes else None,
            shadow=NO_SHADOW if no_shadow else shadow,
            version_policy=version_policy,
            etag=etag,
        )
    if as_json:
        print_json(now)
    else:
        print_deployment(now)


def _either(one: str, given: object, other: str, other_given: object) -> None:
    if given and other_given:
        raise click.UsageError(f"give either {one} or {other}")


def _by_version(weights: tuple[tuple[str, int], ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for version, weight in weights:
        if version in found:
            raise click.UsageError(f"version {version} has several weights")
        found[version] = weight
    return found


# --- List, show, delete ---


@click.group()
def deployments() -> None:
    """List, show and delete deployments, and share their traffic out."""


deployments.add_command(traffic)


@deployments.command("list", cls=PlainCommand)
@address_options
@json_option
def list_(as_json: bool, **values: Any) -> None:
    """List deployments."""
    with connected(values) as millrace:
        found = list(millrace.deployments.list_deployments())
    if as_json:
        print_json({"deployments": found})
    elif not found:
        console().print("None yet.")
    else:
        table = new_table("deployment", "state", "traffic", "replicas", "checkpoint", numbers=("replicas",))
        for one in found:
            state = state_text(pb.Deployment.State.Name(one.state))
            table.add_row(one.name, state, traffic_text(one), replicas_text(*one.versions), one.lineage.checkpoint)
        console().print(table)


@deployments.command(cls=PlainCommand)
@click.argument("deployment")
@address_options
@json_option
def show(deployment: str, as_json: bool, **values: Any) -> None:
    """Show the versions of DEPLOYMENT, which requests each gets, and which of them stay loaded."""
    with connected(values) as millrace:
        found = millrace.deployments.get_deployment(full_name("deployments", deployment))
    if as_json:
        print_json(found)
    else:
        print_deployment(found)


@deployments.command(cls=PlainCommand)
@click.argument("deployment")
@click.option("--etag", default="", help="Delete only what still has this etag.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_options
@json_option
def delete(deployment: str, etag: str, yes: bool, as_json: bool, **values: Any) -> None:
    """Take DEPLOYMENT out of service for good; its checkpoints stay."""
    name = full_name("deployments", deployment)
    if not (yes or as_json):
        click.confirm(f"Delete {name}? It cannot be brought back", abort=True)
    with connected(values) as millrace:
        millrace.deployments.delete_deployment(name, etag=etag)
    if as_json:
        print_json({"deleting": name})
    else:
        console().print(f"{name} is being deleted; requests in flight are answered first.", soft_wrap=True)


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
    version stays loaded, and `millrace rollback` gives it the traffic back; --keep is set once the rollout is
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
    """Give the traffic of DEPLOYMENT back to what had it before its newest rollout, at once."""
    with connected(values) as millrace:
        now = millrace.deployments.rollback(full_name("deployments", deployment), etag=etag)
    if as_json:
        print_json(now)
    else:
        state = rollout_pb2.Rollout.State.Name(now.rollout.state)
        console().print(
            f"[bold]{now.name}[/] answers as version {now.lineage.model_version}; "
            f"the rollout of version {now.rollout.version} is {state_text(state)}."
        )


def _keep(millrace: Millrace, name: str, version_policy: pb.VersionPolicy) -> None:
    """Set the version policy after the rollout was accepted.

    A refused rollout therefore unloads nothing, and until its end no earlier version is removed. If the rollout has
    already ended, the versions that it retired are kept all the same.
    """
    try:
        millrace.deployments.update_traffic(name, version_policy=version_policy)
    except MillraceError as error:
        remedy = f"millrace deployments traffic {name} --keep … sets it; do so before the rollout ends"
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
    from millrace_client.inference import duration

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
    from millrace_client.inference import autoscaling

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
