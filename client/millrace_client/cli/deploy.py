"""`millrace deploy`."""

from __future__ import annotations

from typing import Any

import click

from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.lineage import print_lineage
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json


def _fewest_and_most(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """The same twice for a plain number."""
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
    callback=_fewest_and_most,
    metavar="N|MIN..MAX",
    help="So many, or as many as the load asks for, e.g. 1..4. Default: 1.",
)
@click.option("--cpus", type=float, help="CPUs that Ray keeps free for each replica, e.g. 0.5. Default: its threads.")
@click.option("--gpus", default=0.0, help="GPUs for each replica, e.g. 0.25, or 1. Default: 0.")
@click.option("--max-batch-size", default=0, help="Rows in one call of the model. Default: 32.")
@click.option("--no-wait", is_flag=True, help="Return once it is durable; it loads meanwhile.")
@address_options
@json_option
def deploy(
    deployment: str,
    checkpoint: str,
    replicas: tuple[int, int] | None,
    cpus: float | None,
    gpus: float,
    max_batch_size: int,
    no_wait: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Serve CHECKPOINT as the model DEPLOYMENT (an id).

    CHECKPOINT is trainingJobs/j/checkpoints/c, or a job (trainingJobs/j or j) or sweep (sweeps/s) for its best one.
    """
    with connected(values) as millrace:
        if checkpoint.startswith("sweeps/"):
            sweep, checkpoint = checkpoint, millrace.train.get_sweep(checkpoint).best_checkpoint
            if not checkpoint:
                raise CommandFailed(f"{sweep} has no checkpoint yet", remedy="wait for the first validation of a trial")
        operation = millrace.deployments.create_deployment(
            deployment.removeprefix("deployments/"),
            full_name("trainingJobs", checkpoint),
            max_batch_size=max_batch_size,
            cpus_per_replica=cpus,
            gpus_per_replica=gpus,
            **_replicas(replicas),
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


def _replicas(wanted: tuple[int, int] | None) -> dict[str, Any]:
    """The fields of the specification that say how many replicas."""
    if wanted is None:
        return {}
    from millrace_client.deployments import autoscaling

    least, most = wanted
    return {"num_replicas": least} if least == most else {"autoscaling": autoscaling(least, most)}
