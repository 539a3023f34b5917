"""Rows of a dataset version, in the form in which a model takes them."""

from __future__ import annotations

from inference_service.domain.rows import PREPARED, RAW, Rows
from inference_service.domain.signature import Signature, TensorSpec
from inference_service.domain.tensors import Array
from inference_service.replica.raw_columns import tensor_of_column, values_of_column
from shared.dataset_version import VersionReader, load_version
from shared.errors import FailedPrecondition
from shared.storage import ObjectStore
from shared.transforms.batch import batch_of
from shared.transforms.schema import ColumnType, schema_of


def held_rows(store: ObjectStore, version: str, split: str, most: int, signature: Signature) -> Rows:
    """The first `most` rows of the split, raw where the version has the columns that raw rows are made of, else the
    model's input itself, of a version that was transformed.

    Raises `NotFound`, `InvalidArgument` (the split), `DataLoss` and `FailedPrecondition` (it is not ACTIVE, its columns
    are not what the model takes, or it has no rows).
    """
    reader = VersionReader(store, load_version(store, version))
    schema = schema_of(reader.schema)
    form, tensors = _form(version, schema, signature)
    groups, rows = [], 0
    for group in reader.row_groups_from(split, 0):
        if rows >= most:
            break
        groups.append(group)
        rows += group.row_count
    if not rows:
        raise FailedPrecondition(f"split {split!r} of {version} has no rows", reason="NOTHING_TO_COMPARE")
    batch = batch_of(reader.read_many(groups, [spec.name for spec in tensors]).slice(0, most).combine_chunks())
    values: dict[str, Array] = {}
    nulls: dict[str, Array] = {}
    for spec in tensors:
        values[spec.name], where = values_of_column(schema[spec.name], batch[spec.name])
        if where.any():
            nulls[spec.name] = where
    return Rows(form, values, nulls)


def _form(version: str, schema: dict[str, ColumnType], signature: Signature) -> tuple[str, tuple[TensorSpec, ...]]:
    if all(_is(schema, spec) for spec in signature.raw):
        return RAW, signature.raw
    if _is(schema, signature.prepared):
        return PREPARED, (signature.prepared,)
    wanted = ", ".join(f"{spec.name} {spec}" for spec in signature.raw)
    raise FailedPrecondition(
        f"{version} does not have the columns that the model takes ({wanted}); compare on a version as it was ingested",
        reason="NOTHING_TO_COMPARE",
        metadata={"resource": version},
    )


def _is(schema: dict[str, ColumnType], spec: TensorSpec) -> bool:
    if spec.name not in schema:
        return False
    try:
        found = tensor_of_column(spec.name, schema[spec.name])
    except FailedPrecondition:  # a type that cannot be sent
        return False
    return (found.datatype, found.shape) == (spec.datatype, spec.shape)
