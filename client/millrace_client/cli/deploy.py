"""`millrace deploy`."""

from __future__ import annotations

from typing import Any

import click

from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.lineage import print_lineage
from millrace_client.cli.options import DurationType, address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json
from millrace_client.cli.version_keeping import keep_option


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
    """The further fields of the specification; what was left out is left to the server."""
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
    """Those that say how many replicas."""
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
