"""Pure batch transforms: the same code prepares data, feeds training and runs in serving."""

from shared.transforms.batch import Batch, Column, RaggedImages, RowKeys, batch_of, row_count, table_of
from shared.transforms.pipeline import Fitter, Pipeline
from shared.transforms.schema import (
    RowError,
    ScalarType,
    Schema,
    TensorSpec,
    TensorType,
    arrow_schema,
    arrow_type_of,
    schema_of,
    schema_of_columns,
)

__all__ = [
    "Batch",
    "Column",
    "Fitter",
    "Pipeline",
    "RaggedImages",
    "RowError",
    "RowKeys",
    "ScalarType",
    "Schema",
    "TensorSpec",
    "TensorType",
    "arrow_schema",
    "arrow_type_of",
    "batch_of",
    "row_count",
    "schema_of",
    "schema_of_columns",
    "table_of",
]
