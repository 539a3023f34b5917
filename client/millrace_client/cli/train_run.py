"""`millrace train run`: pushes code and creates a training job of it in one go."""

from __future__ import annotations

import ast
import re
import uuid
from pathlib import Path
from typing import Any

import click

from millrace.train.v1 import resources_pb2
from millrace_client.cli.code import push_source
from millrace_client.cli.command import PlainCommand, address_options, connected, console, json_option, print_json
from millrace_client.cli.progress import watch_job
from millrace_client.cli.step_options import kwargs_of
from millrace_client.specs import program_spec

MAX_STEM = 40
SCRIPT = ".py"


@click.command(cls=PlainCommand)
@click.argument("program", metavar="SCRIPT.py | SOURCE:SCRIPT.py | SOURCE:MODULE:FUNCTION")
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
@click.option("--workers", default=2, show_default=True)
@click.option("--min-workers", default=0, help="The fewest to go on with. Default: --workers.")
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
    "--watch/--no-watch", "then_watch", default=None, help="Stay and show its progress. Default: of a script, yes."
)
@address_options
@json_option
def run(program: str, job: str, config: tuple[str, ...], then_watch: bool | None, as_json: bool, **values: Any) -> None:
    """Run code of your own: push it, and create a training job of it.

    SCRIPT.py is run as `python SCRIPT.py` would, and its TorchTrainers' fit() calls train on the job's workers. The
    file alone is pushed; SOURCE:SCRIPT.py pushes the folder SOURCE, for a script with modules of its own.
    SOURCE:MODULE:FUNCTION calls a training function, without a trainer. What the options say counts, whatever a
    script's ScalingConfig and RunConfig say.

    \b
    millrace train run cells.py --workers 2
    millrace train run ./project:train.py --config epochs=3
    millrace train run ./project:train:train_loop_per_worker --config lr=0.001 --workers 2 --watch
    """
    source, entry = _parts(program)
    settings = kwargs_of(config, "--config")
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
        made = millrace.train.create_training_job(job.removeprefix("trainingJobs/") or _new_id(entry), spec)
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


def _parts(program: str) -> tuple[Path, str]:
    """What is pushed, and the entry in it."""
    if program.endswith(SCRIPT):
        return _script(program)
    source, _, function = program.rpartition(":")
    source, _, module = source.rpartition(":")
    if not (source and module and function):
        raise _wrong(
            f"{program!r}: use a script, e.g. cells.py or ./project:cells.py, or SOURCE:MODULE:FUNCTION, e.g. "
            "./project:train:train_loop_per_worker"
        )
    if not Path(source).exists():
        raise _wrong(f"{source!r} does not exist: name a folder, a wheel or a .py file")
    return Path(source), f"{module}:{function}"


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
    """The modules in the script's folder that it imports at any place. Of what cannot be parsed the service says it."""
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
