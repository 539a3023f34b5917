"""`millrace train download|import`: downloads checkpoints and imports weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from millrace.train.v1 import checkpoint_import_pb2, resources_pb2
from millrace_client.cli.code import push_source
from millrace_client.cli.command import (
    FAILED,
    NOT_FOUND,
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    full_name,
    json_option,
    print_json,
    size_text,
    verbatim,
)
from millrace_client.cli.step_options import OF_TRAINING, OrderedCommand, kwargs_of, step_options, steps_of
from millrace_client.cli.train_specs import TRANSFORM, own_entry
from millrace_client.connection import Millrace
from millrace_client.specs import import_spec

COLLECTION = "trainingJobs"
# The most names shown of each list of a report.
MAX_SHOWN_LINES = 10


@click.command(cls=PlainCommand)
@click.argument("source", metavar="CHECKPOINT|JOB")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--best", is_flag=True, help="The best of the job; the default where a job is named.")
@click.option("--step", type=int, metavar="N", help="The one of the job at step N; of a program, of its report N.")
@address_options
@json_option
def download(source: str, directory: Path, best: bool, step: int | None, as_json: bool, **values: Any) -> None:
    """Write the files of a checkpoint into DIRECTORY, each compared with its digest.

    DIRECTORY is there once all files are. The same command again goes on with a download that was cut off. It leaves a
    folder with other content alone.
    """
    name = full_name(COLLECTION, source)
    is_job = name.count("/") == 1
    if best and step is not None:
        raise click.UsageError("--best and --step name two checkpoints; give one of them")
    if not is_job and (best or step is not None):
        raise click.UsageError("--best and --step choose among a job's checkpoints; name a job with them")
    with connected(values) as millrace:
        if step is not None:
            name = _at_step(millrace, name, step)
        found = _downloaded(millrace, name, directory, as_json)
    if as_json:
        print_json({"checkpoint": found, "directory": str(directory)})
    else:
        console().print(f"[bold]{found.name}[/] is in {directory} ({size_text(found.size_bytes)})", soft_wrap=True)


def _at_step(millrace: Millrace, job: str, step: int) -> str:
    checkpoints = list(millrace.train.list_checkpoints(job))
    for checkpoint in checkpoints:
        if checkpoint.step == step:
            return checkpoint.name
    there = ", ".join(str(one.step) for one in checkpoints)
    remedy = f"it has some at steps {there}" if there else "it has none yet"
    raise CommandFailed(f"{job} has no checkpoint at step {step}", remedy=remedy, code=NOT_FOUND)


def _downloaded(millrace: Millrace, name: str, directory: Path, as_json: bool) -> resources_pb2.Checkpoint:
    """Download, with a bar on a terminal."""
    if as_json or not console().is_terminal:
        return millrace.train.download_checkpoint(name, directory)
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console(), transient=True) as progress:
        task = progress.add_task(name, total=None)

        def show(done: int, size_bytes: int) -> None:
            progress.update(task, completed=done, total=size_bytes)

        return millrace.train.download_checkpoint(name, directory, on_progress=show)


@click.command("import", cls=OrderedCommand)
@click.argument("job")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--model", required=True, help="A builder, mlp, or your own: PATH:MODULE:NAME.")
@click.option("--model-arg", multiple=True, metavar="NAME=VALUE", help="Of the builder, e.g. hidden=[64,32].")
@click.option("--in-channels", default=0, help="Of an mlp the width of its input. A builder needs it.")
@click.option("--num-classes", default=0, help="Of a regression the numbers that it gives. A builder needs it.")
@click.option("--task", type=click.Choice(["classification", "regression"]), default="classification")
@click.option(
    "--input-shape", default="", metavar="N,…", help="Of one row that it is asked about, e.g. 224,224,3 of pixels."
)
@click.option("--input-dtype", default="", metavar="TYPE", help="Default: float32; of pixels uint8.")
@click.option("--input-column", default="", metavar="COLUMN", help="Default: image, or what --concat makes.")
@click.option(
    "--dataset-version", default="", metavar="NAME", help="Rows as this version has them, instead of a shape."
)
@click.option("--class-names", default="", metavar="NAME,…", help="Of the classes 0, 1, …")
@click.option("--key", default="", help="Where the state dict is in a torch file, e.g. state_dict.")
@click.option("--rename-prefix", multiple=True, metavar="PREFIX=TO", help="Names that begin so, e.g. module.=")
@click.option("--rename", multiple=True, metavar="REGEX=TO", help="What matches in a name.")
@click.option("--drop", multiple=True, metavar="REGEX", help="Leave out what has such a name.")
@click.option("--allow-missing", multiple=True, metavar="REGEX", help="Of the model: may be missing, and starts anew.")
@click.option("--allow-non-finite", is_flag=True, help="Take weights that are NaN or infinite.")
@step_options(OF_TRAINING, TRANSFORM)
@click.option("--dry-run", is_flag=True, help="Say what fits; make no job.")
@address_options
@json_option
def import_(job: str, source: Path, dry_run: bool, as_json: bool, **values: Any) -> None:
    """Make a checkpoint of SOURCE: a safetensors file, a torch state dict or a Hugging Face folder.

    It becomes trainingJobs/JOB/checkpoints/imported, to fine-tune (--initial-checkpoint) and to deploy. Steps are
    options, in their order: what is done to rows before the model sees them.

    \b
    millrace train import pets resnet.pth --model torchvision.resnet18 --in-channels 3 --num-classes 37 \\
      --input-shape 224,224,3 --input-dtype uint8 --to-float --normalize 0.485,0.456,0.406:0.229,0.224,0.225 \\
      --rename-prefix module.= --key state_dict
    """
    own = own_entry(values["model"])
    if own is None and (lacking := [name for name in ("in_channels", "num_classes") if not values[name]]):
        raise click.UsageError(f"name --{lacking[0].replace('_', '-')}: a builder needs it")
    spec = _import_spec(values)
    with connected(values) as millrace:
        if own is not None:
            spec.model.code_bundle = push_source(millrace, own[0]).name
        try:
            made = millrace.train.import_checkpoint(
                job.removeprefix(f"{COLLECTION}/"), source, spec, validate_only=dry_run
            )
        except ValueError as error:
            raise CommandFailed(str(error)) from None
    if as_json:
        print_json(made)
    else:
        _show_report(made.report)
        if made.checkpoint.name:
            console().print(
                f"[bold]{made.checkpoint.name}[/] ({size_text(made.checkpoint.size_bytes)})", soft_wrap=True
            )
    if dry_run and not made.report.fits:
        click.get_current_context().exit(FAILED)


def _import_spec(values: dict[str, Any]) -> checkpoint_import_pb2.ImportSpec:
    steps = steps_of(values, OF_TRAINING, TRANSFORM)
    made = [step.concat.into for step in steps if step.HasField("concat")]
    try:
        shape = [int(one) for one in values["input_shape"].split(",") if one]
    except ValueError:
        raise click.BadParameter(f"{values['input_shape']!r}: use numbers, e.g. 224,224,3") from None
    renames = [
        checkpoint_import_pb2.NameMap.Rename(**{kind: _pair(option, text)[0]}, replacement=_pair(option, text)[1])
        for option, kind in (("rename_prefix", "prefix"), ("rename", "pattern"))
        for text in values[option]
    ]
    own = own_entry(values["model"])
    return import_spec(
        model=values["model"] if own is None else resources_pb2.Model(entry=own[1]),
        model_kwargs=kwargs_of(values["model_arg"], "--model-arg"),
        in_channels=values["in_channels"],
        num_classes=values["num_classes"],
        task=f"TASK_{values['task'].upper()}",
        input_shape=shape,
        input_dtype=values["input_dtype"],
        input_column=values["input_column"] or (made[-1] if made else ""),
        dataset_version=values["dataset_version"],
        class_names=[name for name in values["class_names"].split(",") if name],
        transform=steps,
        names=checkpoint_import_pb2.NameMap(
            key=values["key"], renames=renames, drop=values["drop"], allow_missing=values["allow_missing"]
        ),
        allow_non_finite=values["allow_non_finite"],
    )


def _pair(option: str, text: str) -> tuple[str, str]:
    """Parse `REGEX=TO`. TO has no `=`, and may be empty."""
    match, found, replacement = text.rpartition("=")
    if not (found and match):
        flag = f"--{option.replace('_', '-')}"
        raise click.BadParameter(f"{text!r}: use WHAT=TO, e.g. {flag} module.=", param_hint=flag)
    return match, replacement


def _show_report(report: checkpoint_import_pb2.ImportReport) -> None:
    where = f" at {report.key}" if report.key else ""
    console().print(
        f"{report.format.lower().replace('_', ' ')}{where}: {report.fitted_count:,} tensors fit", soft_wrap=True
    )
    misfits = [f"{misfit.source} ({misfit.in_file}, the model has {misfit.in_model})" for misfit in report.misfits]
    non_finite = [f"{one.source} ({one.count:,})" for one in report.non_finite]
    for what, count, names in (
        ("missing", report.missing_count, list(report.missing)),
        ("unexpected", report.unexpected_count, list(report.unexpected)),
        ("of another shape or type", report.misfit_count, misfits),
        ("with NaN or infinities", report.non_finite_count, non_finite),
        ("no tensors, left out", report.other_count, list(report.others)),
    ):
        if count:
            more = f" and {count - MAX_SHOWN_LINES:,} more" if count > MAX_SHOWN_LINES else ""
            console().print(
                f"  {count:,} {what}: ", verbatim(", ".join(names[:MAX_SHOWN_LINES]) + more), sep="", soft_wrap=True
            )
    if report.dropped_count:
        console().print(f"  {report.dropped_count:,} dropped")
