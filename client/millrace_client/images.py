"""Image columns of Arrow tables as numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa


def image_rows(
    table: pa.Table, image_column: str = "image", label_column: str = "label"
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]:
    """Images of shape (N, H, W) or (N, H, W, C), and labels of shape (N,) where the table has them.

    Raises `KeyError` where there is no such image column, and `TypeError` where it holds no tensors of one shape.
    """
    if image_column not in table.column_names:
        raise KeyError(f"no column {image_column!r}; there are {', '.join(table.column_names)}")
    images = _tensors(table.column(image_column).combine_chunks())
    if label_column not in table.column_names:
        return images, None
    return images, table.column(label_column).to_numpy()


def _tensors(column: Any) -> npt.NDArray[np.uint8]:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):  # what `combine_chunks` gives for no rows
        column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    if not isinstance(column.type, pa.FixedShapeTensorType):
        raise TypeError(f"the column's type is {column.type}, not a tensor of fixed shape")
    array: npt.NDArray[np.uint8] = column.to_numpy_ndarray()
    return array
