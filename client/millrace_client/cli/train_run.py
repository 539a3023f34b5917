"""`millrace train run`: pushes code and creates a training job of it in one go."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import click

from millrace.train.v1 import resources_pb2
from millrace_client.cli.code import push_source
from millrace_client.cli.exits import PlainCommand
from millrace_client.cli.options import address_options, connected, json_option
from millrace_client.cli.output import console, print_json
from millrace_client.cli.step_options import kwargs_of
from millrace_client.cli.train_watching import watch_job
from millrace_client.specs import program_spec

MAX_STEM = 40


@click.command(cls=PlainCommand)
@click.argument("entry", metavar="SOURCE:MODULE:FUNCTION")
@click.option("--job", default="", metavar="ID", help="Of the training job. Default: after the module.")
@click.option("--config", multiple=True, metavar="KEY=VALUE", help="Of the function's argument; a value as in JSON.")
@click.option("--dataset-version", default="", metavar="NAME", help="datasets/d/versions/v, for get_dataset_shard.")
@click.option("--train-split", default="", metavar="SPLIT", help="Default: train.")
@click.option("--validation-split", default="", metavar="SPLIT", help="Default: validation, where there is one.")
@click.option("--workers", default=2, show_default=True)
@click.option("--min-workers", default=0, help="The fewest to go on with. Default: --workers.")
@click.option("--cpus", default=0.0, help="Of each worker. Default: 1.")
@click.option("--gpus", type=float, help="Of each worker. Default: 1 where the cluster has enough.")
@click.option("--threads", default=1, show_default=True, help="CPU threads of each worker.")
@click.option("--seed", default=0, show_default=True)
@click.option("--keep-newest", default=0, metavar="N", help="Checkpoints that are kept. Default: all.")
@click.option("--keep-best", default=0, metavar="N", help="Besides them the best ones. Default: 1.")
@click.option("--best-metric", default="", metavar="NAME", help="One that it reports. Default: the newest is the best.")
@click.option("--max-failures", type=int, help="Default: 3.")
@click.option("--watch", "then_watch", is_flag=True, help="Stay and show its progress.")
@address_options
@json_option
def run(entry: str, job: str, config: tuple[str, ...], then_watch: bool, as_json: bool, **values: Any) -> None:
    """Run a training function of your own: push SOURCE and create a job that calls MODULE:FUNCTION.

    \b
    millrace train run ./project:train:train_loop_per_worker --config lr=0.001 --workers 2 --watch
    """
    source, module, function = _parts(entry)
    settings = kwargs_of(config, "--config")
    with connected(values) as millrace:
        bundle = push_source(millrace, source)
        spec = program_spec(
            bundle,
            f"{module}:{function}",
            config=settings,
            dataset_version=values["dataset_version"],
            train_split=values["train_split"],
            validation_split=values["validation_split"],
            num_workers=values["workers"],
            min_workers=values["min_workers"],
            threads_per_worker=values["threads"],
            seed=values["seed"],
            max_failures=values["max_failures"],
            placement=resources_pb2.Placement(cpus_per_worker=values["cpus"], gpus_per_worker=values["gpus"]),
            checkpoints=resources_pb2.CheckpointPolicy(
                **{name: values[name] for name in ("keep_newest", "keep_best", "best_metric")}
            ),
        )
        made = millrace.train.create_training_job(job.removeprefix("trainingJobs/") or _new_id(module), spec)
        if then_watch:
            if not as_json:
                console().print(f"[bold]{made.name}[/] runs {bundle.name}", soft_wrap=True)
            watch_job(millrace, made, 0, as_json)
        elif as_json:
            print_json(made)
        else:
            name = made.name.rpartition("/")[2]
            console().print(
                f"[bold]{made.name}[/] is durable and starts. millrace train watch {name} shows how it goes."
            )


def _parts(entry: str) -> tuple[Path, str, str]:
    source, _, rest = entry.rpartition(":")
    source, _, module = source.rpartition(":")
    if not (source and module and rest):
        raise click.BadParameter(
            f"{entry!r}: use SOURCE:MODULE:FUNCTION, e.g. ./project:train:train_loop_per_worker", param_hint="entry"
        )
    if not Path(source).exists():
        raise click.BadParameter(f"{source!r} does not exist: name a folder, a wheel or a .py file", param_hint="entry")
    return Path(source), module, rest


def _new_id(module: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "-", module.lower()).strip("-")[:MAX_STEM]
    return f"{stem if stem[:1].isalpha() else 'run'}-{uuid.uuid4().hex[:8]}"
