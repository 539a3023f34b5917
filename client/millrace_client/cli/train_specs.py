"""The options that a training specification is made of, and specifications as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from google.protobuf import json_format
from google.protobuf.message import Message

from millrace.train.v1 import resources_pb2
from millrace_client.specs import optimizer, training_spec
from millrace_client.steps import normalize, to_float

Function = TypeVar("Function", bound=Callable[..., Any])
Read = TypeVar("Read", bound=Message)

OPTIONS = (
    click.option("--dataset-version", metavar="NAME", help="datasets/d/versions/v"),
    click.option("--model", default="torchvision.resnet18", show_default=True, help="A builder of torchvision.models."),
    click.option("--in-channels", default=1, show_default=True),
    click.option("--num-classes", default=10, show_default=True),
    click.option("--mean", default=0.1307, show_default=True, help="Of the pixels 0..1, to normalise by."),
    click.option("--std", default=0.3081, show_default=True),
    click.option("--optimizer", "optimizer_name", default="AdamW", show_default=True),
    click.option("--learning-rate", default=0.002, show_default=True),
    click.option("--cosine/--constant", default=True, show_default=True, help="How the learning rate moves."),
    click.option("--epochs", default=3, show_default=True),
    click.option("--batch-size", default=128, show_default=True, help="Rows of a step over all workers."),
    click.option("--workers", default=2, show_default=True, help="0: local mode, without Ray Train, to debug."),
    click.option("--threads", default=1, show_default=True, help="CPU threads of each worker."),
    click.option("--seed", default=0, show_default=True),
    click.option(
        "--allow-cpu-fallback", is_flag=True, help="Go on on CPUs while the cluster has lost the GPUs; else it waits."
    ),
)


def spec_options(function: Function) -> Function:
    """The options that `spec_of` reads."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def spec_of(values: dict[str, Any]) -> resources_pb2.TrainingSpec:
    if not values["dataset_version"]:
        raise click.UsageError("name --dataset-version datasets/d/versions/v (or give --spec)")
    spec = training_spec(
        values["dataset_version"],
        model=values["model"],
        in_channels=values["in_channels"],
        num_classes=values["num_classes"],
        transform=[to_float(), normalize(values["mean"], values["std"])],
        optimizer=optimizer(values["optimizer_name"], values["learning_rate"], cosine=values["cosine"]),
        epochs=values["epochs"],
        global_batch_size=values["batch_size"],
        num_workers=values["workers"],
        threads_per_worker=values["threads"],
        seed=values["seed"],
    )
    if values["allow_cpu_fallback"]:
        spec.placement.allow_cpu_fallback = True
    return spec


def read_message(path: Path, message: Read) -> Read:
    """The message in a file of protobuf's JSON."""
    try:
        return json_format.Parse(path.read_text(), message)
    except json_format.ParseError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--spec") from None
