"""Whether a specification fits the dataset version that it names, and the defaults that depend on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow.types as kinds

from shared import names
from shared.dataset_version import DatasetVersion, load_version
from shared.dataset_version.manifest import Column
from shared.dataset_version.version import read_report
from shared.errors import InvalidArgument, NotFound, invalid_field
from shared.models import input_dimensions
from shared.storage import ObjectStore
from shared.transforms import ScalarType, TensorSpec, TensorType, schema_of_columns
from shared.transforms.schema import ColumnType
from shared.transforms.steps.custom_child import functions_in_children
from train_service.domain import spec_rules
from train_service.domain.order import steps_per_epoch, window_rows
from train_service.domain.spec import REGRESSION, TrainingSpec
from train_service.domain.spec_rules import check_rows
from train_service.loading.preprocessing import FIELD, NON_FINITE_REMEDY, Preprocessing, is_float
from train_service.loading.rows import bytes_of_row

DEFAULT_VALIDATION_SPLIT = "validation"
# Of a version's columns, at most so many are told.
MAX_PROBLEMS = 20


def fitted(store: ObjectStore, spec: TrainingSpec) -> tuple[TrainingSpec, DatasetVersion, TensorSpec]:
    """With the defaults that depend on the version, that version, and the model's input tensor for one row. Raises what
    `CreateTrainingJob` says of a specification, but for its model and initial checkpoint."""
    names.parse("spec.dataset_version", spec.dataset_version, "datasets/{d}/versions/{v}")
    spec_rules.check(spec)
    version = _version_of(store, spec)
    spec = with_defaults(spec, version)
    prepared = check_fits(spec, version)
    check_finite(store, spec, version)
    check_classes(store, spec, version)
    return with_order(spec, version), version, prepared


def fitted_program(store: ObjectStore, spec: TrainingSpec) -> TrainingSpec:
    """Of a program: with the defaults that depend on the version, where it names one. Raises as `fitted`."""
    spec_rules.check(spec)
    if not spec.dataset_version:
        return spec
    names.parse("spec.dataset_version", spec.dataset_version, "datasets/{d}/versions/{v}")
    version = _version_of(store, spec)
    spec = with_defaults(spec, version)
    _check_splits(spec, version)
    # Which columns the program reads is not known, so a row counts with all of them.
    row_bytes = bytes_of_row(version, spec.train_split, [column.name for column in version.columns])
    return replace(spec, window_rows=window_rows(row_bytes, spec.lanes))


def _version_of(store: ObjectStore, spec: TrainingSpec) -> DatasetVersion:
    """Raises as `load_version`; a `NotFound` names the field."""
    try:
        return load_version(store, spec.dataset_version)
    except NotFound as error:
        text = f"{error.message}; name a version that ListVersions shows"
        raise NotFound(
            f"spec.dataset_version: {text}",
            reason=error.specific_reason,
            metadata=error.metadata,
            fields=[("spec.dataset_version", text)],
        ) from None


def with_defaults(spec: TrainingSpec, version: DatasetVersion) -> TrainingSpec:
    """Fills in the validation split: `validation` where the version has it, else none."""
    names = [split.name for split in version.manifest.splits]
    if not spec.validation_split and DEFAULT_VALIDATION_SPLIT in names:
        return replace(spec, validation_split=DEFAULT_VALIDATION_SPLIT)
    return spec


def check_fits(spec: TrainingSpec, version: DatasetVersion) -> TensorSpec:
    """The model's input tensor for one row, prepared. Raises `InvalidArgument` naming the field that does not fit."""
    _check_splits(spec, version)
    _check_label(spec, version)
    check_rows(spec, version.split(spec.train_split).row_count)
    return check_prepared(spec, version.columns)


def check_prepared(spec: TrainingSpec, columns: Sequence[Column]) -> TensorSpec:
    """The same of rows with these columns, whatever their splits and labels are."""
    # An operator's function must not hang or end the service that answers.
    with functions_in_children():
        prepared = Preprocessing(spec, columns, asked=True).output
    dimensions = input_dimensions(spec.model.builder)
    fits = bool(prepared.shape) and dimensions in (None, len(prepared.shape))
    # Of a model of a user's own that may be left open.
    channels = spec.model.in_channels or (prepared.shape[0] if prepared.shape else 0)
    if prepared.dtype != "float32" or not fits or prepared.shape[0] != channels:
        wanted = f"float32 of {_wanted(channels, dimensions)}, as spec.model.in_channels says"
        made = f"{prepared.dtype} of {prepared.shape}"
        hint = "concat" if dimensions == 1 else "to_float"
        raise invalid_field(FIELD, made, f"must make {wanted}; add steps such as {hint}")
    if spec.acceleration.channels_last and len(prepared.shape) != 3:
        remedy = f"the model's input has shape {prepared.shape}, and no channels to put last; leave it out"
        raise invalid_field("spec.acceleration.channels_last", True, remedy)
    return prepared


def _check_splits(spec: TrainingSpec, version: DatasetVersion) -> None:
    names = {split.name: split for split in version.manifest.splits}
    for field, split in (("train_split", spec.train_split), ("validation_split", spec.validation_split)):
        if split and split not in names:
            raise invalid_field(f"spec.{field}", split, f"{version.name} has {', '.join(names)}")
        if split and not names[split].row_count:
            raise invalid_field(f"spec.{field}", split, "it has no rows; choose another")


def check_finite(store: ObjectStore, spec: TrainingSpec, version: DatasetVersion) -> None:
    """By the version's statistics, before any row is read. The specification must fit the version; what a step makes of
    finite values is found only as rows are read.

    Raises `InvalidArgument` naming each column that is NaN or infinite in a split, unless such values are allowed.
    """
    if spec.allow_non_finite:
        return
    with functions_in_children():
        floats = Preprocessing(spec, version.columns).carried_floats
    label = schema_of_columns(version.columns)[spec.label_column]
    if spec.task == REGRESSION and is_float(label):
        floats.append(spec.label_column)
    if not floats:
        return  # pixels, most often: nothing to look for
    splits = (spec.train_split, spec.validation_split)
    found = {
        (one["column"], one["split"]): what
        for one in read_report(store, version).get("columns", ())
        if one["column"] in floats and one["split"] in splits and (what := _non_finite(one))
    }
    if found:
        problems = [f"column {column!r} has {what} in split {split!r}" for (column, split), what in found.items()]
        raise InvalidArgument(
            f"spec.dataset_version: {'; '.join(problems[:MAX_PROBLEMS])} of {version.name}; {NON_FINITE_REMEDY}",
            reason="NON_FINITE_VALUES",
            metadata={"resource": version.name, "column": next(iter(found))[0]},
            fields=[("spec.dataset_version", problem) for problem in problems[:MAX_PROBLEMS]],
        )


def check_classes(store: ObjectStore, spec: TrainingSpec, version: DatasetVersion) -> None:
    """By the version's statistics, before any row is read: raises `InvalidArgument` where a label is no class of the
    model. The specification must fit the version; of a model of a user's own whose width is not known yet nothing is
    said."""
    classes = spec.model.num_classes
    if spec.task == REGRESSION or not classes:
        return
    splits = (spec.train_split, spec.validation_split)
    for one in read_report(store, version).get("columns", ()):
        numbers = one.get("numbers")
        if one["column"] != spec.label_column or one["split"] not in splits or not numbers:
            continue
        least, most = int(numbers.get("min", 0)), int(numbers.get("max", 0))  # JSON leaves a zero out
        if least < 0 or most >= classes:
            label = least if least < 0 else most
            where = f"column {spec.label_column!r} has the label {label} in split {one['split']!r} of {version.name}"
            remedy = f"{where}, and labels must be 0 to num_classes - 1; " + (
                "encode them by ordinal_encode in TransformVersion" if least < 0 else f"use {most + 1} or more"
            )
            field, text = "spec.model.num_classes", f"{classes}: {remedy}"
            raise InvalidArgument(f"{field}: {text}", reason="LABEL_OUT_OF_RANGE", fields=[(field, text)])


def _non_finite(statistics: Mapping[str, Any]) -> str:
    """What a column's statistics, as JSON, show of NaN and infinities; empty where there is none."""
    count = int(statistics.get("nanCount", 0))
    found = [f"{count:,} NaN"] if count else []
    numbers = statistics.get("numbers", {})
    if any(isinstance(numbers.get(bound), str) for bound in ("min", "max")):  # as JSON spells infinities
        found.append("infinities")
    return " and ".join(found)


def with_order(spec: TrainingSpec, version: DatasetVersion) -> TrainingSpec:
    """Fixes what the order of rows hangs on besides lanes and seed. The specification must fit the version."""
    with functions_in_children():
        columns = Preprocessing(spec, version.columns).columns
    return replace(spec, window_rows=window_rows(bytes_of_row(version, spec.train_split, columns), spec.lanes))


def steps_of_run(spec: TrainingSpec, version: DatasetVersion) -> int:
    """Optimiser steps of all epochs. The split must be there."""
    (rows,) = (split.row_count for split in version.manifest.splits if split.name == spec.train_split)
    return steps_per_epoch(rows, spec.global_batch_size) * spec.epochs


def _wanted(channels: int, dimensions: int | None) -> str:
    return {1: f"({channels},)", 3: f"({channels}, H, W)"}.get(dimensions or 0, f"({channels}, ...)")


def ingested_columns(version: DatasetVersion) -> Sequence[Column]:
    """Those of the rows as they were ingested: the version's own where nothing was done to them since."""
    return version.manifest.ingested or version.columns


def class_names(spec: TrainingSpec, version: DatasetVersion) -> Sequence[str]:
    """What the version calls the model's classes 0, 1, …; none where it has no names, and for regression."""
    if spec.task == REGRESSION:
        return ()
    labels = next(column for column in version.columns if column.name == spec.label_column)
    return tuple(labels.value_names[: spec.model.num_classes])


def _check_label(spec: TrainingSpec, version: DatasetVersion) -> None:
    given = schema_of_columns(version.columns).get(spec.label_column)
    if given is None:
        names = ", ".join(column.name for column in version.columns)
        raise invalid_field("spec.label_column", spec.label_column, f"{version.name} has {names}")
    if spec.task == REGRESSION:
        _check_numbers(spec, given)
    elif not isinstance(given, ScalarType) or not kinds.is_integer(given.arrow_type):
        remedy = f"is {given}; name integers, such as ordinal_encode makes in TransformVersion"
        raise invalid_field("spec.label_column", spec.label_column, remedy)


def _check_numbers(spec: TrainingSpec, given: ColumnType) -> None:
    """One number for each output of the model: a scalar column where it has one, a tensor of them where more."""
    width, outputs = None, spec.model.num_classes
    if not outputs and spec.model.is_own:
        return  # looked at again once its code has said it
    if isinstance(given, TensorType):
        width = given.shape[0] if len(given.shape) == 1 else None
    elif kinds.is_integer(given.arrow_type) or kinds.is_floating(given.arrow_type):
        width = 1
    if width != outputs:
        wanted = "numbers" if outputs == 1 else f"tensors of ({outputs},) numbers"
        remedy = f"is {given}; name {wanted}, one for each of the {outputs} outputs that spec.model.num_classes says"
        raise invalid_field("spec.label_column", spec.label_column, remedy)
