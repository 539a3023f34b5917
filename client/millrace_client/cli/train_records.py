"""`millrace train coverage|metrics|logs|export|report`: a run's records; `download|import`: its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from millrace.train.v1 import checkpoint_import_pb2, code_bundle_pb2, resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
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
    new_table,
    print_json,
    size_text,
    verbatim,
)
from millrace_client.cli.spec_options import (
    OF_TRAINING,
    TRANSFORM,
    OrderedCommand,
    kwargs_of,
    own_entry,
    step_options,
    steps_of,
)
from millrace_client.connection import Millrace
from millrace_client.errors import OutOfRange
from millrace_client.specs import import_spec

# --- Records ---

MAX_SHOWN_IDS = 10
MAX_EPOCH = 2**31 - 1
# States of a job whose newest checkpoint is its last one, unless it is resumed.
OVER = (
    resources_pb2.TrainingJob.STATE_SUCCEEDED,
    resources_pb2.TrainingJob.STATE_FAILED,
    resources_pb2.TrainingJob.STATE_CANCELLED,
)
# Descriptions of the evidence for a coverage.
WITNESSES = {
    pb.Coverage.WITNESS_UNSPECIFIED: "Counted are rows whose gradients the optimizer has applied (OPTIMIZER).",
    pb.Coverage.WITNESS_OPTIMIZER: "Counted are rows whose gradients the optimizer has applied (OPTIMIZER).",
    pb.Coverage.WITNESS_GIVEN: "Counted are rows that the program was given (GIVEN); its use of them is not known.",
    pb.Coverage.WITNESS_INDICES: "Counted are indices that a DataLoader's sampler drew (INDICES), no row ids.",
    pb.Coverage.WITNESS_NONE: "The program reads its own data (NONE): nothing is known of its rows.",
}


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--epoch", type=int, help="Only this one, from 0.")
@click.option("--checkpoint", default="", metavar="NAME", help="Up to this one; default: the newest.")
@click.option("--split", default="", metavar="SPLIT", help="Of a program: whose shard. Default: the training split.")
@address_options
@json_option
def coverage(job: str, epoch: int | None, checkpoint: str, split: str, as_json: bool, **values: Any) -> None:
    """Show how often each row of JOB's training split was consumed, by epoch.

    Exit code 1 where a row was consumed twice in an epoch, or left out of one that is over. Rows of steps that the loss
    scaler of a FLOAT16 run skipped are counted by themselves, and are no such fault; nor are the rows of an epoch that
    a program's workers cannot share equally, unless program.remainder is KEEP.
    """
    name = full_name("trainingJobs", job)
    if checkpoint and "/" not in checkpoint:
        checkpoint = f"{name}/checkpoints/{checkpoint}"
    with connected(values) as millrace:
        epochs = begun_epochs(millrace, name, split) if epoch is None else [epoch]
        found = [millrace.train.get_coverage(name, one, checkpoint=checkpoint, shard=split) for one in epochs]
        remainder = most_left_over(millrace, found)
        is_over = millrace.train.get_training_job(name).state in OVER
    if as_json:
        print_json({"coverage": found})
    else:
        skips = any(one.skipped_steps for one in found)
        numbers = ("rows", "seen once", "missing", "repeated", *(("skipped", "skipped steps") if skips else ()))
        table = new_table("epoch", "", *numbers, numbers=("epoch", *numbers))
        for one in found:
            counts = [one.row_count, one.seen_once, one.missing, one.repeated]
            counts += [one.skipped, one.skipped_steps] if skips else []
            table.add_row(str(one.epoch), _epoch_state(one, is_over), *(f"{count:,}" for count in counts))
        console().print(table)
        for one in found:
            _print_ids(one)
        if found:
            console().print(f"up to {found[-1].checkpoint or 'now: there is no checkpoint yet'}", soft_wrap=True)
        for witness in sorted({one.witness for one in found}):
            console().print(WITNESSES[witness], soft_wrap=True)
        if any(one.epoch_done and 0 < one.missing <= remainder for one in found):
            text = "Missing are rows that the workers cannot share equally; program.remainder KEEP gives them, too."
            console().print(text, soft_wrap=True)
    wrong = [one for one in found if one.repeated or (one.epoch_done and one.missing > remainder)]
    if wrong and as_json:
        click.get_current_context().exit(1)
    if wrong:
        raise CommandFailed(f"{name}: epoch {wrong[0].epoch} did not have every row exactly once")


def _epoch_state(one: pb.Coverage, is_over: bool) -> str:
    """Describe an epoch's state in a word.

    A run that has ended may have left its last epoch early, or not begun it.
    """
    if one.epoch_done:
        return "done"
    if not is_over:
        return "at work"
    return "left early" if one.seen_once or one.repeated else "not begun"


def begun_epochs(millrace: Millrace, name: str, split: str = "") -> list[int]:
    """Return the epochs that the newest checkpoint covers in part or in full; [0] without a checkpoint.

    `split` is that of a program's shard.
    """
    checkpoints = list(millrace.train.list_checkpoints(name))
    if not checkpoints:
        return [0]
    newest = max(checkpoints, key=lambda one: one.step)
    spec = millrace.train.get_training_job(name).spec
    if spec.HasField("program"):
        return _epochs_of_program(millrace, name, split)
    # A checkpoint's epoch is that of its next step, which may not have been done.
    return list(range(min(newest.epoch + 1, spec.epochs)))


def _epochs_of_program(millrace: Millrace, name: str, split: str) -> list[int]:
    """Return the epochs of a program's shard.

    A program's checkpoints do not record the shard's epoch. The error for an impossible epoch does.
    """
    try:
        millrace.train.get_coverage(name, MAX_EPOCH, shard=split)
    except OutOfRange as refused:
        return list(range(int(refused.metadata["epochs"])))
    raise CommandFailed(f"{name}: the service knows no end of its epochs")


def most_left_over(millrace: Millrace, found: Sequence[pb.Coverage]) -> int:
    """Return the most rows of an epoch that a program's shard leaves out to give all workers the same number; else
    0."""
    given = [one for one in found if one.witness == pb.Coverage.WITNESS_GIVEN]
    if not given:
        return 0
    spec = millrace.train.get_training_job(given[0].training_job).spec
    keeps = spec.program.remainder == code_bundle_pb2.Program.REMAINDER_KEEP
    return 0 if keeps else max(spec.num_workers - 1, 0)


def _print_ids(one: pb.Coverage) -> None:
    for what, ids, count in (
        ("repeated", one.repeated_row_ids, one.repeated),
        ("missing", one.missing_row_ids if one.epoch_done else (), one.missing),
        ("skipped", one.skipped_row_ids, one.skipped),
    ):
        if ids:
            shown = ", ".join(map(str, ids[:MAX_SHOWN_IDS])) + (", …" if count > MAX_SHOWN_IDS else "")
            console().print(f"epoch {one.epoch}: [yellow]{what}[/] rows {shown}", soft_wrap=True)


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--after", "after_step", default=0, metavar="STEP", help="Only steps behind this one.")
@click.option("--last", type=int, metavar="N", help="Only the last N steps.")
@address_options
@json_option
def metrics(job: str, after_step: int, last: int | None, as_json: bool, **values: Any) -> None:
    """Show the metrics of JOB's steps; with --json, each step as a line."""
    with connected(values) as millrace:
        points = list(millrace.train.list_metrics(full_name("trainingJobs", job), after_step=after_step))
    points = points[-last:] if last else points
    if as_json:
        for point in points:
            print_json(point)
        return
    names = sorted({name for point in points for name in point.values})
    table = new_table("step", "epoch", "attempt", *names, numbers=("step", "epoch", "attempt", *names))
    for point in points:
        cells = (f"{point.values[name]:.5g}" if name in point.values else "" for name in names)
        # A program's report may name no epoch.
        epoch = str(point.epoch) if point.epoch >= 0 else ""
        table.add_row(str(point.step), epoch, str(point.attempt), *cells)
    console().print(table if points else "None yet.")


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--attempt", default=0, metavar="N", help="Default: the newest.")
@click.option("--rank", type=int, help="Only this one; -1 is the attempt's own process. Default: all.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the attempt is over.")
@address_options
@json_option
def logs(job: str, attempt: int, rank: int | None, follow: bool, as_json: bool, **values: Any) -> None:
    """Print what the workers of JOB logged; with several, each line begins with its rank."""
    with connected(values) as millrace:
        found = millrace.train.stream_logs(full_name("trainingJobs", job), attempt=attempt, rank=rank, follow=follow)
        newest = 0
        for one in found:
            if as_json:
                print_json(one)
                continue
            newest = newest or one.attempt
            label = "" if rank is not None else "own  " if one.rank < 0 else f"{one.rank:<4} "
            for line in one.text.splitlines():
                click.echo(label + "".join(char if char.isprintable() or char == "\t" else " " for char in line))
        if not attempt and newest > 1:
            # On standard error, because the log itself may go into a file.
            text = f"This is attempt {newest}; --attempt {newest - 1} shows the one before it."
            click.echo(text, err=True)


@click.command(cls=PlainCommand)
@click.argument("job")
@click.option("--html", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Where the page goes.")
@address_options
@json_option
def report(job: str, html: Path, as_json: bool, **values: Any) -> None:
    """Write a page about JOB: curves, restarts with their causes, coverage, checkpoints and what was asked for."""
    from millrace_client.report.pages import collect, training_page

    with connected(values) as millrace:
        name = full_name("trainingJobs", job)
        found = collect(millrace.train, name, begun_epochs(millrace, name))
    html.write_text(training_page(found), encoding="utf-8")
    if as_json:
        print_json({"training_job": name, "html": str(html)})
    else:
        console().print(f"Wrote {html}", soft_wrap=True)


@click.command(cls=PlainCommand)
@click.argument("job")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--to", "target", required=True, type=click.Choice(["tensorboard", "mlflow", "wandb"]), help="What will read it."
)
@address_options
@json_option
def export(job: str, folder: Path, target: str, as_json: bool, **values: Any) -> None:
    """Write JOB's metrics and parameters below FOLDER, as another tool reads them; nothing is sent to anybody."""
    from millrace_client.export import ExporterMissing, export_run

    with connected(values) as millrace:
        name = full_name("trainingJobs", job)
        run = millrace.train.get_training_job(name)
        points = list(millrace.train.list_metrics(name))
        try:
            written = export_run(target, run, points, folder)
        except ExporterMissing as error:
            raise CommandFailed(str(error), remedy=f"pip install 'millrace[{target}]'") from None
    if as_json:
        print_json({"training_job": name, "target": target, **written.as_dict()})
    else:
        console().print(f"Wrote {written.points:,} steps to {written.folder}; {written.hint}", soft_wrap=True)


# --- Checkpoints ---

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
