"""Steps that select, order and rename columns. They change no value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from millrace.common.v1 import transform_pb2
from shared.dataset_version.columns import repeated
from shared.errors import shown
from shared.transforms.batch import Batch, StepKeys
from shared.transforms.schema import Schema, StepError
from shared.transforms.steps.step import Names, Step, known


@dataclass(frozen=True)
class Select(Step):
    """Keeps these columns, in this order."""

    op: ClassVar[str] = "select"
    columns: tuple[str, ...]

    @classmethod
    def from_message(cls, message: transform_pb2.Select, column: str) -> Self:
        return cls(named(message.columns, "select.columns"))

    def to_proto(self) -> transform_pb2.TransformStep:
        return transform_pb2.TransformStep(select=transform_pb2.Select(columns=self.columns))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns

    def output(self, schema: Schema) -> Schema:
        known(schema, self.columns, "select.columns")
        return {name: schema[name] for name in self.columns}

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return {name: batch[name] for name in self.columns}

    def sources(self, needed: Names, schema: Schema) -> Names:
        return needed

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        return None  # slicing drops columns that are not needed


@dataclass(frozen=True)
class Drop(Step):
    """Removes these columns."""

    op: ClassVar[str] = "drop"
    columns: tuple[str, ...]

    @classmethod
    def from_message(cls, message: transform_pb2.Drop, column: str) -> Self:
        return cls(named(message.columns, "drop.columns"))

    def to_proto(self) -> transform_pb2.TransformStep:
        return transform_pb2.TransformStep(drop=transform_pb2.Drop(columns=self.columns))

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    def output(self, schema: Schema) -> Schema:
        known(schema, self.columns, "drop.columns")
        return self._left(schema)

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return self._left(batch)

    def sources(self, needed: Names, schema: Schema) -> Names:
        return needed

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        return None  # as in `Select`

    def _left(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        dropped = frozenset(self.columns)
        return {name: column for name, column in columns.items() if name not in dropped}


@dataclass(frozen=True)
class Rename(Step):
    """Renames columns, all at once, so two columns may swap names.

    `columns` are (old name, new name).
    """

    op: ClassVar[str] = "rename"
    columns: tuple[tuple[str, str], ...]

    @classmethod
    def from_message(cls, message: transform_pb2.Rename, column: str) -> Self:
        if not message.columns:
            raise StepError("name at least one column", "rename.columns")
        return cls(tuple(sorted(message.columns.items())))

    def to_proto(self) -> transform_pb2.TransformStep:
        return transform_pb2.TransformStep(rename=transform_pb2.Rename(columns=dict(self.columns)))

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(old for old, _ in self.columns)

    def output(self, schema: Schema) -> Schema:
        for old, _ in self.columns:
            if old not in schema:
                raise StepError(f"there is no column {shown(old)}; there are {', '.join(schema)}", "rename.columns")
        renamed = self._renamed(schema)
        if len(renamed) < len(schema):
            new_of = dict(self.columns)
            names = [new_of.get(name, name) for name in schema]
            twice = shown(names[next(repeated(names))])
            raise StepError(f"two columns would be named {twice}; choose another name for one", "rename.columns")
        return renamed

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return self._renamed(batch)

    def sources(self, needed: Names, schema: Schema) -> Names:
        old_of = {new: old for old, new in self.columns}
        return frozenset(old_of.get(name, name) for name in needed)

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        columns = tuple((old, new) for old, new in self.columns if new in needed)
        return Rename(columns) if columns else None

    def _renamed(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        new_of = dict(self.columns)
        return {new_of.get(name, name): column for name, column in columns.items()}


def named(columns: Sequence[str], at: str) -> tuple[str, ...]:
    """Check the names of a step's columns; `at` is the field's path.

    Raises `StepError` unless there is at least one name, and no name twice.
    """
    if not columns:
        raise StepError("name at least one column", at)
    for index in repeated(columns):
        raise StepError(f"name {shown(columns[index])} once only", f"{at}[{index}]")
    return tuple(columns)
