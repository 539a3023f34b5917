"""Labels as they are read: what a loss could not take is refused with its row, before anything learns from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.errors import InvalidArgument
from shared.transforms import batch_of
from train_service.domain.order import Ints
from train_service.domain.spec import CLASSIFICATION


def labels_of(
    table: pa.Table, column: str, row_ids: Ints, num_classes: int, task: str, *, allow_non_finite: bool = False
) -> NDArray[Any]:
    """Classes int64 (rows,); for regression numbers, float32 (rows,), or (rows, K) of a tensor column.

    Raises `InvalidArgument` naming the first row whose label is missing, no class or, unless such are
    allowed, not finite.
    """
    _refuse_nulls(table, column, row_ids)
    if task == CLASSIFICATION:
        return _classes(table.column(column).to_numpy(), column, row_ids, num_classes)
    read = batch_of(table.select([column]))[column]
    values = read if isinstance(read, np.ndarray) else read.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # beyond float32: told as not finite
        numbers = values.astype(np.float32)
    if allow_non_finite:
        return numbers
    finite = np.isfinite(numbers).reshape(len(numbers), -1).all(1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise InvalidArgument(
            f"row {int(row_ids[row])} has the label {values[row]} in column {column!r}; labels must be finite float32 "
            "numbers, so filter or mend such rows in TransformVersion, or set spec.allow_non_finite",
            reason="NON_FINITE_LABEL",
            metadata={"row_id": str(int(row_ids[row]))},
            fields=[("spec.label_column", f"row {int(row_ids[row])}: {values[row]}")],
        )
    return numbers


def _classes(labels: NDArray[Any], column: str, row_ids: Ints, num_classes: int) -> NDArray[Any]:
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        row = int(np.flatnonzero((labels < 0) | (labels >= num_classes))[0])
        raise InvalidArgument(
            f"row {int(row_ids[row])} has the label {int(labels[row])} in column {column!r}; "
            f"spec.model.num_classes is {num_classes}, so labels must be 0 to {num_classes - 1}",
            reason="LABEL_OUT_OF_RANGE",
            fields=[("spec.model.num_classes", f"a label is {int(labels[row])}")],
        )
    return labels.astype(np.int64)


def _refuse_nulls(table: pa.Table, column: str, row_ids: Ints) -> None:
    values = table.column(column)
    if values.null_count:
        row = int(row_ids[int(np.flatnonzero(values.is_null().to_numpy())[0])])
        raise InvalidArgument(
            f"column {column!r} has nulls, the first in row {row}; fill or drop them before training",
            reason="NULL_VALUES",
            metadata={"row_id": str(row)},
            fields=[("spec.label_column", f"row {row} has no label")],
        )
