"""In what the columns of a source differ from those that it is to stand beside, told so that it can be mended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from shared.errors import shown

# So many of them are named.
SHOWN = 5
# Characters of a name, where its type is told too.
SHOWN_NAME = 200

Fits = Callable[[pa.DataType, pa.DataType], bool]


def difference(given: pa.Schema, first_field: str, first: pa.Schema, fits: Fits) -> str:
    """`first` are the columns of `first_field`; `fits` says of one of its types whether another goes with it."""
    theirs, ours = frozenset(first.names), frozenset(given.names)
    lacking = [name for name in first.names if name not in ours]
    more = [name for name in given.names if name not in theirs]
    told = []
    if lacking:
        told.append(f"it lacks {_columns(lacking)}, which {first_field} has")
    if more:
        told.append(f"it has {_columns(more)}, which {first_field} lacks")
    if told:
        return ", and ".join(told)
    moved = next(((one, two) for one, two in zip(given.names, first.names, strict=True) if one != two), None)
    if moved:
        return (
            f"it has the columns of {first_field} in another order: {shown(moved[0])} comes first where that has "
            f"{shown(moved[1])}; write them in one order"
        )
    unfit = [(one, two) for one, two in zip(given, first, strict=True) if not fits(two.type, one.type)]
    pairs = [f"{_spelled(one)} where {first_field} has {_spelled(two)}" for one, two in unfit[:SHOWN]]
    return f"it has {_some(pairs, len(unfit))}; set column_types, or write them alike"


def _columns(names: Sequence[str]) -> str:
    some = _some([shown(name) for name in names[:SHOWN]], len(names))
    return f"the column{'s' if len(names) > 1 else ''} {some}"


def _some(first: Sequence[str], count: int) -> str:
    """These, of `count`."""
    return ", ".join(first) + (f" and {count - len(first):,} more" if count > len(first) else "")


def _spelled(field: pa.Field) -> str:
    name = field.name if len(field.name) <= SHOWN_NAME else field.name[:SHOWN_NAME] + "…"
    return f"{name}: {field.type}"
