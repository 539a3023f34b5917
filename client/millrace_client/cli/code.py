"""`millrace code push|list|show|delete`: bundles of code; `millrace train run`: pushes code and creates a job "
"from it."""

from __future__ import annotations

import ast
import math
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import click
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from millrace.train.v1 import code_bundle_pb2, resources_pb2
from millrace_client.cli.command import (
    INTERRUPTED,
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
from millrace_client.cli.progress import watch_job
from millrace_client.cli.spec_options import kwargs_of, own_entry, workers_of
from millrace_client.connection import Millrace
from millrace_client.specs import program_spec

# --- Bundles of code ---

COLLECTION = "codeBundles"
MAX_SHOWN_MODULES = 5


@click.group()
def code() -> None:
    """Push, list, show and delete bundles of your own code."""


@code.command(cls=PlainCommand)
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@address_options
@json_option
def push(source: Path, as_json: bool, **values: Any) -> None:
    """Pack SOURCE (a folder, a wheel or a .py file) and store it under its digest.

    .git, __pycache__, virtual environments and what a .millraceignore in the folder names stay out.
    """
    with connected(values) as millrace:
        bundle = push_source(millrace, source)
    if as_json:
        print_json(bundle)
    else:
        console().print(f"[bold]{bundle.name}[/]", soft_wrap=True)
        console().print(f"  {bundle.file_count:,} files, {size_text(bundle.size_bytes)}")


@code.command("list", cls=PlainCommand)
@address_options
@json_option
def list_(as_json: bool, **values: Any) -> None:
    """List the bundles that are stored."""
    with connected(values) as millrace:
        bundles = list(millrace.train.list_code_bundles())
    if as_json:
        print_json({"code_bundles": bundles})
    elif not bundles:
        console().print("None yet.")
    else:
        table = new_table("bundle", "files", "size", "pushed", "modules", numbers=("files", "size"))
        for bundle in bundles:
            table.add_row(
                bundle.name,
                f"{bundle.file_count:,}",
                size_text(bundle.size_bytes),
                f"{bundle.create_time.ToDatetime():%Y-%m-%d %H:%M}",
                verbatim(_modules(bundle)),
            )
        console().print(table)


@code.command(cls=PlainCommand)
@click.argument("bundle")
@address_options
@json_option
def show(bundle: str, as_json: bool, **values: Any) -> None:
    """Show BUNDLE (codeBundles/… or its digest): its modules and what it requires."""
    with connected(values) as millrace:
        found = millrace.train.get_code_bundle(full_name(COLLECTION, bundle))
    if as_json:
        print_json(found)
        return
    console().print(f"[bold]{found.name}[/]", soft_wrap=True)
    console().print(f"  {found.file_count:,} files, {size_text(found.unpacked_size_bytes)}")
    for title, texts in (("module", found.modules), ("requires", found.requirements)):
        for text in texts:
            console().print(f"  [dim]{title}[/] ", verbatim(text), sep="", soft_wrap=True)


@code.command(cls=PlainCommand)
@click.argument("bundle")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_options
@json_option
def delete(bundle: str, yes: bool, as_json: bool, **values: Any) -> None:
    """Delete BUNDLE, which no training job names any more."""
    name = full_name(COLLECTION, bundle)
    if not (yes or as_json):
        click.confirm(f"Delete {name}?", abort=True)
    with connected(values) as millrace:
        millrace.train.delete_code_bundle(name)
    if as_json:
        print_json({"deleted": name})
    else:
        console().print(f"[bold]{name}[/] is deleted.", soft_wrap=True)


def push_source(millrace: Millrace, source: Path) -> code_bundle_pb2.CodeBundle:
    """Push a folder, wheel or file. An unusable source fails the command."""
    from millrace_client.train import NotABundle

    try:
        return millrace.train.push_code(source)
    except NotABundle as error:
        raise CommandFailed(f"{source}: {error}") from None


def set_own_code(millrace: Millrace, spec: resources_pb2.TrainingSpec, model: str, *, dry_run: bool = False) -> None:
    """Push the code of the user's own model, and name it in the specification.

    A dry run only computes the bundle's name.
    """
    from millrace_client.train import NotABundle, bundle_name

    own = own_entry(model)
    if own is None:
        return
    source, _ = own
    try:
        spec.model.code_bundle = bundle_name(source) if dry_run else push_source(millrace, source).name
    except NotABundle as error:
        raise CommandFailed(f"{source}: {error}") from None


def _modules(bundle: code_bundle_pb2.CodeBundle) -> str:
    more = len(bundle.modules) - MAX_SHOWN_MODULES
    return ", ".join(bundle.modules[:MAX_SHOWN_MODULES]) + (f" and {more} more" if more > 0 else "")


# --- Train run ---

MAX_STEM = 40
SCRIPT = ".py"


class Seconds(click.FloatRange):
    """A finite number of seconds above 0."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return seconds


SECONDS = Seconds()


@click.command(cls=PlainCommand)
@click.argument("program", metavar="SCRIPT.py | SOURCE:SCRIPT.py | FILE.py:FUNCTION | SOURCE:MODULE:FUNCTION")
@click.option("--job", default="", metavar="ID", help="Of the training job. Default: after the script or module.")
@click.option(
    "--config",
    multiple=True,
    metavar="KEY=VALUE",
    help="Of the function's argument, of a script in place of what its trainers give; a value as in JSON.",
)
@click.option("--dataset-version", default="", metavar="NAME", help="datasets/d/versions/v, for get_dataset_shard.")
@click.option("--train-split", default="", metavar="SPLIT", help="Default: train.")
@click.option("--validation-split", default="", metavar="SPLIT", help="Default: validation, where there is one.")
@click.option(
    "--workers",
    callback=workers_of,
    metavar="N|MIN..MAX",
    help="MIN..MAX: it goes on with fewer, from MIN up, while nodes are lost. 0: local mode, to debug. Default: 2, and "
    "of a script what its ScalingConfig says.",
)
@click.option("--min-workers", default=0, help="The fewest to go on with, of --workers. Default: --workers.")
@click.option("--cpus", default=0.0, help="Of each worker. Default: 1.")
@click.option(
    "--gpus", "--gpus-per-worker", type=float, help="Of each worker. Default: 1 where the cluster has enough."
)
@click.option("--threads", default=1, show_default=True, help="CPU threads of each worker.")
@click.option("--seed", default=0, show_default=True)
@click.option("--keep-newest", default=0, metavar="N", help="Checkpoints that are kept. Default: all.")
@click.option("--keep-best", default=0, metavar="N", help="Besides them the best ones. Default: 1.")
@click.option("--best-metric", default="", metavar="NAME", help="One that it reports. Default: the newest is the best.")
@click.option("--max-failures", type=int, help="Default: 3.")
@click.option(
    "--data-resume",
    type=click.Choice(["replay", "continue"]),
    default="replay",
    show_default=True,
    help="Where a shard goes on after a checkpoint in the middle of an epoch.",
)
@click.option(
    "--remainder",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    show_default=True,
    help="What becomes of rows that workers cannot share equally.",
)
@click.option(
    "--hang-after",
    type=SECONDS,
    metavar="SECONDS",
    help="Without a step, batch or report. Default: by the median step.",
)
@click.option("--stop-within", type=SECONDS, metavar="SECONDS", help="After a request to stop. Default: 300.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), help="Default: nccl where each worker has a GPU.")
@click.option("--timeout", type=SECONDS, metavar="SECONDS", help="Of a collective operation. Default: 1800.")
@click.option("--dry-run", is_flag=True, help="Push the code, have the service check the job, and make none.")
@click.option(
    "--watch/--no-watch", "then_watch", default=None, help="Stay and show its progress. Default: of a script, yes."
)
@address_options
@json_option
def run(
    program: str,
    job: str,
    config: tuple[str, ...],
    then_watch: bool | None,
    dry_run: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Run code of your own: push it, and create a training job of it.

    SCRIPT.py is run as `python SCRIPT.py` would, and its TorchTrainers' fit() calls train on the job's workers. The
    file alone is pushed; SOURCE:SCRIPT.py pushes the folder SOURCE, for a script with modules of its own.
    FILE.py:FUNCTION and SOURCE:MODULE:FUNCTION call a training function, without a trainer. What the options leave
    open of workers, failures and checkpoints, a script's ScalingConfig, RunConfig and TorchConfig say.

    \b
    millrace train run cells.py --workers 2
    millrace train run ./project:train.py --config epochs=3
    millrace train run train.py:train_loop_per_worker --workers 1..4 --dry-run
    millrace train run ./project:train:train_loop_per_worker --config lr=0.001 --workers 2 --watch
    """
    source, entry = _parts(program)
    settings = kwargs_of(config, "--config")
    sizes = _sizes(values["workers"], values["min_workers"], is_script=entry.endswith(SCRIPT))
    if then_watch is None:
        then_watch = entry.endswith(SCRIPT)
    with connected(values) as millrace:
        bundle = push_source(millrace, source)
        spec = program_spec(
            bundle,
            entry,
            config=settings,
            dataset_version=values["dataset_version"],
            train_split=values["train_split"],
            validation_split=values["validation_split"],
            **sizes,
            threads_per_worker=values["threads"],
            seed=values["seed"],
            max_failures=values["max_failures"],
            data_resume=values["data_resume"].upper(),
            remainder=values["remainder"].upper(),
            placement=_placement(values),
            checkpoints=resources_pb2.CheckpointPolicy(
                **{name: values[name] for name in ("keep_newest", "keep_best", "best_metric")}
            ),
        )
        for name in ("hang_after", "stop_within"):
            if values[name] is not None:
                getattr(spec.program, name).CopyFrom(_duration(values[name]))
        job_id = job.removeprefix("trainingJobs/") or _new_id(entry)
        made = millrace.train.create_training_job(job_id, spec, validate_only=dry_run)
        if dry_run:
            _show_dry_run(made, as_json)
        elif then_watch:
            if not as_json:
                console().print(f"[bold]{made.name}[/] runs {bundle.name}", soft_wrap=True)
            try:
                watch_job(millrace, made, 0, as_json)
            except KeyboardInterrupt:
                raise _interrupted(millrace, made.name, may_ask=not as_json and can_ask()) from None
        elif as_json:
            print_json(made)
        else:
            name = made.name.rpartition("/")[2]
            console().print(
                f"[bold]{made.name}[/] is durable and starts. millrace train watch {name} shows how it goes."
            )


def can_ask() -> bool:
    """Return whether a person can answer questions."""
    return sys.stdin.isatty()


def _interrupted(millrace: Millrace, name: str, *, may_ask: bool) -> CommandFailed:
    """Make the error that ends the command. The job is cancelled if the user says so, and continues otherwise."""
    job = name.rpartition("/")[2]
    remedy = f"millrace train watch {job} shows how it goes on; millrace train cancel {job} ends it"
    left = CommandFailed(f"interrupted, and {name} goes on", remedy=remedy, code=INTERRUPTED)
    if not may_ask:
        return left
    try:
        answer = click.prompt(
            f"Cancel {name}, or leave it running?",
            type=click.Choice(["cancel", "leave"]),
            default="leave",
            err=True,
        )
    except click.Abort:  # Ctrl-C again
        return left
    if answer != "cancel":
        return left
    millrace.train.cancel_training_job(name)
    return CommandFailed(f"{name} is asked to stop at its next report", code=INTERRUPTED)


def _show_dry_run(checked: resources_pb2.TrainingJob, as_json: bool) -> None:
    """Print the job as the service would create it, with its defaults."""
    if as_json:
        print_json(checked)
        return
    click.echo(json_format.MessageToJson(checked.spec, preserving_proto_field_name=True))
    click.echo(f"The service would make {checked.name} of it. The code is pushed, and no job was made.")


def _placement(values: dict[str, Any]) -> resources_pb2.Placement:
    placement = resources_pb2.Placement(
        cpus_per_worker=values["cpus"], gpus_per_worker=values["gpus"], backend=values["backend"] or ""
    )
    if values["timeout"] is not None:
        placement.timeout.CopyFrom(_duration(values["timeout"]))
    return placement


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _sizes(workers: tuple[int, int] | None, fewest: int, *, is_script: bool) -> dict[str, Any]:
    """Return the specification's size fields; none if a script sets them."""
    if fewest and workers is None:
        raise click.UsageError(f"--min-workers {fewest} needs the most, too; use --workers {fewest}..MAX")
    if workers is None:
        return {} if is_script else {"num_workers": 2}
    if fewest and workers[0]:
        raise click.UsageError("--workers MIN..MAX has the fewest already; leave --min-workers out")
    return {"num_workers": workers[1], "min_workers": fewest or workers[0]}


def _parts(program: str) -> tuple[Path, str]:
    """Return the path to push, and the entry in it."""
    if program.endswith(SCRIPT):
        return _script(program)
    source, _, function = program.rpartition(":")
    source, _, module = source.rpartition(":")
    if module.endswith(SCRIPT) and function:
        source, module = _module_of(source, module)
    if not (source and module and function):
        raise _wrong(
            f"{program!r}: use a script, e.g. cells.py or ./project:cells.py, or a function of a file, e.g. "
            "train.py:train_loop_per_worker, or SOURCE:MODULE:FUNCTION, e.g. ./project:train:train_loop_per_worker"
        )
    if not Path(source).exists():
        raise _wrong(f"{source!r} does not exist: name a folder, a wheel or a .py file")
    return Path(source), f"{module}:{function}"


def _module_of(source: str, path: str) -> tuple[str, str]:
    """Return the path to push, and the module, for a function that is named by its file.

    `path` lies in the folder `source`, or stands alone.
    """
    if source:
        return source, path.removesuffix(SCRIPT).replace("/", ".")
    if Path(path).is_file() and (beside := _imported_beside(Path(path))):
        raise _wrong(
            f"{path} imports {', '.join(beside)} beside it, and only the file would be pushed; push its folder: "
            f"{Path(path).parent}:{Path(path).stem}:FUNCTION"
        )
    return path, Path(path).stem


def _script(program: str) -> tuple[Path, str]:
    source, _, script = program.rpartition(":")
    path = Path(source, script)
    if source and not Path(source).is_dir():
        raise _wrong(f"{source!r} is no folder: name the one that has {script}")
    if not path.is_file():
        raise _wrong(f"{str(path)!r} does not exist: name a script")
    if source:
        return Path(source), Path(script).as_posix()
    if beside := _imported_beside(path):
        raise _wrong(
            f"{path} imports {', '.join(beside)} beside it, and only the file would be pushed; push its folder: "
            f"{path.parent}:{path.name}"
        )
    return path, path.name


def _imported_beside(script: Path) -> list[str]:
    """Return the modules in the script's folder that it imports anywhere.

    For a script that cannot be parsed, the service reports the problem.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return []
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    folder = script.parent
    return sorted(
        name
        for name in names - {script.stem}
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
    )


def _wrong(text: str) -> click.BadParameter:
    return click.BadParameter(text, param_hint="program")


def _new_id(entry: str) -> str:
    module = entry.removesuffix(SCRIPT).rpartition("/")[2] if entry.endswith(SCRIPT) else entry.partition(":")[0]
    stem = re.sub(r"[^a-z0-9]+", "-", module.lower()).strip("-")[:MAX_STEM]
    return f"{stem if stem[:1].isalpha() else 'run'}-{uuid.uuid4().hex[:8]}"
