"""Whether a specification fits the dataset version that it names, and the defaults that depend on it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pyarrow as pa

from shared.dataset_version import DatasetVersion
from shared.dataset_version.manifest import Column
from shared.errors import invalid_field
from shared.transforms import Pipeline, TensorSpec
from train_service.domain.spec import TrainingSpec, check_rows

DEFAULT_VALIDATION_SPLIT = "validation"


def with_defaults(spec: TrainingSpec, version: DatasetVersion) -> TrainingSpec:
    """Fills in the validation split: `validation` where the version has it, else none."""
    names = [split.name for split in version.manifest.splits]
    if not spec.validation_split and DEFAULT_VALIDATION_SPLIT in names:
        return replace(spec, validation_split=DEFAULT_VALIDATION_SPLIT)
    return spec


def check_fits(spec: TrainingSpec, version: DatasetVersion) -> TensorSpec:
    """The model's input tensor for one row, prepared. Raises `InvalidArgument` naming the field that does not fit."""
    names = {split.name: split for split in version.manifest.splits}
    for field, split in (("train_split", spec.train_split), ("validation_split", spec.validation_split)):
        if split and split not in names:
            raise invalid_field(f"spec.{field}", split, f"{version.name} has {', '.join(names)}")
        if split and not names[split].row_count:
            raise invalid_field(f"spec.{field}", split, "it has no rows; choose another")
    _check_label(spec, version)
    check_rows(spec, names[spec.train_split].row_count)
    pipeline = Pipeline.from_config(spec.transform, spec.input_column)
    prepared = pipeline.output(model_input(version, spec), "spec.transform")
    if prepared.dtype != "float32" or len(prepared.shape) != 3 or prepared.shape[0] != spec.model.in_channels:
        wanted = f"float32 of ({spec.model.in_channels}, H, W), as spec.model.in_channels says"
        made = f"{prepared.dtype} of {prepared.shape}"
        raise invalid_field("spec.transform", made, f"must make {wanted}; add steps such as to_float")
    return prepared


def model_input(version: DatasetVersion, spec: TrainingSpec) -> TensorSpec:
    """One raw row of the input column. Raises `InvalidArgument` unless it is a tensor column."""
    column = _column(version, "spec.input_column", spec.input_column)
    tensor = re.search(r"value_type=(\w+)", column.arrow_type)
    if not column.shape or tensor is None:
        raise invalid_field("spec.input_column", spec.input_column, f"is {column.arrow_type}; name a tensor column")
    # Arrow's `float` is numpy's float32.
    dtype = np.dtype(pa.type_for_alias(tensor.group(1)).to_pandas_dtype())
    return TensorSpec(column.name, dtype.name, tuple(column.shape))


def _check_label(spec: TrainingSpec, version: DatasetVersion) -> None:
    column = _column(version, "spec.label_column", spec.label_column)
    try:
        whole = pa.types.is_integer(pa.type_for_alias(column.arrow_type))
    except ValueError:
        whole = False
    if not whole:
        raise invalid_field("spec.label_column", spec.label_column, f"is {column.arrow_type}; name integers")


def _column(version: DatasetVersion, field: str, name: str) -> Column:
    for column in version.columns:
        if column.name == name:
            return column
    raise invalid_field(field, name, f"{version.name} has {', '.join(one.name for one in version.columns)}")
