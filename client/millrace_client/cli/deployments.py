"""`millrace deployments list|show|delete`, and the group that `traffic` belongs to."""

from __future__ import annotations

from typing import Any

import click

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace_client.cli.deployment_traffic import traffic
from millrace_client.cli.deployment_view import print_deployment, replicas_text, traffic_text
from millrace_client.cli.exits import PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, new_table, print_json, state_text


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
