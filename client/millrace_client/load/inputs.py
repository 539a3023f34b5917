"""What a load asks about: rows made up to fit a model's metadata, or rows of a file; and the requests that carry them.

N = rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference import grpc_service_pb2 as pb
from millrace_client.inference import infer_request
from millrace_client.rows.typed import BadInput, Tensor, dtype_of, typed

Rows = dict[str, npt.NDArray[Any]]

# Made-up integers are 0 and 1 but for bytes, which are most often pixels: any category that a model knows has a 0.
MADE_UP_BELOW = {"UINT8": 256}
TEXT = b"0"


def made_up_rows(metadata: pb.ModelMetadataResponse, count: int, seed: int = 0) -> Rows:
    """`count` rows of noise for each input: floats of a standard normal distribution, bytes of all values, other
    integers 0 and 1, strings "0".

    Raises `BadInput` for an input of which none can be made: its rows have no fixed shape, or numpy has no such type.
    """
    noise = np.random.default_rng(seed)
    return {tensor.name: _made_up(tensor, count, noise) for tensor in metadata.inputs}


def rows_of_file(metadata: pb.ModelMetadataResponse, path: Path) -> Rows:
    """The rows of a file: `.npy` for a model of one input, `.npz` with an array for each, or a `.parquet` with a column
    for each; others are left out. Bytes that end in zeros come from a `.parquet`: numpy's own strings drop those.

    Raises `BadInput` for another kind of file, an input that it does not have, and rows that are not equally many.
    """
    names = [tensor.name for tensor in metadata.inputs]
    found = _columns(path, metadata.inputs) if path.suffix == ".parquet" else _arrays(path, metadata.inputs)
    missing = [name for name in names if name not in found]
    if missing:
        raise BadInput(f"{path} has no {', '.join(missing)}; the model's inputs are {', '.join(names)}")
    rows = {name: found[name] for name in names}
    counts = {name: len(values) for name, values in rows.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise BadInput(f"{path} has rows of each input: {counts}; give as many of each, and at least one")
    return rows


def requests_of(
    model: str, rows: Rows, rows_per_request: int = 1, *, version: str = "", outputs: Sequence[str] = ()
) -> list[bytes]:
    """The rows cut into requests of `rows_per_request`, what is left over dropped, each ready for the wire; `outputs`
    are asked for, or all where none is named. Raises `BadInput` where there are too few rows for one."""
    count = len(next(iter(rows.values())))
    if count < rows_per_request:
        raise BadInput(f"{count} rows do not fill a request of {rows_per_request}; give more rows, or ask for fewer")
    made = []
    for start in range(0, count - rows_per_request + 1, rows_per_request):
        part = {name: values[start : start + rows_per_request] for name, values in rows.items()}
        request = infer_request(model, part, version=version, outputs=dict.fromkeys(outputs, 0))
        made.append(request.SerializeToString())
    return made


def _made_up(tensor: Tensor, count: int, noise: np.random.Generator) -> npt.NDArray[Any]:
    shape = (count, *tensor.shape[1:])
    if any(size < 0 for size in shape):
        raise BadInput(f"input {tensor.name!r} has rows of no fixed shape, {list(tensor.shape)}; give rows in a file")
    if tensor.datatype == "BYTES":
        return np.full(shape, TEXT, object)
    dtype = dtype_of(tensor)
    if dtype.kind == "f":
        return noise.standard_normal(shape).astype(dtype)
    return noise.integers(0, MADE_UP_BELOW.get(tensor.datatype, 2), shape).astype(dtype)


def _arrays(path: Path, inputs: Sequence[Tensor]) -> Rows:
    names = [tensor.name for tensor in inputs]
    if path.suffix == ".npy":
        if len(names) != 1:
            raise BadInput(f"{path} holds one array, and the model has the inputs {', '.join(names)}; use .npz")
        return {names[0]: typed(inputs[0], np.load(path, allow_pickle=False))}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {tensor.name: typed(tensor, arrays[tensor.name]) for tensor in inputs if tensor.name in arrays}
    raise BadInput(f"{path} is no .npy, .npz or .parquet")


def _columns(path: Path, inputs: Sequence[Tensor]) -> Rows:
    import pyarrow.parquet as pq

    from millrace_client.rows.columns import Place, values_of_column
    from millrace_client.rows.tables import INT96_UNIT

    with pq.ParquetFile(path, coerce_int96_timestamp_unit=INT96_UNIT) as file:
        given = [tensor for tensor in inputs if tensor.name in file.schema_arrow.names]
        table = file.read(columns=[tensor.name for tensor in given])
    found = {}
    for tensor in given:
        column = table.column(tensor.name)
        if column.null_count:
            raise BadInput(f"column {tensor.name!r} of {path} has nulls; leave rows with nulls out")
        found[tensor.name], _ = values_of_column(tensor, column, Place(str(path)))
    return found
