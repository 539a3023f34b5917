"""The columns of a version with predictions: what a model's outputs become, and what goes along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_service.commit import columns_of
from data_service.domain.predict_spec import PredictSpec
from data_service.predicting.checking import chained
from shared.checkpoint import CheckpointContent
from shared.dataset_version.columns import tensor_array, tensor_field
from shared.dataset_version.manifest import Column, Manifest
from shared.errors import InvalidArgument, invalid_field, invalid_fields
from shared.model_spec import REGRESSION
from shared.transforms import schema_of_columns
from shared.transforms.schema import arrow_schema

PREDICTION, LABEL, SCORE, PROBABILITIES, LOGITS = "prediction", "prediction_label", "score", "probabilities", "logits"
Array = NDArray[Any]


@dataclass(frozen=True)
class PredictionColumns:
    """Those that are added, by what they hold, in their order. Picklable."""

    fields: Mapping[str, pa.Field]
    class_names: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields.values()]

    @property
    def value_names(self) -> dict[str, list[str]]:
        """Of the class, by its column's name."""
        has_names = PREDICTION in self.fields and self.class_names
        return {self.fields[PREDICTION].name: list(self.class_names)} if has_names else {}

    def arrays(self, outputs: Sequence[Array]) -> list[pa.Array]:
        """`outputs` are those of `LoadedModel`, of B rows: an array of B for each column."""
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
            # A model may have more classes than its data had names.
            names = dict(enumerate(self.class_names))
            made[LABEL] = pa.array([names.get(label) for label in labels.tolist()], pa.string())
        return made


def _regression(outputs: Sequence[Array]) -> dict[str, pa.Array]:
    (values,) = outputs
    return {PREDICTION: pa.array(values[:, 0], pa.float32()) if values.shape[1] == 1 else tensor_array(values)}


def prediction_columns(spec: PredictSpec, content: CheckpointContent) -> PredictionColumns:
    """Raises `InvalidArgument` for an output that the checkpoint's model does not have."""
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
    """`kept` are the source's that go along, `schema` has them and, behind them, the predictions. `ingested` and
    `transforms` are what the new version says of its rows' way since ingest."""

    kept: list[str]
    predictions: PredictionColumns
    schema: pa.Schema
    columns: list[Column]
    ingested: list[Column]
    transforms: list[dict[str, Any]]


def new_columns(spec: PredictSpec, source: Manifest, content: CheckpointContent) -> NewColumns:
    """Raises `InvalidArgument` for a column that is not there, an output that the model does not have, and a name that
    a prediction would have twice."""
    there = {column.name: column for column in source.columns}
    for index, name in enumerate(spec.columns):
        if name not in there:
            raise invalid_field(f"columns[{index}]", name, f"use some of {', '.join(there)}")
    kept = list(spec.columns or there)
    predictions = prediction_columns(spec, content)
    _refuse_taken(kept, predictions)
    given = arrow_schema(schema_of_columns(there[name] for name in kept))
    schema = pa.schema([*given, *predictions.fields.values()])
    value_names = {**{name: there[name].value_names for name in kept}, **predictions.value_names}
    columns = columns_of(schema, value_names)
    # A version of before transforms says nothing of them.
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
    """That of the source, which lets predictions pass as if they had been ingested with the rest, and then what leaves
    the new version's `columns`: a model that is trained on predictions takes them from whoever asks it."""
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
    """A prediction's name may be that of a column that was dropped or renamed since ingest."""
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
