from __future__ import annotations

import numpy as np
import pytest

from inference_service.domain.signature import MAX_SHOWN_ROWS, RAW, Outputs, Rows
from shared.errors import InvalidArgument


def test_rows_of_several_requests_are_joined_with_the_nulls_that_some_have() -> None:
    one = Rows(RAW, {"a": np.array([1, 2]), "b": np.zeros((2, 3))}, {"a": np.array([True, False])})
    other = Rows(RAW, {"a": np.array([3]), "b": np.ones((1, 3))})

    joined = Rows.joined([other, one, other])

    assert joined.values["a"].tolist() == [3, 1, 2, 3]
    assert joined.values["b"].sum(axis=1).tolist() == [3, 0, 0, 3]
    assert joined.nulls["a"].tolist() == [False, True, False, False]
    assert (len(joined), Rows.joined([one]) is one) == (4, True)


def test_a_slice_keeps_each_rows_values_and_nulls() -> None:
    rows = Rows(RAW, {"a": np.arange(5)}, {"a": np.arange(5) == 3})

    assert rows.slice(2, 4).values["a"].tolist() == [2, 3]
    assert rows.slice(2, 4).nulls["a"].tolist() == [False, True]
    assert np.shares_memory(rows.slice(2, 4).values["a"], rows.values["a"])


def test_a_slice_has_the_bytes_of_its_own_rows() -> None:
    rows = Rows(RAW, {"a": np.zeros((3, 2), np.float32), "b": np.array([b"", b"four", b"12"], object)})

    assert [rows.slice(row, row + 1).size_bytes for row in range(3)] == [8, 12, 10]


def test_refused_rows_are_counted_from_the_requests_beginning() -> None:
    outputs = Outputs([np.arange(6)], {1: "bad", 4: "worse"})

    assert outputs.slice(2, 4).checked()[0].tolist() == [2, 3]
    with pytest.raises(InvalidArgument, match=r"^row 11: worse$") as refused:
        outputs.slice(3, 6).checked(10)
    assert refused.value.metadata["row"] == "11"


def test_of_many_refused_rows_only_the_first_are_reported() -> None:
    with pytest.raises(InvalidArgument) as refused:
        Outputs([np.arange(100)], dict.fromkeys(range(100), "bad")).checked()

    assert len(refused.value.fields) == MAX_SHOWN_ROWS + 1
    assert refused.value.message.endswith("and 90 rows more")
