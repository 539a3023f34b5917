"""Checks transforms and predictions against their source, before any row is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf import json_format
from numpy.typing import NDArray

from data_service.domain.checks import fits, parse_checks
from data_service.domain.splits import ColumnSplit, SplitRule, column_problems, split_order, taken_away
from data_service.domain.transform_spec import CheckpointRef, PredictSpec, TransformSpec
from data_service.version_attempt import columns_of
from millrace.common.v1 import transform_pb2
from shared.bundle_predictor import entry_of
from shared.checkpoint import CheckpointContent, load_checkpoint
from shared.checkpoint.format import is_program_checkpoint, load_program_checkpoint
from shared.checkpoint.nan_values import NanPolicy, float_columns, may_be_non_finite, nan_policy_of
from shared.checkpoint.references import resolve_any
from shared.dataset_version import DatasetVersion, Manifest
from shared.dataset_version.manifest import Column, tensor_array, tensor_field
from shared.errors import FailedPrecondition, InvalidArgument, invalid_field, invalid_fields
from shared.model_spec import REGRESSION
from shared.settings import OwnCode, check_functions
from shared.storage import ObjectStore
from shared.transforms import TensorType
from shared.transforms.batch import ColumnType, Schema, Step, arrow_schema, schema_of_columns
from shared.transforms.pipeline import Pipeline
from shared.transforms.records import ModelInput
from shared.transforms.steps.custom import functions_in_children
from shared.transforms.steps.fitted import OneHotEncode
from shared.transforms.steps.images import image_columns

# --- Transforms ---
# Checks a transform against its source, before any row is read.

FIELD = "transform"


def check_transform(spec: TransformSpec, source: Manifest, custom_allowed: Collection[str]) -> None:
    """Raise `InvalidArgument` naming the step, column or split that does not fit the source.

    `custom_allowed` are the functions that custom steps may name. `spec` has passed `transform_spec.check`.
    """
    given = schema_of_columns(source.columns)
    if spec.rule is not None and (problems := list(column_problems(spec.rule, arrow_schema(given)))):
        raise invalid_fields(problems)
    message = json_format.ParseDict(spec.transform, transform_pb2.Transform())
    pipeline = Pipeline.from_proto(message, field=FIELD, custom_allowed=custom_allowed)
    _refuse_augmentations(pipeline)
    # An operator's function must not hang or crash the service.
    with functions_in_children():
        output = output_schema(pipeline, remaining(given, spec.rule))
    splits = known_splits(spec.rule, source)
    if pipeline.unfitted and splits is not None and spec.fit_split not in splits:
        steps = ", ".join(f"{FIELD}.steps[{index}]" for index in pipeline.unfitted)
        there = ", ".join(map(repr, splits))
        raise invalid_field("fit_split", spec.fit_split, f"{steps} learn there, but the splits are {there}")
    fits(parse_checks(spec.checks), output, has_parent=True, splits=splits)


def remaining(schema: Schema, rule: SplitRule | None) -> Schema:
    """Return the columns that the steps see; raise `InvalidArgument` if the rule leaves none."""
    left = {name: one for name, one in schema.items() if name not in taken_away(rule)}
    if not left:
        raise invalid_field("splits.column.column", taken_away(rule)[0], "it is the only column, and is taken away")
    return left


def output_schema(pipeline: Pipeline, schema: Schema) -> pa.Schema:
    """Return the new version's logical columns.

    If a step's shape is not fitted yet, a shape of one element stands in. Raises `InvalidArgument` naming the step that
    does not fit, or the column that a version cannot have.
    """
    pipeline.output(schema, FIELD)
    try:
        return arrow_schema(_with_fitted_lengths(pipeline, schema))
    except ValueError as error:
        raise InvalidArgument(
            f"{FIELD}: {error}", reason="INVALID_FIELD", metadata={"field": FIELD}, fields=[(FIELD, str(error))]
        ) from None


def known_splits(rule: SplitRule | None, source: Manifest) -> list[str] | None:
    """Return the splits in the order of their row ids; None if they depend on the rows."""
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


def _with_fitted_lengths(pipeline: Pipeline, schema: Schema) -> Schema:
    """Return the output as if each unfitted one_hot_encode had found one category."""
    stand_ins = [
        replace(step, categories=("0",)) if isinstance(step, OneHotEncode) and not step.fitted else step
        for step in pipeline.steps
    ]
    return pipeline.with_steps(stand_ins).output(schema, FIELD)


# --- Predictions ---
# Checks whether a checkpoint's model can run on a version: from which step of its pipeline on, and from which columns.

# The name of the checkpoint's steps in errors.
CHAIN = "checkpoint.transform"
# These steps select rows and columns, and leave every value as it is.
KEEP_VALUES = ("select", "drop", "filter")


@dataclass(frozen=True)
class Preparation:
    """The preparation of rows of a version to the model's input, as `row` describes it.

    `reads` are the version's columns that it needs, `images` those with images to decode, and `floats` the float
    columns, whose NaN are handled by `nans`. `is_complete` says whether the input may have a NaN or an infinity.
    Picklable.
    """

    steps: Pipeline
    reads: list[str]
    images: list[str]
    row: ModelInput
    nans: NanPolicy
    floats: list[str]
    is_complete: bool


def preparation(content: CheckpointContent, source: Manifest, source_name: str) -> Preparation:
    """Return the checkpoint's steps that the version's rows have not passed yet, as in serving.

    Raises `FailedPrecondition` if the rows passed other steps, and `InvalidArgument` naming each column that is missing
    or of another type, or a step that does not fit.
    """
    chain = chained(content.transforms).steps
    begin = _place_behind(chain, chained(source.transforms).steps, source_name)
    before = Pipeline(chain[:begin], field=CHAIN).output(content.ingested_schema)
    steps = Pipeline(chain[begin:], field=CHAIN).serving(content.inputs, before)
    reads = steps.reads(content.inputs, before)
    given = {name: before[name] for name in reads}
    _check_columns(given, schema_of_columns(source.columns), source_name)
    row = _checked_input(steps.output(before), content)
    images = image_columns(steps.steps, given)
    return Preparation(
        steps,
        reads,
        images,
        row,
        nans=nan_policy_of(content, steps.steps, given, gone=chain[:begin]),
        floats=float_columns(given),
        is_complete=may_be_non_finite(given, images),
    )


def chained(transforms: Iterable[Mapping[str, Any]]) -> Pipeline:
    """Concatenate frozen `Transform`s, given as JSON."""
    return reduce(Pipeline.then, map(Pipeline.from_config, transforms), Pipeline([]))


def _place_behind(chain: Sequence[Step], gone: Sequence[Step], source_name: str) -> int:
    """Return the index of the first step in `chain` that is still to do, after the steps `gone`.

    Those of `gone` that change values must be the first such steps of the chain, with equal fitted values.
    """
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
        reason="PREPROCESSING_MISMATCH",
        metadata={"resource": source_name, "step": step.op},
        fields=[("source", f"{step.op} is not the checkpoint's")],
    )


def _check_columns(wanted: Schema, schema: Schema, source_name: str) -> None:
    problems = []
    for name, one in wanted.items():
        if name not in schema:
            problems.append(("source", source_name, f"column {name!r} is missing: the checkpoint takes {one}"))
        elif not _same(schema[name], one):
            problems.append(("source", source_name, f"column {name!r} is {schema[name]}: the checkpoint takes {one}"))
    if problems:
        raise invalid_fields(problems)


def _same(column_type: ColumnType, wanted: ColumnType) -> bool:
    if isinstance(column_type, TensorType) or isinstance(wanted, TensorType):
        return column_type == wanted
    return bool(column_type.arrow_type == wanted.arrow_type)


def _checked_input(made: Schema, content: CheckpointContent) -> ModelInput:
    row = content.model_input(made)
    if row is None:
        columns = ", ".join(f"{made[name]} of column {name!r}" for name in content.inputs)
        wanted = "numbers of fixed shapes" if content.input_columns else "float32 of a fixed shape"
        raise FailedPrecondition(
            f"the steps of {content.training_job} make {columns}, not {wanted}", reason="MODEL_DOES_NOT_LOAD"
        )
    return row


# --- Columns of predictions ---
# The columns of a version with predictions: a model's outputs, and the columns kept from the source.

PREDICTION, LABEL, SCORE, PROBABILITIES, LOGITS = "prediction", "prediction_label", "score", "probabilities", "logits"
Array = NDArray[Any]


@dataclass(frozen=True)
class PredictionColumns:
    """The added columns, by their kind, in order.

    Picklable.
    """

    fields: Mapping[str, pa.Field]
    class_names: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields.values()]

    @property
    def value_names(self) -> dict[str, list[str]]:
        """The class names, by the name of the class column."""
        has_names = PREDICTION in self.fields and self.class_names
        return {self.fields[PREDICTION].name: list(self.class_names)} if has_names else {}

    def arrays(self, outputs: Sequence[Array]) -> list[pa.Array]:
        """Return an array of B values for each column.

        `outputs` are those of `LoadedModel` for B rows.
        """
        values = _regression(outputs) if len(outputs) == 1 else self._classification(outputs)
        return [values[kind] for kind in self.fields]

    def _classification(self, outputs: Sequence[Array]) -> dict[str, pa.Array]:
        logits, probabilities, labels = outputs
        made = {
            PREDICTION: pa.array(labels, pa.int64()),
            SCORE: pa.array(probabilities[np.arange(len(labels)), labels], pa.float32()),
            PROBABILITIES: tensor_array(probabilities),
            LOGITS: tensor_array(logits),
        }
        if LABEL in self.fields:
            # A model may have more classes than its data has names.
            names = dict(enumerate(self.class_names))
            made[LABEL] = pa.array([names.get(label) for label in labels.tolist()], pa.string())
        return made


def _regression(outputs: Sequence[Array]) -> dict[str, pa.Array]:
    (values,) = outputs
    return {PREDICTION: pa.array(values[:, 0], pa.float32()) if values.shape[1] == 1 else tensor_array(values)}


def prediction_columns(spec: PredictSpec, content: CheckpointContent) -> PredictionColumns:
    """Return the prediction columns; raise `InvalidArgument` for an output that the model lacks."""
    there = _fields(spec.column_prefix, content)
    for index, name in enumerate(spec.outputs):
        if name not in there:
            why = "" if name != LABEL else "the checkpoint has no names for its classes; "
            raise invalid_field(f"outputs[{index}]", name, f"{why}use some of {', '.join(there)}")
    wanted = spec.outputs or [kind for kind in there if kind != LOGITS]
    return PredictionColumns({kind: field for kind, field in there.items() if kind in wanted}, content.class_names)


def _fields(prefix: str, content: CheckpointContent) -> dict[str, pa.Field]:
    width = content.model.num_classes
    if content.model.task == REGRESSION:
        if width == 1:
            return {PREDICTION: pa.field(prefix + PREDICTION, pa.float32(), nullable=False)}
        return {PREDICTION: tensor_field(prefix + PREDICTION, pa.float32(), (width,))}
    fields = {PREDICTION: pa.field(prefix + PREDICTION, pa.int64(), nullable=False)}
    if content.class_names:
        fields[LABEL] = pa.field(prefix + LABEL, pa.string())
    fields[SCORE] = pa.field(prefix + SCORE, pa.float32(), nullable=False)
    for kind in (PROBABILITIES, LOGITS):
        fields[kind] = tensor_field(prefix + kind, pa.float32(), (width,))
    return fields


@dataclass(frozen=True)
class NewColumns:
    """The columns of the new version.

    `kept` are the columns kept from the source; `schema` has them, followed by the predictions. `ingested` and
    `transforms` record the rows' history since ingest.
    """

    kept: list[str]
    predictions: PredictionColumns
    schema: pa.Schema
    columns: list[Column]
    ingested: list[Column]
    transforms: list[dict[str, Any]]


def new_columns(spec: PredictSpec, source: Manifest, content: CheckpointContent) -> NewColumns:
    """Return the columns of the new version.

    Raises `InvalidArgument` for an unknown column, an output that the model lacks, and a prediction whose name is
    taken.
    """
    kept_columns(spec, source)
    return columns_with(spec, source, prediction_columns(spec, content))


def kept_columns(spec: PredictSpec, source: Manifest) -> list[str]:
    """Return the columns kept from the source; raise `InvalidArgument` for an unknown one."""
    there = [column.name for column in source.columns]
    for index, name in enumerate(spec.columns):
        if name not in there:
            raise invalid_field(f"columns[{index}]", name, f"use some of {', '.join(there)}")
    return list(spec.columns or there)


def columns_with(spec: PredictSpec, source: Manifest, predictions: PredictionColumns) -> NewColumns:
    """Return the columns of the new version; raise as `new_columns` does."""
    there = {column.name: column for column in source.columns}
    kept = kept_columns(spec, source)
    _refuse_taken(kept, predictions)
    given = arrow_schema(schema_of_columns(there[name] for name in kept))
    schema = pa.schema([*given, *predictions.fields.values()])
    value_names = {**{name: there[name].value_names for name in kept}, **predictions.value_names}
    columns = columns_of(schema, value_names)
    # Versions written before transforms existed do not record them.
    ingested = [*(source.ingested or source.columns), *columns[len(kept) :]]
    transforms = _chain(source.transforms, predictions.names, schema.names)
    _check_chain(spec, ingested, transforms, predictions.names)
    return NewColumns(kept, predictions, schema, columns, ingested, transforms)


def _refuse_taken(kept: Sequence[str], predictions: PredictionColumns) -> None:
    taken = [name for name in predictions.names if name in kept]
    remedy = "is a column of the source and the name of a prediction; leave it out of columns, or set column_prefix"
    if taken:
        raise invalid_fields([("columns", name, remedy) for name in taken])


def _chain(
    transforms: Sequence[Mapping[str, Any]], predictions: Sequence[str], columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the transforms of the new version.

    They are the source's, which let predictions pass as if they had been ingested, followed by a selection of the new
    version's `columns`. A model trained on predictions expects them in its requests.
    """
    passing = []
    for transform in transforms:
        steps = [_passing(step, predictions) for step in transform.get("steps", [])]
        passing.append({**transform, "steps": steps} if steps else dict(transform))
    return [*passing, {"steps": [{"select": {"columns": list(columns)}}]}]


def _passing(step: dict[str, Any], predictions: Sequence[str]) -> dict[str, Any]:
    if "select" not in step:
        return step
    return {**step, "select": {"columns": [*step["select"]["columns"], *predictions]}}


def _check_chain(
    spec: PredictSpec, ingested: Sequence[Column], chain: Sequence[Mapping[str, Any]], predictions: Sequence[str]
) -> None:
    """Refuse a prediction's name that a column dropped or renamed since ingest had."""
    names = [column.name for column in ingested]
    remedy = "was the name of another column since ingest; set column_prefix, or another one"
    for name in predictions:
        if names.count(name) > 1:
            raise invalid_field("column_prefix", spec.column_prefix, f"{name!r} {remedy}")
    try:
        chained(chain).output(schema_of_columns(ingested))
    except InvalidArgument as error:
        raise invalid_field(
            "column_prefix", spec.column_prefix, f"a prediction's name {remedy} ({error.message})"
        ) from None


# --- Before a prediction's job ---
# Checks a prediction against its source and its checkpoint, before any row is read.


def found_checkpoint(store: ObjectStore, asked: CheckpointRef) -> CheckpointRef:
    """Find the checkpoint.

    Raises the errors of `resolve`, and `FailedPrecondition` if it does not have the requested digest.
    """
    entry = resolve_any(store, "checkpoint", asked.name)
    if asked.sha256 and asked.sha256 != entry.manifest_sha256:
        raise FailedPrecondition(
            f"checkpoint_sha256: {entry.name} has the manifest {entry.manifest_sha256}, not {asked.sha256}; it was "
            "written again, or is another one",
            reason="CHECKPOINT_REPLACED",
            metadata={"resource": entry.name},
            fields=[("checkpoint_sha256", "is that of another checkpoint")],
        )
    return CheckpointRef(name=entry.name, folder=entry.folder, sha256=entry.manifest_sha256)


def check_predict(
    store: ObjectStore,
    spec: PredictSpec,
    source: DatasetVersion,
    checkpoint: CheckpointRef,
    custom_allowed: Collection[str],
    own_code: OwnCode,
) -> None:
    """Raise the errors that `PredictVersion` documents.

    `custom_allowed` are the functions that custom steps may name, `own_code` says whether a user's own code may run,
    for a model or a program's predictor. `spec` has passed `predict_spec.check`.
    """
    if spec.split:
        source.split(spec.split)
    if is_program_checkpoint(store, checkpoint.folder, checkpoint.sha256):
        own_code.require_own_code(f"checkpoint: {checkpoint.name} predicts by code of a user's bundle: ")
        entry_of(load_program_checkpoint(store, checkpoint.folder, checkpoint.sha256), spec.predictor)
        kept_columns(spec, source.manifest)
        return  # What the predictor takes and gives is found in a worker, since its code never runs here.
    if spec.predictor:
        remedy = f"leave it out: {checkpoint.name} is a model of Millrace's, and no program's checkpoint"
        raise invalid_field("predictor", spec.predictor, remedy)
    content = load_checkpoint(store, checkpoint.folder, checkpoint.sha256).content
    if content.model.is_own:
        own_code.require_own_code(f"checkpoint: the model of {checkpoint.name} is made by a user's own code: ")
    check_functions(content.transforms, custom_allowed, "in the data service")
    # An operator's function must not hang or crash the service.
    with functions_in_children():
        preparation(content, source.manifest, source.name)
        new_columns(spec, source.manifest, content)
