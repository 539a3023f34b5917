"""`millrace deploy`."""

from __future__ import annotations

from typing import Any

import click

from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.lineage import print_lineage
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json


@click.command(cls=PlainCommand)
@click.argument("deployment")
@click.argument("checkpoint")
@click.option("--replicas", default=0, help="Default: 1.")
@click.option("--max-batch-size", default=0, help="Rows in one call of the model. Default: 32.")
@click.option("--no-wait", is_flag=True, help="Return once it is durable; it loads meanwhile.")
@address_options
@json_option
def deploy(
    deployment: str, checkpoint: str, replicas: int, max_batch_size: int, no_wait: bool, as_json: bool, **values: Any
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
            num_replicas=replicas,
            max_batch_size=max_batch_size,
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
