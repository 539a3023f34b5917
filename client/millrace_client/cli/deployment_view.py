"""A deployment as people read it: its versions, who gets which requests, and what stays loaded."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import roll_out_pb2
from millrace_client.cli.lineage import print_lineage
from millrace_client.cli.output import console, new_table, state_text, verbatim
from millrace_client.cli.version_keeping import policy_text


def print_deployment(one: pb.Deployment) -> None:
    """Its versions as a table; below it whatever steers requests, and where the answers come from."""
    console().print(f"[bold]{one.name}[/] {state_text(pb.Deployment.State.Name(one.state))}")
    if one.HasField("error"):
        console().print(verbatim(one.error.message, "red"), soft_wrap=True)
    table = new_table("version", "state", "traffic", "replicas", "checkpoint", numbers=("traffic", "replicas"))
    for version in one.versions:
        state = state_text(pb.ModelVersion.State.Name(version.state))
        table.add_row(version.number, state, share_text(one, version), replicas_text(version), _checkpoint(version))
    console().print(table)
    for line in _steering(one):
        console().print(verbatim(line), soft_wrap=True)
    console().print(verbatim(_spec_text(one.spec), "dim"), soft_wrap=True)
    console().print(f"[dim]etag {one.etag}[/]", soft_wrap=True)
    print_lineage(one.lineage)


def traffic_text(one: pb.Deployment) -> str:
    """E.g. `1: 95 %, 2: 5 %`."""
    return ", ".join(f"{version.number}: {share_text(one, version)}" for version in one.versions if version.weight)


def share_text(one: pb.Deployment, version: pb.ModelVersion) -> str:
    """Of the requests that name no version, e.g. `33.3 %`."""
    total = sum(other.weight for other in one.versions) or 1
    return f"{version.weight / total * 100:.3g} %"


def replicas_text(*versions: pb.ModelVersion) -> str:
    """How many run now, in all; empty where the service does not know."""
    known = [version.replicas for version in versions if version.HasField("replicas")]
    return str(sum(known)) if known else ""


def _checkpoint(version: pb.ModelVersion) -> str:
    return version.lineage.checkpoint


def _steering(one: pb.Deployment) -> Iterator[str]:
    for route in one.traffic.routes:
        yield f"requests with {route.header}: {route.value} go to version {route.version}"
    if one.traffic.HasField("shadow"):
        shadow = one.traffic.shadow
        yield f"version {shadow.version} gets copies of {shadow.percent} % of the requests"
    yield policy_text(one.spec.version_policy)
    if one.HasField("roll_out"):
        roll_out = one.roll_out
        state = roll_out_pb2.RollOut.State.Name(roll_out.state).removeprefix("STATE_").lower().replace("_", " ")
        why = f": {roll_out.error.message}" if roll_out.HasField("error") else ""
        yield f"the roll-out of version {roll_out.version} is {state}{why}"


def _spec_text(spec: pb.DeploymentSpec) -> str:
    """How many replicas there are to be, of what, and how rows wait for them."""
    scaling, number = spec.autoscaling, str(spec.num_replicas)
    if spec.HasField("autoscaling"):
        number = f"{scaling.min_replicas} to {scaling.max_replicas}"
    delay_ms = spec.max_batch_delay.ToMicroseconds() / 1000
    return (
        f"replicas: {number}, threads each: {spec.threads_per_replica}; batches of up to {spec.max_batch_size} rows, "
        f"which wait up to {delay_ms:g} ms for others; at most {spec.max_queued_rows:,} rows wait"
    )
