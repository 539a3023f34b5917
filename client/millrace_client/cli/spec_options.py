"""Options of commands that become specifications: the steps of a transform, and training specifications, also from
files.

The order of the options is the order of the steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from google.protobuf import json_format
from google.protobuf.message import Message

from millrace.common.v1 import transform_pb2
from millrace.train.v1 import resources_pb2
from millrace_client import steps
from millrace_client.cli.command import PlainCommand, was_given
from millrace_client.specs import optimizer, training_spec
from millrace_client.steps import Step, normalize, to_float

# --- Steps of a transform ---

Function = TypeVar("Function", bound=Callable[..., Any])

STATISTICS = ("mean", "median", "mode")
# A number with a decimal comma. JSON has none, so it would be passed on as a text.
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+([eE][-+]?\d+)?")
_ORDER = "millrace.order_of_options"


@dataclass(frozen=True)
class StepOption:
    """One option of a step.

    `make` raises `ValueError` for a text that does not match `metavar`; without a metavar it takes no text.
    """

    flag: str
    metavar: str
    example: str
    help: str
    make: Callable[[str], Sequence[Step]]

    @property
    def name(self) -> str:
        return "step_" + self.flag.removeprefix("--").replace("-", "_")

    def steps(self, text: str) -> Sequence[Step]:
        try:
            return self.make(text)
        except ValueError as error:
            said = f" ({error})" if str(error) else ""
            problem = f"{text!r}: use {self.metavar}, e.g. {self.flag} {self.example}{said}"
            raise click.BadParameter(problem, param_hint=self.flag) from None


class OrderedCommand(PlainCommand):
    """Records the order in which its options were given, repetitions included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # The parser changes the list that it is given.
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        ctx.meta[_ORDER] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


def step_options(options: Sequence[StepOption], file_option: str = "--steps") -> Callable[[Function], Function]:
    """Add the options that `steps_of` reads to an `OrderedCommand`, and `file_option` for a file of steps."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            kind: dict[str, Any] = (
                {"multiple": True, "metavar": option.metavar} if option.metavar else {"is_flag": True}
            )
            function = click.option(option.flag, option.name, help=f"Step: {option.help}", **kind)(function)
        return click.option(
            file_option,
            "steps_file",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help='Steps: JSON of a Transform, {"steps": [{"column": "age", "standardize": {}}, …]}.',
        )(function)

    return decorate


def steps_of(values: dict[str, Any], options: Sequence[StepOption], file_option: str = "--steps") -> list[Step]:
    """Remove the steps' options from `values` and return the steps in the given order.

    The steps of a file come at the position of its option.
    """
    by_name = {option.name: option for option in options}
    given = {name: values.pop(name) for name in (*by_name, "steps_file")}
    rest = {name: iter(one) for name, one in given.items() if isinstance(one, tuple)}
    made: list[Step] = []
    for name in click.get_current_context().meta[_ORDER]:
        if name == "steps_file":
            made += _steps_of_file(next(rest[name]), file_option)
        elif name in by_name:
            made += by_name[name].steps(next(rest[name]) if name in rest else "")
    return made


def _steps_of_file(file: Path, option: str) -> Sequence[Step]:
    try:
        return list(json_format.Parse(file.read_bytes(), transform_pb2.Transform()).steps)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file} is no Transform: {error}", param_hint=option) from None


def value_of(text: str) -> Any:
    """Parse a number, true, false, a quoted text or a list as JSON; otherwise return the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def names_of(text: str) -> list[str]:
    """Parse `A,B,…`. Raises `ValueError` for an empty name."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError("a name is empty")
    return names


def pair_of(text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`. Raises `ValueError`."""
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise ValueError
    return name, value


def size_of(text: str) -> tuple[int, int]:
    """Parse `HxW` into height and width. Raises `ValueError`."""
    height, found, width = text.partition("x")
    if not found:
        raise ValueError
    return int(height), int(width)


def _each(make: Callable[[str], Step]) -> Callable[[str], Sequence[Step]]:
    return lambda text: [make(name) for name in names_of(text)]


def _of_pair(make: Callable[[str, str], Step]) -> Callable[[str], Sequence[Step]]:
    return lambda text: [make(*pair_of(text))]


def _rename(text: str) -> Sequence[Step]:
    names: dict[str, str] = {}
    for old, new in map(pair_of, names_of(text)):
        if old in names:
            raise ValueError(f"{old!r} is there twice")
        names[old] = new
    return [steps.rename(names)]


def _fill_nulls(column: str, text: str) -> Step:
    if text in STATISTICS:
        return steps.fill_nulls(column, statistic=text)
    value = value_of(text)
    return steps.fill_nulls(column, value if isinstance(value, int | float | str | bool) else text)


def _normalize(text: str) -> Sequence[Step]:
    mean, found, std = text.partition(":")
    if not found:
        raise ValueError
    return [steps.normalize(_numbers(mean), _numbers(std))]


def _random_crop(text: str) -> Sequence[Step]:
    size, _, padding = text.partition(":")
    height, width = size_of(size)
    return [steps.random_crop(height, width, padding=int(padding or 0))]


def _color_jitter(text: str) -> Sequence[Step]:
    brightness, contrast, saturation = _numbers(text)
    return [steps.color_jitter(brightness=brightness, contrast=contrast, saturation=saturation)]


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _concat(into: str, columns: str) -> Step:
    return steps.concat(names_of(columns), into=into)


def _tokenize(column: str, text: str) -> Step:
    length, found, which = text.partition(":")
    if not found:
        raise ValueError
    if which.isdecimal():
        return steps.tokenize(column, int(length), vocabulary_size=int(which))
    try:
        return steps.tokenize(column, int(length), tokenizer=Path(which).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(str(error)) from None


CONCAT = StepOption(
    "--concat", "INTO=COLUMN,…", "features=age,fare", "numeric columns to one float32 tensor.", _of_pair(_concat)
)
# For versions: each option names its columns.
OF_VERSIONS = (
    StepOption(
        "--select",
        "COLUMN,…",
        "age,fare",
        "keep these columns, in this order.",
        lambda text: [steps.select(*names_of(text))],
    ),
    StepOption("--drop", "COLUMN,…", "id", "take these columns away.", lambda text: [steps.drop(*names_of(text))]),
    StepOption("--rename", "OLD=NEW,…", "sex=gender", "give columns other names.", _rename),
    StepOption(
        "--cast",
        "COLUMN=TYPE",
        "price=double",
        "to a type in Arrow's spelling, e.g. int64, double, timestamp[us]; values must be exact.",
        _of_pair(steps.cast),
    ),
    StepOption(
        "--filter",
        "EXPRESSION",
        "'age > 3'",
        "keep the rows for which it is true.",
        lambda text: [steps.filter_rows(text)],
    ),
    StepOption(
        "--fill-nulls",
        "COLUMN=VALUE",
        "age=median",
        "with mean, median or mode of the training split, else with VALUE: a number, true, false or a text.",
        _of_pair(_fill_nulls),
    ),
    StepOption("--standardize", "COLUMN,…", "age,fare", "(x - mean) / deviation, learnt.", _each(steps.standardize)),
    StepOption("--min-max-scale", "COLUMN,…", "age,fare", "to 0..1, learnt.", _each(steps.min_max_scale)),
    StepOption(
        "--ordinal-encode",
        "COLUMN,…",
        "species",
        "to the value's place among those of the training split.",
        _each(steps.ordinal_encode),
    ),
    StepOption(
        "--one-hot", "COLUMN,…", "sex,island", "to a vector of zeros and one 1, learnt.", _each(steps.one_hot_encode)
    ),
    StepOption(
        "--bucketize",
        "COLUMN=NUMBER,…",
        "age=18,65",
        "to the number of boundaries at or below.",
        _of_pair(lambda column, text: steps.bucketize(column, _numbers(text))),
    ),
    StepOption(
        "--tokenize",
        "COLUMN=LENGTH:VOCABULARY|FILE",
        "review=128:8000",
        "texts to LENGTH ids and a mask, by a tokenizer of VOCABULARY learnt tokens, or by the JSON of one in FILE.",
        _of_pair(_tokenize),
    ),
    CONCAT,
    StepOption("--decode-image", "COLUMN,…", "image", "JPEG, PNG, … to pixels.", _each(steps.decode_image)),
    StepOption(
        "--resize",
        "COLUMN=HEIGHTxWIDTH",
        "image=64x64",
        "images to this size in pixels.",
        _of_pair(lambda column, text: steps.resize(column, *size_of(text))),
    ),
    StepOption(
        "--center-crop",
        "COLUMN=HEIGHTxWIDTH",
        "image=56x56",
        "the middle of images.",
        _of_pair(lambda column, text: steps.center_crop(column, *size_of(text))),
    ),
    StepOption("--grayscale", "COLUMN,…", "image", "images to one channel.", _each(steps.grayscale)),
)
# For training jobs: all but `concat` work on the input column.
OF_TRAINING = (
    CONCAT,
    StepOption("--decode-image", "", "", "JPEG, PNG, … to pixels.", lambda _: [steps.decode_image("")]),
    StepOption(
        "--resize",
        "HEIGHTxWIDTH",
        "64x64",
        "images to this size in pixels.",
        lambda text: [steps.resize("", *size_of(text))],
    ),
    StepOption(
        "--center-crop",
        "HEIGHTxWIDTH",
        "56x56",
        "the middle of images.",
        lambda text: [steps.center_crop("", *size_of(text))],
    ),
    StepOption("--random-crop", "HEIGHTxWIDTH[:PADDING]", "28x28:4", "a place drawn at random.", _random_crop),
    StepOption(
        "--random-flip",
        "PROBABILITY",
        "0.5",
        "mirror from left to right.",
        lambda text: [steps.random_flip(horizontal=float(text))],
    ),
    StepOption(
        "--random-rotation",
        "DEGREES",
        "10",
        "by an angle of up to so many degrees.",
        lambda text: [steps.random_rotation(float(text))],
    ),
    StepOption(
        "--color-jitter",
        "BRIGHTNESS,CONTRAST,SATURATION",
        "0.2,0.2,0",
        "each by a factor from 1 - x to 1 + x.",
        _color_jitter,
    ),
    StepOption("--to-float", "", "", "pixels to 0..1, channels first.", lambda _: [steps.to_float()]),
    StepOption(
        "--normalize", "MEAN,…:STD,…", "0.1307:0.3081", "(x - mean) / std, one for all channels or each.", _normalize
    ),
)


def kwargs_of(texts: Sequence[str], option: str) -> Mapping[str, Any]:
    """Parse `NAME=VALUE` texts. A value is JSON, else a text."""
    made: dict[str, Any] = {}
    for text in texts:
        try:
            name, value = pair_of(text)
        except ValueError:
            raise click.BadParameter(
                f"{text!r}: use NAME=VALUE, e.g. {option} dropout=0.1", param_hint=option
            ) from None
        if name in made:
            raise click.BadParameter(f"{name} has a value already; name each once", param_hint=option)
        if DECIMAL_COMMA.fullmatch(value):
            number = value.replace(",", ".")
            raise click.BadParameter(
                f"{text!r}: numbers have a point, e.g. {name}={number}; a list is {name}=[{value}], and a text "
                f"{name}='\"{value}\"'",
                param_hint=option,
            )
        made[name] = value_of(value)
    return made


# --- Training specifications ---

# The file option of `train create`; that of versions is `--steps`.
TRANSFORM = "--transform"
MLP, CAUSAL_LM = "mlp", "transformers.causal_lm"
# Options with a default value, and the fields that they set.
WITH_DEFAULTS = {
    "task": "task",
    "target_scaling": "target_scaling",
    "model": "model.builder",
    "model_arg": "model.kwargs",
    "in_channels": "model.in_channels",
    "num_classes": "model.num_classes",
    "optimizer_name": "optimizer.name",
    "optimizer_arg": "optimizer.kwargs",
    "learning_rate": "optimizer.learning_rate",
    "cosine": "optimizer.schedule",
    "epochs": "epochs",
    "batch_size": "global_batch_size",
    "precision": "precision",
    "algorithms": "acceleration.algorithms",
    "transform_device": "acceleration.transform_device",
    "parallel": "placement.parallel",
    "ingest": "ingest",
    "workers": "num_workers",
    "threads": "threads_per_worker",
}
OF_OPTIMIZER = ("optimizer_name", "optimizer_arg", "learning_rate", "cosine")
BESIDE_FILE = ("spec_file", "then_watch", "dry_run", "as_json", "data_address", "train_address", "inference_address")
Read = TypeVar("Read", bound=Message)


def workers_of(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Parse `N` or `MIN..MAX` into (fewest or 0, most); None if the option was not given and has no default."""
    if text is None:
        return None
    fewest, elastic, most = text.partition("..")
    try:
        numbers = (int(fewest), int(most)) if elastic else (0, int(fewest))
    except ValueError:
        raise click.BadParameter(f"{text!r}: use a number, or MIN..MAX, e.g. 1..4") from None
    if elastic and not 1 <= numbers[0] <= numbers[1]:
        raise click.BadParameter(f"{text!r}: use 1 or more, and MAX at least MIN, e.g. 1..4")
    return numbers


OPTIONS = (
    click.option("--dataset-version", metavar="NAME", help="datasets/d/versions/v"),
    click.option("--train-split", default="", metavar="SPLIT", help="Default: train."),
    click.option("--validation-split", default="", metavar="SPLIT", help="Default: validation, where there is one."),
    click.option("--input-column", default="", metavar="COLUMN", help="Default: image, or what --concat makes."),
    click.option(
        "--input-columns",
        default="",
        metavar="COLUMN,…",
        help="The inputs of a model of your own that takes several, as a dict of tensors; steps are in --transform.",
    ),
    click.option("--label-column", default="", metavar="COLUMN", help="Default: label."),
    click.option("--task", type=click.Choice(["classification", "regression"]), default="classification"),
    click.option(
        "--target-scaling",
        type=click.Choice(["none", "standard"]),
        default="none",
        help="Of a regression: learn (target - mean) / deviation; answers are in the target's own unit.",
    ),
    click.option(
        "--model",
        default="torchvision.resnet18",
        show_default=True,
        help="A builder of torchvision.models, mlp, transformers.sequence_classification, an installed one, or "
        "SOURCE:MODULE:NAME of your own code.",
    ),
    click.option("--model-arg", multiple=True, metavar="NAME=VALUE", help="Of the builder, e.g. hidden=[64,32]."),
    click.option(
        "--in-channels",
        default=1,
        show_default=True,
        help="Of an mlp the width of its input; of texts twice their tokens.",
    ),
    click.option("--num-classes", default=10, show_default=True, help="Of a regression the numbers that it gives."),
    click.option("--initial-checkpoint", default="", metavar="NAME", help="Start from its weights."),
    click.option(
        "--mean",
        default=0.1307,
        show_default=True,
        help="Of the pixels 0..1, to normalise by, where no step is given and the model is no mlp.",
    ),
    click.option("--std", default=0.3081, show_default=True),
    click.option("--loss", default="", metavar="NAME", help="cross_entropy, mse, l1, huber, or an installed one."),
    click.option("--loss-arg", multiple=True, metavar="NAME=VALUE", help="Of the loss, e.g. delta=2."),
    click.option("--label-smoothing", default=0.0, help="Of cross_entropy, 0 to below 1."),
    click.option("--metrics", default="", metavar="NAME,…", help="Besides the loss, e.g. f1,auroc or mae,r2."),
    click.option("--optimizer", "optimizer_name", default="AdamW", show_default=True),
    click.option("--optimizer-arg", multiple=True, metavar="NAME=VALUE", help="Of the optimizer, e.g. momentum=0.9."),
    click.option("--learning-rate", default=0.002, show_default=True),
    click.option("--cosine/--constant", default=True, show_default=True, help="How the learning rate moves."),
    click.option("--epochs", default=3, show_default=True),
    click.option("--batch-size", default=128, show_default=True, help="Rows of a step over all workers."),
    click.option("--precision", type=click.Choice(["float32", "tf32", "bfloat16", "float16"]), default="float32"),
    click.option("--accumulation-steps", default=0, help="Parts in which a worker computes its rows of a step."),
    click.option("--max-gradient-norm", default=0.0, help="Default: gradients are not clipped."),
    click.option("--compile", is_flag=True, help="Compile the model with torch.compile."),
    click.option("--channels-last", is_flag=True, help="Lay images out with their channels last: faster on a GPU."),
    click.option("--prefetch-batches", type=int, help="Copied to the GPU ahead of their steps. Default: 2."),
    click.option(
        "--algorithms",
        type=click.Choice(["deterministic", "fastest"]),
        default="deterministic",
        help="Whether a GPU gives the same bits each time.",
    ),
    click.option(
        "--transform-device",
        type=click.Choice(["cpu", "worker"]),
        default="cpu",
        help="Who crops, flips and normalises training images: the loader, or the worker's GPU.",
    ),
    click.option("--checkpoint-every-steps", default=0, metavar="N", help="Besides that at the end of each epoch."),
    click.option("--checkpoint-every", default=0.0, metavar="SECONDS", help="And when so long has gone by."),
    click.option("--keep-newest", default=0, metavar="N", help="Checkpoints that are kept. Default: all."),
    click.option("--keep-best", default=0, metavar="N", help="Besides them the best ones. Default: 1."),
    click.option(
        "--best-metric",
        default="",
        metavar="NAME",
        help="Default: validation_accuracy; of a regression validation_loss.",
    ),
    click.option("--patience", default=0, metavar="EPOCHS", help="End where --best-metric gets no better for so long."),
    click.option("--min-delta", default=0.0, help="With --patience: what counts as better."),
    click.option("--parallel", type=click.Choice(["ddp", "fsdp"]), default="ddp", help="fsdp shards the model."),
    click.option("--ingest", type=click.Choice(["threads", "ray-data"]), default="threads", help="Who prepares rows."),
    click.option("--min-workers", default=0, help="The fewest to go on with. Default: --workers."),
    click.option("--cpus", default=0.0, help="Of each worker. Default: 1."),
    click.option("--gpus", type=float, help="Of each worker. Default: 1 where the cluster has enough."),
    click.option(
        "--workers",
        callback=workers_of,
        default="2",
        metavar="N|MIN..MAX",
        show_default=True,
        help="MIN..MAX: it goes on with fewer, from MIN up, while nodes are lost. 0: local mode, to debug.",
    ),
    click.option("--threads", default=1, show_default=True, help="CPU threads of each worker."),
    click.option("--seed", default=0, show_default=True),
    click.option(
        "--group-by-length",
        default="",
        metavar="COLUMN",
        help="Rows of similar length share steps, by the lengths of this column, e.g. attention_mask.",
    ),
    click.option("--allow-non-finite", is_flag=True, help="Train on inputs and labels that are NaN or infinite, too."),
    click.option(
        "--allow-cpu-fallback", is_flag=True, help="Go on on CPUs while the cluster has lost the GPUs; else it waits."
    ),
)


def spec_options(function: Function) -> Function:
    """Add the options that `spec_of` reads."""
    for option in reversed(OPTIONS):
        function = option(function)
    return step_options(OF_TRAINING, TRANSFORM)(function)


def spec_of(values: dict[str, Any]) -> resources_pb2.TrainingSpec:
    """Make a specification from options. Without steps the rows are pixels, except for an mlp."""
    if not values["dataset_version"]:
        raise click.UsageError("name --dataset-version datasets/d/versions/v (or give --spec)")
    steps = steps_of(values, OF_TRAINING, TRANSFORM)
    if steps and (unused := [name for name in ("mean", "std") if was_given(name)]):
        raise click.UsageError(f"--{unused[0]} is for pixels without other steps; use --normalize MEAN:STD")
    own = own_entry(values["model"])
    if not steps and values["model"] != MLP and own is None:
        steps = [to_float(), normalize(values["mean"], values["std"])]
    made = [step.concat.into for step in steps if step.HasField("concat")]
    inputs = [name for name in values["input_columns"].split(",") if name]
    return training_spec(
        values["dataset_version"],
        train_split=values["train_split"],
        validation_split=values["validation_split"],
        input_column=values["input_column"] or (made[-1] if made and not inputs else ""),
        input_columns=inputs,
        label_column=values["label_column"],
        task=_task(values),
        target_scaling=f"TARGET_SCALING_{values['target_scaling'].upper()}",
        model=values["model"] if own is None else resources_pb2.Model(entry=own[1]),
        model_kwargs=kwargs_of(values["model_arg"], "--model-arg"),
        in_channels=values["in_channels"] if own is None or was_given("in_channels") else 0,
        num_classes=values["num_classes"] if own is None or was_given("num_classes") else 0,
        initial_checkpoint=values["initial_checkpoint"],
        transform=steps,
        loss=_loss(values),
        metrics=[name for name in values["metrics"].split(",") if name],
        optimizer=_optimizer(values) if own is None or any(map(was_given, OF_OPTIMIZER)) else None,
        precision=f"PRECISION_{values['precision'].upper()}",
        accumulation_steps=values["accumulation_steps"],
        max_gradient_norm=values["max_gradient_norm"],
        compile=values["compile"],
        acceleration=_acceleration(values),
        checkpoint_every_steps=values["checkpoint_every_steps"],
        checkpoints=_checkpoints(values),
        early_stopping=_early_stopping(values),
        placement=_placement(values),
        ingest=f"INGEST_{values['ingest'].upper().replace('-', '_')}",
        min_workers=_effective_min_workers(values),
        epochs=values["epochs"],
        global_batch_size=values["batch_size"],
        num_workers=values["workers"][1],
        threads_per_worker=values["threads"],
        seed=values["seed"],
        allow_non_finite=values["allow_non_finite"],
        group_by_length=values["group_by_length"],
    )


def own_entry(model: str) -> tuple[Path, str] | None:
    """Return the source path and `module:name` of the user's own model; None for a builder's name."""
    source, _, name = model.rpartition(":")
    source, _, module = source.rpartition(":")
    if not source:
        return None
    if not Path(source).exists():
        raise click.BadParameter(
            f"{source!r} does not exist: name a folder, a wheel or a .py file, as in ./project:net:build",
            param_hint="--model",
        )
    return Path(source), f"{module}:{name}"


def given_spec_of(values: dict[str, Any]) -> resources_pb2.TrainingSpec:
    """Return only what the options say. The service suggests the rest."""
    steps = any(was_given(one.name) for one in OF_TRAINING) or was_given("steps_file")
    spec = spec_of(values)
    if not (steps or was_given("mean") or was_given("std")):
        spec.ClearField("transform")
    for option, path in WITH_DEFAULTS.items():
        outer, _, inner = path.rpartition(".")
        if not was_given(option):
            (getattr(spec, outer) if outer else spec).ClearField(inner)
    if not any(was_given(name) for name in ("loss", "loss_arg", "label_smoothing")):
        spec.ClearField("loss")
    for outer in ("model", "optimizer", "checkpoints", "placement", "acceleration"):
        if not getattr(spec, outer).ByteSize():
            spec.ClearField(outer)
    if was_given("patience") and not values["patience"]:
        spec.early_stopping.SetInParent()
    return spec


def _effective_min_workers(values: dict[str, Any]) -> int:
    fewest: int = values["workers"][0]
    if fewest and values["min_workers"]:
        raise click.UsageError("--workers MIN..MAX has the fewest already; leave --min-workers out")
    return fewest or int(values["min_workers"])


def _task(values: dict[str, Any]) -> str:
    """Return the task. That of a causal language model is the service's to say."""
    if values["model"] == CAUSAL_LM and not was_given("task"):
        return "TASK_UNSPECIFIED"
    return f"TASK_{values['task'].upper()}"


def _loss(values: dict[str, Any]) -> resources_pb2.Loss:
    loss = resources_pb2.Loss(name=values["loss"], label_smoothing=values["label_smoothing"])
    loss.kwargs.update(kwargs_of(values["loss_arg"], "--loss-arg"))
    return loss


def _optimizer(values: dict[str, Any]) -> resources_pb2.Optimizer:
    made = optimizer(values["optimizer_name"], values["learning_rate"], cosine=values["cosine"])
    made.kwargs.update(kwargs_of(values["optimizer_arg"], "--optimizer-arg"))
    return made


def _checkpoints(values: dict[str, Any]) -> resources_pb2.CheckpointPolicy:
    names = ("keep_newest", "keep_best", "best_metric")
    policy = resources_pb2.CheckpointPolicy(**{name: values[name] for name in names})
    if values["checkpoint_every"]:
        policy.every.FromNanoseconds(round(values["checkpoint_every"] * 1e9))
    return policy


def _early_stopping(values: dict[str, Any]) -> resources_pb2.EarlyStopping | None:
    if values["patience"]:
        return resources_pb2.EarlyStopping(patience=values["patience"], min_delta=values["min_delta"])
    if was_given("min_delta"):
        raise click.UsageError("--min-delta needs --patience EPOCHS")
    return None


def _acceleration(values: dict[str, Any]) -> resources_pb2.Acceleration:
    return resources_pb2.Acceleration(
        channels_last=values["channels_last"],
        prefetch_batches=values["prefetch_batches"],
        algorithms=f"ALGORITHMS_{values['algorithms'].upper()}",
        transform_device=f"TRANSFORM_DEVICE_{values['transform_device'].upper()}",
    )


def _placement(values: dict[str, Any]) -> resources_pb2.Placement:
    return resources_pb2.Placement(
        parallel=values["parallel"].upper(),
        cpus_per_worker=values["cpus"],
        gpus_per_worker=values["gpus"],
        allow_cpu_fallback=values["allow_cpu_fallback"],
    )


def refuse_beside_file() -> None:
    """Raise `UsageError` for an option that repeats what the `--spec` file says."""
    context = click.get_current_context()
    for param in context.command.params:
        if isinstance(param, click.Option) and param.name not in BESIDE_FILE and was_given(param.name or ""):
            raise click.UsageError(f"--spec has the whole specification; leave {param.opts[0]} out, or --spec")


def read_message(path: Path, message: Read) -> Read:
    """Read a message from a file of protobuf's JSON."""
    try:
        return json_format.Parse(path.read_text(), message)
    except json_format.ParseError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--spec") from None
