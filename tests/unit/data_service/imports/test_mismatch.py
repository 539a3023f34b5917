"""What is said of sources whose columns do not fit each other: what differs, and of very many columns a few."""

from __future__ import annotations

import pyarrow as pa
import pytest

from data_service.imports.plan import difference

FIRST = pa.schema({"id": pa.int64(), "size": pa.float64(), "kind": pa.string()})
TYPES = "; set column_types, or write them alike"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"id": pa.int64(), "size": pa.float64()}, "it lacks the column 'kind', which sources[0] has"),
        (
            {"id": pa.int64(), "size": pa.float64(), "kind": pa.string(), "a": pa.int8(), "b": pa.int8()},
            "it has the columns 'a', 'b', which sources[0] lacks",
        ),
        (
            {"ID": pa.int64(), "size": pa.float64(), "kind": pa.string()},
            "it lacks the column 'id', which sources[0] has, and it has the column 'ID', which sources[0] lacks",
        ),
        (
            {"size": pa.float64(), "id": pa.int64(), "kind": pa.string()},
            "it has the columns of sources[0] in another order: 'size' comes first where that has 'id'; "
            "write them in one order",
        ),
        (
            {"id": pa.int64(), "size": pa.string(), "kind": pa.string()},
            f"it has size: string where sources[0] has size: double{TYPES}",
        ),
    ],
    ids=["lacks", "has more", "renamed", "order", "type"],
)
def test_a_differing_column_is_named(given: dict[str, pa.DataType], expected: str) -> None:
    assert difference(pa.schema(given), "sources[0]", FIRST, lambda one, other: one == other) == expected


def test_types_that_fit_each_other_do_not_differ() -> None:
    given = pa.schema({"id": pa.int32(), "size": pa.float32(), "kind": pa.string()})
    reported = difference(given, "sources[0]", FIRST, lambda one, other: pa.int64() in (one, other) or one == other)
    assert reported.startswith("it has size: float where sources[0] has size: double;")


def test_of_very_many_differences_a_few_are_reported() -> None:
    wide = pa.schema([(f"c{number:05d}".ljust(1024, "_"), pa.int64()) for number in range(10_000)])
    other = pa.schema([(name.upper(), pa.int64()) for name in wide.names])
    typed = pa.schema([(name, pa.string()) for name in wide.names])
    for given in (other, typed, pa.schema(list(reversed(wide)))):
        reported = difference(given, "base.version", wide, lambda one, another: one == another)
        assert len(reported) < 5_000
    assert "and 9,995 more" in difference(typed, "base.version", wide, lambda one, another: one == another)
