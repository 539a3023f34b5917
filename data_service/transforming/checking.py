"""What can be said of a transform as soon as its source is known, before any row is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pyarrow as pa
from google.protobuf import json_format

from data_service.domain.checks import fits, parse_checks
from data_service.domain.split_rules import ColumnSplit, SplitRule, column_problems, split_order, taken_away
from data_service.domain.transform_spec import TransformSpec
from millrace.common.v1 import transform_pb2
from shared.dataset_version import Manifest
from shared.errors import InvalidArgument, invalid_field, invalid_fields
from shared.transforms.pipeline import Pipeline
from shared.transforms.schema import Schema, arrow_schema, schema_of_columns
from shared.transforms.steps.custom_child import functions_in_children
from shared.transforms.steps.encoding import OneHotEncode

FIELD = "transform"


def check_transform(spec: TransformSpec, source: Manifest, custom_allowed: Collection[str]) -> None:
    """Raises `InvalidArgument` naming the step, column or split that does not fit the source.

    `custom_allowed` are the functions that custom steps may name. `spec` has passed `transform_spec.check`.
    """
    given = schema_of_columns(source.columns)
    if spec.rule is not None and (problems := list(column_problems(spec.rule, arrow_schema(given)))):
        raise invalid_fields(problems)
    message = json_format.ParseDict(spec.transform, transform_pb2.Transform())
    pipeline = Pipeline.from_proto(message, field=FIELD, custom_allowed=custom_allowed)
    _refuse_augmentations(pipeline)
    # An operator's function must not hang or end the service that answers.
    with functions_in_children():
        output = output_schema(pipeline, remaining(given, spec.rule))
    splits = known_splits(spec.rule, source)
    if pipeline.unfitted and splits is not None and spec.fit_split not in splits:
        steps = ", ".join(f"{FIELD}.steps[{index}]" for index in pipeline.unfitted)
        there = ", ".join(map(repr, splits))
        raise invalid_field("fit_split", spec.fit_split, f"{steps} learn there, but the splits are {there}")
    fits(parse_checks(spec.checks), output, has_parent=True, splits=splits)


def remaining(given: Schema, rule: SplitRule | None) -> Schema:
    """The columns that the steps see. Raises `InvalidArgument` where the rule leaves none."""
    left = {name: one for name, one in given.items() if name not in taken_away(rule)}
    if not left:
        raise invalid_field("splits.column.column", taken_away(rule)[0], "it is the only column, and is taken away")
    return left


def output_schema(pipeline: Pipeline, given: Schema) -> pa.Schema:
    """The new version's logical columns; of a step that has still to learn its shape one element stands for all.

    Raises `InvalidArgument` naming the step that does not fit, or the column that a version cannot keep.
    """
    pipeline.output(given, FIELD)
    try:
        return arrow_schema(_with_learnt_lengths(pipeline, given))
    except ValueError as error:
        raise InvalidArgument(
            f"{FIELD}: {error}", reason="INVALID_FIELD", metadata={"field": FIELD}, fields=[(FIELD, str(error))]
        ) from None


def known_splits(rule: SplitRule | None, source: Manifest) -> list[str] | None:
    """In the order of their row ids; None where only the rows tell."""
    if rule is None:
        return [split.name for split in source.splits]
    return None if isinstance(rule, ColumnSplit) else split_order(rule, [])


def _refuse_augmentations(pipeline: Pipeline) -> None:
    for index, step in enumerate(pipeline.steps):
        if step.augments:
            raise invalid_field(
                f"{FIELD}.steps[{index}]",
                step.op,
                "augmentations act in training alone; set it in the training job's transform, or use center_crop",
            )


def _with_learnt_lengths(pipeline: Pipeline, given: Schema) -> Schema:
    """The output as if each one_hot_encode that has still to learn had found one category."""
    stand_ins = [
        replace(step, categories=("0",)) if isinstance(step, OneHotEncode) and not step.fitted else step
        for step in pipeline.steps
    ]
    return pipeline.with_steps(stand_ins).output(given, FIELD)
