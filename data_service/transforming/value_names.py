"""Which names the numbers of a column have, after steps that made or kept them."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow.types as kinds

from millrace.common.v1 import transform_pb2
from shared.transforms.pipeline import Pipeline
from shared.transforms.schema import arrow_type_of

ValueNames = Mapping[str, list[str]]


def value_names(given: ValueNames, pipeline: Pipeline) -> dict[str, list[str]]:
    """`given` are those of the columns before the steps; a column whose numbers became others loses its names."""
    names = {column: list(values) for column, values in given.items() if values}
    for step in pipeline.to_proto().steps:
        _follow(names, step)
    return names


def _follow(names: dict[str, list[str]], step: transform_pb2.TransformStep) -> None:
    match step.WhichOneof("op"):
        case "ordinal_encode":
            names[step.column] = list(step.ordinal_encode.categories)
        case "select":
            _keep_only(names, step.select.columns)
        case "drop":
            _forget(names, step.drop.columns)
        case "rename":
            renamed = {step.rename.columns.get(column, column): values for column, values in names.items()}
            names.clear()
            names.update(renamed)
        case "concat":
            _forget(names, [step.concat.into, *([] if step.concat.keep else step.concat.columns)])
        case "custom":
            _forget(names, step.custom.columns)
        case "cast" if kinds.is_integer(arrow_type_of(step.cast.arrow_type)):
            pass
        case "filter" | "fill_nulls":
            pass
        case _:
            _forget(names, [step.column])


def _keep_only(names: dict[str, list[str]], columns: object) -> None:
    kept = set(columns)  # type: ignore[call-overload]
    for column in [one for one in names if one not in kept]:
        del names[column]


def _forget(names: dict[str, list[str]], columns: object) -> None:
    for column in columns:  # type: ignore[attr-defined]
        names.pop(column, None)
