"""`millrace deployments list|show|traffic|delete`: deployments, their traffic and their loaded versions.

A served model's lineage is printed with a line for each step. `--keep` selects the versions that stay loaded without
traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from millrace.common.v1.lineage_pb2 import Lineage
from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import rollout_pb2
from millrace_client.cli.command import (
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
from millrace_client.deployments import keep_all, keep_latest, keep_named

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
        yield f"the roll-out of version {rollout.version} is {state}{why}"


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

    A request goes to the version that it names, else by the first route that fits, else by weight. While a roll-out is
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
