"""What is known of a dataset version before any row is read: its columns with their statistics, and its splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import invalid_field

# Kinds of columns.
NUMBER, INTEGER, BOOLEAN, TEXT, BYTES, TIME, TENSOR, OTHER = (
    *("number", "integer", "boolean", "text", "bytes", "time", "tensor", "other"),
)
# Statistics keep so many values of a column.
MAX_VALUES = 100
MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """What the schema and the statistics of all splits say of one column; `known`: whether it has statistics.

    `values` are all different ones, or None where they are too many. `mean` and `deviation` are of the training split.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    value_names: tuple[str, ...] = ()
    known: bool = True
    rows: int = 0
    nulls: int = 0
    nans: int = 0
    infinite: bool = False
    distinct: int = 0
    values: tuple[Any, ...] | None = None
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    deviation: float | None = None

    @property
    def empty(self) -> bool:
        return self.known and self.rows > 0 and self.nulls + self.nans >= self.rows

    @property
    def is_image(self) -> bool:
        """uint8 (H, W) or (H, W, C)."""
        of_image = len(self.shape) == 2 or (len(self.shape) == 3 and self.shape[2] in (1, 3, 4))
        return self.kind == TENSOR and self.dtype == "uint8" and of_image

    @property
    def whole(self) -> bool:
        """Whether all of its different values are known and are whole numbers."""
        return self.values is not None and all(float(one).is_integer() for one in self.values)


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """`splits` has the rows of each."""

    name: str
    columns: Sequence[ColumnFacts]
    splits: Mapping[str, int]
    size_bytes: int = 0

    def column(self, name: str, path: str) -> ColumnFacts:
        """Raises `InvalidArgument` for a column that is not there."""
        for one in self.columns:
            if one.name == name:
                return one
        raise invalid_field(path, name, f"{self.name} has {names_shown([one.name for one in self.columns])}")


def names_shown(names: Sequence[str] | Mapping[str, Any]) -> str:
    """The first of them, and how many more there are."""
    shown = list(names)[:MAX_NAMES_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
