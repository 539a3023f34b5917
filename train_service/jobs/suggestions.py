"""Suggested specifications for a version in the store.

They follow from its schema and statistics by the domain's rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds
from google.protobuf import json_format

from millrace.common.v1 import transform_pb2
from shared.dataset_version import DatasetVersion, load_version
from shared.dataset_version.manifest import Column
from shared.dataset_version.version import read_report
from shared.errors import invalid_field
from shared.storage import ObjectStore
from shared.transforms import Pipeline, ScalarType, TensorType, schema_of_columns
from shared.transforms.batch import ColumnType
from shared.transforms.steps.custom import functions_in_children
from train_service.domain import suggesting as known
from train_service.domain.suggesting import MAX_VALUES, ColumnFacts, Suggestion, VersionFacts, suggest
from train_service.loading.preprocessing import FIELD

Json = Mapping[str, Any]
# (check of an Arrow type, kind)
KINDS = (
    (kinds.is_boolean, known.BOOLEAN),
    (kinds.is_integer, known.INTEGER),
    (kinds.is_floating, known.NUMBER),
    (kinds.is_string, known.TEXT),
    (kinds.is_binary, known.BYTES),
    (kinds.is_temporal, known.TIME),
)


def suggest_spec(store: ObjectStore, name: str, given: Json, custom_allowed: Collection[str] = ()) -> Suggestion:
    """Return a suggestion for the version `name`.

    `given` is the JSON form of a partial specification. Raises the errors that the RPC's comment lists.
    """
    version = load_version(store, name)
    wanted = given.get("train_split") or "train"
    facts = version_facts(version, read_report(store, version).get("columns", []), wanted)

    def shape_made(column: str) -> tuple[int, ...]:
        return _shape_made(version, given, column, custom_allowed)

    return suggest(facts, given, shape_made)


def version_facts(version: DatasetVersion, statistics: Sequence[Json], train_split: str) -> VersionFacts:
    """Return the facts of a version. `statistics` are those of its quality report."""
    by_column: dict[str, list[Json]] = {}
    for one in statistics:
        by_column.setdefault(one["column"], []).append(one)
    schema = schema_of_columns(version.columns)
    columns = [
        _facts(column, schema[column.name], by_column.get(column.name, ()), train_split) for column in version.columns
    ]
    splits = {split.name: split.row_count for split in version.manifest.splits}
    return VersionFacts(
        name=version.name,
        columns=columns,
        splits=splits,
        size_bytes=version.manifest.size_bytes,
    )


def _facts(column: Column, column_type: ColumnType, statistics: Sequence[Json], train_split: str) -> ColumnFacts:
    """Return the facts of a column over all splits.

    Mean and deviation are those of the training split, or of the first split if there are none.
    """
    numbers = [one["numbers"] for one in statistics if "numbers" in one]
    of_train = next((one for one in statistics if one["split"] == train_split), statistics[0] if statistics else {})
    values = _values(statistics)
    return ColumnFacts(
        name=column.name,
        kind=known.TENSOR if isinstance(column_type, TensorType) else _kind(column_type.arrow_type),
        dtype=column_type.dtype if isinstance(column_type, TensorType) else "",
        shape=tuple(column.shape),
        value_names=tuple(column.value_names),
        known=bool(statistics),
        rows=sum(int(one["rowCount"]) for one in statistics),
        nulls=sum(int(one["nullCount"]) for one in statistics),
        nans=sum(int(one["nanCount"]) for one in statistics),
        # JSON spells infinities as strings.
        infinite=any(isinstance(number.get(bound), str) for number in numbers for bound in ("min", "max")),
        distinct=max((int(one["distinctCount"]) for one in statistics), default=0) if values is None else len(values),
        values=values,
        least=min((float(one["min"]) for one in numbers), default=None),
        most=max((float(one["max"]) for one in numbers), default=None),
        mean=_finite(of_train.get("numbers", {}).get("mean")),
        deviation=_finite(of_train.get("numbers", {}).get("deviation")),
    )


def _values(statistics: Sequence[Json]) -> tuple[Any, ...] | None:
    """Return all distinct values over all splits.

    The result is None if a split's statistics lack some of its values.
    """
    found: set[Any] = set()
    for one in statistics:
        values = one.get("values", ())
        if not one["distinctIsExact"] or len(values) < int(one["distinctCount"]):
            return None
        found |= {_scalar(each["value"]) for each in values}
    return tuple(sorted(found)) if statistics and 0 < len(found) <= MAX_VALUES else None


def _scalar(value: Json) -> Any:
    (kind,) = value
    return int(value[kind]) if kind == "integer" else float(value[kind]) if kind == "number" else value[kind]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _kind(arrow_type: pa.DataType) -> str:
    return next((kind for check, kind in KINDS if check(arrow_type)), known.OTHER)


def _shape_made(version: DatasetVersion, given: Json, column: str, custom_allowed: Collection[str]) -> tuple[int, ...]:
    """Return the shape of a transformed row.

    The given transform is applied to `column`. Raises `InvalidArgument` unless it is a tensor of a fixed shape.
    """
    message = json_format.ParseDict(given.get("transform", {}), transform_pb2.Transform())
    pipeline = Pipeline.from_proto(message, column, FIELD, custom_allowed)
    with functions_in_children():
        made = pipeline.output(schema_of_columns(version.columns)).get(column)
    lengths = tuple(one for one in made.shape if one is not None) if isinstance(made, TensorType) else ()
    if not isinstance(made, TensorType) or not lengths or len(lengths) < len(made.shape):
        shown = "nothing" if made is None else str(made.arrow_type) if isinstance(made, ScalarType) else str(made)
        raise invalid_field(FIELD, shown, f"column {column!r} must become a tensor of a fixed shape; add steps")
    return lengths
