"""Steps of a transform as options of a command. Their order is the order of the steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from google.protobuf import json_format

from millrace.common.v1 import transform_pb2
from millrace_client import steps
from millrace_client.cli.command import PlainCommand
from millrace_client.steps import Step

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
