"""Whether a checkpoint's model can be run over a version: from which step of its chain on, and from which columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from shared.checkpoint import CheckpointContent
from shared.checkpoint.missing_values import NanReading, float_columns, may_be_non_finite, nan_reading
from shared.dataset_version.manifest import Manifest
from shared.errors import FailedPrecondition, invalid_fields
from shared.transforms import Pipeline, Schema, TensorType, schema_of_columns
from shared.transforms.schema import ColumnType
from shared.transforms.steps.decoding import image_columns
from shared.transforms.steps.step import Step

# What errors call the checkpoint's chain of steps.
CHAIN = "checkpoint.transform"
# They say which rows and columns there are, and leave every value as it is.
KEEP_VALUES = ("select", "drop", "filter")


@dataclass(frozen=True)
class Preparation:
    """From rows of a version to the model's `input_column`, float32 (B, *shape). `reads` are the version's columns that
    it takes, `images` those of them whose images it decodes, and `floats` those that hold floats, whose NaN are read as
    `nans` says. `looked_through` is whether the input may have a NaN or an infinity. Picklable."""

    steps: Pipeline
    reads: list[str]
    images: list[str]
    input_column: str
    nans: NanReading
    floats: list[str]
    looked_through: bool


def preparation(content: CheckpointContent, source: Manifest, source_name: str) -> Preparation:
    """The steps of the checkpoint's chain that the version's rows have not gone through, as serving runs them.

    Raises `FailedPrecondition` where the rows went through others, and `InvalidArgument` naming each column that is
    missing or of another type, or a step that does not fit.
    """
    chain = chained(content.transforms).steps
    begin = _place_behind(chain, chained(source.transforms).steps, source_name)
    before = Pipeline(chain[:begin], field=CHAIN).output(content.ingested_schema)
    steps = Pipeline(chain[begin:], field=CHAIN).serving([content.input_column], before)
    reads = steps.reads([content.input_column], before)
    given = {name: before[name] for name in reads}
    _check_columns(given, schema_of_columns(source.columns), source_name)
    _check_input(steps.output(before)[content.input_column], content)
    images = image_columns(steps.steps, given)
    return Preparation(
        steps,
        reads,
        images,
        content.input_column,
        nans=nan_reading(content, steps.steps, given, gone=chain[:begin]),
        floats=float_columns(given),
        looked_through=may_be_non_finite(given, images),
    )


def chained(transforms: Iterable[Mapping[str, Any]]) -> Pipeline:
    """Frozen `Transform`s as JSON, one after the other."""
    return reduce(Pipeline.then, map(Pipeline.from_config, transforms), Pipeline([]))


def _place_behind(chain: Sequence[Step], gone: Sequence[Step], source_name: str) -> int:
    """The index in `chain` from which on it is still to do, after the steps `gone`: those of them that change values
    must be the first such ones of the chain, with all that they learnt."""
    place = 0
    for step in gone:
        if step.op in KEEP_VALUES:
            continue
        while place < len(chain) and chain[place].op in KEEP_VALUES:
            place += 1
        if place == len(chain) or chain[place].to_proto() != step.to_proto():
            raise _prepared_otherwise(step, source_name)
        place += 1
    return place


def _prepared_otherwise(step: Step, source_name: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"source: the rows of {source_name} went through {step.op}, and those of the checkpoint did not at that "
        "place, or with other values learnt; name a version of raw rows, or the one that it was trained on",
        reason="PREPARED_OTHERWISE",
        metadata={"resource": source_name, "step": step.op},
        fields=[("source", f"{step.op} is not the checkpoint's")],
    )


def _check_columns(wanted: Schema, given: Schema, source_name: str) -> None:
    problems = []
    for name, one in wanted.items():
        if name not in given:
            problems.append(("source", source_name, f"column {name!r} is missing: the checkpoint takes {one}"))
        elif not _same(given[name], one):
            problems.append(("source", source_name, f"column {name!r} is {given[name]}: the checkpoint takes {one}"))
    if problems:
        raise invalid_fields(problems)


def _same(given: ColumnType, wanted: ColumnType) -> bool:
    if isinstance(given, TensorType) or isinstance(wanted, TensorType):
        return given == wanted
    return bool(given.arrow_type == wanted.arrow_type)


def _check_input(made: ColumnType, content: CheckpointContent) -> None:
    if not isinstance(made, TensorType) or made.dtype != "float32" or None in made.shape:
        raise FailedPrecondition(
            f"the steps of {content.training_job} make {made} of column {content.input_column!r}, not float32 of a "
            "fixed shape",
            reason="MODEL_DOES_NOT_LOAD",
        )
