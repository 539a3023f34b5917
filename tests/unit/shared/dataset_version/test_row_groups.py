from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from shared.dataset_version.parquet import (
    DEFAULT_GROUP_ROWS,
    GROUPS_BEFORE,
    GROWN_GROUP_ROWS,
    MAX_UNEQUAL_GROUP_BYTES,
    cut_groups,
)


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


def groups_of(table: pa.Table, first_row_id: int = 0) -> list[int]:
    return cut_groups(table, to_end=True, first_row_id=first_row_id)


def test_groups_grow_with_the_rows_before_them_up_to_a_mebibyte() -> None:
    # 1,000 bytes a row.
    rows = pa.table({"x": pa.nulls(150_000, pa.binary(1000))})
    groups = groups_of(rows)
    ends = np.cumsum(groups)
    for size, since in ((256, 0), (512, 2 * 256 * GROUPS_BEFORE), (1024, 2 * 512 * GROUPS_BEFORE)):
        assert groups[int(np.searchsorted(ends, since, side="right"))] == size
    assert set(groups[:-1]) == {256, 512, 1024}
    assert all(rows == 256 or rows * GROUPS_BEFORE <= end - rows for rows, end in zip(groups, ends, strict=True))
    assert len(groups) > 3 * GROUPS_BEFORE


def test_texts_grow_to_thousands_of_rows_and_photographs_keep_their_few() -> None:
    words = pa.table({"text": pa.array([b"x" * 60] * 40_000, pa.binary())})
    assert groups_of(words, first_row_id=10_000_000)[:2] == [GROWN_GROUP_ROWS, GROWN_GROUP_ROWS]
    images = pa.table({"image": pa.array([b"x" * 100_000] * 200, pa.binary())})
    assert groups_of(images, first_row_id=10_000_000) == groups_of(images) == [41] * 4 + [36]
    thumbnails = pa.table({"image": pa.array([b"x" * 2000] * 2000, pa.binary())})
    grown = groups_of(thumbnails, first_row_id=10_000_000)
    assert grown[0] == 1024 * 1024 // 2004
    assert groups_of(thumbnails)[0] == DEFAULT_GROUP_ROWS


def test_a_part_of_a_split_has_the_groups_that_its_row_ids_give() -> None:
    rows = pa.table({"x": pa.nulls(200_000, pa.binary(800)), "_row_id": pa.nulls(200_000, pa.int64())})
    whole = groups_of(rows)
    place = 40
    first = sum(whole[:place])
    assert groups_of(rows.slice(first), first_row_id=first) == whole[place:]


@pytest.mark.parametrize("columns", [1, 40, 500])
def test_a_group_never_outgrows_four_mebibytes(columns: int) -> None:
    one = pa.nulls(20_000, pa.float64())
    groups = groups_of(pa.table({f"c{index}": one for index in range(columns)}), first_row_id=10**9)
    assert groups[0] * columns * 8 <= MAX_UNEQUAL_GROUP_BYTES
    assert groups[0] * 2 > min(GROWN_GROUP_ROWS, 1024)
