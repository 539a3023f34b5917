from __future__ import annotations

import pyarrow as pa
import pytest

from shared.dataset_version.writer import DEFAULT_GROUP_ROWS, cut_groups


@pytest.mark.parametrize(
    ("values", "full_groups", "left"),
    [
        ([b"x" * 1_000_000] * 10, [4, 4], 2),  # a fifth row would pass the bytes of a group
        ([b"x"] * (DEFAULT_GROUP_ROWS + 44), [DEFAULT_GROUP_ROWS], 44),
    ],
    ids=["many bytes", "many rows"],
)
def test_rows_that_later_rows_could_join_are_left_until_the_end(
    values: list[bytes], full_groups: list[int], left: int
) -> None:
    stored = pa.table({"text": pa.array(values, pa.binary())})
    assert cut_groups(stored, to_end=False) == full_groups
    assert cut_groups(stored, to_end=True) == [*full_groups, left]
