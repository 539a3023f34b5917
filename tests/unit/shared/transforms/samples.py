"""What the tests of transforms share: pipelines from JSON, batches of every kind of column, and their bits."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from shared.transforms import Batch, Column, Pipeline, RaggedImages, ScalarType, Schema, TensorType
from shared.transforms.batch import joined, row_count


def pipeline(*steps: dict[str, Any]) -> Pipeline:
    """Of steps as JSON."""
    return Pipeline.from_config({"steps": list(steps)})


def schema_of_batch(batch: Batch) -> Schema:
    schema: Schema = {}
    for name, column in batch.items():
        if isinstance(column, pa.Array):
            schema[name] = ScalarType(column.type)
        elif isinstance(column, RaggedImages):
            schema[name] = TensorType("uint8", column.shape)
        else:
            schema[name] = TensorType(column.dtype.name, column.shape[1:])
    return schema


def fitted(built: Pipeline, batch: Batch) -> Pipeline:
    """Taught by the rows of `batch`, in as many passes as it takes."""
    while built.unfitted:
        fitter = built.fitter(schema_of_batch(batch))
        fitter.update(batch)
        built = fitter.fitted()
    return built


def rows_between(batch: Batch, start: int, end: int) -> Batch:
    return {
        name: RaggedImages(column.images[start:end], column.shape)
        if isinstance(column, RaggedImages)
        else column[start:end]
        for name, column in batch.items()
    }


def cut(batch: Batch, places: Sequence[int]) -> list[Batch]:
    edges = [0, *sorted(places), row_count(batch)]
    return [rows_between(batch, start, end) for start, end in pairwise(edges)]


def bits(batch: Batch) -> dict[str, Any]:
    """Equal only where every value has the same bits; what lies under nulls does not count."""
    return {name: _bits(column) for name, column in batch.items()}


def joined_bits(parts: Sequence[Batch]) -> dict[str, Any]:
    return bits(joined(parts))


def _bits(column: Column) -> Any:
    if isinstance(column, RaggedImages):
        return column.shape, [(image.shape, image.tobytes()) for image in column.images]
    if isinstance(column, np.ndarray):
        return column.dtype.name, column.shape, column.tobytes()
    values = column.drop_null()
    number = pa.types.is_floating(column.type)
    return column.type, column.is_valid().to_pylist(), values.to_numpy().tobytes() if number else values.to_pylist()


def pixels(rows: int, shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), np.uint8)


def encoded(image: NDArray[Any], file_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, file_format, **options)
    return buffer.getvalue()


def people(rows: int, seed: int = 0) -> Batch:
    """Scalars of most types, some of them null, and images of three kinds."""
    random = np.random.default_rng(seed)

    def some(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        return pa.array([value if random.random() > 0.2 else None for value in values], kind)

    sizes = [(int(height), int(width)) for height, width in random.integers(3, 20, (rows, 2))]
    return {
        "age": some(random.normal(40, 20, rows).tolist(), pa.float64()),
        "visits": some(random.integers(-5, 5, rows).tolist(), pa.int64()),
        "city": some(random.choice(["Bern", "Ulm", "Århus", "東京"], rows).tolist(), pa.string()),
        "member": some((random.random(rows) > 0.5).tolist(), pa.bool_()),
        "weight": pa.array(random.random(rows).astype(np.float32)),
        "digits": pa.array([str(number) for number in random.integers(0, 99, rows)], pa.string()),
        "seen": pa.array(random.integers(0, 10**15, rows), pa.timestamp("us")),
        "gray": random.integers(0, 256, (rows, 9, 7), np.uint8),
        "colour": random.integers(0, 256, (rows, 8, 10, 3), np.uint8),
        "vector": random.random((rows, 3)).astype(np.float32),
        "png": pa.array([encoded(random.integers(0, 256, (*size, 3), np.uint8)) for size in sizes], pa.binary()),
    }
