"""Pure batch transforms: the same code prepares data, feeds training and runs in serving."""

from shared.transforms.batch import (
    Batch,
    Column,
    RaggedImages,
    RowError,
    RowKeys,
    ScalarType,
    Schema,
    TensorSpec,
    TensorType,
    arrow_schema,
    arrow_type_of,
    batch_of,
    row_count,
    schema_of,
    schema_of_columns,
    table_of,
)
from shared.transforms.pipeline import Fitter, Pipeline

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
