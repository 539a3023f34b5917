"""Which names the columns of a version may have, and how many there may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.dataset_version.columns import ROW_ID
from shared.errors import shown

MAX_COLUMNS = 10_000
# Of one column's name: every report, error and quarantined row has it.
MAX_NAME_BYTES = 1024


def name_problem(name: str) -> str | None:
    """Why no version can have a column of that name; None where one can."""
    if name in ("", ROW_ID):
        return f"a column must not be named {name!r}; choose another name"
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        return f"a column has a name of {size} bytes; at most {MAX_NAME_BYTES} are kept: {shown(name)}"
    if "\0" in name:
        return f"column {shown(name)} has a zero byte in its name; rename it"
    return None


def repeated(names: Sequence[str]) -> Iterator[int]:
    """The places of those that there are before them, too."""
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            yield place
        seen.add(name)
